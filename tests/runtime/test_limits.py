"""Limits of control groups: the bound is the least limit of every group above this process, of each kind."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from moesaic.runtime import limits, machine
from moesaic.runtime.limits import CGROUPS, OWN_GROUPS, Limit, cpu_quota, memory_limit, tightest_memory_limit

GIB = 1 << 30
NONE_IN_V1 = 9223372036854771712


@dataclass(frozen=True)
class Level:
    """What one group of a tree limits. None: nothing."""

    max_bytes: int | None = None
    high_bytes: int | None = None
    used_bytes: int = 0
    file_bytes: int = 0
    cores: float | None = None


@dataclass(frozen=True)
class Tree:
    """A fake /sys/fs/cgroup and /proc/self/cgroup."""

    cgroups: Path
    own_groups: Path

    @property
    def paths(self) -> tuple[Path, Path]:
        return self.cgroups, self.own_groups


def write_new(folder: Path, level: Level) -> None:
    """A group of version 2. Its root has no such files on a real machine, but that of a container does."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, amount in (("memory.max", level.max_bytes), ("memory.high", level.high_bytes)):
        (folder / name).write_text(f"{'max' if amount is None else amount}\n")
    (folder / "memory.current").write_text(f"{level.used_bytes}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {level.file_bytes}\nactive_file 0\n")
    quota = "max" if level.cores is None else round(level.cores * 100_000)
    (folder / "cpu.max").write_text(f"{quota} 100000\n")


def write_old(memory: Path, cpu: Path, level: Level) -> None:
    """A group of version 1, whose controllers have trees of their own."""
    memory.mkdir(parents=True, exist_ok=True)
    cpu.mkdir(parents=True, exist_ok=True)
    max_bytes = NONE_IN_V1 if level.max_bytes is None else level.max_bytes
    (memory / "memory.limit_in_bytes").write_text(f"{max_bytes}\n")
    (memory / "memory.usage_in_bytes").write_text(f"{level.used_bytes}\n")
    stat = f"inactive_file 0\ntotal_inactive_file {level.file_bytes}\ntotal_active_file 0\n"
    (memory / "memory.stat").write_text(stat)
    quota = -1 if level.cores is None else round(level.cores * 50_000)
    (cpu / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (cpu / "cpu.cfs_period_us").write_text("50000\n")


def make_tree(root: Path, levels: Sequence[Level], kind: str, name: str | None = None) -> Tree:
    """A tree in which this process is in the last group, and each group is in the one before.

    kind: new, unified (version 2 beside version 1), old, or joint (cpu,cpuacct). name: of the last group in
    /proc/self/cgroup; None: as it is in the tree.
    """
    cgroups, own_groups = root / "cgroup", root / "own"
    cgroups.mkdir()
    path = Path(*(f"g{depth}" for depth in range(1, len(levels))))
    cpu = "cpu,cpuacct" if kind == "joint" else "cpu"
    for depth, level in enumerate(levels):
        part = Path(*path.parts[:depth])
        if kind in ("new", "unified"):
            write_new(cgroups / ("unified" if kind == "unified" else "") / part, level)
        else:
            write_old(cgroups / "memory" / part, cgroups / cpu / part, level)
    name = "/" + "/".join(path.parts) if name is None else name
    if kind in ("new", "unified"):
        own_groups.write_text(f"1:name=systemd:/\n0::{name}\n")
    else:
        own_groups.write_text(f"4:memory:{name}\n3:{cpu}:{name}\n1:name=systemd:/x\n0::/\n")
    return Tree(cgroups, own_groups)


AMOUNTS = st.none() | st.integers(1, 64).map(lambda number: number * GIB)
LEVELS = st.lists(
    st.builds(
        Level,
        AMOUNTS,
        AMOUNTS,
        st.integers(0, 80 * GIB),
        st.integers(0, GIB),
        st.none() | st.sampled_from([0.5, 1, 2.5, 8]),
    ),
    min_size=1,
    max_size=4,
)


@given(levels=LEVELS, kind=st.sampled_from(["new", "unified", "old", "joint"]))
@settings(max_examples=60, deadline=None)
def test_the_bound_is_the_least_of_all_groups_and_kinds(levels: list[Level], kind: str) -> None:
    """The law."""
    is_new = kind in ("new", "unified")
    with TemporaryDirectory() as folder:
        tree = make_tree(Path(folder), levels, kind)
        found, left, quota = (look(*tree.paths) for look in (memory_limit, tightest_memory_limit, cpu_quota))
    amounts = [
        (amount, min(amount, max(0, amount - level.used_bytes + level.file_bytes)))
        for level in levels
        for amount in ((level.max_bytes, level.high_bytes) if is_new else (level.max_bytes,))
        if amount is not None
    ]
    assert (found is None) == (left is None) == (not amounts)
    if found is not None and left is not None:
        assert found.amount == min(amount for amount, _ in amounts)
        assert left.left == min(number for _, number in amounts)
        assert found.source.startswith(("memory.max", "memory.high") if is_new else "memory.limit_in_bytes")
    cores = [level.cores for level in levels if level.cores is not None]
    assert (None if quota is None else quota.amount) == min(cores, default=None)


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("/docker/4f2a", "/"),  # version 1 without a namespace: the container sees its group as the root
        ("/docker/4f2a/g1", "/g1"),
        ("/../../g1", "/g1"),  # a namespace whose root is another group
        ("/", "/"),
    ],
)
@pytest.mark.parametrize("kind", ["new", "old"])
def test_a_container_finds_its_groups_by_the_end_of_their_name(
    name: str, group: str, kind: str, tmp_path: Path
) -> None:
    levels = [Level(max_bytes=4 * GIB), Level(max_bytes=2 * GIB)]
    limit = memory_limit(*make_tree(tmp_path, levels, kind, name).paths)
    assert limit is not None and limit.source.endswith(f" of the control group {group}")
    assert limit.amount == (2 if group == "/g1" else 4) * GIB


