"""How a process ended: the words for what the kernel did to it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from moesaic.models.files import resolve
from moesaic.runtime import process_end
from moesaic.runtime.limits import CGROUPS, OWN_GROUPS
from moesaic.runtime.process_end import OomKills, describe_exit

GIB = 1 << 30


class Kernel:
    """What it counts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.oom_kills = 3
        monkeypatch.setattr(process_end, "count_oom_kills", lambda: self.oom_kills)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return Kernel(monkeypatch)


def test_each_oom_kill_explains_one_end(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_end, "total_memory", lambda: GIB)
    monkeypatch.setattr(process_end, "describe_total_memory", lambda: "memory.max of the control group /a")
    oom_kills = OomKills()
    assert describe_exit(-9, None, oom_kills) == "killed by signal 9", "those before count for nothing"
    kernel.oom_kills += 2
    assert describe_exit(-11, None, oom_kills) == "killed by signal 11"
    for _ in range(2):
        ending = describe_exit(-9, None, oom_kills)
        assert "memory was used up: 1.0 GiB (memory.max of the control group /a)" in ending
        assert "--kv-cache-memory" in ending and "--fast-memory" in ending
    assert describe_exit(-9, None, oom_kills) == "killed by signal 9"


def test_an_exit_is_its_code(kernel: Kernel) -> None:
    assert [describe_exit(code, None, OomKills()) for code in (0, 2)] == [
        "exited with code 0",
        "exited with code 2",
    ]


READER = """
import mmap, sys
with open(sys.argv[1], "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
print("mapped", flush=True)
sys.stdin.readline()
sum(mapped[::4096])
"""


def test_a_process_that_dies_of_a_cut_file_names_it(tmp_path: Path) -> None:
    model = shutil.copytree(resolve("demo"), tmp_path / "model")
    weights = model / "model.safetensors"
    whole = weights.read_bytes()
    with subprocess.Popen(
        [sys.executable, "-c", READER, str(weights)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "mapped\n"
        os.truncate(weights, len(whole) // 3)
        process.stdin.write("\n")
        process.stdin.flush()
        code = process.wait(60)
    ending = describe_exit(code, model)
    assert ending.startswith("killed by signal 7 (SIGBUS)") and f"{weights}: " in ending
    assert "truncated" in ending
    weights.write_bytes(whole)
    assert "none of its files is short now" in describe_exit(code, model)


# ---- a real control group


def write(file: Path, text: str) -> None:
    """pytest.skip says why this machine does not let a test limit itself."""
    try:
        file.write_text(text)
    except OSError as error:
        pytest.skip(f"no control group can be made: {file}: {error.strerror}")


@contextmanager
def control_group(num_bytes: int, cores: float) -> Iterator[list[Path]]:
    """A group below that of this process, and its cgroup.procs files."""
    lines = (
        [line.split(":", 2) for line in OWN_GROUPS.read_text().splitlines()] if OWN_GROUPS.is_file() else []
    )
    names = {controller: name for _, controllers, name in lines for controller in controllers.split(",")}
    if "memory" in names:
        mounts = [
            (CGROUPS / controller, names[controller])
            for controller in ("memory", "cpu")
            if controller in names
        ]
        files = {"memory.limit_in_bytes": str(num_bytes), "cpu.cfs_quota_us": str(round(cores * 100_000))}
    else:
        mounts, files = (
            [(CGROUPS, names.get("", "/"))],
            {
                "memory.max": str(num_bytes),
                "cpu.max": f"{round(cores * 100_000)} 100000",
            },
        )
    folders: list[Path] = []
    try:
        for mount, name in mounts:
            parent = mount / name.strip("/")
            folder = (parent if parent.is_dir() else mount) / f"moesaic-test-{os.getpid()}"
            try:
                folder.mkdir()
            except OSError as error:
                pytest.skip(f"no control group can be made: {folder}: {error.strerror}")
            folders.append(folder)
        for file, text in files.items():
            holders = [folder / file for folder in folders if (folder / file).exists()]
            if not holders:
                pytest.skip(f"no control group has {file} here")
            write(holders[0], text)
        yield [folder / "cgroup.procs" for folder in folders]
    finally:
        for folder in folders:
            folder.rmdir()


def run_within(groups: list[Path], *command: str) -> subprocess.CompletedProcess[str]:
    """Runs a command whose process is in these groups."""
    shell = [f"echo $$ > {group}" for group in groups]
    return subprocess.run(
        ["sh", "-c", " && ".join([*shell, 'exec "$@"']), "sh", *command],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


ALLOCATING = """
import subprocess, sys
from moesaic.runtime.machine import available_memory, cores, describe_total_memory, total_memory
from moesaic.runtime.process_end import describe_exit
print(cores(), total_memory(), describe_total_memory(), sep="|")
print(available_memory())
code = subprocess.run([sys.executable, "-c", "held = bytearray(b'x') * (3 << 29)"]).returncode
print(describe_exit(code))
code = subprocess.run([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]).returncode
print(describe_exit(code))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's")
def test_a_group_of_one_gibibyte_is_kept_to_and_named() -> None:
    with control_group(GIB, 1.0) as groups:
        finished = run_within(groups, sys.executable, "-c", ALLOCATING)
        report = run_within(groups, sys.executable, "-m", "moesaic", "doctor", "--json")
    assert not finished.returncode, finished.stderr
    threads, available, out_of_memory, killed = finished.stdout.splitlines()
    assert threads.startswith(f"1|{GIB}|memory.") and " of the control group /" in threads
    assert 0 < int(available) <= GIB
    assert out_of_memory.startswith("killed by signal 9, because memory was used up: 1.0 GiB (memory.")
    assert killed == "killed by signal 9"
    machine: dict[str, Any] = json.loads(report.stdout)["machine"]
    assert machine["memory_limit"]["amount"] == GIB and machine["cpu_quota"]["amount"] == 1.0
    assert machine["threads"] == 1 and machine["memory_available"] <= GIB


def test_a_process_that_cannot_be_killed_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process_end, "KILLED_SECONDS", 0.01)
    with subprocess.Popen(["sleep", "60"]) as process:
        process_end.wait_for_killed(process, "expert server")
        assert f"expert server {process.pid} cannot be killed: it waits for a disk" in caplog.text
        caplog.clear()
        process.kill()
        monkeypatch.setattr(process_end, "KILLED_SECONDS", 60.0)
        process_end.wait_for_killed(process, "expert server")
        assert not caplog.text
