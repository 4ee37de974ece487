"""Collectives of rows on the ranks' devices: the bits and bytes of those through the host."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import IO

import numpy as np
import pytest
import torch
from tests.experts.collectives.test_death import PATIENCE, line
from tests.support import row_scenarios
from tests.support.collectives_scenarios import Outcome

from moesaic.config import one_gpu, worker_environment
from moesaic.core.errors import ConnectionLost
from moesaic.experts.collectives.group import Group
from moesaic.experts.collectives.one_shot import local_group
from moesaic.runtime.group.rows import HostRows, RowCollectives
from moesaic.runtime.group.tensor_rows import DeviceRows
from moesaic.runtime.group.torch_peers import TorchPeers

CPU = torch.device("cpu")
SIZES = (2, 3, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 4)))


def in_threads(size: int, connect: Callable[[Group], RowCollectives], device: str = "cpu") -> list[Outcome]:
    def rank(group: Group) -> Outcome:
        rows = connect(group)
        found = row_scenarios.run(rows, device)
        group.announce(b"")  # nobody closes before all are done
        rows.close()
        return found

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank, local_group(size)))


@cache
def wanted(size: int) -> list[Outcome]:
    return in_threads(size, HostRows)


def same(found: list[Outcome], size: int) -> None:
    for one, other in zip(found, wanted(size), strict=True):
        assert one.keys() == other.keys()
        for name, value in other.items():
            assert np.array_equal(one[name], value), name


@pytest.mark.parametrize("size", SIZES)
def test_gloo_has_the_bits_and_bytes_of_the_host(size: int) -> None:
    same(in_threads(size, lambda group: DeviceRows(group, TorchPeers("gloo", group, CPU))), size)


def start(folder: Path, rank: int, size: int, backend: str, *task: str) -> subprocess.Popen[str]:
    """A rank in a process of its own, with a GPU of its own for nccl."""
    environment = worker_environment() | (one_gpu(rank, size) if backend == "nccl" else {})
    command = [sys.executable, "-m", "tests.support.rows_rank", str(folder / "s"), str(rank), str(size)]
    pipe = subprocess.PIPE
    return subprocess.Popen([*command, backend, *task], stdout=pipe, stdin=pipe, text=True, env=environment)


def in_processes(size: int, backend: str, folder: Path) -> list[Outcome]:
    """What ranks in processes of their own find."""
    files = [folder / f"{rank}.npz" for rank in range(size)]
    children = [start(folder, rank, size, backend, "suite", str(file)) for rank, file in enumerate(files)]
    for child in children:
        with child:
            assert child.wait(4 * PATIENCE) == 0
    return [dict(np.load(file)) for file in files]


@pytest.mark.full
@pytest.mark.parametrize("size", [3, 4])
def test_processes_have_the_bits_and_bytes_of_the_host(size: int, tmp_path: Path) -> None:
    same(in_processes(size, "gloo", tmp_path), size)


@pytest.mark.slow
def test_the_death_of_a_rank_ends_the_exchange_of_the_other(tmp_path: Path) -> None:
    children = [start(tmp_path, rank, 2, "gloo", task) for rank, task in enumerate(["wait", "idle"])]
    try:
        assert [line(child) for child in children] == ["started", "started"]
        assert [line(child) for child in children] == ["waiting", "idle"]
        children[1].kill()
        assert line(children[0]).startswith("lost: an exchange of rows through gloo failed: ")
        assert children[0].wait(PATIENCE) == 0
    finally:
        for child in children:
            child.kill()
            with child:
                pass


def test_a_closed_end_is_noticed_by_both() -> None:
    ends = local_group(2)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda group: DeviceRows(group, TorchPeers("gloo", group, CPU)), ends)
    second.close()
    second.close()
    for end in (first, second):
        with pytest.raises(ConnectionLost):
            end.all_reduce(torch.ones(3))
    first.close()


def files_at(numbers: set[int | None], folder: Path) -> list[IO[str]]:
    """New files, of which some have these descriptors. They are free."""
    files: list[IO[str]] = []
    while not numbers <= {file.fileno() for file in files}:
        assert len(files) < 64
        files.append((folder / str(len(files))).open("w"))
    return files


def written(files: list[IO[str]]) -> set[bytes]:
    for file in files:
        file.close()
    return {Path(file.name).read_bytes() for file in files}


def test_the_last_to_close_writes_to_no_other_file(tmp_path: Path) -> None:
    """The others' descriptors are closed by then, and their numbers belong to other files."""
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda group: TorchPeers("gloo", group, CPU), local_group(2))
    numbers = {first._file}
    first.close()
    files = files_at(numbers, tmp_path)
    second.close()
    assert written(files) == {b""}


def test_an_error_that_is_kept_writes_to_no_other_file(tmp_path: Path) -> None:
    """Its traceback must not keep the store beyond the end of its descriptor."""
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda group: TorchPeers("gloo", group, CPU), local_group(2))
    numbers = {first._file, second._file}
    first.close()
    with pytest.raises(ConnectionLost) as kept:
        second.exchange(torch.ones(2, 3), [1, 1], [1, 1])
    files = files_at(numbers, tmp_path)
    del kept
    gc.collect()
    assert written(files) == {b""}


def test_ranks_meet_in_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So nothing remains when a process is killed."""
    opened: list[str] = []
    store = torch.distributed.FileStore

    def seen(path: str, size: int) -> torch.distributed.FileStore:
        opened.append(path)
        return store(path, size)

    monkeypatch.setattr(torch.distributed, "FileStore", seen)
    in_threads(2, lambda group: DeviceRows(group, TorchPeers("gloo", group, CPU)))
    assert all(path.startswith("/proc/") for path in opened) and len(opened) == 2
