"""What is recorded with prefill workers: the rows of one process, each of them once."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moesaic import LLM, SamplingParams
from moesaic.core.profile import Profile
from moesaic.core.routing import END_POSITION, Rows
from moesaic.trace.options import RecordConfig
from tests.cluster.test_identity import alone
from tests.cluster.test_prefill import DuringTransfer, prefill_cluster, workload
from tests.support import pairs
from tests.support.cluster_driver import Cluster

Routed = dict[tuple[int, ...], bytes]
"""Tokens of a request that passed the model -> their experts [t, layers, k]."""


@functools.cache
def of_one_process(tokens: int) -> Routed:
    """Of requests whose prompts are computed from the first token on."""
    taken: list[Rows] = []
    llm = LLM("demo", threads=1, kv_cache_memory="64MiB", enable_prefix_caching=False, routing=taken.append)
    llm.generate(*workload(tokens))
    rows = np.concatenate(taken)
    rows = rows[rows["position"] != END_POSITION]
    found = {}
    for request in np.unique(rows["request"]):
        mine = rows[rows["request"] == request]
        mine = mine[np.argsort(mine["position"])]
        assert mine["position"].tolist() == list(range(len(mine)))
        found[tuple(mine["token"].tolist())] = mine["experts"].tobytes()
    return found


def routed(profile: Profile) -> Routed:
    routes = profile.routes
    spans = zip(routes.starts.tolist(), routes.starts[1:].tolist(), strict=False)
    found = [(tuple(routes.tokens[a:b].tolist()), routes.experts[a:b].tobytes()) for a, b in spans]
    assert len(dict(found)) == len(found), "no request is counted twice"
    return dict(found)


SHAPES: dict[str, dict[str, Any]] = {
    "own experts": {"expert_servers": 0},
    "async": {"schedule": "async", "attention_workers": 2, "prefill_workers": 2},
    "barrier": {"schedule": "barrier"},
    "two batches in flight": {"inflight_batches": 2},
    "small caches": {"kv_cache_memory": "1MiB", "max_model_len": 256, "expert_servers": 0},
}


def record(file: Path, shape: dict[str, Any], kill: DuringTransfer | None = None) -> tuple[Routed, Cluster]:
    """What a cluster without a prefix cache recorded of the workload."""
    with prefill_cluster(record=RecordConfig(str(file), 1.0), enable_prefix_caching=False, **shape) as served:
        served.submit(*workload(40))
        if kill is not None:
            kill.served = served
        answers = served.finish() if kill is None else served.finish(kill)
        assert answers == alone(*workload(40))
    return routed(Profile.load(file)), served


@pytest.mark.parametrize("shape", pairs.some(list(SHAPES), ["async", "small caches"]))
def test_the_rows_are_those_of_one_process(shape: str, tmp_path: Path) -> None:
    """Where caches are small, requests wait for room, and most runs preempt some of them."""
    found, served = record(tmp_path / "p.npz", SHAPES[shape])
    assert found == of_one_process(40)
    assert served.stats.transfers.received_requests


@pytest.mark.parametrize(
    ("victim", "schedule"),
    pairs.some(
        [(f"{role} worker 0", how) for role in ("prefill", "attention") for how in ("lockstep", "async")],
        [("prefill worker 0", "lockstep")],
    ),
)
@pytest.mark.parametrize("count", [1, 2])
def test_a_prompt_that_is_computed_again_counts_once(
    victim: str, schedule: str, count: int, tmp_path: Path
) -> None:
    """The worker that died may have recorded a part of it, or all."""
    kill = DuringTransfer(None, victim, after=0, times=2)  # type: ignore[arg-type]
    shape = {"attention_workers": count, "prefill_workers": count, "schedule": schedule}
    assert record(tmp_path / "p.npz", shape, kill)[0] == of_one_process(40)
    assert kill.left < 2


@pytest.mark.slow
def test_rows_that_a_prefix_cache_spares_are_left_out(tmp_path: Path) -> None:
    """As with one worker, which has computed them for another request."""
    prompt = workload()[0][-2]
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    with prefill_cluster(record=RecordConfig(str(tmp_path / "p.npz"), 1.0)) as served:
        for _ in range(2):
            served.submit([prompt], [params])
            served.finish()
        served.until(lambda: served.stats.transfers.received_requests == 2)
    whole, rest = sorted(routed(Profile.load(tmp_path / "p.npz")).items(), key=lambda one: -len(one[0]))
    assert len(whole[0]) == len(prompt) + 4 and whole[0][: len(prompt)] == tuple(prompt)
    assert len(rest[0]) == len(prompt) + 4 - 192, "twelve blocks of 200 tokens"
    assert whole[0][192:] == rest[0] and whole[1].endswith(rest[1])
