"""Groups of ranks over several hosts: the bits of a group on one host, through the loss of a rank's host."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moesaic import LLM
from moesaic.testing import byte_tokenizer
from tests.cluster.test_groups_with_servers import workload
from tests.support import model_configs, pairs, tiny_models
from tests.support.cluster_driver import Answer, cluster
from tests.support.hosts import Hosts, missing
from tests.support.joined_cluster import PREFILL, RANKS, SERVER, WORKER, After, joined_cluster

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
KILL, CUT = "kill", "cut"
FAMILIES = {
    "mixtral": ("mixtral", model_configs.mixtral(num_attention_heads=8, num_key_value_heads=4)),
    "qwen3-next": model_configs.CASES["qwen3-next"],
}
STEADY: dict[str, Any] = {"rebalance_interval": 0.0}
TWO = {"tensor_parallel_size": 2, "nnodes": 2}
"""A rank on each of two hosts."""


@pytest.fixture(scope="module")
def models(shared: Path) -> Callable[[str], str]:
    """The path of a family's checkpoint, which all hosts have."""

    @functools.cache
    def path(family: str) -> str:
        folder = shared / family
        tiny_models.save(tiny_models.build(*FAMILIES[family]), folder)
        byte_tokenizer(folder)
        return str(folder)

    return path


@functools.cache
def of_one_process(path: str) -> list[list[int]]:
    """The tokens that one process computes."""
    found = LLM(path, threads=1, enforce_eager=True).generate(*workload())
    return [completion.outputs[0].token_ids for completion in found]


@functools.cache
def of_one_host(path: str, **shape: Any) -> list[Answer]:
    """What a group on one host computes."""
    with cluster(path, **STEADY, **shape) as served:
        served.submit(*workload())
        found = served.finish()
    assert [tokens for tokens, _ in found] == of_one_process(path)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("family", "ranks"), [("mixtral", 4), ("qwen3-next", 2)])
def test_the_host_of_some_ranks_is_killed_and_returns(
    family: str, ranks: int, hosts: Hosts, shared: Path, models: Callable[[str], str]
) -> None:
    """Requests wait until the host is there again, and go on with the same bits."""
    shape: dict[str, Any] = {"expert_servers": 0, "tensor_parallel_size": ranks}
    expected = of_one_host(models(family), **shape)
    shape |= {"model": models(family), "nnodes": 2, **STEADY}
    with joined_cluster(hosts, shared, [(hosts[1], RANKS)], **shape) as joined:
        assert joined.numbers(RANKS) == {0}
        assert joined.answers(*workload()) == expected

        def restart() -> None:
            hosts[1].kill()
            hosts[1].boot()
            joined.join(hosts[1], RANKS)

        away = After(20, restart)
        assert joined.answers(*workload(), away) == expected and away.done
        assert joined.numbers(RANKS) == {1} and joined.numbers(WORKER) == {0}
        assert joined.served.supervisor.report().counters.moved_requests > 0
    assert joined.joined[-1].wait(30) == 0, joined.logs()
