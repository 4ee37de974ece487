"""Who gets a request, under each rule of `--dispatch`, also when workers die, come back and come new."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moesaic.cluster.dispatching import choose_dispatch
from moesaic.cluster.placing import read_placement
from moesaic.cluster.router import Router
from moesaic.config import ClusterConfig
from moesaic.core import messages
from moesaic.core.coclusters import Coclusters
from moesaic.core.errors import ConfigError
from moesaic.core.metrics import ExpertStats, WorkerStats
from moesaic.core.request import FinishReason, Request, SamplingParams
from moesaic.core.tables import Tables
from moesaic.policy.placement.dispatch import Affinity, Dispatch, RoundRobin, Rounds, least_loaded
from tests.cluster.test_router_requests import joined, submitted, token
from tests.policy.placement.test_dispatch import TWO, tables

RULES: dict[str, Callable[[], Dispatch]] = {
    "least-loaded": lambda: least_loaded,
    "round-robin": RoundRobin,
    "affinity": lambda: Affinity(TWO),
    "affinity-rounds": lambda: Rounds(TWO),
}
HERE, THERE = [1], [0]
"""Prompts for rank 0 and for rank 1, by the tables TWO."""


def router(rule: str) -> Router:
    made = Router()
    made.dispatch = RULES[rule]()
    return made


def asked(request_id: int, prompt: list[int]) -> messages.Submit:
    return messages.Submit([Request(request_id, prompt, SamplingParams(max_tokens=8), (), 0.0)])


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("least-loaded", [[0, 2], [1, 3]]),
        ("round-robin", [[0, 2], [1, 3]]),
        ("affinity", [[1, 3], [0, 2]]),
        ("affinity-rounds", [[1, 3], [0, 2]]),
    ],
)
def test_requests_go_where_the_rule_says(rule: str, expected: list[list[int]]) -> None:
    """Prompts for ranks 1, 0, 0, 1: in the second round the first of them has the choice."""
    subject = router(rule)
    ends = [joined(subject, 0), joined(subject, 1)]
    for number, prompt in enumerate([THERE, HERE, THERE, HERE]):
        subject.send(asked(number, prompt))
    assert [submitted(end) for end in ends] == expected


@pytest.mark.parametrize("rule", RULES)
def test_a_dead_workers_requests_go_on_and_its_successor_gets_new_ones(rule: str) -> None:
    subject = router(rule)
    ends = [joined(subject, 0), joined(subject, 1)]
    for number in range(4):
        subject.send(asked(number, [HERE, THERE][number % 2]))
    had, others = map(submitted, ends)
    assert len(had) == len(others) == 2
    subject.take(0, token(had[0], 1))
    subject.leave(0)
    assert sorted(submitted(ends[1])) == had
    ends[0] = joined(subject, 0)
    for number in range(4, 8):
        subject.send(asked(number, HERE))
    assert len(submitted(ends[0])) >= 2
    subject.leave(0)
    subject.leave(1)
    assert subject.moved_requests >= len(had) + 4
    last = joined(subject, 1)
    assert sorted(submitted(last)) == list(range(8)), "all waited, none got lost"


def test_a_moved_request_is_placed_by_its_tokens_too() -> None:
    """The prompt is rank 1's, and rank 2's where that is gone; with the generated token it is rank 0's."""
    subject = Router(Affinity(tables([[0, 2, 1], [3, 0, 0]])))
    ends = [joined(subject, worker) for worker in (0, 1, 2)]
    subject.send(asked(0, THERE))
    assert [submitted(end) for end in ends] == [[], [0], []]
    subject.take(1, token(0, 1))
    subject.leave(1)
    assert [submitted(ends[0]), submitted(ends[2])] == [[0], []]


def test_a_new_worker_has_no_rank_and_gets_what_is_left_of_a_round() -> None:
    subject = router("affinity-rounds")
    ends = [joined(subject, worker) for worker in (0, 1, 7)]
    for number, prompt in enumerate([HERE, THERE, HERE, HERE]):
        subject.send(asked(number, prompt))
    assert [submitted(end) for end in ends] == [[0, 3], [1], [2]]


def test_tokens_that_the_tables_do_not_know_count_nothing() -> None:
    """A checkpoint with the same experts may have a longer vocabulary."""
    subject = router("affinity")
    ends = [joined(subject, 0), joined(subject, 1)]
    subject.send(asked(0, [*THERE, 2, 4000]))
    assert [submitted(end) for end in ends] == [[], [0]]


