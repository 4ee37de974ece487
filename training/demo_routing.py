"""How differently the domains load the experts."""

from __future__ import annotations

import math
from itertools import combinations

import torch
from torch import Tensor


def js_distance(first: Tensor, second: Tensor) -> float:
    """The Jensen-Shannon distance, the root of the divergence in bits."""
    p = first.double() / first.sum()
    q = second.double() / second.sum()
    middle = (p + q) / 2
    divergence = 0.0
    for one in (p, q):
        kept = one > 0
        divergence += 0.5 * float((one[kept] * (one[kept] / middle[kept]).log2()).sum())
    return math.sqrt(max(divergence, 0.0))


def distances(loads: dict[str, Tensor]) -> dict[str, list[float]]:
    """Per pair of domains, the distance in each layer of [layers, experts] loads."""
    return {
        f"{one}/{other}": [js_distance(a, b) for a, b in zip(loads[one], loads[other], strict=True)]
        for one, other in combinations(loads, 2)
    }


def mean_distance(loads: dict[str, Tensor]) -> float:
    """The distance averaged over the layers and the pairs."""
    values = [value for row in distances(loads).values() for value in row]
    return float(torch.tensor(values).mean())


def idle_experts(loads: dict[str, Tensor], floor: float = 0.1) -> int:
    """How many experts get less than `floor` of an even share of all picks."""
    total = torch.stack([load / load.sum(dim=-1, keepdim=True) for load in loads.values()])
    shares = total.mean(dim=0)
    return int((shares < floor / shares.shape[-1]).sum())
