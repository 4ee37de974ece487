from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moesaic.core.errors import ConfigError
from moesaic.core.placement import Placement
from moesaic.core.tables import SCHEMA, Tables


def tables() -> Tables:
    """Tables of three token ids, layers 1 and 2 with two experts, two ranks, and k = 1."""
    return Tables(
        model="toy-1",
        layers=(1, 2),
        experts=np.array([[0, 1], [1, 0]], dtype=np.int16),
        scores=np.array([[2, 0], [0.5, 1.5], [1, 1]], dtype=np.float32),
        labels=np.array([[0, 0], [1, 1], [0, 1]], dtype=np.int16),
        confidence=np.array([[1, 1], [0.75, 0.75], [0.5, 0.5]], dtype=np.float16),
        after=np.array([[0, 0, 0, 0], [0, 1, 0, 1]], dtype=np.int16),
        after_confidence=np.zeros((2, 4), dtype=np.float16),
    )


PLACEMENT = Placement(0, 2, {1: {0: [0], 1: [1]}, 2: {0: [1], 1: [0]}}, "toy-1")


def test_worked_example() -> None:
    made = tables()
    assert (made.ranks, made.vocab_size) == (2, 3)
    assert made.request_scores([0, 1, 1]).tolist() == [3.0, 3.0]
    assert made.request_scores([]).tolist() == [0.0, 0.0]
    assert made.nbytes == 8 + 24 + 12 + 12 + 16 + 16


def test_a_long_prompt_is_summed_exactly() -> None:
    """In float32, 2^24 + 1 would be 2^24."""
    made = replace(tables(), scores=np.array([[2.0**24, 0], [1, 1], [0, 0]], dtype=np.float32))
    assert made.request_scores([0, 1, 1, 1]).tolist() == [2.0**24 + 3, 3.0]


def test_megabytes_for_the_largest_models() -> None:
    """DeepSeek-V2's size on 8 ranks: the paper's 11.7 MiB of labels, as much for confidence, and
    the scores."""
    vocab_size, layers, ranks = 102_400, 60, 8
    made = Tables(
        "deepseek_v2",
        tuple(range(layers)),
        np.zeros((layers, 160), dtype=np.int16),
        np.zeros((vocab_size, ranks), dtype=np.float32),
        np.zeros((vocab_size, layers), dtype=np.int16),
        np.zeros((vocab_size, layers), dtype=np.float16),
        np.zeros((layers, ranks**2), dtype=np.int16),
        np.zeros((layers, ranks**2), dtype=np.float16),
    )
    assert made.labels.nbytes / 2**20 == pytest.approx(11.72, abs=0.01)
    assert made.nbytes < 27 * 2**20


def test_file(tmp_path: Path) -> None:
    made = tables()
    made.save(tmp_path / "t.npz")
    read = Tables.load(tmp_path / "t.npz")
    assert (read.model, read.layers) == ("toy-1", (1, 2))
    for name in ("experts", "scores", "labels", "confidence", "after", "after_confidence"):
        one, other = getattr(made, name), getattr(read, name)
        assert one.dtype == other.dtype and np.array_equal(one, other), name
    assert [path.name for path in tmp_path.iterdir()] == ["t.npz"]


def test_placement_fits() -> None:
    tables().check(PLACEMENT, "t.npz")
    copies = {1: {0: [0, 1], 1: [0, 1]}, 2: {0: [1], 1: [0, 1]}}
    tables().check(Placement(3, 2, copies, "toy-1"), "t.npz")


