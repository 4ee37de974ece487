"""What the collectives benchmark draws and computes, and that what it takes away changes no row."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from grouped import ablation, latency, routes, serve
from grouped.exchange import CASES, BatchOrder, Exchange, Variant
from grouped.processes import slowest

from moesaic.core.metrics import ExpertStats, GroupStats, WorkerStats
from moesaic.core.profile import Profile, Routes
from moesaic.core.tokens import IntArray
from moesaic.experts.collectives.group import Traffic
from moesaic.experts.collectives.one_shot import OneShotGroup
from moesaic.experts.collectives.packets import FloatArray, Packet, metadata_bytes
from moesaic.policy.placement import predict
from moesaic.policy.placement.solvers.tokens import labelled
from moesaic.runtime.group.experts import GroupCounts
from moesaic.runtime.group.forecast import ExpectedRanks
from moesaic.transport.peers import local_peers

# ---- routes


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("share", [0.0, 0.2, 0.6, 0.9, 1.0])
def test_the_local_share_is_what_was_asked_for(ranks: int, share: float) -> None:
    drawn = routes.draw(rows=25, top_k=8, num_experts=64, ranks=ranks, share=share, seed=1)
    assert drawn.local_share == share  # 200 pairs divide by all of these
    assert all(len(set(row)) == 8 for row in drawn.experts.tolist())
    assert (drawn.owners == drawn.experts * ranks // 64).all()
    assert drawn.remote_pairs == round(200 * (1 - share))


def test_of_few_pairs_the_nearest_share() -> None:
    assert routes.draw(1, 8, 64, 2, 0.2, seed=0).local_share == 0.25


def test_a_row_counts_each_other_rank_once() -> None:
    drawn = routes.Drawn(np.arange(8).reshape(2, 4), np.array([[1, 1, 0, 2], [2, 2, 2, 2]]), np.array([0, 2]))
    assert (drawn.remote_ranks, drawn.remote_pairs) == (2, 3)  # row 0: ranks 1 and 2, three pairs
    assert routes.all_to_all(drawn, hidden=10, ranks=4) == (2 + 3) * 40 / 4
    assert routes.all_to_all(drawn, hidden=10, ranks=4, once=False) == (3 + 3) * 40 / 4


def test_closed_forms_of_four_rows_on_two_ranks() -> None:
    forms = routes.closed_forms(4, 8, 2)
    assert forms == {"all-reduce": 128, "reduce-scatter": 64, "all-gather": 64}


def test_what_one_rank_sends_the_other_receives() -> None:
    drawn = routes.draw(30, 8, 64, 3 + 1, 0.4, seed=2)
    legs = [latency.legs(drawn, rank, 4) for rank in range(4)]
    for leg in (0, 1):
        sent = np.array([one[leg]["sent"] for one in legs])
        assert (sent == np.array([one[leg]["received"] for one in legs]).T).all()
        assert sent.sum() == (drawn.remote_ranks, drawn.remote_pairs)[leg]


# ---- an exchange on ranks that are threads

ROWS, HIDDEN, EXPERTS, TOP_K, LAYERS = 23, 6, 12, 4, 4


def on_ranks(size: int, task: Callable[[Any, OneShotGroup], Any]) -> list[Any]:
    found: list[Any] = [None] * size

    def one(peers: Any) -> None:
        try:
            found[peers.rank] = task(peers, OneShotGroup(peers))
        finally:
            peers.close()

    threads = [threading.Thread(target=one, args=(peers,)) for peers in local_peers(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def profile() -> Profile:
    rng = np.random.default_rng(0)
    experts = np.argsort(rng.random((ROWS, LAYERS, EXPERTS)), axis=2)[:, :, :TOP_K].astype(np.int16)
    made = Routes(
        tokens=np.arange(ROWS, dtype=np.int32),
        starts=np.array([0, ROWS]),
        prompts=np.array([ROWS], dtype=np.int32),
        topics=np.zeros(1, dtype=np.int16),
        experts=experts,
    )
    return Profile.from_routes("model", ROWS, EXPERTS, range(1, LAYERS + 1), made, topics=["all"])


def scaled(packet: Packet) -> FloatArray:
    """Expert e multiplies by e + 1."""
    row, expert = packet.pairs
    return packet.hidden[row] * (expert[:, None] + 1).astype(np.float32)


def merged(hidden: FloatArray, weights: FloatArray, pairs: FloatArray) -> FloatArray:
    return hidden + np.einsum("nk,nkh->nh", weights, pairs)


def exchanged(size: int, variant: Variant) -> tuple[list[list[FloatArray]], list[Traffic], list[int]]:
    """Rows after each layer, bytes of each rank, and the pairs that were local."""
    known = profile()
    owners = np.stack([np.random.default_rng(i).permutation(EXPERTS) % size for i in range(LAYERS)])
    tables = predict.build(known, labelled(known, owners.astype(np.int16)))

    def task(peers: Any, group: OneShotGroup) -> Any:
        forecast = ExpectedRanks(group, GroupCounts(), tables) if variant.shuffle else BatchOrder(group)
        one = Exchange(peers, group, variant, forecast, owners.astype(np.int64), scaled, merged)
        one.begin(known.routes.tokens.astype(np.int64))
        rows = [one.layer(i + 1, i, *of_layer(known, i), addend(group.rank)) for i in range(LAYERS)]
        group.announce(b"")
        return rows, group.traffic, one.local_pairs

    found = on_ranks(size, task)
    return [one[0] for one in found], [one[1] for one in found], [one[2] for one in found]


def of_layer(known: Profile, layer: int) -> tuple[IntArray, FloatArray]:
    weights = np.random.default_rng(layer).random((ROWS, TOP_K), dtype=np.float32)
    return known.routes.experts[:, layer].astype(np.int64), weights


def addend(rank: int) -> FloatArray:
    return np.random.default_rng(100 + rank).random((ROWS, HIDDEN), dtype=np.float32)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", [2, 3])
def test_every_variant_exchanges_the_same_rows(size: int, case: str) -> None:
    known = profile()
    total = np.sum([addend(rank) for rank in range(size)], axis=0)
    ranks, _, _ = exchanged(size, CASES[case])
    for layer in range(LAYERS):
        experts, weights = of_layer(known, layer)
        wanted = total * (1 + (weights * (experts + 1)).sum(axis=1, keepdims=True))
        for rows in ranks:
            np.testing.assert_allclose(rows[layer], wanted, rtol=1e-5)


def total_of(traffic: list[Traffic]) -> tuple[int, int]:
    return sum(one.payload for one in traffic), sum(one.metadata for one in traffic)


def test_one_taken_away_costs_what_it_saves() -> None:
    """Payload on three ranks."""
    found = {case: exchanged(3, variant) for case, variant in CASES.items()}
    payload = {case: total_of(traffic)[0] for case, (_, traffic, _) in found.items()}
    local = {case: sum(pairs) for case, (_, _, pairs) in found.items()}
    assert payload["no single packet"] == payload["all four"]
    half = LAYERS * 2 * ROWS * HIDDEN * 4
    remote = {case: LAYERS * ROWS * TOP_K - count for case, count in local.items()}
    for case in ("no de-duplication", "none of them"):
        assert payload[case] == 2 * half + 2 * remote[case] * HIDDEN * 4
    assert payload["all four"] < payload["no de-duplication"]
    assert local["all four"] > local["no shuffle"]
    assert payload["all four"] < payload["no shuffle"]


def test_metadata_of_a_round_before_is_as_long() -> None:
    variant = Variant(shuffle=False)
    apart = exchanged(2, replace(variant, one_packet=False))
    assert total_of(apart[1])[1] == total_of(exchanged(2, variant)[1])[1] >= metadata_bytes(1, TOP_K)


# ---- numbers


def test_a_call_takes_as_long_as_on_its_slowest_rank() -> None:
    assert slowest([[1, 5], [2, 3]]).tolist() == [2, 5]


def test_an_exchange_is_a_layer_of_a_step() -> None:
    counted = {"exchange": 10.0, "payload": 40.0, "metadata": 4.0, "local_pairs": 6, "pairs": 8}
    rank = {"times": {"all four": [0.004, 0.002, 0.008]}, "counted": {"all four": counted}}
    [row] = ablation.summary([rank, rank], rows=5, layers=2)
    assert (row["ms"], row["local_share"]) == (2.0, 0.75)
    assert (row["exchange_bytes_per_row"], row["payload_bytes_per_row"]) == (2.0, 8.0)


def test_bytes_of_a_token_are_those_between_two_moments() -> None:
    def stats(scale: int) -> WorkerStats:
        group = GroupStats(10 * scale, 20 * scale, 30 * scale, 40 * scale, 6 * scale, 8 * scale, 2 * scale)
        return WorkerStats(
            prefill_tokens=3 * scale, decode_tokens=2 * scale, experts=ExpertStats(group=group)
        )

    assert serve.moved(stats(1), stats(3)) == {
        "payload_bytes_per_token": 20.0,
        "all_to_all_bytes_per_token": 8.0,
        "metadata_bytes_per_token": 1.2,
        "local_share": 0.25,
    }


def test_prompts_are_profiled_or_served() -> None:
    prompts = [[number] for number in range(10)]
    profiled, served = serve.split(prompts, profiled=8, most=4)
    assert (len(profiled), len(served)) == (6, 4)
    assert sorted(profiled + served) == prompts
    with pytest.raises(SystemExit, match="11 or more"):
        serve.split(prompts, profiled=8, most=10)
