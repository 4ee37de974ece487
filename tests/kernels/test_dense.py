"""Projections, norms and rotations against their formulas."""

from __future__ import annotations

import math

import pytest
import torch

from moesaic.core.errors import ConfigError
from moesaic.kernels import table
from moesaic.kernels.reference import dense
from moesaic.kernels.reference.dense import LARGE_WEIGHT

torch.set_num_threads(1)


@pytest.mark.parametrize("rows", [0, 1, 2, 5, 6, 40])
@pytest.mark.parametrize("shape", [(5, 7), (300, 256)])
def test_linear_is_a_product_and_a_bias(rows: int, shape: tuple[int, int]) -> None:
    assert (LARGE_WEIGHT <= 300 * 256) and (LARGE_WEIGHT > 5 * 7)
    inputs, weight, bias = torch.randn(rows, shape[1]), torch.randn(shape), torch.randn(shape[0])
    torch.testing.assert_close(dense.linear(inputs, weight), inputs @ weight.t(), rtol=1e-4, atol=1e-4)
    wanted = inputs @ weight.t() + bias
    torch.testing.assert_close(dense.linear(inputs, weight, bias), wanted, rtol=1e-4, atol=1e-4)


def test_a_narrow_weight_answers_in_float32() -> None:
    inputs, weight = torch.randn(3, 8), torch.randn(4, 8).bfloat16()
    found = dense.linear(inputs, weight)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, inputs @ weight.float().t(), rtol=0.05, atol=0.1)


def test_head_linear_has_a_matrix_per_head() -> None:
    rows, weight = torch.randn(5, 3, 4), torch.randn(3, 4, 6)
    torch.testing.assert_close(dense.head_linear(rows, weight), torch.einsum("nhi,hio->nho", rows, weight))


def test_rms_norm_has_unit_mean_square() -> None:
    rows = torch.randn(4, 3, 64) * 7
    normed = dense.rms_norm(rows, torch.ones(64), 1e-6)
    torch.testing.assert_close(normed.square().mean(-1), torch.ones(4, 3))
    torch.testing.assert_close(dense.rms_norm(rows, torch.full((64,), 2.0), 1e-6), 2 * normed)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_turns_pairs_by_their_angle(interleaved: bool) -> None:
    rows, table, positions = torch.randn(5, 2, 6), torch.randn(9, 3), torch.tensor([4, 0, 8, 4, 1])
    found = dense.rope(rows, table.cos(), table.sin(), positions, interleaved)
    angle = table[positions]
    first, second = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(0, 3), slice(3, 6))
    pairs = torch.complex(rows[..., first], rows[..., second])
    wanted = pairs * torch.polar(torch.ones(5, 1, 3), angle[:, None])
    torch.testing.assert_close(torch.complex(found[..., first], found[..., second]), wanted)


def test_gated_mlp_gates_with_silu() -> None:
    rows, gate, up, down = torch.randn(3, 8), torch.randn(6, 8), torch.randn(6, 8), torch.randn(8, 6)
    wide = rows @ gate.t()
    wanted = (wide * torch.sigmoid(wide) * (rows @ up.t())) @ down.t()
    torch.testing.assert_close(dense.gated_mlp(rows, gate, up, down), wanted, rtol=1e-4, atol=1e-4)


def test_sigmoid_gate_multiplies_each_row_by_one_number() -> None:
    rows, weight = torch.tensor([[1.0, 2.0], [0.0, 0.0]]), torch.tensor([[3.0, -1.0]])
    found = dense.sigmoid_gate(rows, weight, torch.tensor([[1.0, -2.0, 4.0], [1.0, -2.0, 4.0]]))
    opened = 1 / (1 + math.exp(-1.0))
    wanted = torch.tensor([[opened, -2 * opened, 4 * opened], [0.5, -1.0, 2.0]])
    torch.testing.assert_close(found, wanted)


def test_clip_keeps_what_is_within_the_limit() -> None:
    found = dense.clip(torch.tensor([[-3.0, -0.5, 0.0, 0.5, 3.0]]), 0.5)
    assert found.tolist() == [[-0.5, -0.5, 0.0, 0.5, 0.5]]


def test_pick_names_what_it_picked() -> None:
    assert table.pick("cpu", "reference") is table.pick("cuda:1") is table.REFERENCE
    assert table.REFERENCE.name == "reference (torch)"
    names = [table.pick("cpu", name).name for name in table.instruction_sets()]
    assert names == [f"native ({name})" for name in table.instruction_sets()]
    assert table.pick("cpu").name == [*names, table.REFERENCE.name][0]


def test_without_a_compiler_the_reference_is_picked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "_native", None)
    assert table.instruction_sets() == ()
    assert table.pick("cpu") is table.REFERENCE
    with pytest.raises(ConfigError, match="--kernels: got 'avx2'; allowed: auto, reference"):
        table.pick("cpu", "avx2")


@pytest.mark.parametrize(
    ("device", "wanted"), [("", "auto"), ("tpu", "auto"), ("cuda", "portable"), ("cpu", "sse")]
)
def test_what_this_machine_cannot_run_is_refused(device: str, wanted: str) -> None:
    with pytest.raises(ConfigError, match="device|--kernels"):
        table.pick(device, wanted)
