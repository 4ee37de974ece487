"""The kernel of an expert server, on rows and answers that lie in several calls."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("moesaic.kernels.native._native")

from moesaic.kernels.native import plain

HIDDEN, WIDTH, EXPERTS = 8, 16, 3
Part = plain.Part


@pytest.fixture
def weights() -> np.ndarray:
    """[E, 3, w, h] gate, up and transposed down."""
    plain.use()
    plain.set_threads(1, False)
    return np.random.default_rng(0).standard_normal((EXPERTS, 3, WIDTH, HIDDEN)).astype(np.float32)


def answer(weights: np.ndarray, parts: list[Part], held: int = EXPERTS) -> None:
    downs = [np.ascontiguousarray(one[2].T) for one in weights]
    found = [[one[line].ctypes.data for one in weights] for line in (0, 1)] + [
        [one.ctypes.data for one in downs]
    ]
    table = np.array(found, dtype=np.uint64)
    table[:, held:] = 0
    plain.experts(table, (HIDDEN, WIDTH), True, parts)


def expert(weights: np.ndarray, number: int, row: np.ndarray) -> np.ndarray:
    gate, up, down = weights[number].astype(np.float64)
    inner = gate @ row
    found: np.ndarray = (inner / (1 + np.exp(-inner)) * (up @ row)) @ down
    return found


def part(rows: int, lines: list[int], places: list[int], experts: list[int], shift: int = 0) -> Part:
    """Rows begin `shift` bytes behind an address that any number is aligned to."""
    memory = memoryview(bytearray(4 * rows * HIDDEN + shift))[shift:]
    hidden = np.frombuffer(memory, np.float32).reshape(rows, HIDDEN)
    hidden[:] = np.random.default_rng(rows).standard_normal(hidden.shape)
    out = np.full((max(lines) + 2, HIDDEN), 7, np.float32)
    return hidden, np.array(places), np.array(experts), out, np.array(lines)


@pytest.mark.parametrize("shift", [0, 4])
def test_each_pair_goes_to_its_line_and_nothing_else_is_written(weights: np.ndarray, shift: int) -> None:
    parts = [part(2, [3, 0, 1], [1, 0, 1], [2, 0, 0], shift), part(1, [0], [0], [2], shift)]
    answer(weights, parts)
    for hidden, places, experts, out, lines in parts:
        for line in range(len(out)):
            if line not in lines:
                assert (out[line] == 7).all()
        for place, number, line in zip(places, experts, lines, strict=True):
            np.testing.assert_allclose(
                out[line], expert(weights, number, hidden[place]), rtol=1e-4, atol=1e-4
            )


def test_no_pairs_are_no_error(weights: np.ndarray) -> None:
    none, rows = np.zeros(0, np.int64), np.zeros((0, HIDDEN), np.float32)
    answer(weights, [])
    answer(weights, [(rows, none, none, rows, none)])


def test_an_expert_that_is_not_held_is_named_and_nothing_is_written(weights: np.ndarray) -> None:
    one = part(2, [0, 1], [0, 1], [0, 2])
    with pytest.raises(KeyError, match="expert 2 is not held here"):
        answer(weights, [one], held=2)
    assert (one[3] == 7).all()
    one[2][1] = EXPERTS
    with pytest.raises(KeyError, match="expert 3 is not held here"):
        answer(weights, [one])


@pytest.mark.parametrize("index", range(5))
@pytest.mark.parametrize("fault", ["type", "short", "outside", "strided", "read-only"])
def test_arrays_that_do_not_fit_are_refused(weights: np.ndarray, index: int, fault: str) -> None:
    """None is converted: the kernel would read a copy that is gone, or write into one."""
    good = part(4, [0, 1], [0, 1], [0, 2])
    array = good[index]
    bad = {
        "type": array.astype(np.float64 if array.ndim == 2 else np.int32),
        "short": array[:, :4].copy() if array.ndim == 2 else array[:1].copy(),
        "outside": array if array.ndim == 2 else array - 5,
        "strided": np.repeat(array, 2, axis=-1)[..., ::2],
        "read-only": array.copy(),
    }[fault]
    bad.flags.writeable = fault != "read-only"
    parts = [(*good[:index], bad, *good[index + 1 :])]
    if (fault == "read-only" and index != 3) or (fault == "outside" and index in (0, 3)):
        answer(weights, parts)
        return
    with pytest.raises(KeyError if fault == "outside" and index == 2 else ValueError):
        answer(weights, parts)
    assert (good[3] == 7).all()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("width", [3, 8, 4096])
def test_rows_are_put_to_their_lines(threads: int, width: int) -> None:
    plain.set_threads(threads, False)
    drawn = np.random.default_rng(width)
    rows = drawn.standard_normal((70, width)).astype(np.float32)
    for count in (0, 1, 50):
        lines, places = drawn.permutation(60)[:count], drawn.integers(0, 70, count)
        out = np.full((60, width), 7, np.float32)
        wanted = out.copy()
        wanted[lines] = rows[places]
        plain.put(out, lines, rows, places)
        np.testing.assert_array_equal(out, wanted)


@pytest.mark.parametrize(
    ("lines", "places"), [([0, 4], [0, 0]), ([0, -1], [0, 0]), ([0, 1], [0, 2]), ([0], [0, 1])]
)
def test_a_line_or_a_place_that_is_none(lines: list[int], places: list[int]) -> None:
    out, rows = np.zeros((4, 8), np.float32), np.ones((2, 8), np.float32)
    with pytest.raises(ValueError, match="fit|range|none"):
        plain.put(out, np.array(lines), rows, np.array(places))
    for other in (out.astype(np.float64), np.zeros((8, 4), np.float32).T):
        with pytest.raises(TypeError):
            plain.put(other, np.array([0]), rows, np.array([0]))
    with pytest.raises(ValueError, match="fit"):
        plain.put(out, np.array([0]), np.ones((2, 9), np.float32), np.array([0]))
    assert not out.any()
