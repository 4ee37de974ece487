"""A file that a process computes from: what somebody else does to it, and what the process notices."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from moesaic.core.errors import CheckpointError
from moesaic.models import fingerprint, served_files
from moesaic.models.files import resolve
from moesaic.models.served_files import ServedFiles, watch_files
from moesaic.offload.reading import ALIGNMENT, DirectFile

WEIGHTS = "model.safetensors"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return shutil.copytree(resolve("demo"), tmp_path / "model")


@pytest.fixture
def opened(model: Path) -> Iterator[ServedFiles]:
    made = ServedFiles(model, fingerprint.stamp(model))
    made._fingerprint = made._read_fingerprint()
    yield made
    made.close()


def overwrite(file: Path, number: int = 1) -> None:
    """Changes bytes in the middle of a file, as `rsync --inplace` does."""
    with file.open("r+b") as stream:
        stream.seek(file.stat().st_size // 2)
        stream.write(bytes([number]) * 64)


def overwrite_behind_its_time(file: Path) -> None:
    before = file.stat()
    overwrite(file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 3)


def replace_by_rename(file: Path) -> None:
    other = file.with_suffix(".new")
    other.write_bytes(bytes(file.stat().st_size))
    other.replace(file)


def rewrite(file: Path) -> None:
    file.write_bytes(file.read_bytes())


STOPPED: list[tuple[Callable[[Path], object], str]] = [
    (overwrite, "it was written over in place"),
    (rewrite, "it was written over in place"),
    (cut, "instead of"),
    (overwrite_behind_its_time, "it has other bytes of tensors than at the start"),
]
UNHARMED: list[Callable[[Path], object]] = [
    Path.unlink,
    replace_by_rename,
    lambda file: file.chmod(0o600),
    lambda file: os.chown(file, os.getuid(), os.getgid()),
    lambda file: file.with_name("link").hardlink_to(file),
    lambda file: file.rename(file.with_name("moved")),
    lambda file: file.with_name("config.json").write_text("{}"),
]


@pytest.mark.parametrize(("act", "words"), STOPPED)
def test_bytes_that_changed_are_found_by_name(
    act: Callable[[Path], object], words: str, model: Path, opened: ServedFiles
) -> None:
    assert opened.find_change() is None
    act(model / WEIGHTS)
    change = opened.find_change()
    assert (
        change is not None and change.startswith(f"{model / WEIGHTS}: this file changed") and words in change
    )


@pytest.mark.parametrize("act", UNHARMED)
def test_what_leaves_the_mapped_file_as_it_is_stops_nothing(
    act: Callable[[Path], object], model: Path, opened: ServedFiles
) -> None:
    act(model / WEIGHTS)
    assert opened.find_change() is None and opened.find_change() is None


def test_a_new_mode_is_compared_and_logged_once(
    model: Path, opened: ServedFiles, caplog: pytest.LogCaptureFixture
) -> None:
    (model / WEIGHTS).chmod(0o600)
    with caplog.at_level(logging.WARNING):
        assert opened.find_change() is None and opened.find_change() is None
    assert [record.getMessage() for record in caplog.records] == [
        f"{model / WEIGHTS}: its mode, owner, links or times changed; its sampled bytes did not"
    ]


def test_files_that_changed_after_they_were_loaded_are_not_opened(model: Path) -> None:
    stamp = fingerprint.stamp(model)
    overwrite(model / WEIGHTS)
    with pytest.raises(CheckpointError, match="the files changed since they were first read"):
        ServedFiles(model, stamp)


def test_a_thread_reports_a_change_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_files, "LOOK_SECONDS", 0.02)
    reports: list[str] = []
    has_reported = threading.Event()

    def report(change: str) -> None:
        reports.append(change)
        has_reported.set()

    with watch_files(model, fingerprint.stamp(model), report):
        overwrite(model / WEIGHTS)
        assert has_reported.wait(60)
    assert len(reports) == 1 and WEIGHTS in reports[0]


def test_nothing_stays_open_after_the_watch(model: Path) -> None:
    def count_open() -> int:
        links = [entry.readlink() for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
        return sum(str(model) in str(link) for link in links)

    served_files = ServedFiles(model, fingerprint.stamp(model))  # without its thread, which opens them too
    assert count_open() == 1
    served_files.close()
    assert count_open() == 0


# ---- streamed reads


def aligned(size: int) -> memoryview:
    memory = np.empty(size + ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % ALIGNMENT
    return memory[begin : begin + size].data


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(("act", "words"), STOPPED[:3])
def test_no_read_returns_bytes_of_a_changed_file(
    act: Callable[[Path], object], words: str, direct: bool, model: Path
) -> None:
    with DirectFile(model / WEIGHTS, direct) as file:
        file.read(0, aligned(ALIGNMENT))
        act(model / WEIGHTS)
        with pytest.raises(CheckpointError, match=words):
            file.read(0, aligned(ALIGNMENT))


@pytest.mark.parametrize("act", UNHARMED)
def test_reads_of_a_file_go_on_where_its_bytes_are_the_same(
    act: Callable[[Path], object], model: Path
) -> None:
    with DirectFile(model / WEIGHTS) as file:
        before, after = aligned(ALIGNMENT), aligned(ALIGNMENT)
        file.read(0, before)
        act(model / WEIGHTS)
        file.read(0, after)
    assert bytes(before) == bytes(after)


# ---- fingerprints while somebody changes the mode


def test_a_new_mode_while_a_fingerprint_is_computed_is_no_change(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, compute_digest = fingerprint.compute_fingerprint(model), fingerprint._digest
    modes = iter([0o600, 0o640] * 1000)

    def digest(*arguments: object) -> str:
        (model / WEIGHTS).chmod(next(modes))
        return compute_digest(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(fingerprint, "_digest", digest)
    (model / WEIGHTS).chmod(0o644)  # so that the last fingerprint is not taken
    assert fingerprint.compute_fingerprint(model) == expected
