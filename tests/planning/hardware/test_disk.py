from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from moesaic.core.errors import ConfigError
from moesaic.offload.reading import IN_FLIGHT
from moesaic.planning.hardware import disk
from moesaic.planning.hardware.disk import Disk, Read, Sizes
from moesaic.planning.hardware.timing import Clock

PAGE = 4096
TINY = Sizes(file=64 * PAGE, least=16 * PAGE, blocks=(PAGE, 8 * PAGE))


def measured(path: Path, sizes: Sizes = TINY, limit: float = 0.002) -> Disk:
    return disk.measure(path, sizes, limit, time.perf_counter, lambda *_: None)


class Spy:
    """Takes the place of DirectFile. Records what is read, and by which thread."""

    direct = False

    def __init__(self, path: Path) -> None:
        self.seen: list[tuple[int, int, int]] = []

    def read(self, offset: int, into: memoryview) -> int:
        self.seen.append((threading.get_ident(), offset, len(into)))
        return len(into)

    def __enter__(self) -> Spy:
        return self

    def __exit__(self, *reason: object) -> None: ...


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    one = Spy(Path())
    monkeypatch.setattr(disk, "DirectFile", lambda path: one)
    return one


def test_a_directory_gets_a_file_and_keeps_none(tmp_path: Path) -> None:
    found = measured(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert found.file == f"a temporary file in {tmp_path}" and found.write is not None and found.write > 0
    assert [(one.is_repeated, one.block, one.readers) for one in found.reads] == [
        (False, 8 * PAGE, 1),
        *((True, block, readers) for readers in (1, IN_FLIGHT) for block in (PAGE, 8 * PAGE)),
    ]
    assert all(one.bandwidth > 0 for one in found.reads) and found.memory > 0


def test_a_large_file_is_read_and_stays(tmp_path: Path) -> None:
    file = tmp_path / "shard"
    file.write_bytes(b"x" * (20 * PAGE + 5))
    found = measured(file)
    assert found.file == str(file) and found.write is None and file.stat().st_size == 20 * PAGE + 5


def test_a_checkpoint_is_read_where_the_directory_has_one(tmp_path: Path) -> None:
    for name, pages in (("a.safetensors", 17), ("b.safetensors", 30), ("c.safetensors", 1), ("d.bin", 99)):
        (tmp_path / name).write_bytes(b"x" * (pages * PAGE))
    assert measured(tmp_path).file == str(tmp_path / "b.safetensors")


def test_the_first_read_goes_through_once(tmp_path: Path, spy: Spy) -> None:
    (tmp_path / "shard").write_bytes(b"x" * (64 * PAGE))
    sizes = Sizes(least=PAGE, blocks=(8 * PAGE,))
    disk.measure(tmp_path / "shard", sizes, 0.0, time.perf_counter, lambda *_: None)
    assert [offset for _, offset, _ in spy.seen[:1]] == [0], "no time: one block"
    spy.seen.clear()
    disk.measure(tmp_path / "shard", sizes, 1e-4, ticking(1e-6), lambda *_: None)
    assert [offset // PAGE for _, offset, _ in spy.seen[:8]] == list(range(0, 64, 8))


def ticking(tick: float) -> Clock:
    """A clock that advances by `tick` at every reading."""
    now = [0.0]

    def clock() -> float:
        now[0] += tick
        return now[0]

    return clock


def test_repeated_reads_stay_in_what_was_read_first(tmp_path: Path, spy: Spy) -> None:
    (tmp_path / "shard").write_bytes(b"x" * (640 * PAGE))
    sizes = Sizes(least=PAGE, blocks=(4 * PAGE,))
    disk.measure(tmp_path / "shard", sizes, 1e-4, ticking(2.5e-5), lambda *_: None)
    first = next(number for number, one in enumerate(spy.seen[1:], 1) if one[1] == 0)
    again = [offset // PAGE for _, offset, _ in spy.seen[first:]]
    assert 1 < first < 160 and max(again) < 4 * first


def test_each_of_several_readers_takes_blocks_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, ...]] = []

    def read(
        self: object, first: int, span: int, block: int, limit: float, step: int = 1, repeat: bool = False
    ) -> tuple[int, float]:
        asked.append((first // PAGE, span // PAGE, block // PAGE, step, repeat))
        return 32 * PAGE, 1.0 + first // PAGE / 2

    monkeypatch.setattr(disk._Reader, "read", read)
    (tmp_path / "shard").write_bytes(b"x" * (64 * PAGE))
    sizes = Sizes(least=PAGE, blocks=(2 * PAGE,))
    found = disk.measure(tmp_path / "shard", sizes, 1.0, ticking(1.0), lambda *_: None)
    assert asked[0] == (0, 64, 2, 1, False)
    assert asked[1:2] == [(0, 32, 2, 1, True)]
    assert sorted(asked[2:]) == [(2 * reader, 32, 2, IN_FLIGHT, True) for reader in range(IN_FLIGHT)]
    longest = 1.0 + (IN_FLIGHT - 1)
    bandwidths = [32, 32, IN_FLIGHT * 32 / longest]
    assert [one.bandwidth / PAGE for one in found.reads] == bandwidths, "bytes of all, in the longest time"


def test_the_best_repeated_read_as_weights_are_read_counts() -> None:
    several = (Read(True, 4, IN_FLIGHT, 3.0), Read(True, 8, IN_FLIGHT, 2.0))
    reads = (Read(False, 8, 1, 9.0), Read(True, 8, 1, 7.0), *several)
    assert Disk("x", 1, True, reads, None).bandwidth == 3


def test_bytes_over_seconds(spy: Spy, tmp_path: Path) -> None:
    (tmp_path / "shard").write_bytes(b"x" * (16 * PAGE))
    found = measured_with(tmp_path / "shard")
    assert found.reads[0].bandwidth == pytest.approx(16 * PAGE / 9.0), "eight blocks, nine looks at the clock"


def measured_with(path: Path) -> Disk:
    sizes = Sizes(least=PAGE, blocks=(2 * PAGE,))
    return disk.measure(path, sizes, 10.0, ticking(1.0), lambda *_: None)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none", "--path: got '.*none'; allowed: a directory to write to, or a file to read"),
        ("small", "--path: got '.*small'; allowed: a directory, or a file of at least 65536 bytes"),
    ],
)
def test_what_cannot_be_measured_is_named(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "small").write_bytes(b"x")
    with pytest.raises(ConfigError, match=message):
        measured(tmp_path / name)


def test_a_full_disk_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="allowed: a disk with 2305843009213693952 bytes left"):
        measured(tmp_path, Sizes(file=1 << 62, least=1 << 60))
    assert list(tmp_path.iterdir()) == []


