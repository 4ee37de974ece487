"""The experts and servers of each token are those that the trace of the same run names."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moesaic import LLM, SamplingParams
from moesaic.cluster.launch import launch
from moesaic.config import CacheConfig, ClusterConfig, ModelConfig, SchedulerConfig, WorkerConfig
from moesaic.core.request import RequestOutput, TokenRoute
from moesaic.trace.parts import collecting
from tests.support import trace_reader
from tests.support.cluster_driver import PATIENCE, Cluster

PROMPT = [5]
TOKENS = 24
ASKING = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True, return_routed_experts=True, seed=1)
SPECULATION = '{"method": "ngram", "num_speculative_tokens": 3}'


def routes_of(
    trace: str | None = None, kill: str | None = None, more: int = 0, **settings: Any
) -> tuple[list[int], list[TokenRoute], list[RequestOutput]]:
    """Tokens and routes of one request, and the outputs of `more` others that do not ask.

    kill: a process that is killed after half of the tokens.
    """
    scheduler = {"max_num_seqs": 8, "max_num_batched_tokens": 64, **settings.pop("scheduler", {})}
    worker = WorkerConfig(
        ModelConfig("demo", threads=1),
        CacheConfig("32MiB"),
        SchedulerConfig(**scheduler),
        trace=trace,
    )
    tokens: list[int] = []
    routes: list[TokenRoute] = []
    others: list[RequestOutput] = []
    with collecting(trace), launch(worker, ClusterConfig(**settings), seed=0) as launched:
        Cluster(launched).connected()
        engine = launched.engine
        asked = engine.submit(PROMPT, ASKING)
        left = {asked} | {engine.submit([7 + n], SamplingParams(max_tokens=9, seed=n)) for n in range(more)}
        while left:
            message = launched.connection.receive(PATIENCE)
            assert message is not None
            for output in engine.receive(message):  # type: ignore[arg-type]
                if output.request_id == asked:
                    tokens += output.token_ids
                    routes += output.routes or []
                else:
                    others.append(output)
                if output.finished:
                    left.discard(output.request_id)
                if kill is not None and len(tokens) == TOKENS // 2:
                    assert launched.supervisor is not None
                    launched.supervisor.kill(kill)
                    kill = None
    return tokens, routes, others


@pytest.fixture(scope="module")
def alone() -> RequestOutput:
    """The same request in one process, which computes its experts itself."""
    llm = LLM("demo", threads=1, kv_cache_memory="32MiB")
    return llm.generate([PROMPT], ASKING)[0].outputs[0]


@pytest.mark.slow
def test_one_process_tells_the_experts_that_the_recorder_writes_down(alone: RequestOutput) -> None:
    taken: list[Any] = []
    llm = LLM("demo", threads=1, kv_cache_memory="32MiB", routing=taken.append)
    params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    found = llm.generate([PROMPT], params)[0].outputs[0]
    rows = np.concatenate(taken)
    rows = rows[rows["position"] >= 0]
    rows = rows[np.argsort(rows["position"])]
    assert alone.routes is not None and found.routes is None and alone.token_ids == found.token_ids
    assert [route.experts for route in alone.routes] == rows["experts"].tolist()
    assert [route.servers for route in alone.routes] == [[]] * TOKENS


@pytest.mark.parametrize(
    "scheduler",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"schedule": "async"}, marks=pytest.mark.slow),
        pytest.param({"schedule": "barrier"}, marks=pytest.mark.full),
        pytest.param({"combine": "partial"}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_pairs_of_servers_and_layers_are_those_of_the_trace(
    scheduler: dict[str, Any], alone: RequestOutput, tmp_path: Path
) -> None:
    """A prompt of one token: each row that is computed is one from which a token is sampled."""
    file = tmp_path / "trace.json"
    tokens, routes, _ = routes_of(
        str(file), scheduler=scheduler, expert_servers=2, redundant_experts=2, rebalance_interval=0.0
    )
    assert alone.routes is not None and len(routes) == len(tokens) == TOKENS
    if scheduler.get("combine") != "partial":
        assert tokens == alone.token_ids
        assert [route.experts for route in routes] == [route.experts for route in alone.routes]
    named: Counter[tuple[str, int]] = Counter()
    for route in routes:
        for layer, servers in enumerate(route.servers):
            named.update((f"expert server {server}", layer) for server in servers)
    traced: Counter[tuple[str, int]] = Counter()
    for row in trace_reader.rows(trace_reader.joined(file)):
        if row.process.startswith("expert server"):
            for span in row.layers:
                assert span.layer is not None
                traced[row.process, span.layer] += span.args["pairs"]
    layers = sorted({layer for _, layer in traced if traced[_, layer]})
    assert {(name, layers[layer]): pairs for (name, layer), pairs in named.items()} == {
        key: pairs for key, pairs in traced.items() if pairs
    }
    assert len({name for name, _ in named}) == 2


@pytest.mark.parametrize(
    ("settings", "kill"),
    [
        pytest.param({"min_replicas": 2}, "expert server 0", marks=pytest.mark.slow),
        pytest.param({"attention_workers": 2}, "attention worker 0", marks=pytest.mark.full),
        pytest.param(
            {"min_replicas": 2, "scheduler": {"schedule": "async"}}, "expert server 1", marks=pytest.mark.full
        ),
        pytest.param({"scheduler": {"speculative_config": SPECULATION}}, None, marks=pytest.mark.full),
        pytest.param({"scheduler": {"inflight_batches": 2}}, None, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_routes_are_complete_when_a_process_is_killed_and_beside_others(
    settings: dict[str, Any], kill: str | None, alone: RequestOutput
) -> None:
    tokens, routes, others = routes_of(kill=kill, more=4, expert_servers=2, **settings)
    assert alone.routes is not None
    assert tokens == alone.token_ids
    assert [route.experts for route in routes] == [route.experts for route in alone.routes]
    assert {server for route in routes for servers in route.servers for server in servers} <= {0, 1}
    assert all(output.routes is None for output in others)
