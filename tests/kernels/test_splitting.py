"""Kernels that make two or three bf16 numbers of each number of a row, for products in AMX tiles."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.kernels.test_rounding import in_tiles
from tests.support.native_kernels import same_bits, stored

from moesaic.commands.machine import examine
from moesaic.kernels import table

torch.set_num_threads(1)
HERE = [name for name in table.instruction_sets() if name in table.SPLITTING]
pytestmark = pytest.mark.skipif(not HERE, reason="no AMX on this CPU, and no emulation of it in this build")
each = pytest.mark.parametrize("name", sorted(table.SPLITTING))
ULP = 2.0**-24


@pytest.fixture(autouse=True)
def auto_again() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    table.pick("cpu").set_threads(1, False)


def parts_of(rows: torch.Tensor, count: int) -> list[torch.Tensor]:
    """The bf16 numbers, as float32, whose sum stands for each number."""
    parts = []
    for _ in range(count):
        parts.append(rows.bfloat16().float())
        rows = rows - parts[-1]
    return parts


def test_three_parts_hold_every_bit() -> None:
    rows = torch.randn(1000, 1) * 2.0 ** torch.randint(-90, 90, (1000, 1))
    one = torch.ones(1, 1, dtype=torch.bfloat16)
    assert same_bits(table.pick("cpu", "amx_bf16x3").linear(rows, one), rows)
    assert same_bits(sum(parts_of(rows, 3)[1:], parts_of(rows, 3)[0]), rows)
    found = table.pick("cpu", "amx_bf16x2").linear(rows, one)
    assert 2.0**-19 < float(((found - rows) / rows).abs().max()) <= 2.0**-17


@each
@pytest.mark.parametrize("width", [31, 33, 100])
@pytest.mark.parametrize("n", [1, 70])
def test_each_part_is_added_up_alone_and_the_smallest_first(name: str, width: int, n: int) -> None:
    rows, weight = stored(n, width), stored(50, width, dtype=torch.bfloat16)
    *others, last = (in_tiles(part, weight.float()) for part in parts_of(rows, int(name[-1])))
    wanted = last
    for part in reversed(others):
        wanted = part + wanted
    assert same_bits(table.pick("cpu", name).linear(rows, weight), wanted)


def test_infinities_stay_and_large_numbers_become_infinite() -> None:
    one, inf = torch.ones(1, 1, dtype=torch.bfloat16), float("inf")
    rows = torch.tensor([[inf], [-inf], [3.38e38], [3.4e38], [-3.4e38]])
    for name in HERE:
        found = table.pick("cpu", name).linear(rows, one).flatten()
        assert found[[0, 1, 3, 4]].tolist() == [inf, -inf, inf, -inf]
        assert float(found[2]) == pytest.approx(3.38e38, rel=2**-17)
    assert table.pick("cpu", HERE[0]).linear(torch.tensor([[float("nan")]]), one).isnan().all()


@pytest.mark.skipif("amx_bf16" in examine().instruction_sets, reason="this CPU has tiles")
def test_only_tests_see_emulated_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(table.instruction_sets()) >= table.TILED
    monkeypatch.delenv("_MOESAIC_EMULATE_AMX")
    assert not set(table.instruction_sets()) & table.TILED


def deviation(name: str, rows: torch.Tensor, weight: torch.Tensor) -> float:
    """The error of a product beside float64: root mean square, in units of 2^-24 of the results' size."""
    exact = rows.double() @ weight.double().t()
    found = table.pick("cpu", name).linear(rows, weight).double()
    return float((found - exact).square().mean().sqrt() / exact.square().mean().sqrt()) / ULP


@pytest.mark.parametrize(
    ("width", "most"),
    [
        (128, 1.0),
        (768, 1.0),
        (2048, 1.2),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in [(4096, 1.5), (14336, 2.5)]),
    ],
)
def test_the_error_of_a_product_is_that_of_float32(width: int, most: float) -> None:
    rows, weight = torch.randn(32, width), torch.randn(48, width).bfloat16()
    exact, three, two, rounded = (
        deviation(name, rows, weight) for name in ("avx512", "amx_bf16x3", "amx_bf16x2", "amx_bf16")
    )
    assert three < most * exact
    assert two < 50
    assert rounded > 1e4
