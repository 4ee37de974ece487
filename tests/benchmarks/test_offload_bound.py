"""The least that a load reads from a disk, beside all ways of keeping experts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from offloading import bound
from offloading.routes import Request

EXPERTS = 4


def list_requests(routes: Sequence[Sequence[int]], prompt: int) -> tuple[Request, ...]:
    requests = []
    for route in routes:
        experts = np.array(route, np.int16)[:, None, None]
        requests.append(Request(prompt, np.arange(len(route), dtype=np.int32), experts, experts))
    return tuple(requests)


def search(steps: Sequence[set[int]], places: int) -> int:
    """The least reads by trying every set of experts that may be kept after each step."""
    costs = {frozenset(kept): 0 for kept in itertools.combinations(range(EXPERTS), places)}
    for chosen in steps:
        after: dict[frozenset[int], int] = {}
        for kept, cost in costs.items():
            for next_kept in itertools.combinations(sorted(kept | chosen), places):
                key, reads = frozenset(next_kept), cost + len(chosen - kept)
                after[key] = min(reads, after.get(key, reads))
        costs = after
    return min(costs.values())


@pytest.mark.parametrize("places", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(5))
def test_no_other_way_reads_less(places: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    requests = list_requests([rng.integers(0, EXPERTS, 9).tolist() for _ in range(4)], prompt=2)
    steps = list(bound.merge(requests, 2))
    sets = [set(step.experts.ravel().tolist()) for step in steps]
    least = search(sets, places)
    assert bound.count_least_reads(steps, EXPERTS, places) == least
    routes = bound.Routes(requests, EXPERTS, read_bytes=10.0)
    assert routes.least_bytes(2, places) == 10 * least
    assert routes.num_tokens == 4 * 8, "the last token of an answer is chosen and never computed"


def test_a_disk_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bound, "SECONDS", 0.01)
    file = tmp_path / "weights"
    file.write_bytes(bytes(16 << 20))
    assert bound.measure_disk(file) > 0
