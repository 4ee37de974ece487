"""Experts with compressed weights have the same bits as experts with bf16 weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tests.kernels.test_bounds import Guarded
from tests.kernels.test_compressed_layout import SPECIAL, matrix, numbers

from moesaic.core.weight_types import COMPRESSED_DTYPE, NATIVE_DTYPES
from moesaic.kernels.compressed_layout import Bits, Bytes, compress
from moesaic.kernels.table import Kernels

try:
    from moesaic.kernels.native import _native
except ImportError:
    _native = None  # type: ignore[assignment]


@pytest.fixture
def reading(native: Kernels) -> Kernels:
    """The instruction sets that can read compressed weights."""
    if not native.can_use_quantized:
        pytest.skip("tiles are loaded from bf16 rows")
    return native


class Mlp:
    """An expert's gate and up [w, h] and down [h, w]. Memory that cannot be accessed follows each."""

    def __init__(self, matrices: Sequence[Bits | Bytes]) -> None:
        guarded = Guarded()
        self.memory = [guarded(torch.from_numpy(one.view(np.uint8))) for one in matrices]
        self.addresses = [one.data_ptr() for one in self.memory]


NONE = Mlp(())
NONE.addresses = [0, 0, 0]


@dataclass(frozen=True)
class Size:
    h: int
    w: int

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        return (self.w, self.h), (self.w, self.h), (self.h, self.w)

    def trained(self, rng: np.random.Generator) -> list[Bits]:
        """Random weights distributed as in trained models. One in 128 is tiny."""
        made = [rng.standard_normal(shape, dtype=np.float32) * 0.05 for shape in self.shapes]
        for one in made:
            one[:, 63::128] *= 2.0**-40
        return [(one.view(np.uint32) >> 16).astype(np.uint16) for one in made]

    def run(self, mlps: Sequence[Mlp], stored: int, rows: npt.NDArray[np.float32], ids: list[int]) -> Bits:
        """Answers [n, h] as bits. Row i is computed by expert ids[i]. Lines beside them keep their values."""
        n = len(rows)
        answers = np.full((n + 2, self.h), 7.0, dtype=np.float32)
        lines, chosen = np.arange(1, n + 1), np.array(ids, dtype=np.int64)
        part = (rows, lines - 1, chosen, answers, lines)
        table = np.array([mlp.addresses for mlp in mlps], dtype=np.uint64).T.copy()
        _native.gathered_experts(table, self.h, self.w, stored, [part])
        assert (answers[[0, -1]] == 7.0).all()
        return answers[1:-1].view(np.uint32)


BF16, TWELVE = NATIVE_DTYPES.index("bfloat16"), NATIVE_DTYPES.index(COMPRESSED_DTYPE)
SIZES = [
    Size(1, 1),
    Size(3, 65),
    Size(64, 64),
    Size(130, 1025),
    Size(1100, 33),
    Size(1024, 70),
    Size(2100, 130),
]
LARGE = pytest.param(Size(2100, 1030), marks=pytest.mark.slow)


def uneven(rng: np.random.Generator, n: int) -> list[int]:
    """Of five experts the first gets most of n rows. Experts 2 and 4 get none."""
    return [int(expert) for expert in rng.choice([0, 0, 0, 0, 0, 0, 1, 3], n)]