def test_pairs_of_each_layer_are_added_up_also_of_those_that_are_gone() -> None:
    subject = router("round-robin")
    for worker in (0, 1, 2):
        joined(subject, worker)
    for worker, local in ((0, (1, 2)), (1, (10, 20))):
        counted = ExpertStats(layer_pairs=(50, 50), local_pairs=local)
        subject.take(worker, messages.Stats(WorkerStats(experts=counted)))
    subject.leave(0)
    found = subject.stats().experts
    assert (found.layer_pairs, found.local_pairs) == ((100, 100), (11, 22))


# ---- what --dispatch comes to


def solved(folder: Path, name: str = "t.npz", rank: int = 0) -> str:
    """A placement file: expert 0 on rank 0, expert 1 on rank 1; its tables have expert 0 on `rank`."""
    labels = np.zeros((1, 2), dtype=np.int16)
    experts = np.array([[0, 1]], dtype=np.int16)
    clusters = Coclusters(2, experts, labels, np.zeros((1, 2), dtype=np.float32))
    (folder / "p.json").write_text(clusters.placement((0,), "toy", name).to_json())
    made = Tables(**vars(TWO) | {"experts": np.array([[rank, 1]], dtype=np.int16)})
    made.save(folder / "t.npz")
    return str(folder / "p.json")


RANKS: dict[str, Any] = {"data_parallel_size": 2, "enable_expert_parallel": True}
APART: dict[str, Any] = {"attention_workers": 2, "expert_servers": 2}


def rule_of(cluster: ClusterConfig) -> tuple[str, Any]:
    """As the supervisor finds it."""
    resolved = cluster.resolve()
    return choose_dispatch(resolved, read_placement(resolved))


@pytest.mark.parametrize(
    ("shape", "dispatch", "name"),
    [
        (RANKS, None, "affinity"),
        (RANKS, "affinity", "affinity"),
        (RANKS, "least-loaded", "least-loaded"),
        (RANKS, "round-robin", "round-robin"),
        (APART, None, "least-loaded"),
        (APART, "affinity", "affinity"),
        (APART, "round-robin", "round-robin"),
    ],
)
def test_the_rule_that_is_chosen(shape: dict[str, Any], dispatch: Any, name: str, tmp_path: Path) -> None:
    found, rule = rule_of(ClusterConfig(placement=solved(tmp_path), dispatch=dispatch, **shape))
    assert found == name
    kinds = {"affinity": Affinity, "round-robin": RoundRobin}
    assert rule is least_loaded if name == "least-loaded" else isinstance(rule, kinds[name])


def test_nothing_asked_for_and_no_tables(tmp_path: Path) -> None:
    for placement in (None, solved(tmp_path, name="")):
        assert rule_of(ClusterConfig(placement=placement, **RANKS)) == ("least-loaded", least_loaded)
    assert rule_of(ClusterConfig(attention_workers=2))[0] == "least-loaded"


def test_affinity_needs_tables_that_fit(tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    for settings in (
        {"placement": None, **RANKS},
        {"placement": solved(tmp_path / "bare", name=""), **RANKS},
        {"attention_workers": 2},
        {"attention_workers": 2, "tensor_parallel_size": 2, "placement": solved(tmp_path)},
    ):
        with pytest.raises(
            ConfigError, match="--dispatch: got 'affinity'; allowed: least-loaded, round-robin"
        ):
            rule_of(ClusterConfig(dispatch="affinity", **settings))
    with pytest.raises(ConfigError, match=r"t.npz: rank of expert 0 in layer 0: got 1"):
        rule_of(ClusterConfig(placement=solved(tmp_path, rank=1), **RANKS))
    with pytest.raises(ConfigError, match=r"gone.npz: No such file"):
        rule_of(ClusterConfig(placement=solved(tmp_path, name="gone.npz"), **RANKS))


def test_dispatch_is_for_several_workers() -> None:
    with pytest.raises(ConfigError, match="--attention-workers: got 1; allowed: at least 2 with --dispatch"):
        ClusterConfig(dispatch="round-robin")
    with pytest.raises(
        ConfigError, match="--dispatch: got 'random'; allowed: affinity, affinity-rounds, least-"
    ):
        ClusterConfig(attention_workers=2, dispatch="random")  # type: ignore[arg-type]


def test_a_finished_request_is_not_dispatched_again() -> None:
    subject = router("affinity")
    ends = [joined(subject, 0), joined(subject, 1)]
    subject.send(asked(0, HERE))
    subject.take(0, token(0, 5, FinishReason.STOP))
    subject.leave(0)
    assert submitted(ends[1]) == []
