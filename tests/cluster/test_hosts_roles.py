"""A host with a process of every role dies or is cut off, for families with and without states.

Each combination has a workload of long prompts, so that prefill workers have transfers under way.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moesaic import LLM, SamplingParams
from moesaic.testing import byte_tokenizer
from tests.support import model_configs, pairs, tiny_models
from tests.support.cluster_driver import Answer
from tests.support.hosts import Hosts, missing
from tests.support.joined_cluster import PREFILL, SERVER, WORKER, After, JoinedCluster, joined_cluster

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
KILL, CUT = "kill", "cut"
LENGTHS = (200, 129, 65, 17, 180, 10, 150, 90)
TOKENS = 32
ROLES = ((WORKER,), (WORKER, SERVER), (PREFILL,), (WORKER, PREFILL, SERVER), (WORKER, WORKER, PREFILL))
"""What runs on the host that goes. The cluster's own host has a process of each role besides."""


@pytest.fixture(scope="module")
def models(shared: Path) -> Callable[[str], str]:
    """The path of a family's checkpoint, which all hosts have."""

    @functools.cache
    def path(family: str) -> str:
        if family == "demo":
            return family
        folder = shared / family
        tiny_models.save(tiny_models.build(*model_configs.CASES[family]), folder)
        byte_tokenizer(folder)
        return str(folder)

    return path


def workload() -> tuple[list[list[int]], list[SamplingParams]]:
    numbers = random.Random(5)
    prompts = [[numbers.randrange(3, model_configs.VOCAB) for _ in range(length)] for length in LENGTHS]
    params = [
        SamplingParams(max_tokens=TOKENS, temperature=0.8 * (i % 2), seed=i, ignore_eos=True, logprobs=0)
        for i in range(len(prompts))
    ]
    return prompts, params


@functools.cache
def alone(path: str) -> list[Answer]:
    """What one process computes."""
    model = LLM(path, threads=1, kv_cache_memory="64MiB", enforce_eager=True)
    found = []
    for completion in model.generate(*workload()):
        [output] = completion.outputs
        found.append((output.token_ids, [entry.logprob for entry in output.logprobs or []]))
    return found


def transferring(joined: JoinedCluster) -> Callable[[], bool]:
    """Whether a prompt's KV is on its way now."""
    return lambda: bool(joined.served.router.transfers)


CASES = pairs.cover((KILL, CUT), ROLES, ("lockstep", "barrier", "async"), ("demo", "qwen3-next"))
NOW = [case for case in CASES if case[1] == ROLES[3]][:1]


@pytest.mark.parametrize(("fault", "roles", "schedule", "family"), pairs.some(CASES, NOW))
def test_a_host_with_several_roles_goes_and_returns(
    fault: str,
    roles: tuple[str, ...],
    schedule: str,
    family: str,
    hosts: Hosts,
    shared: Path,
    models: Callable[[str], str],
) -> None:
    expected = alone(models(family))
    shape: dict[str, Any] = {"prefill_workers": int(PREFILL in roles), "schedule": schedule}
    shape |= {"attention_workers": 1, "expert_servers": 2, "min_replicas": 2, "max_num_batched_tokens": 16}
    with joined_cluster(hosts, shared, model=models(family), rebalance_interval=0.0, **shape) as joined:
        before = {role: len(joined.numbers(role)) for role in (WORKER, PREFILL, SERVER)}
        joined.bring(hosts[1], roles)
        moment = transferring(joined) if PREFILL in roles else lambda: True
        go = hosts[1].kill if fault == KILL else hosts[1].cut
        away = After(20, go, moment)
        assert joined.answers(*workload(), away) == expected and away.done
        for role, count in before.items():
            joined.until(count, role)
        if fault == CUT:
            hosts[1].heal()
            for role in set(roles):
                joined.until(before[role] + roles.count(role), role)
        else:
            hosts[1].boot()
            joined.bring(hosts[1], roles)
        assert joined.answers(*workload()) == expected
