"""The processes of a group. Other tests start them; see tests/test_llm_offload_group.py."""

from __future__ import annotations

import pytest

from moesaic.runtime.group.launcher import EndedRank


@pytest.mark.parametrize(
    ("code", "reason", "followed"), [(0, "", True), (-9, "", False), (0, "no memory", False), (1, "x", False)]
)
def test_a_rank_that_ended_well_and_silently_followed_the_group(
    code: int, reason: str, followed: bool
) -> None:
    assert EndedRank(1, 7, code, reason).ended_with_group is followed
