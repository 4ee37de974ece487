"""Chooses the GPUs of each process of a host.

A process keeps its devices for as long as it is a member of the cluster, also over restarts. A new one takes
the devices that the fewest processes use, the first of equals. So processes take them in turn, and a process
that is added later takes the place of one that left.

Question: Which GPUs does a process get?
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

Devices = tuple[str, ...]
"""Names of GPUs, as in CUDA_VISIBLE_DEVICES."""


def choose(names: Sequence[str], devices_in_use: Iterable[Devices], count: int = 1) -> Devices:
    """The devices of a new process: `count` of `names`, or all of them if there are fewer.

    names: the devices of the host, in their order. devices_in_use: those of each other process.

    Example: of devices 0 to 3, where three processes have 0, 1 and 0, a new one gets 2, and a group of two
    ranks gets 2 and 3.
    """
    num_uses = Counter(device for devices in devices_in_use for device in devices)
    order = sorted(range(len(names)), key=lambda place: (num_uses[names[place]], place))
    return tuple(names[place] for place in sorted(order[:count]))


def count_sharing(own_devices: Devices, other_devices: Iterable[Devices]) -> int:
    """How many of the `other_devices` use one of the devices `own_devices`. Example: 0, 1 beside 1, 2 and
    3 -> 1."""
    return sum(bool(set(own_devices) & set(devices)) for devices in other_devices)