@pytest.mark.parametrize("size", [*SIZES, LARGE], ids=str)
def test_experts_have_the_bits_of_bf16(reading: Kernels, size: Size) -> None:
    rng = np.random.default_rng(size.h)
    matrices = [size.trained(rng) for _ in range(4)]
    plain = [*map(Mlp, matrices), NONE]
    small = [*(Mlp([compress(one) for one in mlp]) for mlp in matrices), NONE]
    for n in (1, 2, 3, 7, 25, 200):
        rows, ids = rng.standard_normal((n, size.h), dtype=np.float32), uneven(rng, n)
        wanted = size.run(plain, BF16, rows, ids)
        assert wanted.any(axis=1).all()
        for threads in (1, 2):
            reading.set_threads(threads, False)
            assert np.array_equal(size.run(small, TWELVE, rows, ids), wanted)
        for row in {0, n // 2, n - 1}:
            alone = size.run(small, TWELVE, rows[row : row + 1], ids[row : row + 1])
            assert np.array_equal(alone[0], wanted[row])
    with pytest.raises(KeyError, match="expert 4 is not held here"):
        size.run(small, TWELVE, rows[:1], [4])


@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize("columns", [1, 63, 64, 65, 1023, 1024, 1025, 2111])
def test_any_bits_are_read_as_they_are(reading: Kernels, columns: int, finite: bool) -> None:
    """A row that is 1 at one place and 0 elsewhere reads the numbers of that place. A sum with several NaNs
    may be any NaN."""
    rng = np.random.default_rng(columns)
    size = Size(columns, 7)
    any_bits = [matrix(rng, *shape) for shape in size.shapes]
    if finite:
        for one in any_bits:
            one[one >> 7 & 0xFF == 0xFF] &= 0xBFFF
    for at in range(4):  # gate, up, down, all
        mlp = [
            one if i == at or at == 3 else numbers(rng, one.shape, 127, 4) for i, one in enumerate(any_bits)
        ]
        plain, small = Mlp(mlp), Mlp([compress(one) for one in mlp])
        for n in (1, 5, 40):
            rows = np.zeros((n, columns), dtype=np.float32)
            rows[np.arange(n), rng.permutation(np.resize([*range(columns)], n))] = 1.0
            wanted = size.run([plain], BF16, rows, [0] * n)
            found = size.run([small], TWELVE, rows, [0] * n)
            number = wanted & 0x7FFFFFFF <= 0x7F800000
            assert np.array_equal(found & 0x7FFFFFFF <= 0x7F800000, number)
            assert np.array_equal(found[number], wanted[number])


@pytest.mark.parametrize("bits", SPECIAL, ids=hex)
def test_one_strange_number(reading: Kernels, bits: int) -> None:
    rng, size = np.random.default_rng(bits), Size(1100, 5)
    rows = rng.standard_normal((40, size.h), dtype=np.float32)
    for place in (0, 63, 64, 1023, 1024, 1087, 1088, 1099):
        mlp = size.trained(rng)
        before = size.run([Mlp([compress(one) for one in mlp])], TWELVE, rows, [0] * len(rows))
        for one in mlp[:2]:
            one[3, place] = bits
        mlp[2][place, 4] = bits
        plain, small = Mlp(mlp), Mlp([compress(one) for one in mlp])
        for n in (1, 4, 40):
            wanted = size.run([plain], BF16, rows[:n], [0] * n)
            assert np.array_equal(size.run([small], TWELVE, rows[:n], [0] * n), wanted)
        assert not np.array_equal(wanted, before)


@pytest.mark.parametrize("fill", [0x00, 0x7F, 0xFF, None])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_damage_stays_in_its_row(reading: Kernels, size: Size, fill: int | None) -> None:
    """A row of weights has random bytes. Its number of the answer may be anything. All other numbers stay
    equal."""
    rng = np.random.default_rng(size.w)
    matrices = [compress(one) for one in size.trained(rng)]
    whole, hurt = Mlp(matrices), int(rng.integers(0, size.h))
    down = matrices[2].copy()
    down[hurt] = rng.integers(0, 256, down.shape[1]) if fill is None else fill
    everywhere = [rng.integers(0, 256, one.shape).astype(np.uint8) for one in matrices]
    for n in (1, 6, 50, 130):
        rows, ids = rng.standard_normal((n, size.h), dtype=np.float32), [0] * n
        wanted = size.run([whole], TWELVE, rows, ids)
        found = size.run([Mlp([*matrices[:2], down])], TWELVE, rows, ids)
        assert np.array_equal(np.delete(found, hurt, 1), np.delete(wanted, hurt, 1))
        size.run([Mlp(everywhere)], TWELVE, rows, ids)
