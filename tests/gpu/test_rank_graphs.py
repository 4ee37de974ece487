"""Ranks with Triton's kernels on the sanitizer's device: their decode steps are CUDA graphs, and tokens are
those of one process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from tests.gpu import test_offload
from tests.support import model_configs, pairs, prediction, tiny_models
from tests.support.gpu_graphs import Graph, graphs
from tests.support.gpu_sanitizer import WAITS, sanitized
from tests.support.graph_peers import GraphPeers, ranks_in_threads
from tests.support.group_placements import recorded, write
from tests.support.thread_groups import RANK, group_of_threads
from tests.support.triton_kernels import IS_INTERPRETED

from moesaic import LLM, SamplingParams
from moesaic.core.errors import ConnectionLost
from moesaic.core.tokens import TokenBatch
from moesaic.gpu.ranks.recorded_rank import RecordedRank
from moesaic.models import registry
from moesaic.policy.scheduling.step_prices import StepPrices
from moesaic.runtime.group import build_rank
from moesaic.runtime.step.step_kind import Kind, bucket
from moesaic.testing import byte_tokenizer

pytestmark = [
    pytest.mark.skipif(not IS_INTERPRETED, reason="a GPU compiles what it runs"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of NumPy, in the interpreter
]
TWO = {"num_hidden_layers": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "keys and values": (
        "mixtral",
        model_configs.mixtral(num_attention_heads=4, num_key_value_heads=2, **TWO),
    ),
    "latent": ("deepseek_v2", model_configs.deepseek(n_shared_experts=1, **TWO)),
    "shared experts": ("qwen2_moe", model_configs.qwen2(num_attention_heads=4, num_key_value_heads=2, **TWO)),
}
FORMS = ("all-reduce", "reduce-scatter", "deepspeed", "shuffled")
PROMPTS = [tiny_models.prompt(length, model_configs.VOCAB, seed=length) for length in (1, 2, 3)]
COUNTS = (4, 2, 4)
"""Tokens of each answer: a step has three rows, then two."""


def answers(llm: LLM, prompts: int = len(PROMPTS)) -> list[list[int]]:
    params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in COUNTS]
    return [one.outputs[0].token_ids for one in llm.generate(PROMPTS[:prompts], params[:prompts])]


def saved(model: str, folder: Path) -> Path:
    path = tiny_models.save(tiny_models.build(*MODELS[model]), folder)
    byte_tokenizer(path)
    return path


def alone(path: Path) -> list[list[int]]:
    return answers(LLM(str(path), threads=1, device="cpu", kernels="reference", max_model_len=64))


def placement(path: Path, size: int) -> str:
    """Where experts are expected, as the prompts have routed their tokens."""
    greedy = [SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)] * len(PROMPTS)
    return write(path, recorded(str(path), PROMPTS, greedy)[1], size, copies=1)


@contextmanager
def ranks(path: Path, nccl: bool, size: int = 2, **settings: Any) -> Iterator[tuple[LLM, list[GraphPeers]]]:
    """A group of threads on the device. nccl: graphs can hold its exchanges."""
    ends, connect, within = ranks_in_threads(nccl, size)
    asked = {"max_model_len": 64, "kv_cache_memory": "16MiB", "kernels": "triton", "device": "cuda"}
    with (
        np.errstate(all="ignore"), sanitized(), graphs(),
        mock.patch.object(build_rank, "connect_rows", connect),
        group_of_threads(str(path), within, tensor_parallel_size=size, **asked, **settings) as (llm, _, _),
    ):  # fmt: skip
        yield llm, ends


class Here(threading.local):
    """What the calling thread has replayed."""

    graphs = 0


HERE = Here()


class Steps:
    """The steps of all ranks."""

    def __init__(self) -> None:
        self.recorded: list[Kind] = []
        """Rows and longest context of each recording."""
        self.predictions: list[bool] = []
        """Whether the layer that drafts tokens was replayed, of each time that it followed a replay."""
        self.replays: list[tuple[int, list[str]]] = []
        """Graphs of a replayed step, and where its host waited."""
        self.rows = 0
        """Rows that the first rank has sent in steps, padded ones among them. The first step of a kind runs
        three times: before it is recorded, behind its recording, and when it is replayed."""

    def ran(self, rank: RecordedRank, batch: TokenBatch) -> torch.Tensor:
        waited, graphs, known = len(WAITS.mine.of), HERE.graphs, len(rank._steps)
        hidden = RUN(rank, batch)
        replayed, new = HERE.graphs > graphs, len(rank._steps) > known
        if replayed and not new:
            self.replays.append((HERE.graphs - graphs, WAITS.mine.of[waited:]))
        multiple = rank._recorded_rows.multiple if replayed else 1
        rows = bucket(batch.num_rows) if replayed else batch.num_rows
        if not threading.current_thread().name.startswith(RANK):
            self.rows += (3 if new else 1) * -(-rows // multiple) * multiple
        return hidden

    def predicted(self, rank: RecordedRank, *given: Any) -> torch.Tensor:
        graphs, follows = HERE.graphs, rank._was_replay
        hidden = PREDICT(rank, *given)
        if follows:
            self.predictions.append(HERE.graphs > graphs)
        return hidden

    def record(self, rank: RecordedRank, kind: Kind) -> Any:
        self.recorded.append(kind)
        return RECORD(rank, kind)


RUN, RECORD, REPLAY = RecordedRank.run, RecordedRank._record, Graph.replay
PREDICT = RecordedRank.predict


def replay(graph: Graph) -> None:
    HERE.graphs += 1
    REPLAY(graph)


@contextmanager
def steps() -> Iterator[Steps]:
    seen = Steps()
    with (
        mock.patch.object(RecordedRank, "run", lambda *given: seen.ran(*given)),
        mock.patch.object(RecordedRank, "predict", lambda *given: seen.predicted(*given)),
        mock.patch.object(RecordedRank, "_record", lambda *given: seen.record(*given)),
        mock.patch.object(Graph, "replay", replay),
    ):
        yield seen


CUTS = {("all-reduce", True): 0, ("all-reduce", False): 2, ("shuffled", True): 3}
"""Where a graph ends in a layer with routed experts, by form and backend."""
OTHERS = {True: 1, False: 3}
CASES = pairs.params(MODELS, FORMS, (True, False), (False, True))


@pytest.mark.parametrize(("model", "form", "nccl", "eager"), CASES)
def test_tokens_are_those_of_one_process(
    model: str, form: str, nccl: bool, eager: bool, tmp_path: Path
) -> None:
    """nccl: graphs can hold exchanges of rows. eager: with --enforce-eager."""
    path = saved(model, tmp_path)
    settings: dict[str, Any] = {"moe_collectives": form, "enforce_eager": eager}
    if form == "shuffled":
        settings["placement"] = placement(path, 2)
    wanted = alone(path)
    with steps() as seen, ranks(path, nccl, **settings) as (llm, _):
        assert answers(llm) == wanted
        sent = llm.stats().experts.group.all_reduce_bytes
    if eager:
        assert not seen.recorded and not seen.replays
        return
    assert sorted(seen.recorded) == [(2, 1024, False)] * 2 + [(4, 1024, False)] * 2, (
        "both ranks record the same"
    )
    spec = registry.read_spec(path)
    routed, dense = len(spec.moe_layers), spec.num_layers - len(spec.moe_layers)
    cuts = routed * CUTS.get((form, nccl), OTHERS[nccl]) + dense * (not nccl)
    assert seen.replays and {graphs for graphs, _ in seen.replays} == {cuts + 1}
    if nccl and form != "shuffled":
        choices = 0 if form == "all-reduce" else routed
        assert all(waits == ["synchronize"] * choices for _, waits in seen.replays), "for the gate's choice"
    if nccl and form == "all-reduce":
        assert sent == 4 * spec.hidden_size * seen.rows * (2 * routed + dense), "replays are counted too"


@pytest.mark.full
@pytest.mark.parametrize("nccl", [True, False])
@pytest.mark.parametrize(
    ("size", "form", "settings"),
    [
        (3, "deepspeed", {}),
        (3, "reduce-scatter", {}),
        (3, "shuffled", {"shuffle_align": "variable"}),
        (3, "all-reduce", {}),
        (4, "all-reduce", {"expert_tensor_parallel_size": 2}),
        (4, "reduce-scatter", {"expert_tensor_parallel_size": 2}),
    ],
)
def test_more_ranks(size: int, form: str, settings: dict[str, Any], nccl: bool, tmp_path: Path) -> None:
    """Three rows are padded to a multiple of the ranks, where ranks share out the rows."""
    heads = 4 if size == 4 else 3
    options = model_configs.mixtral(num_attention_heads=2 * heads, num_key_value_heads=heads, **TWO)
    path = tiny_models.save(tiny_models.build("mixtral", options), tmp_path)
    byte_tokenizer(path)
    wanted = alone(path)
    if form == "shuffled":
        settings = settings | {"placement": placement(path, size)}
    with steps() as seen, ranks(path, nccl, size, moe_collectives=form, **settings) as (llm, _):
        assert answers(llm) == wanted
    shared = {3: {6, 3}, 4: {4}}[size]
    whole = form in ("all-reduce", "shuffled")
    assert {kind.rows for kind in seen.recorded} == ({4, 2} if whole else shared)


DRAFTING = [
    pytest.param("all-reduce", True, marks=pytest.mark.slow),
    pytest.param("deepspeed", False, marks=pytest.mark.full),
    pytest.param("reduce-scatter", True, marks=pytest.mark.full),
]


@pytest.mark.parametrize(("form", "nccl"), DRAFTING)
def test_a_layer_that_drafts_is_replayed_after_a_replay(form: str, nccl: bool, tmp_path: Path) -> None:
    path = prediction.save("glm4_moe", tmp_path / "glm", strength=0.004)
    wanted = alone(path)
    drafts = {"method": "mtp", "num_speculative_tokens": 1}
    with (
        mock.patch.object(StepPrices, "record_duration"),
        steps() as seen,
        ranks(path, nccl, moe_collectives=form, speculative_config=drafts) as (llm, _),
    ):
        assert answers(llm) == wanted
        assert llm.stats().speculation.draft_tokens > 0
    assert seen.recorded and len(seen.predictions) > 2 and all(seen.predictions)


@pytest.mark.full
@pytest.mark.parametrize("form", ["all-reduce", "deepspeed"])
def test_ranks_that_page_their_experts(form: str, tmp_path: Path) -> None:
    path = saved("shared experts", tmp_path)
    wanted, offload = alone(path), replace(test_offload.STAYS, static_experts=1)
    with steps() as seen, ranks(path, False, moe_collectives=form, offload=offload) as (llm, _):
        assert answers(llm) == wanted
        assert any(one.loaded_bytes for one in llm.stats().experts.passes)
    assert not seen.recorded


@pytest.mark.slow
@pytest.mark.parametrize("form", ["all-reduce", pytest.param("deepspeed", marks=pairs.REST)])
def test_a_rank_that_is_gone_ends_the_group(form: str, tmp_path: Path) -> None:
    """In the middle of a replay. Graphs are destroyed before their connection: see `GraphPeers.close`."""
    path = saved("keys and values", tmp_path)
    with steps() as seen, ranks(path, True, moe_collectives=form) as (llm, ends):
        answers(llm, 1)
        ends[1].last = ends[1].replayed + 1
        for _ in range(2):
            with pytest.raises(ConnectionLost):
                answers(llm, 1)
    assert seen.replays


@pytest.mark.slow
def test_a_rank_that_is_gone_while_steps_are_recorded(tmp_path: Path) -> None:
    """The other one has recorded a part of a step, and destroys that too."""
    path = saved("keys and values", tmp_path)
    with steps() as seen, ranks(path, True, moe_collectives="deepspeed") as (llm, ends):
        ends[1].last = 2  # an all-reduce is two exchanges, and ends up in the first graph
        with pytest.raises(ConnectionLost):
            answers(llm)
        assert [end.replayed for end in ends] == [3, 2] and not seen.replays
