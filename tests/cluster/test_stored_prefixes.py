"""Prompts that clusters keep on a disk: the tokens of one process, cold, warm, restarted and after kills."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from moesaic import SamplingParams
from moesaic.runtime.prefix_cache.entry_files import FOLDER
from tests.cluster.test_groups import ranks, same
from tests.cluster.test_identity import alone
from tests.support import pairs
from tests.support.cluster_driver import Answer, Cluster, cluster

PROMPT = [5 + index % 300 for index in range(100)]
PARAMS = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, logprobs=0)


def ask(served: Cluster, prompt: list[int]) -> Answer:
    served.forget()
    [number] = served.submit([prompt], [PARAMS])
    served.finish()
    return served.running.answers[number]


def wanted(prompt: list[int]) -> Answer:
    return alone([prompt], [PARAMS])[0]


def read_tokens(served: Cluster, worker: str) -> int:
    """Statistics come a moment after the tokens that they count."""
    return served.supervisor.worker_stats()[worker].stored_prefixes.read_tokens


def written(served: Cluster, num_bytes: int) -> None:
    served.until(lambda: served.stats.stored_prefixes.written_bytes >= num_bytes)


def entries(directory: Path) -> list[Path]:
    """The files of blocks, without one that a killed process has not finished."""
    return [path for path in (directory / FOLDER).iterdir() if not path.name.startswith(".")]


def newest(directory: Path) -> Path:
    """The file of a prompt's first block, which is marked as used after the others."""
    return max(entries(directory), key=lambda path: path.stat().st_mtime_ns)


BLOCK_BYTES = 16 * 3072
"""Bytes of a block of the demo's KV."""


@pytest.mark.slow
@pytest.mark.parametrize("servers", [0, 1])
def test_prefill_workers_read_what_any_worker_wrote(servers: int, tmp_path: Path) -> None:
    """The second turn begins with the first one's answer, whose KV only the attention worker computed."""
    shape: dict[str, Any] = {"prefill_workers": 1, "expert_servers": servers}
    second = [*PROMPT, *wanted(PROMPT)[0], *range(2, 20)]
    with cluster(**shape, prefix_cache_dir=str(tmp_path)) as served:
        assert ask(served, PROMPT) == wanted(PROMPT)
        assert ask(served, PROMPT) == wanted(PROMPT)
        written(served, 8 * BLOCK_BYTES)
    with cluster(**shape, prefix_cache_dir=str(tmp_path)) as served:
        assert ask(served, second) == wanted(second)
        served.until(lambda: read_tokens(served, "prefill worker 0") == 128)
        served.until(lambda: served.stats.transfers.received_requests == 1)
        assert ask(served, second) == wanted(second)
    with cluster(attention_workers=2, expert_servers=servers, prefix_cache_dir=str(tmp_path)) as served:
        assert ask(served, second) == wanted(second)
        served.until(lambda: served.stats.stored_prefixes.read_tokens == 144)


RANKS: dict[str, dict[str, Any]] = {
    "experts on the ranks": {"expert_servers": 0},
    "deepspeed": {"expert_servers": 0, "moe_collectives": "deepspeed"},
    "servers": {"expert_servers": 1},
    "async": {"expert_servers": 1, "schedule": "async"},
    "prefill workers": {"expert_servers": 0, "prefill_workers": 1},
}
SECOND = [*PROMPT[:64], *range(400, 470)]


@pytest.mark.parametrize(
    "shape", pairs.some(list(RANKS), ["experts on the ranks", "async", "prefill workers"])
)
def test_each_rank_reads_its_own_part(shape: str, tmp_path: Path) -> None:
    """Cold, warm and after a restart. A block counts only if the parts of both ranks are there."""
    settings: dict[str, Any] = {"tensor_parallel_size": 2, "prefix_cache_dir": str(tmp_path), **RANKS[shape]}
    with cluster(**settings) as served:
        cold = ask(served, PROMPT)
        same([cold], [wanted(PROMPT)])
        assert ask(served, PROMPT) == cold
        written(served, 4 * BLOCK_BYTES)  # half of the bytes of eight blocks, on the first rank
    assert len(entries(tmp_path)) == 2 * 8
    with cluster(**settings) as served:
        assert ask(served, PROMPT) == cold
        served.until(lambda: served.stats.stored_prefixes.read_tokens == 96)
        same([ask(served, SECOND)], [wanted(SECOND)])
    lost = newest(tmp_path)
    lost.unlink()
    with cluster(**settings) as served:
        assert ask(served, PROMPT) == cold
        served.until(lost.exists)
        assert served.stats.stored_prefixes.read_tokens == 0


@pytest.mark.parametrize("victim", pairs.some([0, 1], [1]))
def test_a_rank_is_killed_while_it_writes(victim: int, tmp_path: Path) -> None:
    """The other rank may have written more blocks. Those do not count, and are completed later."""
    settings: dict[str, Any] = {"tensor_parallel_size": 2, "expert_servers": 0}
    long = [5 + index * index % 300 for index in range(1500)]
    with cluster(**settings, prefix_cache_dir=str(tmp_path)) as served:
        cold = ask(served, long)
        os.kill(ranks(served)[victim], signal.SIGKILL)
        assert ask(served, long) == cold
        assert ask(served, PROMPT) == ask(served, PROMPT)
        served.until(lambda: len(entries(tmp_path)) == 2 * (96 + 8))
    with cluster(**settings, prefix_cache_dir=str(tmp_path)) as served:
        assert ask(served, long) == cold
        served.until(lambda: served.stats.stored_prefixes.read_tokens == 1488)
