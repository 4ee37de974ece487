"""The layer that drafts tokens (`mtp`), recorded as CUDA graphs on the sanitizer's device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tests.support import pairs, prediction, served_worker, tiny_models
from tests.support.gpu_graphs import graphs
from tests.support.gpu_sanitizer import sanitized
from tests.support.served_worker import server
from tests.support.triton_kernels import IS_INTERPRETED

from moesaic import LLM, SamplingParams
from moesaic.config import CacheConfig, ModelConfig, SchedulerConfig, WorkerConfig
from moesaic.core.tokens import TokenBatch
from moesaic.gpu.graphs import graphs as module
from moesaic.gpu.graphs.graph_inputs import is_recorded
from moesaic.policy.scheduling.schedulers.actions import StepPlan
from moesaic.policy.scheduling.step_prices import StepPrices
from moesaic.runtime.model_loading import read_expert_layout
from moesaic.runtime.predicting import LayerPredictor
from moesaic.runtime.step.running_step import StepGenerator, WholeStep
from moesaic.runtime.step.step_kind import Kind, bucket

pytestmark = [
    pytest.mark.skipif(not IS_INTERPRETED, reason="a GPU compiles what it runs"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of NumPy, in the interpreter
]
MTP = '{"method": "mtp", "num_speculative_tokens": 1}'
PROMPTS = [tiny_models.prompt(length, prediction.VOCAB, seed=length) for length in (1, 2, 3)]
COUNTS = (7, 3, 7)
"""Tokens of each answer, so that there are fewer rows from time to time."""


@pytest.fixture(autouse=True)
def prices_of_the_prior(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is drafted then depends on no clock."""
    monkeypatch.setattr(StepPrices, "record_duration", lambda self, rows, seconds: None)


@pytest.fixture
def device() -> Iterator[None]:
    with np.errstate(all="ignore"), sanitized(), graphs():
        yield


class Replayed(NamedTuple):
    """A replay of the layer that drafts tokens."""

    rows: int
    drafted: int
    """Rows whose hidden states it returned."""
    kind: Kind
    parts: int


class Seen:
    """What that layer does from now on."""

    def __init__(self, patch: pytest.MonkeyPatch, beside: bool = False) -> None:
        """beside: before each replay the layer computes the same operation by operation."""
        self.decodes = 0
        """Steps that it followed and that are recorded."""
        self.replays: list[Replayed] = []
        self.recorded: list[Kind] = []
        self.found: list[tuple[torch.Tensor, torch.Tensor]] = []
        """[m, h] the hidden states of each replay, and of the same operations one by one."""
        begin, replay = LayerPredictor.begin, module._RecordedStep.replay
        record = module.GraphRunner._record_prediction

        def begun(predictor: LayerPredictor, plan: StepPlan, *given: Any) -> Any:
            follows = is_recorded(plan.batch)
            self.decodes += follows
            if follows and beside:
                single = begin(LayerPredictor(predictor.runner), plan, *given).finish().hidden.cpu()
                step = begin(predictor, plan, *given)
                hidden = step.finish()
                self.found.append((hidden.hidden.cpu(), single))
                return WholeStep(lambda: hidden)
            return begin(predictor, plan, *given)

        def replayed(step: Any, batch: TokenBatch) -> StepGenerator:
            if step.hidden is not None:
                one = Replayed(batch.num_rows, len(batch.logit_rows), step.inputs.kind, len(step.parts))
                self.replays.append(one)
            return replay(step, batch)

        def recorded(runner: Any, kind: Kind, recorder: Any) -> Any:
            self.recorded.append(kind)
            return record(runner, kind, recorder)

        patch.setattr(LayerPredictor, "begin", begun)
        patch.setattr(module._RecordedStep, "replay", replayed)
        patch.setattr(module.GraphRunner, "_record_prediction", recorded)


def params(count: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, seed=0)


def answers(path: Path, prompts: int, **settings: Any) -> list[list[int]]:
    llm = LLM(str(path), threads=1, max_model_len=96, **settings)
    found = llm.generate(PROMPTS[-prompts:], [params(count) for count in COUNTS[-prompts:]])
    return [one.outputs[0].token_ids for one in found]


@pytest.mark.parametrize(
    ("kind", "prompts"),
    [
        pytest.param("deepseek_v3", 1, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", 3, marks=pairs.REST),
        pytest.param("glm4_moe", 1, marks=pairs.REST),
        pytest.param("glm4_moe", 3, marks=pairs.REST),
    ],
)
def test_replayed_drafts_are_those_of_the_operations_one_by_one(
    device: None, tmp_path: Path, kind: str, prompts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit where nothing is padded and each sequence has one row."""
    path = prediction.save(kind, tmp_path / kind, strength=0.02)
    wanted = answers(path, prompts, kernels="reference", device="cpu")
    seen, exact = Seen(monkeypatch, beside=True), 0
    assert answers(path, prompts, kernels="triton", device="cuda", speculative_config=MTP) == wanted
    assert len(seen.replays) == seen.decodes > 3, "each decode step is followed by a replay"
    assert {one.parts for one in seen.replays} == {1}
    kinds = [one.kind for one in seen.replays]
    assert seen.recorded == list(dict.fromkeys(kinds)) and len(kinds) > len(seen.recorded)
    for step, (hidden, single) in zip(seen.replays, seen.found, strict=True):
        assert step.kind.rows == bucket(step.rows)
        torch.testing.assert_close(hidden, single, rtol=0, atol=1e-5)
        if step.drafted == step.rows == step.kind.rows:
            assert torch.equal(hidden, single)
            exact += 1
    assert exact > 1


@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param({"inflight_batches": 2}, marks=pytest.mark.slow),
        pytest.param({"schedule": "async"}, marks=pairs.REST),
        pytest.param({"schedule": "barrier", "combine": "partial"}, marks=pairs.REST),
    ],
)
def test_a_graph_ends_where_servers_have_the_experts(
    tmp_path: Path, schedule: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = prediction.save("glm4_moe", tmp_path / "glm", strength=0.02)
    wanted = LLM(str(path), threads=1, device="cpu", kernels="reference").generate(PROMPTS, params(5))
    model = ModelConfig(str(path), device="cuda", kernels="triton", threads=1)
    scheduler = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, speculative_config=MTP, **schedule)
    config = WorkerConfig(model, CacheConfig("1MiB"), scheduler, remote_experts=True, supervised=True)
    layout, seen = read_expert_layout(replace(model, device="cpu"), predicting=True), Seen(monkeypatch)
    with (
        server(path, layout, tmp_path) as directory,
        np.errstate(all="ignore"), sanitized(), graphs(),
    ):  # fmt: skip
        found = served_worker.generated(config, directory, PROMPTS, params(5))
    assert found == {number: one.outputs[0].token_ids for number, one in enumerate(wanted)}
    assert len(seen.replays) == seen.decodes > 1
    assert {one.parts for one in seen.replays} == {3}, "they end at a request, at a merge and at the end"
