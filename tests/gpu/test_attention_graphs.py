"""Ranks that share attention, with experts on servers: all of them record it as CUDA graphs and replay it
together, on the sanitizer's device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from tests.gpu.test_rank_graphs import saved
from tests.support import model_configs, pairs, prediction, served_worker, tiny_models
from tests.support.gpu_graphs import graphs
from tests.support.gpu_sanitizer import sanitized
from tests.support.graph_peers import GraphPeers, ranks_in_threads
from tests.support.served_worker import server
from tests.support.thread_groups import Threads
from tests.support.triton_kernels import IS_INTERPRETED

from moesaic import LLM, SamplingParams
from moesaic.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig, WorkerConfig
from moesaic.core.errors import ConnectionLost
from moesaic.gpu.graphs import graphs as module
from moesaic.gpu.graphs.graph_inputs import is_recorded
from moesaic.gpu.ranks.recorded_attention import AttentionRecordings
from moesaic.models import registry
from moesaic.policy.scheduling.step_prices import StepPrices
from moesaic.runtime.executor import Executor
from moesaic.runtime.group import build_rank
from moesaic.runtime.group.shared_attention import SharedAttention
from moesaic.runtime.model_loading import read_expert_layout
from moesaic.runtime.worker import Worker
from moesaic.testing import byte_tokenizer

pytestmark = [
    pytest.mark.skipif(not IS_INTERPRETED, reason="a GPU compiles what it runs"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of NumPy, in the interpreter
]
MTP = '{"method": "mtp", "num_speculative_tokens": 1}'
DRAFTED = "drafted"
"""A model with a layer that drafts tokens, and a dense one."""
PROMPTS = [tiny_models.prompt(length, model_configs.VOCAB, seed=length) for length in (1, 3)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, seed=0)


@pytest.fixture(autouse=True)
def prices_of_the_prior(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is drafted then depends on no clock."""
    monkeypatch.setattr(StepPrices, "record_duration", lambda self, rows, seconds: None)


@contextmanager
def ranks(nccl: bool, size: int) -> Iterator[list[GraphPeers]]:
    """Groups are threads on the device. nccl: graphs can hold their exchanges."""
    (ends, connect, within), made = ranks_in_threads(nccl, size), list[Threads]()

    def launcher(config: WorkerConfig) -> Threads:
        made.append(Threads(config, within))
        return made[-1]

    try:
        with (
            np.errstate(all="ignore"), sanitized(), graphs(),
            mock.patch.object(build_rank, "connect_rows", connect),
            mock.patch.object(build_rank, "RankLauncher", launcher),
        ):  # fmt: skip
            yield ends
    finally:
        for each in made:
            each.close()
            assert not each.failed, each.failed


@dataclass
class Seen:
    """What the ranks did."""

    parts: list[tuple[int, bool]] = field(default_factory=list)
    """Of each step that the first rank replayed: its graphs, and whether it drafts tokens."""
    followed: int = 0
    """Graphs that the other ranks have replayed."""
    alone: list[bool] = field(default_factory=list)
    """Of each layer that ran operation by operation: whether its step is of those that are recorded."""
    hidden: list[torch.Tensor] = field(default_factory=list)
    """[m, h] of each decode step, and of what drafts tokens after it."""
    recorded: list[tuple[int, bool]] = field(default_factory=list)
    """Of each recording: its rows, and whether it drafts tokens."""


@contextmanager
def seen() -> Iterator[Seen]:
    found = Seen()
    replay, follow = module._RecordedStep.replay, AttentionRecordings._replay
    attend, finish, drafted = SharedAttention._attend, Executor._finish, Executor._add_drafts
    record, record_drafts = module.GraphRunner._record, module.GraphRunner._record_prediction

    def replayed(step: Any, batch: Any) -> Any:
        found.parts.append((len(step.parts), step.hidden is not None))
        return replay(step, batch)

    def followed(*given: Any) -> None:
        found.followed += 1
        follow(*given)

    def recorded(runner: Any, kind: Any, recorder: Any) -> Any:
        found.recorded.append((kind.rows, False))
        return record(runner, kind, recorder)

    def recorded_drafts(runner: Any, kind: Any, recorder: Any) -> Any:
        found.recorded.append((kind.rows, True))
        return record_drafts(runner, kind, recorder)

    def alone(shared: Any, block: Any, layer: int, *given: Any) -> torch.Tensor:
        found.alone.append(is_recorded(given[2].batch))
        return attend(shared, block, layer, *given)

    def finished(executor: Any, plan: Any, result: Any) -> Any:
        if is_recorded(plan.batch):
            found.hidden.append(result.hidden.cpu())
        return finish(executor, plan, result)

    def ended(executor: Any, plan: Any, done: Any, drafts: Any) -> Any:
        if is_recorded(plan.batch):
            found.hidden.append(drafts.hidden.cpu())
        return drafted(executor, plan, done, drafts)

    with (
        mock.patch.object(module._RecordedStep, "replay", replayed),
        mock.patch.object(AttentionRecordings, "_replay", followed),
        mock.patch.object(SharedAttention, "_attend", alone),
        mock.patch.object(Executor, "_finish", finished),
        mock.patch.object(module.GraphRunner, "_record", recorded),
        mock.patch.object(module.GraphRunner, "_record_prediction", recorded_drafts),
        mock.patch.object(Executor, "_add_drafts", ended),
    ):
        yield found


def checkpoint(model: str, folder: Path) -> Path:
    if model == "states":
        path = tiny_models.save(tiny_models.build(*model_configs.CASES["qwen3-next"]), folder)
        byte_tokenizer(path)
        return path
    return prediction.save("glm4_moe", folder, strength=0.02) if model == DRAFTED else saved(model, folder)


