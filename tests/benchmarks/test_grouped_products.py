"""The experts' grouped products beside those of libraries: in Triton's interpreter, and as CUDA graphs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import grouped_products

from moesaic.kernels.reference.experts import experts_plain
from tests.support.gpu_graphs import graphs
from tests.support.gpu_sanitizer import WAITS, sanitized
from tests.support.triton_kernels import EXACT, IS_INTERPRETED, close

pytestmark = [
    pytest.mark.skipif(not IS_INTERPRETED, reason="these are for machines without a GPU"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of NumPy, in the interpreter
]
SIZES = ["--experts=3", "--top-k=2", "--hidden=16", "--width=8", "--layers=2", "--rounds=1", "--repeats=1"]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[dict[str, Any]], str]:
    """The exit code, what was found, and what was said of mistakes."""
    code = grouped_products.main([*SIZES, "--json", *arguments])
    printed = capsys.readouterr()
    return code, json.loads(printed.out)["found"] if printed.out else [], printed.err


def waiting(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """As torch computes on GPUs for which it has no kernel."""
    assert ends.cpu()[-1] == len(rows)
    return grouped_products.of_torch(rows, weights, ends)


def wrong(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Each group gets the weights of the next expert."""
    return grouped_products.of_torch(rows, weights.roll(1, 0), ends)


@pytest.mark.parametrize("chosen", [[[1, 2], [2, 1], [1, 2]], [[2, 0]], [[0, 1], [1, 2], [2, 0]]])
def test_stacked_experts_are_those_of_the_reference(chosen: list[list[int]]) -> None:
    """Some experts have no rows: the first, one in the middle, none."""
    layer = grouped_products.Stacked(3, 16, 8, "cpu")
    hidden, ids = torch.randn(len(chosen), 16).bfloat16().float(), torch.tensor(chosen)
    close(layer.experts(rounded, hidden, ids), experts_plain(layer.weights, hidden, ids), 2**-7)


def rounded(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """A product in float32, one row at a time."""
    of_row = torch.searchsorted(ends, torch.arange(len(rows)), right=True)
    return torch.stack(
        [weights[expert].float() @ row.float() for expert, row in zip(of_row, rows, strict=True)]
    )


def crowded(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Has other bits where there are many rows."""
    return rounded(rows, weights, ends) * (1 + 2**-12 * (len(rows) > 2))


@pytest.mark.slow
def test_the_products_agree(capsys: pytest.CaptureFixture[str]) -> None:
    name = f"{__name__}:crowded"
    code, found, problem = run(capsys, "--device", "cpu", "--tokens", "1", "5", "--products", "torch", name)
    assert (code, problem) == (0, "")
    assert [(one["tokens"], one["product"]) for one in found] == [
        (tokens, product) for tokens in (1, 5) for product in ("triton", "torch", name)
    ]
    assert all(one["microseconds"] > 0 and one["gb_per_s"] > 0 for one in found)
    assert [one["product"] for one in found if not one["alone"]] == [name], "only with the tokens of others"
    assert not any(one["recorded"] for one in found)
    assert all(0 < one["difference"] < grouped_products.LARGEST for one in found)


@pytest.mark.slow
def test_a_product_with_the_wrong_weights_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    name = f"{__name__}:wrong"
    code, found, problem = run(capsys, "--device", "cpu", "--tokens", "4", "--products", name)
    assert code == 1 and name in problem and "triton" not in problem
    assert found[1]["difference"] > grouped_products.LARGEST > found[0]["difference"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["--device", "cpu", "--products", "other"],
            "got 'other'; allowed: torch, flashinfer, quack, module:function",
        ),
        (["--device", "cpu", "--products", "moesaic:other"], "allowed: one that exists"),
        (["--device", "cpu", "--top-k", "9"], "--top-k: got 9; allowed: at most --experts (3)"),
        (["--device", "cpu", "--width", "12"], "--width: got 12; allowed: multiples of 8"),
        ([], "--device: got 'cuda'; allowed: cpu"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    try:
        code = grouped_products.main([*SIZES, *arguments])
    except SystemExit as ended:
        code = ended.code
    assert code == 2 and says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("product", "module", "function", "starts", "transposed"),
    [
        ("flashinfer", "flashinfer.grouped_mm", "grouped_mm_bf16", "m_indptr", False),
        ("quack", "quack.gemm_interface", "gemm", "cu_seqlens_m", True),
    ],
)
def test_libraries_get_where_the_rows_of_each_expert_begin_and_end(
    monkeypatch: pytest.MonkeyPatch, product: str, module: str, function: str, starts: str, transposed: bool
) -> None:
    def computed(a: torch.Tensor, b: torch.Tensor, *places: Any, out_dtype: Any, **named: Any) -> Any:
        [begins] = places or (named[starts],)
        assert begins.dtype is torch.int32 and begins.tolist() == [0, 2, 2, 3]
        return rounded(a, b.mT if transposed else b, begins[1:]).to(out_dtype)

    made: Any = ModuleType(module)
    setattr(made, function, computed)
    monkeypatch.setitem(sys.modules, module.partition(".")[0], ModuleType(module.partition(".")[0]))
    monkeypatch.setitem(sys.modules, module, made)
    rows, weights = torch.randn(3, 16).bfloat16(), torch.randn(3, 8, 16).bfloat16()
    ends = torch.tensor([2, 2, 3], dtype=torch.int32)
    found = grouped_products.PRODUCTS[product](rows, weights, ends)
    close(found, grouped_products.of_torch(rows, weights, ends).float(), 2**-7)
    close(found, rounded(rows, weights, ends), EXACT)


class Refused(list[str]):
    """Raises where the host would wait for the device, as torch does in its mode "error"."""

    def append(self, name: str) -> None:
        raise RuntimeError(f"called a synchronizing CUDA operation: {name}")


@pytest.mark.slow
def test_calls_are_graphs_unless_the_product_waits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def mode(name: str) -> None:
        WAITS.of = Refused() if name == "error" else []

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", mode)
    name = f"{__name__}:waiting"
    with sanitized(), graphs():
        code, found, _ = run(capsys, "--tokens", "3", "--products", "torch", name)
    assert code == 0
    assert {one["product"]: one["recorded"] for one in found} == {"triton": True, "torch": True, name: False}
