"""Structured outputs in a cluster: under each schedule, and after the death of a worker."""

from __future__ import annotations

import os
import signal
from typing import Any, get_args

import pytest

from moesaic import SamplingParams
from moesaic.config import Schedule
from moesaic.core.reasoning import ReasoningBudget
from tests.cluster.test_identity import alone, workload
from tests.support import pairs
from tests.support.cluster_driver import cluster

FORMS: list[dict[str, Any] | None] = [
    {"regex": "([a-z]{4}[0-9]{4};){3}"},
    None,
    {"json": {"type": "array", "items": {"type": "integer", "maximum": 9999}, "minItems": 6, "maxItems": 9}},
    {"regex": "(ab|cd|ef){12,20}"},
]

BUDGET = ReasoningBudget(20, "<", ("</>",), (5, 6, 7, 5), starts_inside=True)
"""Of requests without a form."""


def constrained() -> tuple[list[list[int]], list[SamplingParams]]:
    prompts, _ = workload(8, 24)
    params = [
        SamplingParams(
            max_tokens=40,
            temperature=0.9 * (i % 2),
            seed=i,
            logprobs=0,
            structured_outputs=FORMS[i % 4],  # type: ignore[arg-type]
            reasoning=BUDGET if i % 4 == 1 else None,
        )
        for i in range(8)
    ]
    return prompts, params


@pytest.mark.parametrize("schedule", pairs.some(get_args(Schedule), ["lockstep", "async"]))
def test_a_killed_workers_requests_go_on(schedule: str) -> None:
    """The matcher of the worker that takes over begins behind the tokens that the dead one sent."""
    killed: list[int] = []
    with cluster(schedule=schedule, attention_workers=2, expert_servers=2) as served:

        def kill(tokens: int) -> None:
            if tokens >= 60 and not killed:
                killed.append(served.pid("attention worker 0"))
                os.kill(killed[0], signal.SIGKILL)

        served.submit(*constrained())
        found = served.finish(kill)
        assert found == alone(*constrained())
    assert all(found[i][0][20:24] == [5, 6, 7, 5] for i in (1, 5))
    assert killed