def config(path: Path, size: int, model: str, **scheduler: Any) -> WorkerConfig:
    """Of a worker whose ranks share attention."""
    drafts = {"speculative_config": MTP} if model == DRAFTED else {}
    settings = SchedulerConfig(**{"max_num_seqs": 4, "max_num_batched_tokens": 16, **drafts, **scheduler})
    of_model = ModelConfig(str(path), device="cuda", kernels="triton", threads=1, max_model_len=64)
    parallel = ParallelConfig(size)
    return WorkerConfig(
        of_model, CacheConfig("1MiB"), settings, parallel, remote_experts=True, supervised=True
    )


def answers(
    asked: WorkerConfig, path: Path, folder: Path, prompts: list[list[int]]
) -> tuple[list[list[int]], int]:
    """Tokens, and the bytes that the first rank has sent in all-gathers."""
    sent: list[int] = []

    def look(worker: Worker) -> None:
        sent.append(worker.stats().experts.group.all_gather_bytes)

    layout = read_expert_layout(
        replace(asked.model, device="cpu"), predicting=asked.scheduler.speculative_config is not None
    )
    with server(path, layout, folder) as directory:
        found = served_worker.generated(asked, directory, prompts, GREEDY, look)
    return [found[number] for number in range(len(prompts))], sent[0]


def alone(path: Path, prompts: list[list[int]]) -> list[list[int]]:
    llm = LLM(str(path), threads=1, device="cpu", kernels="reference", max_model_len=64)
    return [one.outputs[0].token_ids for one in llm.generate(prompts, GREEDY)]


CASES = [
    pytest.param("keys and values", False, 2, marks=pytest.mark.slow),
    pytest.param(DRAFTED, True, 2, marks=pytest.mark.slow),
    *(
        pytest.param(*case, marks=pairs.REST)
        for case in (
            (DRAFTED, False, 2),
            ("keys and values", True, 2),
            ("latent", True, 2),
            ("latent", False, 4),
            ("shared experts", True, 4),
            ("states", True, 2),
            ("states", False, 2),
        )
    ),
]


@pytest.mark.parametrize(("model", "nccl", "size"), CASES)
def test_every_rank_replays_what_it_would_compute(model: str, nccl: bool, size: int, tmp_path: Path) -> None:
    """With the tokens of one process, and the bits of the same steps operation by operation.

    nccl: graphs can hold exchanges of rows. A step has one or two rows, so none is padded.
    """
    path = checkpoint(model, tmp_path / "model")
    asked, spec = config(path, size, model), registry.read_spec(path)
    with seen() as recorded, ranks(nccl, size):
        found, sent = answers(asked, path, tmp_path, PROMPTS)
    assert found == alone(path, PROMPTS)
    assert recorded.parts and not any(recorded.alone), "no decode step runs operation by operation"
    routed = len(spec.moe_layers)
    of_step = (2 * routed + 1, routed) if nccl else (2 * routed + 1 + 2 * spec.num_layers, spec.num_layers)
    of_drafts = (3, 1) if nccl else (5, 1)
    expected = {False: of_step, True: of_drafts}
    assert all(parts == expected[drafts][0] for parts, drafts in recorded.parts)
    assert recorded.followed == (size - 1) * sum(expected[drafts][1] for _, drafts in recorded.parts)
    assert {drafts for _, drafts in recorded.parts} == ({False, True} if model == DRAFTED else {False})
    twice = 2 * nccl * sum(rows * (1 if drafts else spec.num_layers) for rows, drafts in recorded.recorded)
    extra = 4 * spec.hidden_size * (size - 1) * twice  # before they are recorded, and then at once
    eager = replace(asked, model=replace(asked.model, enforce_eager=True))
    with seen() as single, ranks(nccl, size):
        assert answers(eager, path, tmp_path, PROMPTS) == (found, sent - extra)
    assert not single.parts and not single.followed and any(single.alone)
    assert len(recorded.hidden) == len(recorded.parts) == len(single.hidden)
    if model == DRAFTED:
        return  # a sequence has two rows in some steps, whose attention rounds in another way
    assert all(map(torch.equal, recorded.hidden, single.hidden))


@pytest.mark.full
@pytest.mark.parametrize("nccl", [True, False])
@pytest.mark.parametrize(
    "scheduler", [{"inflight_batches": 2}, {"schedule": "async"}, {"schedule": "barrier"}]
)
def test_steps_take_turns(scheduler: dict[str, Any], nccl: bool, tmp_path: Path) -> None:
    """Padded: a batch has up to three rows."""
    path = checkpoint("latent", tmp_path / "model")
    prompts = [tiny_models.prompt(length, model_configs.VOCAB, seed=length) for length in (1, 2, 3, 4, 5)]
    asked = config(path, 2, "latent", **scheduler, max_num_seqs=8)
    with seen() as recorded, ranks(nccl, 2):
        assert answers(asked, path, tmp_path, prompts)[0] == alone(path, prompts)
    assert recorded.parts and recorded.followed


@pytest.mark.slow
def test_a_rank_that_is_gone_ends_the_group(tmp_path: Path) -> None:
    """In the middle of a replay. Graphs are destroyed before their connection: see `GraphPeers.close`."""
    path = checkpoint("keys and values", tmp_path / "model")
    with seen() as recorded, ranks(True, 2) as ends:
        ends[1].last = 12
        with pytest.raises(ConnectionLost):
            answers(config(path, 2, "keys and values"), path, tmp_path, PROMPTS[:1])
        assert ends[1].replayed == 12
    assert recorded.followed