@pytest.mark.parametrize(
    ("placement", "words"),
    [
        (Placement(0, 2, PLACEMENT.experts_by_layer, "toy-2"), "t.npz: model: got 'toy-1'; .*'toy-2'"),
        (Placement(0, 3, PLACEMENT.experts_by_layer, "toy-1"), "t.npz: experts: got 2; .*3"),
        (
            Placement(0, 2, {1: {0: [0], 1: [1]}, 2: {0: [0], 1: [1]}}, "toy-1"),
            "rank of expert 0 in layer 2: got 1; allowed: the placement's, 0$",
        ),
    ],
)
def test_placement_of_something_else(placement: Placement, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        tables().check(placement, "t.npz")


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"schema": SCHEMA + 1}, "schema 2, this version reads 1"),
    ({"labels": None}, "it has no 'labels'"),
    ({"labels": np.full((3, 2), 2, dtype=np.int16)}, "do not fit"),
    ({"labels": np.full((3, 2), -1, dtype=np.int16)}, "do not fit"),
    ({"labels": np.zeros((2, 2), dtype=np.int16)}, "do not fit"),
    ({"confidence": np.zeros((3, 3), dtype=np.float16)}, "do not fit"),
    ({"after": np.zeros((2, 9), dtype=np.int16)}, "do not fit"),
    ({"after_confidence": np.zeros((1, 4), dtype=np.float16)}, "do not fit"),
    ({"experts": np.zeros((3, 2), dtype=np.int16)}, "do not fit"),
    ({"layers": 1}, "not tables of tokens"),
    ({"scores": np.zeros(3, dtype=np.float32)}, "not tables of tokens"),
    ({"scores": np.full((3, 2), np.nan, dtype=np.float32)}, "do not fit"),
    ({"confidence": np.full((3, 2), np.nan, dtype=np.float16)}, "do not fit"),
    ({"after_confidence": np.full((2, 4), np.inf, dtype=np.float16)}, "do not fit"),
]


@pytest.mark.parametrize(("change", "words"), CHANGES)
def test_damaged_file(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    path = tmp_path / "t.npz"
    tables().save(path)
    with np.load(path) as archive:
        arrays = {name: archive[name] for name in archive.files} | change
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    with pytest.raises(ConfigError, match=words) as caught:
        Tables.load(path)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


def test_no_file_or_another_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        Tables.load(tmp_path / "missing.npz")
    for content in (b"", b"PK\x03\x04 not a zip", b"hello"):
        (tmp_path / "t.npz").write_bytes(content)
        with pytest.raises(ConfigError, match="not tables of tokens"):
            Tables.load(tmp_path / "t.npz")


@pytest.mark.parametrize("compressed", [True, False])
def test_a_damage_anywhere_gets_one_line_or_does_no_harm(tmp_path: Path, compressed: bool) -> None:
    """400 damaged files. Bytes are changed in many places (some into other digits, as of a shape), zeroed or
    cut off."""
    path, rng = tmp_path / "t.npz", np.random.default_rng(compressed)
    tables().save(path)
    if not compressed:
        with np.load(path) as archive:
            np.savez(path, **dict(archive))
    whole = path.read_bytes()
    said: list[str] = []
    for _ in range(400):
        content = bytearray(whole)
        places = rng.integers(len(content), size=rng.choice([1, 3, 20]))
        for place in places.tolist():
            content[place] = rng.choice([rng.integers(256), ord("0") + rng.integers(10)])
        if rng.random() < 0.2:
            content[places[0] : places[0] + 200] = bytes(len(content[places[0] : places[0] + 200]))
        path.write_bytes(bytes(content[: places[0]] if rng.random() < 0.1 else content))
        try:
            read = Tables.load(path)
        except ConfigError as error:
            said.append(str(error))
        else:
            assert np.array_equal(read.experts, tables().experts)
    assert len(said) > 200
    assert all(one.startswith(f"{path}: ") and "\n" not in one for one in said)


def test_tables_of_another_number_of_ranks(tmp_path: Path) -> None:
    made = tables()
    wider = replace(
        made,
        scores=np.ones((3, 3), dtype=np.float32),
        after=np.zeros((2, 9), dtype=np.int16),
        after_confidence=np.zeros((2, 9), dtype=np.float16),
    )
    wider.save(tmp_path / "t.npz")
    file = tmp_path / "p.json"
    file.write_text(replace(PLACEMENT, tables="t.npz").to_json())
    with pytest.raises(ConfigError, match=r"t\.npz: ranks: got 3; allowed: as many as are served, 2$"):
        Tables.load_for(str(file), Placement.read(str(file), 2))
    made.save(tmp_path / "t.npz")
    assert Tables.load_for(str(file), Placement.read(str(file), 2)) is not None


def test_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "t.npz"
    tables().save(path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ConfigError, match="not tables of tokens"):
        Tables.load(path)
