"""Checkpoints with a chosen skew: who is hot, and the bias that makes it so."""

from __future__ import annotations

from pathlib import Path

import make_checkpoint
import numpy as np
import pytest
import skew
import torch


def test_the_hot_half_alternates() -> None:
    assert skew.direction("persistent", 1, 4).tolist() == [1, 1, -1, -1]
    assert skew.direction("alternating", 0, 4).tolist() == [1, 1, -1, -1]
    assert skew.direction("alternating", 1, 4).tolist() == [-1, -1, 1, 1]
    assert skew.hot(skew.direction("alternating", 1, 4)).tolist() == [False, False, True, True]


def test_exponential_loads_are_dealt_out_anew_in_each_layer() -> None:
    one, other = skew.direction("exponential", 0, 16), skew.direction("exponential", 1, 16)
    assert sorted(one) == pytest.approx(sorted(other))
    assert one.tolist() != other.tolist()
    assert (one.mean(), one.std()) == pytest.approx((0.0, 1.0))


@pytest.mark.parametrize("pattern", skew.PATTERNS)
@pytest.mark.parametrize("share", [0.6, 0.75, 0.9])
def test_the_bias_gives_the_share(pattern: str, share: float) -> None:
    rng = np.random.default_rng(0)
    logits, x0 = rng.normal(size=(2000, 16)), rng.uniform(0.8, 1.2, size=2000)
    t = skew.direction(pattern, 0, 16)
    b = skew.solve(logits, x0, t, 4, share)
    assert skew.hot(t)[skew.top_k(logits, x0, b, t, 4)].mean() == pytest.approx(share, abs=0.005)


def test_shares_of_counted_pairs() -> None:
    assert skew.shares({0: np.array([3, 1]), 1: np.array([1, 3])}, "persistent") == {0: 0.75, 1: 0.25}
    assert skew.busier_half({0: np.array([3, 0, 1, 4])}) == {0: 7 / 8}


def test_coordinate_0_is_set_apart() -> None:
    for name, where in (("o_proj", np.s_[0, :]), ("experts.3.down_proj", np.s_[0, :]), ("gate", np.s_[:, 0])):
        tensor = torch.ones(3, 3)
        skew.reserve(f"model.layers.0.mlp.{name}.weight", tensor)
        assert tensor[where].tolist() == [0, 0, 0]
        assert tensor.sum() == 6
    embedding = torch.zeros(3, 3)
    skew.reserve("model.embed_tokens.weight", embedding)
    assert embedding[:, 0].tolist() == [1, 1, 1]


@pytest.mark.slow
def test_a_written_checkpoint_routes_as_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint.write("qwen3-moe-0.01b", tmp_path, "alternating", 0.75)
    prompts, _ = skew.count(tmp_path, new=2)
    assert list(skew.shares(prompts, "alternating").values()) == pytest.approx([0.75] * 4, abs=0.03)
    halves = [float(pairs[:8].sum() / pairs.sum()) for pairs in prompts.values()]
    assert halves == pytest.approx([0.75, 0.25, 0.75, 0.25], abs=0.03)
    assert "layer by layer: 0.75" in capsys.readouterr().out
