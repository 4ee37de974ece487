"""`moesaic top`: what it computes from two samples, and what it shows of a real cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import httpx
import pytest
from rich.console import Console
from tests.server.conftest import NO_TLS
from tests.support.terminal import Terminal
from tests.test_serve import COMMAND

from moesaic.commands import cli
from moesaic.commands.top_view import Sample, compare_samples, draw, read_metrics
from moesaic.core.cluster_status import ClusterCounters, ClusterStatus, Failure, ProcessStatus
from moesaic.core.metrics import ExpertServerStats

TOP = (sys.executable, "-m", "moesaic", "top")
METRICS = """\
# TYPE moesaic:prompt_tokens counter
moesaic:prompt_tokens_total{model_name="m"} 30.0
# TYPE moesaic:num_requests_running gauge
moesaic:num_requests_running{model_name="m"} 2.0
# TYPE moesaic:request_success counter
moesaic:request_success_total{model_name="m",finished_reason="stop"} 2.0
moesaic:request_success_total{model_name="m",finished_reason="length"} 3.0
# TYPE moesaic:time_to_first_token_seconds histogram
moesaic:time_to_first_token_seconds_bucket{model_name="m",le="+Inf"} 4.0
moesaic:time_to_first_token_seconds_count{model_name="m"} 4.0
moesaic:time_to_first_token_seconds_sum{model_name="m"} 2.0
"""


def status(pairs: tuple[int, int], incarnation: int = 1, **fields: Any) -> dict[str, Any]:
    """Of a cluster whose servers have computed so many pairs, in a second for each hundred."""
    processes = [ProcessStatus("attention worker 0", "attention worker", 0, "serving", 5, 1, 0, None, 0.1)]
    for number, each in enumerate(pairs):
        stats = ExpertServerStats(pairs=each, busy_seconds=each / 100, waiting_pairs=number)
        one = ProcessStatus(
            f"expert server {number}", "expert server", number, "serving", 6 + number,
            incarnation if number else 1, 0, None, 0.1, experts=24, stats=stats,
        )  # fmt: skip
        processes.append(one)
    counters = ClusterCounters(process_deaths=1, failovers=2)
    found = ClusterStatus(1, 1, None, processes, [], [Failure(0.0, "it died")], counters)
    return asdict(found) | fields


def shown(*parts: Any, width: int = 80) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as text:
        console.print(*parts)
    return text.get()


def test_metrics_are_summed_over_labels() -> None:
    found = read_metrics(METRICS)
    assert found["request_success_total"] == 5.0 and found["time_to_first_token_seconds_sum"] == 2.0
    assert "time_to_first_token_seconds_bucket" not in found
    assert read_metrics(METRICS.replace("moesaic:", "vllm:")) == found


def test_a_view_has_what_happened_between_two_samples() -> None:
    before = Sample(10.0, {"prompt_tokens_total": 10.0, "time_to_first_token_seconds_sum": 1.0})
    found = compare_samples("http://x", before, Sample(12.0, read_metrics(METRICS)))
    assert (found.seconds, found.prompt_tokens_per_second, found.running) == (2.0, 10.0, 2)
    assert found.time_to_first_token == 0.25
    assert found.generation_tokens_per_second is None and found.prefix_cache_hit_rate is None
    text = shown(draw(found))
    assert "prompt tokens/s      10.0" in text and "250.0 ms" in text and "process" not in text


def test_the_load_of_each_server() -> None:
    before = Sample(0.0, {}, status((100, 100)))
    found = compare_samples("http://x", before, Sample(2.0, {}, status((150, 250))))
    first, second = found.processes[1:]
    assert (first.pairs_per_second, first.load, first.busy) == (25.0, 0.25, 0.25)
    assert (second.pairs_per_second, second.load, second.busy, second.waiting_pairs) == (75.0, 0.75, 0.75, 1)
    assert found.processes[0].pairs_per_second is None
    assert found.counters["process_deaths"] == 1 and found.failures == ["it died"]


def test_a_new_process_of_a_server_begins_at_zero() -> None:
    before = Sample(0.0, {}, status((100, 100)))
    found = compare_samples("http://x", before, Sample(1.0, {}, status((100, 40), incarnation=2)))
    assert [one.pairs_per_second for one in found.processes[1:]] == [0.0, 40.0]


def test_nothing_computed_is_no_share() -> None:
    sample = Sample(0.0, {}, status((0, 0)))
    found = compare_samples("http://x", sample, Sample(1.0, {}, status((0, 0))))
    assert found.processes[1].load is None


def test_eighty_columns_are_enough() -> None:
    sample = Sample(0.0, {}, status((10**8, 10**8)))
    later = status((10**9, 3 * 10**9), change="adding expert server 2", watched=False)
    text = shown(draw(compare_samples("http://x", sample, Sample(60.0, {}, later))))
    assert "…" not in text and "in progress: adding expert server 2" in text
    assert "The supervisor has stopped" in text and "failure: it died" in text
    assert "process deaths 1, failovers 2" in text


@pytest.mark.parametrize(
    ("width", "names"),
    [(45, "process stage deaths busy"), (60, "process stage deaths pairs/s load busy")],
)
def test_a_narrow_terminal_has_fewer_columns(width: int, names: str) -> None:
    """The stage of a process is never left out, nor cut."""
    found = compare_samples("http://x", Sample(0.0, {}, status((0, 0))), Sample(1.0, {}, status((10, 30))))
    found.processes[2] = replace(found.processes[2], stage="waiting to be restarted")
    text = shown(draw(found, width), width=width)
    assert next(line for line in text.splitlines() if line.startswith("process ")).split() == names.split()
    table = text[text.index("attention worker 0") : text.index("process deaths")]
    assert "…" not in table and "serving" in table and {"waiting", "restarted"} <= set(table.split())


FAR, NEAR = "10.0.0.2", ["attention worker 0", "expert server 0"]
LINK = {
    "one": "",
    "other": FAR,
    "latency_seconds": 1e-4,
    "bytes_per_second": 1.25e9,
    "source": "measured",
}


def on_two_hosts(**fields: Any) -> dict[str, Any]:
    """The second server is on another host. fields: of its process."""
    found = status((100, 100), change=None)
    found["processes"][2] |= {"host": FAR, "pid": None} | fields
    there = [] if fields.get("waiting") else ["expert server 1"]
    found["hosts"] = [{"name": "", "processes": NEAR}, {"name": FAR, "processes": there}]
    return found | {"links": [LINK]}


def test_processes_are_shown_by_host_with_the_links_between_hosts() -> None:
    found = compare_samples(
        "http://x", Sample(0.0, {}, on_two_hosts()), Sample(1.0, {}, on_two_hosts(suspected=True))
    )
    assert [one.host for one in found.processes] == ["", "", FAR]
    assert asdict(found)["links"] == [LINK] and found.hosts == ["", FAR]
    lines = [line.rstrip() for line in shown(draw(found)).splitlines()]
    first, second = lines.index("on this host"), lines.index(f"on {FAR}")
    assert [line[:18].rstrip() for line in lines[first + 1 : second]] == NEAR
    assert lines[second + 1].split()[:4] == ["expert", "server", "1", "suspected"]
    assert lines[first - 1].split()[:3] == ["process", "pid", "stage"]
    stage = lines[first - 1].index("stage")
    assert lines[first + 1][stage:].startswith("serving") and lines[second + 1][stage:].startswith("suspect")
    assert any(line.split() == [*f"this host - {FAR} 100 µs 1.25 GB/s measured".split()] for line in lines)


def test_what_a_process_without_a_host_waits_for_is_shown() -> None:
    why = "waiting for a host: no node has 2 CPU free; 2 nodes have 1 of 5 CPU free"
    found = compare_samples(
        "http://x", Sample(0.0, {}, {}), Sample(1.0, {}, on_two_hosts(waiting=why, host=""))
    )
    text = shown(draw(found), width=120)
    assert f"expert server 1: {why}" in text
    assert text.index("on 10.0.0.2") < text.index("without a host") < text.index("expert server 1  ")


def test_many_links_are_counted() -> None:
    many = on_two_hosts() | {"links": [LINK] * 9}
    text = shown(draw(compare_samples("http://x", Sample(0.0, {}, many), Sample(1.0, {}, many))))
    assert text.count("1.25 GB/s") == 6 and "and 3 more links" in text


def test_without_other_hosts_nothing_of_hosts_is_shown() -> None:
    one = status((1, 2)) | {"hosts": [{"name": "", "processes": ["attention worker 0"]}]}
    old = {**one, "processes": [{k: v for k, v in p.items() if k != "suspected"} for p in one["processes"]]}
    text = shown(draw(compare_samples("http://x", Sample(0.0, {}, one), Sample(1.0, {}, one))))
    assert "host" not in text and "link" not in text
    assert text == shown(draw(compare_samples("http://x", Sample(0.0, {}, old), Sample(1.0, {}, old))))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("top localhost", "--url: got 'localhost'; allowed: an address such as http://127.0.0.1:8000"),
        ("top --interval 0", "--interval: got 0.0; allowed: a positive number of seconds"),
    ],
)
def test_mistakes(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(line.split()) == 2
    assert message in capsys.readouterr().err


def test_no_server_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top", "http://127.0.0.1:1", "--once"]) == 1
    assert capsys.readouterr().err.startswith("moesaic: http://127.0.0.1:1: ")


CLUSTER = ("--attention-workers", "1", "--expert-servers", "2", "--min-replicas", "2")


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    command = [*COMMAND, *CLUSTER, "--api-key", "geheim", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process, json.loads(process.stdout.readline())
    process.terminate()
    process.communicate()


def once(url: str, *flags: str) -> dict[str, Any]:
    command = [*TOP, url, "--once", "--json", "--interval", "0.5", "--api-key", "geheim", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


@pytest.mark.slow
def test_a_cluster_whose_server_is_killed(
    served: tuple[subprocess.Popen[str], dict[str, Any]],
) -> None:
    """The live view goes on while a server dies and comes back, and names the failure."""
    url, ended = served[1]["url"], threading.Event()

    def ask() -> None:
        headers = {"Authorization": "Bearer geheim"}
        body = {"prompt": "Hello", "max_tokens": 200, "ignore_eos": True}
        with httpx.Client(
            base_url=url, headers=headers, trust_env=False, verify=NO_TLS, timeout=60
        ) as client:
            while not ended.is_set():
                client.post("/v1/completions", json=body).raise_for_status()

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        with Terminal(*TOP, url, "--api-key", "geheim", "--interval", "0.3") as terminal:
            terminal.wait_for(r"expert server 1 +\d+ serving +0 +144 +[1-9][\d.]+ +\d")
            victim = next(one for one in once(url)["processes"] if one["name"] == "expert server 1")
            os.kill(victim["pid"], signal.SIGKILL)
            terminal.wait_for(r"expert server 1 +\d+ serving +1 ")
            terminal.wait_for(r"(?s)process deaths 1.*failure: expert server 1: .*killed by signal 9")
            terminal.type("\x03")
            assert terminal.wait() == 130
        found = once(url)
    finally:
        ended.set()
        asking.join()
    assert found["counters"]["process_deaths"] == 1 and found["generation_tokens_per_second"] > 0
    assert "killed by signal 9" in found["failures"][0]
    assert {one["stage"] for one in found["processes"]} == {"serving"}


@pytest.mark.slow
def test_a_wrong_key_is_one_line(served: tuple[subprocess.Popen[str], dict[str, Any]]) -> None:
    command = [*TOP, served[1]["url"], "--once", "--api-key", "wrong"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("moesaic: HTTP 401: wrong or missing")
