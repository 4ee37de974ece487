"""Policies for the experts in memory, on routes whose best is known."""

from __future__ import annotations

import argparse

import numpy as np
import pytest
from offloading import replay
from offloading.routes import Recording, Request, list_prompts


def recording(routes: list[int], prompt: int = 2) -> Recording:
    experts = np.array(routes, np.int16)[:, None, None]
    return Recording(4, (Request(prompt, np.arange(len(routes), dtype=np.int32), experts, experts),))


@pytest.mark.parametrize(("places", "hits"), [(1, 2 / 6), (2, 3 / 6), (4, 1.0)])
def test_the_best_policy_keeps_what_comes_first(places: int, hits: float) -> None:
    """After the prompt: 0 1 2 0 2 0, with 0 (and 1) in memory at first."""
    given = recording([3, 3, 0, 1, 2, 0, 2, 0])
    found = replay.replay(list(replay.merge(given.requests, 1)), given, places)
    assert found["hits"]["best"] >= hits
    assert all(found["hits"]["best"] >= rate for rate in found["hits"].values())


def test_nothing_wins_where_choices_are_even() -> None:
    arguments = argparse.Namespace(
        models=["even"], prompts=8, gen_len=60, clients=[1, 4], shares=[0.5], routes=None
    )
    for row in replay.measure(arguments):
        rates = dict(row["hits"])
        assert rates.pop("best") > 0.6
        assert all(abs(rate - 0.5) < 0.02 for rate in rates.values())


def test_clients_are_merged_by_step() -> None:
    requests = recording([3, 3, 0, 1]).requests * 3
    steps = list(replay.merge(requests, 2))
    assert [step.is_prompt for step in steps] == [True, False, False, True, False, False]
    assert [len(step.tokens) for step in steps] == [4, 2, 2, 2, 1, 1]


def test_prompts_differ() -> None:
    prompts = list_prompts(32)
    assert len(set(prompts)) == len(prompts) == 32
