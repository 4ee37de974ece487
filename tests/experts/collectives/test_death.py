"""Ranks in other processes are killed, frozen or never start. No rank hangs."""

from __future__ import annotations

import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
PATIENCE = 60.0
"""Seconds after which a test counts as hanging."""
Child = subprocess.Popen[str]


@contextmanager
def ranks(path: Path, tasks: list[str], size: int | None = None) -> Iterator[list[Child]]:
    """Starts a process for each task. Kills them at the end."""
    command = [sys.executable, "-m", "tests.support.collectives_rank", str(path / "s")]
    total = str(len(tasks) if size is None else size)
    with ExitStack() as stack:
        children = []
        for rank, task in enumerate(tasks):
            child = subprocess.Popen(
                [*command, str(rank), total, task], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
            )
            stack.enter_context(child)
            stack.callback(child.kill)
            children.append(child)
        assert {line(child) for child in children} == {"started"}
        yield children


def line(child: Child) -> str:
    """The next line of a process. Fails if none comes."""
    assert child.stdout is not None
    assert select.select([child.stdout], [], [], PATIENCE)[0], "nothing was said"
    return child.stdout.readline().strip()


@pytest.mark.parametrize("victim", [0, 1, 3])
def test_a_death_ends_the_round_of_all_others(victim: int, tmp_path: Path) -> None:
    tasks = ["idle" if rank == victim else "wait" for rank in range(4)]
    with ranks(tmp_path, tasks) as children:
        assert [line(child) for child in children] == [
            "idle" if rank == victim else "waiting" for rank in range(4)
        ]
        children[victim].kill()
        for rank, child in enumerate(children):
            if rank != victim:
                assert line(child).startswith("lost: rank")
                assert child.wait(PATIENCE) == 0


def test_a_death_between_rounds_is_told_at_the_next(tmp_path: Path) -> None:
    with ranks(tmp_path, ["idle", "idle", "idle"]) as children:
        assert [line(child) for child in children] == ["idle"] * 3
        children[2].kill()
        children[2].wait()
        for child in children[:2]:
            assert child.stdin is not None
            child.stdin.write("\n")
            child.stdin.flush()
        assert all(line(child).startswith("lost: rank") for child in children[:2])


def test_a_frozen_rank_is_waited_for(tmp_path: Path) -> None:
    with ranks(tmp_path, ["wait", "idle"]) as (first, second):
        assert [line(first), line(second)] == ["waiting", "idle"]
        second.send_signal(signal.SIGSTOP)
        assert first.stdout is not None and second.stdin is not None
        second.stdin.write("\n")
        second.stdin.flush()
        assert not select.select([first.stdout], [], [], 0.2)[0]
        second.send_signal(signal.SIGCONT)
        assert [line(first), line(second)] == ["done", "done"]


def test_a_death_before_all_are_there(tmp_path: Path) -> None:
    """Two of three ranks have arrived. The one that the others wait for dies."""
    with ranks(tmp_path, ["wait", "wait"], size=3) as (first, second):
        while not (tmp_path / "s").exists():
            assert first.poll() is None
        first.kill()
        assert second.wait(PATIENCE) != 0
