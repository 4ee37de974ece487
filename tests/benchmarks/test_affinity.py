"""What the affinity benchmark computes, and which prompts it takes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from disaggregated import affinity
from rich.console import Console

from moesaic.core.errors import ConfigError
from moesaic.core.metrics import ExpertStats, WorkerStats
from moesaic.core.placement import Placement
from moesaic.core.profile import Profile, Routes
from moesaic.core.tables import Tables


def worker(
    prefill: int, decode: int, pairs: tuple[int, ...], local: tuple[int, ...], sent: int = 0
) -> WorkerStats:
    experts = ExpertStats(layer_pairs=pairs, local_pairs=local, remote_bytes=sent)
    return WorkerStats(prefill_tokens=prefill, decode_tokens=decode, experts=experts)


def test_what_crossed_worked_example() -> None:
    """10 rows and 80 pairs, 60 of them local, 320 bytes counted."""
    before, after = worker(100, 50, (40, 40), (10, 20), 80), worker(104, 56, (80, 80), (30, 60), 400)
    found = affinity.crossed(before, after)
    assert found["local_activation_rate"] == 0.75
    assert (found["remote_pairs_per_token"], found["remote_bytes_per_token"], found["rows"]) == (2, 32, 10)


def test_counters_may_begin_empty() -> None:
    found = affinity.crossed(WorkerStats(), worker(1, 1, (2, 2), (0, 1)))
    assert (found["local_activation_rate"], found["remote_pairs_per_token"]) == (0.25, 1.5)
    assert affinity.crossed(WorkerStats(), WorkerStats())["local_activation_rate"] == 0


def routes(*requests: list[int]) -> Routes:
    """The last token of each was generated; experts 0 and 1 for even ids, 2 and 3 for odd ones."""
    tokens = np.array([token for request in requests for token in request], dtype=np.int32)
    lengths = np.array([len(request) for request in requests])
    return Routes(
        tokens,
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        (lengths - 1).astype(np.int32),
        np.full(len(requests), -1, dtype=np.int16),
        np.where(tokens[:, None, None] % 2, [[2, 3]], [[0, 1]]).astype(np.int16),
    )


def test_profiled_prompts_are_left_out_and_others_come_once() -> None:
    prompts = [[5, 6], [5, 7], [5, 7], [9], [1, 2], []]
    # 5 6 and 9 are prompts there; of 1 2 the 2 was generated
    assert affinity.unknown(prompts, routes([5, 6, 7, 8], [9, 3], [1, 2]), 2) == [[5, 7], [1, 2]]


def test_prompts_are_mixed_evenly_and_by_seed() -> None:
    domains = {"a": [[1], [2], [3]], "b": [[11], [12], [13]]}
    found = affinity.mixed(domains, 5, 0)
    assert sorted(token > 10 for [token] in found) == [False] * 3 + [True] * 2
    assert len({token for [token] in found}) == 5
    assert found == affinity.mixed(domains, 5, 0)
    orders = [[token > 10 for [token] in affinity.mixed(domains, 6, seed)] for seed in range(5)]
    assert any(order != sorted(order) for order in orders)
    assert len({tuple(map(tuple, affinity.mixed(domains, 6, seed))) for seed in range(5)}) > 1
    with pytest.raises(ConfigError, match="prompts of a"):
        affinity.mixed(domains, 7, 0)


def test_both_placements_come_with_their_tables(tmp_path: Path) -> None:
    profile = Profile.from_routes("m", 10, 4, [3], routes([2, 4, 6, 8], [1, 3, 5, 7]))
    for solver in ("vanilla", "kmeans"):
        file = affinity.placed(profile, solver, tmp_path)
        placement = Placement.read(str(file), affinity.RANKS)
        tables = Tables.load(tmp_path / placement.tables)
        tables.check(placement, "tables")
        even, odd = tables.request_scores([2, 4]), tables.request_scores([1, 3])
        assert even.argmax() != odd.argmax()


def test_the_table_compares_with_the_first_row(tmp_path: Path) -> None:
    numbers = {
        "local_activation_rate": 0.5,
        "remote_pairs_per_token": 12.0,
        "remote_bytes_per_token": 24_576.0,
        "server_mean_over_max": 0.9,
        "prefill_tokens_per_s": 1.0,
        "decode_tokens_per_s": 2.0,
    }
    rows = [
        {"placement": "vanilla", "dispatch": "round-robin", "tokens_per_s": 10.0, **numbers},
        {"placement": "ours", "dispatch": "affinity", "tokens_per_s": 15.0, **numbers},
    ]
    with (tmp_path / "shown").open("w+") as file:
        found = {"rows": rows, "prompts": {"maths": 7}, "concurrency": 4, "rounds": 1}
        affinity.show(found, Console(file=file, width=140))
        file.seek(0)
        text = file.read()
    assert all(part in text for part in ("maths (7)", "50.0%", "24,576", "1.00x", "1.50x"))
