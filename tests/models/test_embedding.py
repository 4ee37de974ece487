from __future__ import annotations

import numpy as np
import pytest
import torch

from moesaic.core.tokens import IntArray
from moesaic.models import embedding, files
from moesaic.models.checkpoint import Checkpoint
from moesaic.models.embedding import nearest, nearest_known


def test_a_worked_example() -> None:
    rows = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 1.0], [-1.0, -2.0], [0.0, 0.0]])
    known = np.array([0, 1], dtype=np.int32)
    assert nearest(rows, known).tolist() == [0, 1, 0, 0, 0]


@pytest.mark.parametrize("chunk", [1, 100, 1 << 24])
def test_chunks_do_not_matter(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding, "CHUNK", chunk)
    rows = torch.randn(60, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    known = np.array([3, 7, 8, 50], dtype=np.int32)
    told: list[tuple[int, int]] = []
    found = nearest(rows, known, lambda *one: told.append(one))
    assert found.tolist() == slow(rows, known.astype(np.int64)).tolist()
    assert told[-1] == (56, 56)


def slow(rows: torch.Tensor, known: IntArray) -> IntArray:
    """Every pair."""
    likeness = torch.cosine_similarity(rows.float()[:, None], rows.float()[known][None], dim=2)
    answer: IntArray = known[likeness.argmax(dim=1).numpy()]
    return answer


def test_the_demos_own_embedding() -> None:
    path = files.resolve("demo")
    known = np.arange(100, 1100, dtype=np.int32)
    found = nearest_known(path, known)
    rows = Checkpoint(path).tensor("model.embed_tokens.weight", 4096, 192, dtype=torch.float32)
    assert found.shape == (4096,) and found.dtype == np.int32
    assert (found[known] == known).all()
    some = np.arange(2000, 2040)
    likeness = torch.cosine_similarity(rows[some][:, None], rows[known][None], dim=2)
    best, mine = likeness.max(dim=1).values, likeness[range(40), found[some] - 100]
    assert torch.allclose(best, mine, atol=1e-6)
