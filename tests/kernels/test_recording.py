"""A replayed step repeats what was recorded, with the present contents of its inputs."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from tests.support.native_kernels import CACHED, same_bits, stored
from tests.support.paged_steps import cache, tokens

from moesaic.core.tokens import TokenBatch
from moesaic.kernels.batch import AttentionBatch
from moesaic.kernels.gating import Gating
from moesaic.kernels.table import Kernels, OperationRecorder
from moesaic.kernels.weights import ExpertWeights

torch.set_num_threads(1)
HIDDEN, HEADS, WIDTH = 40, 4, 10
GATING = Gating(2, True, 2.5, 3, 2, "sigmoid", "two best", 1e-20)


class Layer:
    """Every operation once, over weights that are drawn once."""

    def __init__(self, native: Kernels, dtype: torch.dtype) -> None:
        self.native = native
        self.embedding, self.norm = stored(50, HIDDEN), stored(HIDDEN)
        angles = torch.randn(64, WIDTH // 2)
        self.cosine, self.sine = angles.cos(), angles.sin()
        self.projections = [stored(HIDDEN, HIDDEN, spread=0.1) for _ in range(3)]
        self.up, self.router = stored(HEADS, WIDTH, WIDTH), stored(6, HIDDEN, spread=0.1)
        self.bias = stored(6, spread=0.1)
        self.opening = stored(1, HIDDEN, spread=0.1)
        self.mlp = [stored(*shape, spread=0.1) for shape in ((30, HIDDEN), (30, HIDDEN), (HIDDEN, 30))]
        parts = [tuple(stored(*one.shape, spread=0.1) for _ in range(6)) for one in self.mlp]
        self.experts = ExpertWeights(*parts)
        self.keys, self.values = cache(4, HEADS, WIDTH, dtype), cache(4, HEADS, WIDTH, dtype)

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        k = self.native
        hidden = k.embed(self.embedding, ids)
        normed = k.rms_norm(hidden, self.norm, 1e-6)
        parts = [one.view(-1, HEADS, WIDTH) for one in k.linears(normed, self.projections, [None] * 3)]
        query, key = (k.rope(one, self.cosine, self.sine, positions) for one in parts[:2])
        k.store(self.keys, key, batch.slots)
        k.store(self.values, parts[2], batch.slots)
        attended = k.paged_attention(k.head_linear(query, self.up), self.keys, self.values, batch, 0.3)
        joined = k.join(attended[..., :4], attended[..., 4:]).flatten(1)
        residual, normed = k.add_norm(hidden, k.linear(joined, self.projections[0]), self.norm, 1e-6)
        chosen, weights = k.gate(normed, self.router, GATING, self.bias)
        dense = k.clip(k.sigmoid_gate(normed, self.opening, k.gated_mlp(normed, *self.mlp)), 0.5)
        return k.merge(residual, dense, k.experts(self.experts, normed, chosen), weights)


def decode(contexts: list[int], seed: int) -> TokenBatch:
    return tokens([1] * len(contexts), contexts, 4, seed)


def fill(into: AttentionBatch, step: TokenBatch) -> None:
    into.batch.positions[:] = step.positions
    into.batch.context_lens[:] = step.context_lens
    into.batch.block_tables[:, : step.block_tables.shape[1]] = step.block_tables
    into.fill_slots()


def recorder(native: Kernels) -> OperationRecorder:
    assert native.recorder is not None
    return native.recorder()


def test_where_a_step_writes_lives_as_long_as_its_recording(native: Kernels) -> None:
    layer, chosen = Layer(native, torch.float32), torch.tensor([[0, 1]])
    rows, out = torch.zeros(1, HIDDEN), torch.empty(1, 2, HIDDEN)
    alive = weakref.ref(out)

    def step(out: torch.Tensor = out) -> None:
        native.experts(layer.experts, rows, chosen, out)

    recording = recorder(native)(step)
    del out, step
    assert alive() is not None
    del recording
    assert alive() is None


@pytest.mark.parametrize("dtype", CACHED)
@pytest.mark.parametrize("threads", [1, 3])
def test_a_replay_has_the_bits_of_the_step_itself(native: Kernels, threads: int, dtype: torch.dtype) -> None:
    native.set_threads(threads, False)
    layer, record = Layer(native, dtype), recorder(native)
    made = {}
    steps = [[5], [30, 1, 9], [6], [7, 40, 64], [2, 3], [64], [3, 3, 3], [60, 61], [13]]
    for seed, contexts in enumerate(steps):
        ids, step = torch.randint(50, (len(contexts),)), decode(contexts, seed)
        before = layer.keys.clone(), layer.values.clone()
        wanted = layer(ids, torch.from_numpy(step.positions), AttentionBatch.build(step, 4))
        after = layer.keys.clone(), layer.values.clone()
        layer.keys.copy_(before[0]), layer.values.copy_(before[1])
        if len(contexts) in made:
            own, batch, recording = made[len(contexts)]
            own.copy_(ids)
            fill(batch, step)
            found = recording.run()
        else:
            batch = AttentionBatch.build_reusable(step, 4, 16)
            positions = torch.from_numpy(batch.batch.positions)
            recording = record(lambda ids=ids, p=positions, b=batch: layer(ids, p, b))
            made[len(contexts)] = ids, batch, recording
            found = recording.result
        assert same_bits(found, wanted)
        assert same_bits(layer.keys, after[0]) and same_bits(layer.values, after[1])


def test_a_replay_needs_nothing_that_the_recording_left_behind(native: Kernels) -> None:
    rows, weights = stored(3, HIDDEN), [stored(HIDDEN, HIDDEN, spread=0.1) for _ in range(20)]

    def step() -> torch.Tensor:
        hidden = native.linear(rows, weights[0])
        for weight in weights[1:]:
            hidden = native.merge(hidden, native.linear(hidden, weight), None, None)
        return hidden

    recording = recorder(native)(step)
    for _ in range(3):
        rows.copy_(torch.randn(3, HIDDEN))
        litter = [torch.full((3, HIDDEN), torch.nan) for _ in range(100)]
        assert same_bits(recording.run(), step()), len(litter)


def test_rows_of_experts_may_lie_elsewhere_at_each_replay(native: Kernels) -> None:
    """A replay reads its inputs where they are now. The rows of another merge stay where they were."""
    hidden, weights, mine = torch.randn(3, HIDDEN), torch.rand(3, 2), torch.randn(3, 2, HIDDEN)

    def step(given: torch.Tensor) -> torch.Tensor:
        once = native.merge(hidden, None, given, weights)
        return native.merge(once, once, mine, weights)

    given = torch.randn(3, 2, HIDDEN)
    recording = recorder(native)(lambda: step(given), given)
    wanted = step(given)
    assert same_bits(recording.result, wanted)
    for _ in range(3):
        other = torch.randn(3, 2, HIDDEN)
        mine.copy_(torch.randn(3, 2, HIDDEN))
        wanted = step(other)
        given.fill_(torch.nan)
        assert same_bits(recording.run(other), wanted)
    with pytest.raises(ValueError, match="every run or never"):
        recording.run()


COMPUTED_BY_TORCH: dict[str, Callable[[torch.Tensor], object]] = {
    "a sum": lambda rows: rows + 1,
    "a sum in place": lambda rows: rows.add_(1),
    "a copy": lambda rows: rows.clone(),
    "a copy into another": lambda rows: torch.empty(3, 8).copy_(rows),
    "zeros": lambda rows: rows.zero_(),
    "zeros of its own": lambda _: torch.zeros(3, 8),
    "rows that are made dense": lambda rows: rows.t().contiguous(),
    "a row by its index": lambda rows: rows[torch.tensor([0])],
    "a write by index": lambda rows: rows.__setitem__(0, 1.0),
    "a number": lambda rows: rows[0, 0].item(),
    "a question": lambda rows: bool((rows > 0).all()),
    "an equality": lambda rows: torch.equal(rows, rows),
}


@pytest.mark.parametrize("what", COMPUTED_BY_TORCH)
def test_what_torch_computes_cannot_be_recorded(native: Kernels, what: str) -> None:
    rows, weight = torch.ones(3, 8), torch.ones(8, 8)

    def step() -> torch.Tensor:
        made = native.linear(rows, weight)
        COMPUTED_BY_TORCH[what](made)
        return made

    with pytest.raises(RuntimeError, match="cannot be part of a recorded step"):
        recorder(native)(step)


def test_views_can_be_recorded(native: Kernels) -> None:
    rows, weight = torch.randn(3, 8), torch.randn(8, 8)

    def step() -> torch.Tensor:
        made = native.linear(rows, weight)
        first, second = made.view(3, 2, 4)[:, :, 1:].tensor_split([1], dim=-1)
        return native.join(first, second).flatten(1)

    recording = recorder(native)(step)
    rows.copy_(torch.randn(3, 8))
    assert same_bits(recording.run(), step())


def test_an_error_ends_the_recording(native: Kernels) -> None:
    rows, weight = torch.ones(3, 8), torch.ones(8, 8)

    def fails() -> torch.Tensor:
        native.linear(rows, weight)
        raise KeyboardInterrupt

    record = recorder(native)
    with pytest.raises(KeyboardInterrupt):
        record(fails)
    wanted = native.linear(rows, weight)
    for _ in range(3):  # were it still recording, each of these would lie in the memory of recordings
        assert same_bits(native.linear(rows, weight) + 0.0, wanted)
    recording = record(lambda: native.linear(rows, weight))
    assert same_bits(recording.run(), wanted)


def test_an_expert_that_is_missing_at_a_replay_is_an_error(native: Kernels) -> None:
    one = (stored(6, 8), None)
    table = ExpertWeights(one, one, (stored(8, 6), None))
    rows, ids = stored(3, 8), torch.zeros(3, 1, dtype=torch.int64)
    recording = recorder(native)(lambda: native.experts(table, rows, ids))
    wanted = recording.run().clone()
    for absent in (1, 2, -1):
        ids[1] = absent
        with pytest.raises(KeyError, match="is not held here"):
            recording.run()
    ids[1] = 0
    assert same_bits(recording.run(), wanted)
