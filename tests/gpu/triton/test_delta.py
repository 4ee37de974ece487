"""Linear attention and short convolutions in Triton against the reference: steps, states, padded rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.support.delta_steps import BLOCK, STATES, Inputs, Layer, Piece, copy_states, empty_states
from tests.support.triton_kernels import DEVICE, EXACT, TRITON, close

from moesaic.core.tokens import TokenBatch
from moesaic.kernels.batch import AttentionBatch
from moesaic.kernels.states import LayerStates, StateSizes
from moesaic.kernels.table import REFERENCE

pytestmark = pytest.mark.slow
SIZES = (
    StateSizes(1, 2, 16, 8, 4),
    StateSizes(2, 2, 24, 40, 2),
    StateSizes(1, 1, 8, 72, 3, max_draft_tokens=2),
)
BEGUN = [60, 62, 0]
"""Positions of the sequences before the steps."""
STEPS = (
    [(0, 3)],
    [(1, 1), (2, 1)],
    [(0, 1), (1, 1), (2, 1)],
    [(1, 2), (0, 3), (2, 1)],
    [(0, 1), (1, 1)],
)
"""Chunks and decode: rows up to a multiple of 64, over it, and behind it."""


class OnCpu(Layer):
    """The reference."""

    device = "cpu"

    def __init__(self, inputs: Inputs, in_place: bool = True) -> None:
        super().__init__(REFERENCE, inputs, in_place)


class OnDevice(Layer):
    """The kernels under test, on their device."""

    device = DEVICE

    def __init__(self, inputs: Inputs, in_place: bool = True) -> None:
        super().__init__(TRITON, inputs, in_place)
        self.states = moved(self.states, DEVICE)

    def compute(self, rows: torch.Tensor, gates: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        there = AttentionBatch.build(batch.batch, BLOCK, DEVICE)
        weight, decay, bias = (
            one.to(DEVICE) for one in (self.inputs.weight, self.inputs.decay, self.inputs.bias)
        )
        mixed = TRITON.convolve(rows.to(DEVICE), weight, self.states, there)
        return TRITON.delta(mixed, gates.to(DEVICE), decay, bias, self.states, there)

    def state(self, index: int) -> list[torch.Tensor]:
        self.states = moved(self.states, "cpu")
        return super().state(index)


Side = OnCpu | OnDevice


def moved(states: LayerStates, device: str) -> LayerStates:
    return replace(states, **{name: getattr(states, name).to(device) for name in STATES})


def begun(layer: Side, positions: list[int]) -> Side:
    """As if each sequence had come to its position: what it kept are small random numbers."""
    generator = torch.Generator().manual_seed(1)
    states = moved(layer.states, "cpu")
    for name in STATES:
        one = getattr(states, name)
        one[int(name.startswith("page")) :] = torch.rand(one[:1].shape, generator=generator) / 4
    states.decays.neg_().copy_(states.decays.cumsum(-1))
    layer.states, layer.done = moved(states, layer.device), list(positions)
    return layer


@pytest.mark.parametrize(("sizes", "in_place"), list(zip(SIZES, (True, False, True), strict=True)))
def test_steps_agree_with_the_reference(sizes: StateSizes, in_place: bool) -> None:
    inputs = Inputs(sizes, [69, 67, 3])
    ours, theirs = (begun(make(inputs, in_place), BEGUN) for make in (OnDevice, OnCpu))
    compare(ours, theirs, STEPS)


def test_a_prompt_of_several_chunks() -> None:
    inputs = Inputs(SIZES[2], [135])
    compare(OnDevice(inputs), OnCpu(inputs), [[(0, 2)], [(0, 132)], [(0, 1)]])


def compare(ours: Side, theirs: Side, steps: Sequence[Sequence[Piece]]) -> None:
    for step in steps:
        for found, wanted in zip(ours.step(step), theirs.step(step), strict=True):
            close(found, wanted)
    for index in range(len(ours.done)):
        for found, wanted in zip(ours.state(index), theirs.state(index), strict=True):
            close(found, wanted)


@pytest.mark.parametrize(("first", "count"), [(62, 3), (63, 1)])
def test_nothing_but_the_states_of_a_step_changes(first: int, count: int) -> None:
    layer = begun(OnDevice(Inputs(SIZES[0], [70, 70, 70])), [first] * 3)
    before = copy_states(moved(layer.states, "cpu"))
    layer.step([(1, count)])
    for name in STATES:
        found, kept = (
            getattr(layer.states, name).cpu(),
            torch.ones(len(getattr(before, name)), dtype=torch.bool),
        )
        kept[3 if name.startswith("page") else 1] = False
        assert torch.equal(found[kept], getattr(before, name)[kept]), name
        assert not torch.equal(found[~kept], getattr(before, name)[~kept]), name


def test_padded_rows_have_no_states() -> None:
    """Seat -1: nothing is read or written for them, and the other rows are what they are without them."""
    inputs = Inputs(SIZES[0], [64, 1])
    layer, alone = (begun(make(inputs), [63, 0]) for make in (OnDevice, OnCpu))
    wanted = alone.step([(0, 1)])[0]
    pieces = [(0, 1), (1, 1)]
    batch = layer.batch(pieces)
    batch.states[1, 3], batch.context_lens[1] = -1, 0
    rows, gates = layer.taken(inputs.rows, pieces), layer.taken(inputs.gates, pieces)
    found = layer.compute(rows, gates, AttentionBatch.build(batch, BLOCK))
    close(found[:1], wanted)
    for name in STATES:
        close(getattr(layer.states, name), getattr(alone.states, name))


@pytest.mark.parametrize("number", [-90.0, -20.0, 0.0, 21.0, 90.0])
def test_gates_of_any_size(number: float) -> None:
    inputs = Inputs(StateSizes(1, 2, 8, 8, 2), [3])
    inputs.gates[0] += number
    found, wanted = (make(inputs).run(0, [2, 1]) for make in (OnDevice, OnCpu))
    assert bool(((found.cpu() - wanted).abs() <= EXACT * wanted.abs().max() + 1e-30).all())


@pytest.mark.parametrize(("channels", "taps", "drafted"), [(1, 2, 0), (150, 3, 2)])
def test_a_convolution_alone(channels: int, taps: int, drafted: int) -> None:
    sizes = replace(StateSizes.of_convolution(channels, taps), max_draft_tokens=drafted)
    rows, weight = torch.randn(133, channels), torch.randn(channels, taps)
    made = []
    for kernels, device in ((TRITON, DEVICE), (REFERENCE, "cpu")):
        states, found = moved(empty_states(sizes, 2, 1), device), []
        for start, stop in ((0, 1), (1, 63), (63, 64), (64, 65), (65, 133)):
            place = np.array([[0, 0, 1, 0]] if start < 64 else [[1, 64, 1, 0]])
            zero, count = np.zeros(1, np.int64), np.array([0, stop - start])
            many = zero.repeat(stop - start)
            batch = TokenBatch(many, np.arange(start, stop), count, np.array([stop]), zero[None], zero, place)
            one = AttentionBatch.build(batch, BLOCK, device)
            found.append(
                kernels.convolve(rows[start:stop].to(device), weight.to(device), states, one, activate=False)
            )
        made.append((torch.cat(found), states.page_tails[1], states.tails[0]))
    for mine, theirs in zip(*made, strict=True):
        close(mine, theirs)


def test_gates_of_heads() -> None:
    rows, weight, gates = torch.randn(3, 2, 24), torch.randn(24), torch.randn(3, 2, 60)
    part = gates[:, :, 5:29]
    there, gate = rows.to(DEVICE), gates.to(DEVICE)[:, :, 5:29]
    close(TRITON.sigmoid_times(there, gate), REFERENCE.sigmoid_times(rows, part))
    flat = gates.flatten(1)[:, 3:51]
    found = TRITON.gated_norm(there, weight.to(DEVICE), gates.to(DEVICE).flatten(1)[:, 3:51], 1e-6)
    close(found, REFERENCE.gated_norm(rows, weight, flat, 1e-6))
    assert TRITON.sigmoid_times(there[:0], gate[:0]).shape == (0, 48)