@pytest.mark.parametrize("file", ["memory.max", "cpu.max", "memory.current", "memory.stat"])
def test_a_file_that_cannot_be_read_limits_nothing(file: str, tmp_path: Path) -> None:
    tree = make_tree(tmp_path, [Level(GIB, used_bytes=5, cores=1.0)], "new")
    (tree.cgroups / file).unlink()
    limit, quota = memory_limit(*tree.paths), cpu_quota(*tree.paths)
    assert (limit is None, quota is None) == (file == "memory.max", file == "cpu.max")


def test_no_groups_limit_nothing(tmp_path: Path) -> None:
    nowhere = tmp_path / "none"
    assert memory_limit(nowhere, nowhere) is None and cpu_quota(nowhere, nowhere) is None


def test_the_address_space_of_a_process_is_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = make_tree(tmp_path, [Level(max_bytes=GIB)], "new")
    for amount, source in (
        (GIB // 2, "RLIMIT_AS (ulimit -v)"),
        (2 * GIB, "memory.max of the control group /"),
    ):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, amount=amount: (amount, amount))
        limit = memory_limit(*tree.paths)
        assert limit is not None and limit.source == source


@pytest.mark.parametrize(("quota", "threads"), [(None, 4), (0.5, 1), (1.9, 1), (2.0, 2), (3.5, 3), (64.0, 4)])
def test_threads_keep_to_the_time_that_they_get(
    quota: float | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "allowed_cpus", lambda: [0, 1, 2, 3])
    monkeypatch.setattr(machine, "cpu_quota", lambda: None if quota is None else Limit(quota, "cpu.max"))
    assert machine.cores() == threads


def test_memory_keeps_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = Limit(64 << 20, "memory.max of the control group /a", 16 << 20)
    monkeypatch.setattr(machine, "memory_limit", lambda: limit)
    monkeypatch.setattr(machine, "tightest_memory_limit", lambda: limit)
    assert machine.available_memory() == 16 << 20
    assert machine.total_memory() == 64 << 20
    assert machine.describe_total_memory() == "memory.max of the control group /a"
    for other in (None, Limit(1 << 59, "memory.max of the control group /")):
        monkeypatch.setattr(machine, "memory_limit", lambda other=other: other)
        assert 64 << 20 < machine.total_memory() < 1 << 59
        assert machine.describe_total_memory() == "the memory of this machine"


def test_oom_kills_are_counted_where_the_kernel_counts_them(tmp_path: Path) -> None:
    new = make_tree(tmp_path, [Level(), Level()], "new")
    (new.cgroups / "memory.events").write_text("oom 9\noom_kill 9\n")
    (new.cgroups / "g1" / "memory.events").write_text("low 0\noom 3\noom_kill 2\noom_group_kill 0\n")
    assert limits.count_oom_kills(*new.paths) == 2
    (tmp_path / "b").mkdir()
    old = make_tree(tmp_path / "b", [Level()], "old")
    (old.cgroups / "memory" / "memory.oom_control").write_text(
        "oom_kill_disable 0\nunder_oom 0\noom_kill 7\n"
    )
    assert limits.count_oom_kills(*old.paths) == 7


def test_the_real_groups_of_this_process_can_be_read() -> None:
    for look in (memory_limit, tightest_memory_limit, cpu_quota):
        limit = look(CGROUPS, OWN_GROUPS)
        assert limit is None or (limit.amount > 0 and limit.source)
