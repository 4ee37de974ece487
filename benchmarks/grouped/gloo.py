"""The outside peer: gloo's collectives, through torch.distributed.

They are given less to do than ours. Memory of both sides is there and packed, the sizes of an all-to-all are
known to all, and nothing says which row is which; ours select rows, write what goes with them, and put the
answers in their places.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

from grouped.processes import Call

SECONDS = timedelta(seconds=60)


def join(folder: Path, rank: int, size: int) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)  # names that torch gives anew
    store = f"file://{folder}/gloo"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=SECONDS)


def operations(rows: int, hidden: int) -> dict[str, Call]:
    """Of rows [B, h], cut by numbers; B h is divisible by the ranks. Zeros: sums stay what they are."""
    size = distributed.get_world_size()
    whole, part = torch.zeros(rows * hidden), torch.zeros(rows * hidden // size)
    return {
        "all-reduce": lambda: distributed.all_reduce(whole),
        "reduce-scatter": lambda: distributed.reduce_scatter_tensor(part, whole),
        "all-gather": lambda: distributed.all_gather_into_tensor(whole, part),
    }


def all_to_all(hidden: int, there: Mapping[str, Sequence[int]], back: Mapping[str, Sequence[int]]) -> Call:
    """Two all_to_all_single. there, back: "sent" and "received" rows of this rank by the other rank."""
    legs = [
        (
            torch.empty(sum(leg["received"]), hidden),
            torch.ones(sum(leg["sent"]), hidden),
            list(leg["received"]),
            list(leg["sent"]),
        )
        for leg in (there, back)
    ]

    def once() -> None:
        for out, rows, received, sent in legs:
            distributed.all_to_all_single(out, rows, received, sent)

    return once


def leave() -> None:
    distributed.destroy_process_group()
