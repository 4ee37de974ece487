"""Servers beside each other, in the same memory."""

from __future__ import annotations

import argparse
import io
from dataclasses import replace
from pathlib import Path

import make_checkpoint
import pytest
from offloading import serve
from rich.console import Console

from moesaic.cost.machines import MACHINES
from moesaic.kernels import table
from moesaic.planning.hardware import file


def test_no_two_prompts_begin_alike() -> None:
    given = argparse.Namespace(prompt_len=5, requests=3)
    found = serve._prompts(given, clients=4, turn=1)
    assert len({prompt.split()[0] for prompt in found}) == len(found) == 12
    assert found == serve._prompts(given, clients=4, turn=1) != serve._prompts(given, clients=4, turn=2)


def test_medians_and_failures_are_shown() -> None:
    rows = [
        {"name": "a", "clients": 1, "throughput": rate, "ttft": 5.0, "answer": 90.0, "tokens": 4}
        | {"charged": 2 << 20, "read": 8 << 20}
        for rate in (1.0, 9.0, 3.0)
    ]
    failed = {"name": "b", "clients": 1, "failed": "out of memory", "charged": None}
    found = {"settings": {"model": "/m/it", "cap": "1GiB", "libraries": "0"}, "rows": [serve._median(rows)]}
    found["rows"].append(serve._median([*rows, failed]))
    said = io.StringIO()
    serve.show(found, Console(file=said, width=120))
    for text in ("3.00", "2.0 MiB", "out of memory"):
        assert text in said.getvalue(), text


@pytest.mark.full
@pytest.mark.skipif(not table.instruction_sets(), reason="no native kernels in this build")
def test_a_server_is_measured_and_a_cap_refused(tmp_path: Path) -> None:
    make_checkpoint.write("qwen3-moe-0.01b", tmp_path / "model")
    machine = next(iter(MACHINES.values()))

    file.save(replace(machine, slow=replace(machine.slow, processor=None)), tmp_path / "this.toml")
    parser = argparse.ArgumentParser()
    serve.add(parser)
    for cap in ("40MiB", "1MiB"):
        given = ["--cap", cap, "--no-limit", "--hardware", str(tmp_path / "this.toml")]
        arguments = parser.parse_args([str(tmp_path / "model"), *given])
        serve.quick(arguments)
        rows = serve.measure(arguments)["rows"]
        assert [row["clients"] for row in rows] == [1, 2]
        if cap == "1MiB":
            assert all("--fast-memory: got '1MiB'" in row["failed"] for row in rows)
        else:
            assert [row["tokens"] for row in rows] == [4, 8]
