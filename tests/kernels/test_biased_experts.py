"""Experts with biases and other activations: the reference, every instruction set, and a server's calls."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.support.native_kernels import ROWS, STORED, activated, close_mlp, same_bits, stored

from moesaic.core.experts import SILU, Activation
from moesaic.kernels.reference import experts as reference
from moesaic.kernels.table import REFERENCE, Kernels
from moesaic.kernels.weights import ExpertWeights

torch.set_num_threads(1)
GPT_OSS = Activation(alpha=1.702, up_offset=1.0, limit=0.7)
"""Its limit is low, so that some products are beyond it."""
ACTIVATIONS = {
    "gpt-oss": GPT_OSS,
    "silu": SILU,
    "alpha": Activation(alpha=1.702),
    "added": Activation(up_offset=1.0),
    "limit": Activation(limit=0.7),
}
PARTS = tuple(kind for kind in ACTIVATIONS if kind != "gpt-oss")
SIZES = ((1, 1), (7, 33), (100, 24), (65, 300))
"""Hidden size and width."""
NUMBER = 5


def weights(
    hidden: int, width: int, dtype: torch.dtype, activation: Activation = GPT_OSS, biased: bool = True
) -> ExpertWeights:
    def make(*shape: int, dtype: torch.dtype = dtype) -> tuple[torch.Tensor, ...]:
        return tuple(stored(*shape, dtype=dtype, spread=shape[-1] ** -0.5) for _ in range(NUMBER))

    biases = [make(size, dtype=torch.float32) for size in (width, width, hidden)] if biased else []
    return ExpertWeights(
        make(width, hidden), make(width, hidden), make(hidden, width), *biases, activation=activation
    )


def routing(rows: int, top_k: int = 2) -> torch.Tensor:
    return torch.stack([torch.randperm(NUMBER)[:top_k] for _ in range(max(rows, 1))])[:rows]


def check(native: Kernels, table: ExpertWeights, rows: torch.Tensor, ids: torch.Tensor) -> None:
    found = native.experts(table, rows, ids)
    for expert in range(NUMBER):
        row, rank = (ids == expert).nonzero(as_tuple=True)
        biases = table.biases_of(expert)
        close_mlp(native, found[row, rank], rows[row], table.matrices_of(expert), biases, table.activation)


@pytest.mark.parametrize("rows", [1, 2, 9])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_the_reference(kind: str, biased: bool, rows: int) -> None:
    torch.manual_seed(0)
    table = weights(24, 20, torch.float32, ACTIVATIONS[kind], biased)
    hidden, ids = torch.randn(rows, 24), routing(rows)
    check(REFERENCE, table, hidden, ids)
    plain = reference.experts_plain(table, hidden, ids)
    torch.testing.assert_close(REFERENCE.experts(table, hidden, ids), plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize(
    ("kind", "size"), [*(("gpt-oss", size) for size in SIZES), *((kind, (100, 24)) for kind in PARTS)]
)
def test_native_experts(native: Kernels, kind: str, size: tuple[int, int], dtype: torch.dtype) -> None:
    inputs = stored(max(ROWS), size[0])
    for biased in (True, False):
        table = weights(*size, dtype, ACTIVATIONS[kind], biased)
        for count in ROWS:
            check(native, table, inputs[:count], routing(count))


@pytest.mark.parametrize("dtype", STORED)
def test_silu_without_biases_has_the_bits_of_silu_with_zeros(native: Kernels, dtype: torch.dtype) -> None:
    plain = weights(100, 70, dtype, SILU, biased=False)
    zeros = [(torch.zeros(size),) * NUMBER for size in (70, 70, 100)]
    added = ExpertWeights(*plain.parts, *zeros)
    rows, ids = stored(20, 100), routing(20)
    assert torch.equal(native.experts(added, rows, ids), native.experts(plain, rows, ids))


@pytest.mark.parametrize("dtype", STORED)
def test_a_row_has_the_same_bits_in_any_company(native: Kernels, dtype: torch.dtype) -> None:
    table, rows = weights(140, 200, dtype), stored(70, 140)
    for ids in (routing(70), torch.full((70, 1), 3)):
        wanted = torch.cat([native.experts(table, rows[i : i + 1], ids[i : i + 1]) for i in range(70)])
        for threads, count in itertools.product((1, 3), (2, 5, 13, 49, 70)):
            native.set_threads(threads, False)
            assert same_bits(native.experts(table, rows[:count], ids[:count]), wanted[:count])
        native.set_threads(1, False)


def test_far_numbers_and_what_is_none(native: Kernels) -> None:
    """A product far below zero gives almost nothing, one beyond the limit as much as the limit; NaN stays."""
    one, nothing = (torch.ones(1, 1),), (torch.zeros(1),)
    table = ExpertWeights(one, one, one, nothing, nothing, nothing, activation=replace(GPT_OSS, limit=7.0))
    values = [-1e38, -300.0, -7.5, -1.0, -0.0, 1e-30, 6.9, 7.1, 1e15, float("inf")]
    rows = torch.tensor(values)[:, None]
    found = native.experts(table, rows, torch.zeros(len(values), 1, dtype=torch.int64)).flatten()
    wanted = activated(table.activation, rows, rows).flatten()
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-30)
    assert native.experts(table, torch.tensor([[torch.nan]]), torch.zeros(1, 1).long()).isnan().all()


@pytest.mark.parametrize("dtype", STORED)
def test_a_servers_calls_have_the_bits_of_one_batch(native: Kernels, dtype: torch.dtype) -> None:
    plain = pytest.importorskip("moesaic.kernels.native.plain")
    table, rows, ids = weights(33, 70, dtype), stored(6, 33), routing(6, 1)
    wanted = native.experts(table, rows, ids)[:, 0].numpy()
    addresses = np.array(
        [[one.data_ptr() for one in part if one is not None] for part in table.parts], dtype=np.uint64
    )
    assert addresses.shape == (6, NUMBER)
    out = np.full((7, 33), np.nan, np.float32)
    lines, stored_as = np.array([3, 1, 0, 6, 2, 4]), table.table.dtype_code
    part = (rows.numpy(), np.arange(6), ids[:, 0].numpy(), out, lines)
    plain.experts(addresses, (33, 70), stored_as, [part], table.activation)
    np.testing.assert_array_equal(out[lines], wanted)
    assert np.isnan(out[5]).all()
    with pytest.raises(ValueError, match="table: got 4 rows; allowed: 3"):
        plain.experts(addresses[:4], (33, 70), stored_as, [part], table.activation)


@pytest.mark.parametrize("part", [3, 4, 5])
@pytest.mark.parametrize("wrong", ["short", "bf16", "strided", "absent"])
def test_biases_that_do_not_fit_are_refused(native: Kernels, part: int, wrong: str) -> None:
    table = weights(8, 6, torch.float32)
    bias = table.parts[part][2]
    assert bias is not None
    other = {
        "short": bias[1:].clone(),
        "bf16": bias.bfloat16(),
        "strided": bias.repeat_interleave(2)[::2],
        "absent": None,
    }[wrong]
    parts = list(table.parts)
    parts[part] = (*parts[part][:2], other, *parts[part][3:])
    with pytest.raises(TypeError, match="the biases of expert 2"):
        native.experts(table.with_parts(parts), stored(3, 8), torch.zeros(3, 2).long())
