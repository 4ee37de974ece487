"""Rows that are regrouped between two layers have the bits of a whole step."""

from __future__ import annotations

import random
from typing import cast

import numpy as np
import pytest
import torch

from moesaic.config import ModelConfig
from moesaic.core.tokens import IntArray, TokenBatch
from moesaic.experts.client import DirectExperts, ExpertRequest, RequestHandle
from moesaic.experts.remote import RemoteExperts
from moesaic.models.kvcache.paged_kv import PagedKV
from moesaic.policy.scheduling.schedulers.actions import RowSource, RunSegment, StepPlan
from moesaic.runtime.model_loading import LoadedModel, load_model
from moesaic.runtime.step.eager import EagerRunner
from moesaic.runtime.step.layerwise import LayerwiseRunner
from moesaic.runtime.step.recorded_runner import RecordedRunner
from moesaic.runtime.step.running_step import Combine, SegmentRunner
from moesaic.runtime.step.stages import BlockStages

ROWS, PROMPT, BLOCK = 6, 5, 4
TABLES = np.arange(2 * ROWS).reshape(ROWS, 2)
CPU = torch.device("cpu")
NOTHING: IntArray = np.zeros(0, dtype=np.int64)


class Answered:
    """Stands for RemoteExperts whose answers are all there at the first poll."""

    def __init__(self, direct: DirectExperts) -> None:
        self._direct = direct
        self.open: dict[int, torch.Tensor] = {}
        self._submitted = 0

    def submit(self, request: ExpertRequest) -> RequestHandle:
        answer = self._direct.poll(self._direct.submit(request))
        assert answer is not None
        handle = RequestHandle(self._submitted)
        self._submitted += 1
        self.open[handle.number] = answer.clone()
        return handle

    def poll(self, handle: RequestHandle) -> torch.Tensor | None:
        return self.open[handle.number]

    def rows(self, handle: RequestHandle) -> torch.Tensor:
        return self.open[handle.number]

    def release(self, handle: RequestHandle) -> None:
        del self.open[handle.number]


class Engine:
    """The demo's stages, with prompts in the cache. Steps run as a whole or segment by segment."""

    def __init__(self, recorded: bool) -> None:
        loaded: LoadedModel = load_model(ModelConfig("demo", threads=1), None, None, 1)
        spec = loaded.model.spec
        kv = PagedKV(spec.kv, spec.num_layers, TABLES.size, BLOCK, torch.float32, CPU, loaded.kernels)
        direct = DirectExperts(loaded.model.experts, loaded.kernels, ROWS * PROMPT)
        stages = BlockStages(loaded.model, kv, BLOCK, CPU, Combine(False, ROWS, spec.top_k, CPU))
        self.whole = EagerRunner(stages, direct)
        self.experts = Answered(direct)
        remote = cast(RemoteExperts, self.experts)
        eager = EagerRunner(stages, remote)
        self.runner: SegmentRunner = eager
        if recorded:
            assert loaded.kernels.recorder is not None
            self.runner = RecordedRunner(eager, loaded.kernels.recorder, 2, direct=False)
        self.layered = LayerwiseRunner(self.runner, remote)
        self.segments = len(spec.moe_layers)
        self.runs = 0
        with torch.inference_mode():
            self.whole.begin(prompts()).finish()

    def one(
        self, batch: TokenBatch, segment: int, sources: list[RowSource]
    ) -> tuple[int, torch.Tensor | None]:
        run, self.runs = self.runs, self.runs + 1
        plan = StepPlan(run, batch, NOTHING, NOTHING, NOTHING, NOTHING)
        with torch.inference_mode():
            result = self.layered.run(RunSegment(plan, segment, sources))
            return run, None if result is None else result.hidden


def prompts() -> TokenBatch:
    starts = np.arange(ROWS + 1) * PROMPT
    tokens = np.arange(ROWS * PROMPT) % 50 + 7
    positions = np.tile(np.arange(PROMPT), ROWS)
    return TokenBatch(tokens, positions, starts, np.full(ROWS, PROMPT), TABLES, starts[1:] - 1)


def decodes() -> TokenBatch:
    """One row behind each prompt."""
    every = np.arange(ROWS)
    return TokenBatch(
        every + 60, np.full(ROWS, PROMPT), np.arange(ROWS + 1), np.full(ROWS, PROMPT + 1), TABLES, every
    )


def wanted(engine: Engine) -> torch.Tensor:
    with torch.inference_mode():
        return engine.whole.begin(decodes()).finish().hidden.clone()


def together(engine: Engine) -> torch.Tensor:
    """All rows through all segments as one batch."""
    batch, sources = decodes(), list[RowSource]()
    for segment in range(engine.segments):
        run, hidden = engine.one(batch, segment, sources)
        assert hidden is None
        if sources:
            engine.layered.forget([sources[0].run])
        sources = [RowSource(run, 0, ROWS)]
    _, hidden = engine.one(batch, engine.segments, sources)
    assert hidden is not None
    engine.layered.forget([sources[0].run])
    return hidden.clone()


def parted(engine: Engine, dice: random.Random) -> torch.Tensor:
    """At each segment the rows form new groups, in any order."""
    batch, found = decodes(), torch.empty(0)
    where: dict[int, RowSource] = {}
    for segment in range(engine.segments + 1):
        order = dice.sample(range(ROWS), ROWS)
        cuts = sorted(dice.sample(range(1, ROWS), dice.randrange(3)))
        before, new = {source.run for source in where.values()}, dict[int, RowSource]()
        for start, stop in zip([0, *cuts], [*cuts, ROWS], strict=True):
            group = order[start:stop]
            run, hidden = engine.one(batch.sequences(group), segment, [where[row] for row in group if where])
            for line, row in enumerate(group):
                new[row] = RowSource(run, line, line + 1)
                if hidden is not None:
                    found = hidden.new_empty(ROWS, hidden.shape[1]) if not len(found) else found
                    found[row] = hidden[line]
        engine.layered.forget(sorted(before))
        where = new
    return found


@pytest.mark.slow
@pytest.mark.parametrize("recorded", [False, True])
def test_rows_that_part_and_meet_have_the_bits_of_a_whole_step(recorded: bool) -> None:
    engine, dice = Engine(recorded), random.Random(3)
    expected = wanted(engine)
    for _ in range(12):
        assert torch.equal(parted(engine, dice), expected)
        assert torch.equal(together(engine), expected)
        assert not engine.experts.open and not engine.layered._runs and not engine.layered._run_of


@pytest.mark.slow
def test_a_recording_serves_the_next_rows_when_its_own_went_on_elsewhere() -> None:
    """Its memory is theirs then: as many recordings as groups that began at the same time, no more."""
    engine, dice = Engine(recorded=True), random.Random(5)
    for _ in range(20):
        parted(engine, dice)
    assert isinstance(engine.runner, RecordedRunner)
    assert 1 <= len(engine.runner._free) <= 3
    recordings = [id(one) for one in engine.runner._free]
    for _ in range(20):
        parted(engine, dice)
    assert sorted(id(one) for one in engine.runner._free) == sorted(recordings)
