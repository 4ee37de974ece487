"""The NUMA nodes of this machine, and processes that keep to one of them.

A machine with several sockets reads the memory of its own socket faster. Linux lists the nodes below
/sys/devices/system/node. A child process inherits the cores and the memory policy of the thread that starts
it (set_mempolicy(2)).

Question: Which cores does a process get, and which NUMA node?
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from moesaic.config.values import NumaBinding

ROOT = Path("/sys/devices/system/node")
SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
"""Number of the system call, by machine."""
DEFAULT, PREFERRED, INTERLEAVE = 0, 1, 3
"""Policies: memory of the node that touches it first; of one node while that has some; of all in turn."""
MASK_BITS = 1024
"""Nodes that a mask can name."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Node:
    """One NUMA node."""

    number: int
    cpus: tuple[int, ...]
    """Its cores that this process may use."""


def nodes(allowed: Collection[int], root: Path = ROOT) -> tuple[Node, ...]:
    """The nodes with cores of `allowed`, in order. Empty if the kernel lists none.

    A node that has memory only is left out.
    """
    found = []
    for folder in root.glob("node[0-9]*"):
        cpus = parse_list((folder / "cpulist").read_text(encoding="utf-8"))
        mine = tuple(cpu for cpu in cpus if cpu in allowed)
        if mine:
            found.append(Node(int(folder.name.removeprefix("node")), mine))
    return tuple(sorted(found, key=lambda node: node.number))


def here(binding: NumaBinding) -> tuple[Node, ...]:
    """The nodes that processes of this machine are bound to. Empty with --numa off."""
    if binding == "off" or not hasattr(os, "sched_getaffinity"):
        return ()
    return nodes(os.sched_getaffinity(0))


def parse_list(text: str) -> tuple[int, ...]:
    """The numbers of one of the kernel's lists.

    >>> parse_list("0-2,8,10-11")
    (0, 1, 2, 8, 10, 11)
    """
    parts = [part.split("-") for part in text.strip().split(",") if part]
    return tuple(number for part in parts for number in range(int(part[0]), int(part[-1]) + 1))


@contextmanager
def on(chosen: Sequence[Node]) -> Generator[None]:
    """Processes started by this thread inside the context keep to these nodes.

    One node: they run on its cores and take its memory while it has some. Several: their memory is taken from
    all of them in turn. None: nothing changes. A system that refuses the policy is logged, and the memory is
    then that of the node that touches it first.
    """
    if not chosen:
        yield
        return
    before = os.sched_getaffinity(0)
    if len(chosen) == 1:
        os.sched_setaffinity(0, chosen[0].cpus)
    try:
        _set_policy(PREFERRED if len(chosen) == 1 else INTERLEAVE, [node.number for node in chosen])
        yield
    finally:
        _set_policy(DEFAULT, ())
        os.sched_setaffinity(0, before)


def _set_policy(policy: int, numbers: Collection[int]) -> None:
    """Set the memory policy of this thread."""
    call = SET_MEMPOLICY.get(platform.machine())
    if call is None:
        _log.warning(
            "the memory of processes is not bound to NUMA nodes: not known on %s", platform.machine()
        )
        return
    mask = (ctypes.c_ulong * (MASK_BITS // 64))()
    for number in numbers:
        mask[number // 64] |= 1 << number % 64
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(call, policy, mask if numbers else None, MASK_BITS + 1 if numbers else 0) != 0:
        reason = os.strerror(ctypes.get_errno())
        _log.warning("the memory of processes is not bound to NUMA nodes: %s", reason)
