"""Programs that put counters into moesaic's own classes still start, and count."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from disaggregated import breakdown, colocated
from disaggregated.serving import random_prompts, serving

from moesaic.config import ClusterConfig

from .conftest import FOLDER

PROMPTS = [[5, 6, 7], [8, 9, 10, 11]]


@pytest.mark.slow
def test_processes_with_stopwatches_serve_and_tell_where_the_time_went(tmp_path: Path) -> None:
    shape = ClusterConfig(attention_workers=1, expert_servers=1, rebalance_interval=0)
    with colocated._stopwatches(tmp_path), serving("timed", "demo", 1, shape) as served:
        pids = [served.pid("attention worker 0")], [served.pid("expert server 0")]
        served.measured(random_prompts(2, 6, 900), 4)
        [worker, server] = colocated._read(tmp_path, *pids)
    for process in (worker, server):
        assert process["runs"] > 0 and len(process["layers"]) > 1, "counted for each layer with experts"
        assert process["seconds"]["execution"] > 0
        assert set(process["seconds"]) <= {*breakdown.STAGES, "waiting"}


@pytest.mark.slow
def test_the_engine_of_the_comparison_computes_and_counts_what_it_reads() -> None:
    command = [sys.executable, str(FOLDER / "peer_moesaic.py"), "demo", "1"]
    orders = [{"do": "run", "prompts": PROMPTS, "new": 4}, {"do": "count", "prompts": PROMPTS}]
    text = "".join(json.dumps(order) + "\n" for order in orders)
    ended = subprocess.run(command, input=text, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stderr
    run, count = map(_object, ended.stdout.splitlines())
    assert [len(tokens) for tokens in run["tokens"]] == [4, 4]
    assert 0 < count["numbers"] <= count["bytes"]


def _object(line: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(line)
    return found
