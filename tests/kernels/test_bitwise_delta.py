"""A row of linear attention has the same bits in decode, in any chunk, beside other rows, and in a replay."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.support.delta_steps import BLOCK, STATES, Inputs, Layer, copy_states
from tests.support.native_kernels import same_bits

from moesaic.kernels.batch import AttentionBatch
from moesaic.kernels.states import CHUNK, StateSizes
from moesaic.kernels.table import REFERENCE, Kernels

torch.set_num_threads(1)
LENGTH = 201
SIZES = (StateSizes(2, 4, 16, 8, 4), StateSizes(1, 3, 40, 24, 2), StateSizes(4, 8, 128, 128, 4))
CUTS = ([3, 50, 20, 1, 1, 1, 100, 25], [63, 1, 64, 73], [64, 64, 64, 9], [2, 130, 60, 9], [1] * LENGTH)


def check(found: Layer, wanted: Layer, index: int = 0) -> None:
    """Whether two layers have the same state of a sequence."""
    assert all(same_bits(*both) for both in zip(found.state(index), wanted.state(index), strict=True))


@pytest.fixture
def own(native: Kernels) -> Kernels:
    """Native kernels that have forms of their own of these operations."""
    assert native.delta is not REFERENCE.delta and native.convolve is not REFERENCE.convolve
    return native


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_cuts_change_no_bit(own: Kernels, sizes: StateSizes, threads: int) -> None:
    inputs = Inputs(sizes, [LENGTH])
    whole = Layer(own, inputs)
    wanted = whole.run(0, [LENGTH])
    own.set_threads(threads, False)
    for cuts in CUTS:
        for in_place in (True, False):
            layer = Layer(own, inputs, in_place)
            assert same_bits(layer.run(0, cuts), wanted), cuts
            check(layer, whole)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_other_sequences_change_no_bit(own: Kernels, sizes: StateSizes, threads: int) -> None:
    inputs = Inputs(sizes, [100, 70, 130, 9])
    alone = Layer(own, inputs)
    wanted = [alone.run(index, [len(rows)]) for index, rows in enumerate(inputs.rows)]
    own.set_threads(threads, False)
    together = Layer(own, inputs)
    found: list[list[torch.Tensor]] = [[], [], [], []]
    for step in ([(2, 10), (0, 1)], [(0, 64), (1, 63), (2, 54), (3, 9)], [(1, 1), (2, 1), (0, 1)], [(0, 34)]):
        for (index, _), rows in zip(step, together.step(step), strict=True):
            found[index].append(rows)
    found[2].append(together.step([(2, 65), (1, 6)])[0])
    for index in (0, 2, 3):
        assert same_bits(torch.cat(found[index]), wanted[index])
    for index in range(4):
        check(together, alone, index)


def test_a_page_is_a_snapshot_for_another_sequence(own: Kernels) -> None:
    """A sequence that begins with the page of another one has the bits of one that computed everything."""
    inputs = Inputs(SIZES[0], [150, 150])
    for of in (inputs.rows, inputs.gates):
        of[1][:128] = of[0][:128]
    alone = Layer(own, inputs)
    wanted = alone.run(1, [150])
    layer = Layer(own, inputs)
    layer.step([(0, 128)])
    layer.done[1], layer.places[1] = 128, (layer.places[0][0], 128, 3, 1)
    layer.places[0] = (1, 128, 2, 0)
    found = layer.step([(1, 10), (0, 22)])[0]
    assert same_bits(torch.cat([found, layer.step([(1, 12)])[0]]), wanted[128:])
    assert same_bits(layer.states.tails[1], alone.states.tails[1])


class Recorded:
    """Decode steps of a layer that are recorded once and replayed."""

    def __init__(self, layer: Layer, gate: torch.Tensor) -> None:
        self.layer, self.gate = layer, gate
        self.weight = torch.randn(layer.inputs.sizes.value_width)

    def compute(self, rows: torch.Tensor, gates: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        native = self.layer.native
        made = self.layer.compute(rows, gates, batch)
        normed = native.gated_norm(made, self.weight, self.gate[:, 1:-1], 1e-6)
        return native.sigmoid_times(normed.view(made.shape), self.gate[:, :-2].view(made.shape))


def fill(into: AttentionBatch, layer: Layer, steps: list[tuple[int, int]]) -> None:
    batch = layer.batch(steps)
    np.copyto(into.batch.context_lens, batch.context_lens)
    np.copyto(into.batch.states, batch.states)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_replay_has_the_bits_of_the_step_itself(own: Kernels, threads: int) -> None:
    own.set_threads(threads, False)
    inputs = Inputs(SIZES[0], [80, 90, 100])
    eager = Layer(own, inputs, in_place=False)
    eager.step([(0, 60), (1, 5), (2, 61)])
    assert own.recorder is not None
    record, rows, gates = own.recorder(), torch.empty(2, inputs.sizes.channels), torch.empty(2, 8)
    replayed = Layer(own, inputs, in_place=False)
    replayed.states = copy_states(eager.states)
    replayed.done, replayed.places = list(eager.done), list(eager.places)
    gate = torch.randn(2, 34)[:, :34]
    ours, theirs = Recorded(replayed, gate), Recorded(eager, gate)
    theirs.weight = ours.weight
    recording = batch = None
    for pair in ([0, 2], [0, 1], [2, 0], [2, 1], [0, 2], [0, 1], [0, 2], [2, 1]):
        steps = [(index, 1) for index in pair]
        rows.copy_(eager.taken(inputs.rows, steps)), gates.copy_(eager.taken(inputs.gates, steps))
        wanted = theirs.compute(rows, gates, AttentionBatch.build(eager.batch(steps), BLOCK))
        if recording is None:
            batch = AttentionBatch.build_reusable(replayed.batch(steps), BLOCK, 1)
            recording = record(lambda b=batch: ours.compute(rows, gates, b))
            found = recording.result
        else:
            fill(batch, replayed, steps)
            found = recording.run()
        assert same_bits(found, wanted)
        for name in STATES:
            assert same_bits(getattr(replayed.states, name), getattr(eager.states, name)), name
        eager.advance(steps), replayed.advance(steps)
    assert eager.places[0][1] == eager.places[2][1] == CHUNK


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_rows_that_turn_out_not_to_count_change_no_bit(
    own: Kernels, sizes: StateSizes, reference: bool
) -> None:
    """Each step computes up to three rows too many, but none across a multiple of CHUNK."""
    inputs, kernels = Inputs(sizes, [LENGTH]), REFERENCE if reference else own
    wanted = Layer(kernels, inputs).run(0, [LENGTH])
    guessed = Inputs(replace(sizes, max_draft_tokens=3), [LENGTH])
    guessed.weight, guessed.decay, guessed.bias = inputs.weight, inputs.decay, inputs.bias
    layer, found, step = Layer(kernels, guessed), [], 0
    while layer.done[0] < LENGTH:
        done, step = layer.done[0], step + 1
        count = min(1 + step % 3, LENGTH - done)
        extra = min(3, CHUNK - 1 - (done + count) % CHUNK, LENGTH - done - count)
        for right, guess in ((inputs.rows, guessed.rows), (inputs.gates, guessed.gates)):
            guess[0][done : done + count] = right[0][done : done + count]
        rows = layer.step([(0, count + extra)])[0]
        layer.done[0] -= extra
        found.append(rows[:count])
    if reference:  # whose bits depend on the number of rows
        torch.testing.assert_close(torch.cat(found), wanted)
    else:
        assert same_bits(torch.cat(found), wanted)