def test_writing_stops_when_its_time_is_over(tmp_path: Path) -> None:
    sizes = Sizes(file=8 * PAGE, least=2 * PAGE, blocks=(2 * PAGE,))
    shown: list[tuple[str, int, int]] = []
    disk.measure(tmp_path, sizes, 1.0, ticking(3.0), lambda *step: shown.append(step))
    writing = [step[1:] for step in shown if step[0].startswith("writing")]
    assert writing == [(0, 8 * PAGE), (2 * PAGE, 8 * PAGE), (8 * PAGE, 8 * PAGE)], (
        "12 seconds from the first look"
    )


def test_writing_that_takes_less_than_a_second_has_its_own_seconds(tmp_path: Path) -> None:
    sizes = Sizes(file=8 * PAGE, least=2 * PAGE, blocks=(2 * PAGE,))
    found = disk.measure(tmp_path, sizes, 1.0, ticking(0.01), lambda *_: None)
    assert found.write == pytest.approx(8 * PAGE / 0.04), "five looks at the clock"


def test_the_file_that_is_written_has_no_name(tmp_path: Path) -> None:
    """So a measurement that is killed leaves nothing behind."""
    seen: list[list[Path]] = []
    found = disk.measure(
        tmp_path, TINY, 0.002, time.perf_counter, lambda *_: seen.append(list(tmp_path.iterdir()))
    )
    assert found.write and seen and not any(seen)
