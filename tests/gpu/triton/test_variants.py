"""How many variants of a kernel are compiled while steps have other rows and contexts.

Each takes a part of a second when it first comes, in the middle of requests.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from tests.support import delta_steps, paged_steps
from tests.support.triton_kernels import DEVICE

from moesaic.gpu.triton import attention, cache, convolution, delta, dense, experts, gate, rows
from moesaic.kernels import table
from moesaic.kernels.batch import AttentionBatch
from moesaic.kernels.gating import Gating
from moesaic.kernels.states import StateSizes
from moesaic.kernels.weights import ExpertWeights

Variants = dict[str, set[str]]
ROWS = (1, 2, 3, 7, 8, 16, 31, 64, 100, 129, 256, 500, 1024)


@pytest.fixture
def variants(monkeypatch: pytest.MonkeyPatch) -> Variants:
    """Constants that kernels are launched with. Nothing is computed."""
    found: Variants = defaultdict(set)

    def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        found[f"{kernel.fn.__module__}.{kernel.__name__}"].add(repr(sorted(constants.items())))

    for module in (attention, cache, convolution, delta, dense, experts, gate, rows):
        monkeypatch.setattr(module, "launch", launch)
    return found


def test_other_numbers_of_rows_are_at_most_three_variants(variants: Variants) -> None:
    shapes = ((32, 64), (32, 64), (64, 32))
    weights = ExpertWeights(*((torch.zeros(shape, device=DEVICE),) * 8 for shape in shapes))
    for count in ROWS:
        hidden, ids = torch.zeros(count, 64, device=DEVICE), torch.zeros(count, 2, dtype=torch.int64)
        experts.experts(weights, hidden, ids.to(DEVICE))
        rows.add_norm(hidden, hidden, hidden[0], 1e-6)
        rows.merge(hidden, None, hidden.view(count, 1, 64), hidden[:, :1])
        gate.gate(hidden, torch.zeros(8, 64, device=DEVICE), Gating(2))
        cache.store(torch.zeros(4, 16, 2, 32, device=DEVICE), hidden.view(count, 2, 32), ids[:, 0])
    assert len(variants) > 6 and max(map(len, variants.values())) <= 3


def test_contexts_are_a_variant_for_each_power_of_two(variants: Variants) -> None:
    """1,024 tokens and fewer, then twice as many, and so on, up to 131,072."""
    pool = torch.zeros(1, 16, 2, 32, device=DEVICE)
    query = torch.zeros(1, 4, 32, device=DEVICE)
    for context in (1, 100, 1000, 1025, 3000, 5000, 10_000, 20_000, 40_000, 100_000, 131_072):
        batch = AttentionBatch.build(paged_steps.tokens([1], [context], 16, num_blocks=8193), 16, DEVICE)
        attention.paged_attention(query, pool, pool, batch, 0.1)
    assert {name.rpartition(".")[2]: len(those) for name, those in variants.items()} == {
        "_attend": 8,
        "_join": 7,
    }


def test_states_have_one_variant_for_decode_and_one_for_chunks(variants: Variants) -> None:
    sizes = StateSizes(1, 2, 16, 16, 4)
    for counts in ([1], [1, 1, 1], [2], [3, 70], [1, 200]):
        layer = delta_steps.Layer(table.REFERENCE, delta_steps.Inputs(sizes, counts))
        batch = AttentionBatch.build(layer.batch(list(enumerate(counts))), delta_steps.BLOCK)
        one = torch.zeros(sum(counts), sizes.channels)
        convolution.convolve(one, torch.zeros(4, sizes.channels).t(), layer.states, batch)
        gates = torch.zeros(sum(counts), 2 * sizes.value_heads)
        delta.delta(one, gates, gates[0, :2], gates[0, :2], layer.states, batch)
    assert len(variants) == 5
    assert {name: len(those) for name, those in variants.items() if len(those) > 1} == {
        "moesaic.gpu.triton.convolution._mix": 2
    }
