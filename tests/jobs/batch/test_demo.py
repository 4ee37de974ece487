"""The real thing: the API's own code and a worker process with the model of the package."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from functools import partial

import pytest
from tests.jobs.batch.test_kill import finish, start, when_lines
from tests.support.fake_batch_server import results
from tests.support.processes import all_children, children, gone

from moesaic.commands.cli import main

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_workers")]
FULL = partial(pytest.param, marks=pytest.mark.full)

LINES = 24


@pytest.fixture
def files(tmp_path):
    return written(tmp_path)


def written(folder):
    """A file of lines, and where their results go."""
    rows = []
    for number in range(LINES):
        body = {"model": "demo", "max_tokens": 30, "temperature": 0, "ignore_eos": True}
        if number % 2:
            url = "/v1/chat/completions"
            body["messages"] = [{"role": "user", "content": f"What is {number} + 1?"}]
        else:
            url, body["prompt"] = "/v1/completions", f"def add_{number}(a, b):"
        rows.append({"custom_id": f"r{number}", "method": "POST", "url": url, "body": body})
    file = folder / "in.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file, folder / "out.jsonl"


def worker_of(process):
    """The process id of the worker of a run."""
    return children(process.pid, "moesaic.runtime")[0]


def when_gone(pid):
    for _ in range(1000):
        if gone(pid):
            return
        time.sleep(0.01)
    raise AssertionError(f"process {pid} lives on")


def answers(path):
    """custom_id -> what was said, every one exactly once and without an error."""
    found = results(path)
    assert sorted(result["custom_id"] for result in found) == sorted(f"r{number}" for number in range(LINES))
    assert all(result["error"] is None and result["response"]["status_code"] == 200 for result in found)
    choices = {result["custom_id"]: result["response"]["body"]["choices"][0] for result in found}
    return {name: choice.get("text") or choice["message"]["content"] for name, choice in choices.items()}


def test_killed_at_every_turn_it_answers_what_an_undisturbed_run_answers(files, alone):
    process = start(files, demo=True, window=4)
    when_lines(files[1], 3, process)
    worker = worker_of(process)
    process.kill()
    process.communicate(timeout=120)
    when_gone(worker)
    kept = len(results(files[1]))

    process = start(files, demo=True, window=4)
    when_lines(files[1], kept + 2, process)
    os.kill(worker_of(process), signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    if len(results(files[1])) < LINES:
        assert process.returncode == 1
        last = err.rstrip().split("\n")[-1]
        assert "the worker is gone" in last and "run the same command again to continue" in last

    code, _, err = finish(files, demo=True)
    assert code == 0
    assert answers(files[1]) == alone


@contextmanager
def running(*command):
    """A process that ends with the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", "moesaic", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def run_batch(files, *flags):
    names = "-i", str(files[0]), "-o", str(files[1])
    return running("run-batch", *names, "--max-in-flight", "4", *flags)


@pytest.fixture(scope="module")
def alone(tmp_path_factory, quick_workers):
    """What an undisturbed run of one worker answers."""
    files = written(tmp_path_factory.mktemp("alone"))
    code, out, err = finish(files, demo=True)
    assert code == 0, err
    assert f"{LINES} completed, 0 failed; {LINES * 30} tokens" in out
    return answers(files[1])


@pytest.mark.parametrize(
    ("flags", "victim"),
    [
        FULL(("--attention-workers", "2", "--expert-servers", "2", "--schedule", "async"), "moesaic.experts"),
        (("--attention-workers", "2", "--expert-servers", "1"), "moesaic.runtime"),
        FULL(("--tensor-parallel-size", "2"), "moesaic.runtime"),
    ],
)
def test_a_batch_on_a_cluster_survives_what_dies_in_it(files, alone, flags, victim):
    with run_batch(files, "--model", "demo", "--threads", "1", *flags) as process:
        when_lines(files[1], 3, process)
        os.kill(all_children(process.pid, victim)[0], signal.SIGKILL)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    assert answers(files[1]) == alone


def test_a_batch_survives_the_restart_of_the_server_that_answers_it(files, alone):
    serve = "serve", "demo", "--threads", "1", "--json", "--port"
    with running(*serve, "0", "--expert-servers", "2") as first:
        url = json.loads(first.stdout.readline())["url"]
        with run_batch(files, "--base-url", url) as process:
            when_lines(files[1], 3, process)
            first.kill()
            first.wait()
            with running(*serve, url.rpartition(":")[2]):
                _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert answers(files[1]) == alone


def test_ctrl_c_ends_the_worker_too(files):
    process = start(files, demo=True, window=4)
    when_lines(files[1], 1, process)
    worker = worker_of(process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    when_gone(worker)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert "run the same command again to continue" in out


def test_a_setting_that_is_wrong_is_one_line(files, tmp_path):
    code, _, err = finish((tmp_path / "none", files[1]), demo=True)
    assert code == 2
    assert err.count("\n") == 1 and "--input-file" in err


def test_lines_with_unknown_fields_fail_only_with_strict_fields(tmp_path, caplog):
    file = tmp_path / "in.jsonl"
    rows = [
        {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", **more}}
        for name, more in (("a", {}), ("b", {"slot_id": 1}))
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for flags, code, failed in (((), 0, []), (("--strict-fields",), 1, ["b"])):
        output = tmp_path / f"out{code}.jsonl"
        assert main(["run-batch", "-i", str(file), "-o", str(output), "--model", "demo", *flags]) == code
        found = results(output)
        assert [one["custom_id"] for one in found if one["error"]] == failed
        assert ("slot_id: ignored in a request" in caplog.text) == (not failed)
        caplog.clear()
