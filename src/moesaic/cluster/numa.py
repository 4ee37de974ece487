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
MPOL_DEFAULT, MPOL_PREFERRED, MPOL_INTERLEAVE = 0, 1, 3
"""Policies: memory of the node that touches it first; of one node while that has some; of all in turn."""
MASK_BITS = 1024
"""Nodes that a mask can name."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Node:
    """A NUMA node of this machine."""

    number: int
    cpus: tuple[int, ...]
    """The cores of the node that this process may use."""


def list_nodes(usable_cpus: Collection[int], root: Path = ROOT) -> tuple[Node, ...]:
    """The nodes with cores of `usable_cpus`, in order. Empty if the kernel lists none.

    A node that has memory only is left out.
    """
    nodes = []
    for folder in root.glob("node[0-9]*"):
        cpus = parse_list((folder / "cpulist").read_text(encoding="utf-8"))
        own_cpus = tuple(cpu for cpu in cpus if cpu in usable_cpus)
        if own_cpus:
            nodes.append(Node(int(folder.name.removeprefix("node")), own_cpus))
    return tuple(sorted(nodes, key=lambda node: node.number))


def list_bindable_nodes(binding: NumaBinding) -> tuple[Node, ...]:
    """The nodes that processes of this machine are bound to. Empty with --numa off."""
    if binding == "off" or not hasattr(os, "sched_getaffinity"):
        return ()
    return list_nodes(os.sched_getaffinity(0))


def parse_list(text: str) -> tuple[int, ...]:
    """The numbers of one of the kernel's lists.

    >>> parse_list("0-2,8,10-11")
    (0, 1, 2, 8, 10, 11)
    """
    parts = [part.split("-") for part in text.strip().split(",") if part]
    return tuple(number for part in parts for number in range(int(part[0]), int(part[-1]) + 1))


@contextmanager
def bind_to_nodes(nodes: Sequence[Node]) -> Generator[None]:
    """Processes started by this thread inside the context keep to these nodes.

    One node: they run on its cores and take its memory while it has some. Several: their memory is taken from
    all of them in turn. None: nothing changes. A system that refuses the policy is logged, and the memory is
    then that of the node that touches it first.
    """
    if not nodes:
        yield
        return
    former_cpus = os.sched_getaffinity(0)
    if len(nodes) == 1:
        os.sched_setaffinity(0, nodes[0].cpus)
    try:
        _set_policy(MPOL_PREFERRED if len(nodes) == 1 else MPOL_INTERLEAVE, [node.number for node in nodes])
        yield
    finally:
        _set_policy(MPOL_DEFAULT, ())
        os.sched_setaffinity(0, former_cpus)


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
    # The kernel reads one bit less than it is told (a quirk of set_mempolicy), hence the + 1.
    if libc.syscall(call, policy, mask if numbers else None, MASK_BITS + 1 if numbers else 0) != 0:
        reason = os.strerror(ctypes.get_errno())
        _log.warning("the memory of processes is not bound to NUMA nodes: %s", reason)
