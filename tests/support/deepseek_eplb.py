"""DeepSeek EPLB: which experts get redundant copies and which GPU holds which copy.

Its three steps, for every layer alone (github.com/deepseek-ai/EPLB):

 1. Groups of experts are packed into nodes, so that a group-limited gate's experts share a node.
 2. Inside a node each further slot goes to the expert with the largest load per copy.
 3. The copies are packed into the node's GPUs by their load per copy.

*Packing* takes items by load, heaviest first; each goes to the lightest pack that still has room, and all
packs get equally many. Where groups don't divide by nodes there is one group and one node: the global form.

EPLB minimises no moves, needs GPUs of equal size, may put two copies of one expert on one GPU, and leaves
cold experts with a single copy. It is the baseline; `policy.placement.balance.place` is what moesaic serves
with.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moesaic.core.errors import ConfigError
from moesaic.core.tokens import IntArray

FloatArray = npt.NDArray[np.float64]


class Replication(NamedTuple):
    """Experts over R physical slots; slot p belongs to GPU p // (R / gpus)."""

    phys_to_log: IntArray
    """[L, R] the expert in each slot."""
    log_to_phys: IntArray
    """[L, E, most] the slots of each expert, in order of their making, -1 behind the last."""
    copies: IntArray
    """[L, E] copies of each expert."""


def eplb(load: FloatArray, slots: int, groups: int, nodes: int, gpus: int) -> Replication:
    """Replicate and pack by load [L, E], tokens of each expert.

    Raises ConfigError where slots don't divide by gpus, gpus by nodes or experts by groups, and where experts
    outnumber slots.

    Example: load [[90, 10]], 4 slots, 1 group, 1 node, 2 GPUs: expert 0 gets three copies of load 30, and
    the GPUs hold experts 0, 0 and 0, 1: loads 60 and 40.
    """
    layers, experts = load.shape
    if groups > 0 and nodes > 0 and groups % nodes:
        groups = nodes = 1
    _check(experts, slots, groups, nodes, gpus)
    by_node = _experts_by_node(load, groups, nodes)
    node_load = np.take_along_axis(load, by_node, axis=1).reshape(layers * nodes, experts // nodes)
    made, rank, made_count = _replicate(node_load, slots // nodes)
    each = np.take_along_axis(node_load / made_count, made, axis=1)
    gpu, seat = _pack(each, gpus // nodes)
    order = np.argsort(gpu * (slots // gpus) + seat, axis=1)
    first = np.tile(np.arange(nodes) * (experts // nodes), layers)[:, None]
    local = (np.take_along_axis(made, order, axis=1) + first).reshape(layers, slots)
    ranks = np.take_along_axis(rank, order, axis=1).reshape(layers, slots)
    phys_to_log = np.take_along_axis(by_node, local, axis=1)
    count = np.empty((layers, experts), dtype=np.int64)
    np.put_along_axis(count, by_node, made_count.reshape(layers, experts), axis=1)
    log_to_phys = np.full((layers, experts, int(count.max())), -1, dtype=np.int64)
    log_to_phys[np.arange(layers)[:, None], phys_to_log, ranks] = np.arange(slots)
    return Replication(phys_to_log, log_to_phys, count)


def _check(experts: int, slots: int, groups: int, nodes: int, gpus: int) -> None:
    for name, value in (("groups", groups), ("nodes", nodes), ("gpus", gpus)):
        if value < 1:
            raise ConfigError.field(name, value, "at least 1")
    if slots < experts or slots % gpus:
        raise ConfigError.field("slots", slots, f"a multiple of {gpus} GPUs, {experts} experts or more")
    if gpus % nodes:
        raise ConfigError.field("gpus", gpus, f"a multiple of {nodes} nodes")
    if experts % groups:
        raise ConfigError.field("groups", groups, f"a divisor of {experts} experts")


def _experts_by_node(load: FloatArray, groups: int, nodes: int) -> IntArray:
    """[L, E] the experts of node 0, then those of node 1, ...: step 1."""
    layers, experts = load.shape
    size = experts // groups
    node, seat = _pack(load.reshape(layers, groups, size).sum(axis=2), nodes)
    order = np.argsort(node * (groups // nodes) + seat, axis=1)
    by_node: IntArray = (order[:, :, None] * size + np.arange(size)).reshape(layers, experts)
    return by_node


def _pack(load: FloatArray, packs: int) -> tuple[IntArray, IntArray]:
    """Row after row, load [r, n] -> the pack [r, n] of each item and its seat there, from 0.

    Ties go to the first item and to the first pack. One item a pack: item i is in pack i.

    Example: load [[5, 1, 3, 2]], 2 packs -> packs [[0, 0, 1, 1]], seats [[0, 1, 0, 1]].
    """
    rows, items = load.shape
    room = items // packs
    pack = np.tile(np.arange(items), (rows, 1))
    seat = np.zeros_like(pack)
    if room == 1:
        return pack, seat
    row = np.arange(rows)
    total, filled = np.zeros((rows, packs)), np.zeros((rows, packs), dtype=np.int64)
    for item in np.argsort(-load, axis=1, kind="stable").T:
        chosen = np.where(filled < room, total, np.inf).argmin(axis=1)
        pack[row, item], seat[row, item] = chosen, filled[row, chosen]
        total[row, chosen] += load[row, item]
        filled[row, chosen] += 1
    return pack, seat


def _replicate(load: FloatArray, slots: int) -> tuple[IntArray, IntArray, IntArray]:
    """Step 2: load [r, n] -> expert [r, slots] of each slot, which copy of it that is, copies [r, n] of each.

    Example: load [[9, 4]], 4 slots -> experts [[0, 1, 0, 0]], copies [[0, 0, 1, 2]], counts [[3, 1]]:
    9/1 is above 4/1, then 9/2 above 4/1.
    """
    rows, experts = load.shape
    row = np.arange(rows)
    expert = np.tile(np.arange(slots), (rows, 1))
    rank = np.zeros_like(expert)
    count = np.ones((rows, experts), dtype=np.int64)
    for slot in range(experts, slots):
        expert[:, slot] = chosen = (load / count).argmax(axis=1)
        rank[:, slot] = count[row, chosen]
        count[row, chosen] += 1
    return expert, rank, count
