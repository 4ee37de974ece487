"""Processes that really die, and disks that are really full."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout

import pytest
from tests.support import pairs, run_batch_program
from tests.support.fake_batch_server import results, write_input

PATIENCE = 120.0
"""Seconds after which something hangs, on a busy machine too."""


@pytest.fixture
def files(tmp_path):
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def given(files, **settings):
    return json.dumps({"input": str(files[0]), "output": str(files[1])} | settings)


def start(files, **settings):
    paths = os.pathsep.join(dict.fromkeys(path for path in sys.path if path))
    return subprocess.Popen(
        [sys.executable, run_batch_program.__file__, given(files, **settings)],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(files, **settings):
    """Runs it in this process, or in one with limits. Returns the exit code, the output and the errors."""
    if "max_file_bytes" in settings:
        process = start(files, **settings)
        out, err = process.communicate(timeout=PATIENCE)
        return process.returncode, out, err
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = run_batch_program.main(given(files, **settings))
    return code, out.getvalue(), err.getvalue()


def when_lines(path, count, process):
    """Return once the output has at least `count` lines."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if path.exists() and path.read_bytes().count(b"\n") >= count:
            return
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.005)
    raise AssertionError("no progress")


def one_result_each(path, ids):
    assert sorted(result["custom_id"] for result in results(path)) == sorted(ids)
    assert all(result["error"] is None for result in results(path))


@pytest.mark.slow
def test_sigkill_costs_only_what_was_in_flight(files):
    ids = write_input(files[0], 60)
    for least, most in ((5, 8), (20, 20), (40, 25)):  # in all it answers 53 at most, however late the kill is
        process = start(files, delay=0.02, most=most)
        when_lines(files[1], least, process)
        process.kill()
        process.communicate(timeout=PATIENCE)
        kept = len(results(files[1]))
        assert least <= kept <= 53
    code, out, _ = finish(files)
    assert code == 0
    assert f"{60 - kept} completed, 0 failed, {kept} were done before" in out
    one_result_each(files[1], ids)


@pytest.mark.parametrize("signum", pairs.some([signal.SIGINT, signal.SIGTERM], [signal.SIGTERM]))
def test_a_signal_stops_at_once_and_says_how_to_go_on(files, signum):
    ids = write_input(files[0], 40)
    process = start(files, delay=0.05, most=20)
    when_lines(files[1], 5, process)
    process.send_signal(signum)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + signum
    assert "Traceback" not in err
    assert "run the same command again to continue" in out
    assert finish(files)[0] == 0
    one_result_each(files[1], ids)


@pytest.mark.slow
def test_a_file_size_limit_is_a_full_disk(files):
    ids = write_input(files[0], 40)
    code, _, err = finish(files, max_file_bytes=4000)
    assert code == 1
    assert err.count("\n") == 1 and "File too large; run the same command again" in err
    assert 3000 < files[1].stat().st_size <= 4000
    kept = len(results(files[1]))
    assert 0 < kept < 40
    assert finish(files)[0] == 0
    one_result_each(files[1], ids)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = shutil.which("mount")
    command = [mount or "mount", "-t", "tmpfs", "-o", "size=64k", "none", str(place)]
    if mount is None or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting needs root")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.slow
def test_a_full_disk_leaves_whole_lines(files, small_disk):
    ids = write_input(files[0], 40, size=3000)
    output = small_disk / "out.jsonl"
    code, _, err = finish((files[0], output))
    assert code == 1
    assert err.count("\n") == 1 and "No space left on device; run the same command again" in err
    kept = len(results(output))
    assert 0 < kept < 40
    assert finish((files[0], output))[0] == 1
    assert len(results(output)) >= kept
    shutil.copy(output, files[1])
    assert finish(files)[0] == 0
    one_result_each(files[1], ids)


@pytest.mark.slow
def test_a_second_run_on_the_same_output_is_refused(files):
    write_input(files[0], 400)  # so many that it is at them for longer than the other one takes to start
    first = start(files, delay=0.5)
    when_lines(files[1], 1, first)
    code, _, err = finish(files)
    assert code == 2
    assert "another run-batch is writing it" in err
    first.kill()
    first.communicate(timeout=PATIENCE)
    assert finish(files)[0] == 0
