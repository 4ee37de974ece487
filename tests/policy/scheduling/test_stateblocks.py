"""Seats, pages and snapshots in worked examples: chunks of 64 positions, blocks of 16."""

from __future__ import annotations

import numpy as np
import pytest

from moesaic.core.errors import ConfigError
from moesaic.core.tokens import IntArray
from moesaic.policy.scheduling.stateblocks import SNAPSHOT_TOKENS, ZEROS, StateBlocks


def ints(count: int, first: int = 0) -> IntArray:
    return np.arange(first, first + count)


def pool(seats: int = 2, snapshots: int = 4, reuse: bool = True) -> StateBlocks:
    return StateBlocks(400, 16, reuse, seats, snapshots)


def run(states: StateBlocks, request: int, tokens: IntArray, start: int = 0) -> list[int]:
    """Steps until all tokens are computed. Returns where they end."""
    ends = []
    while start < len(tokens):
        start = states.cut(request, start, len(tokens))
        states.states(request)
        states.commit(request, tokens, start)
        ends.append(start)
    return ends


def test_a_prompt_is_cut_where_the_next_one_may_branch_off() -> None:
    states = pool()
    assert states.allocate(0, ints(220), 219) == 0
    assert states.states(0) == (ZEROS, 0, 1, 0)
    assert run(states, 0, ints(220)) == [192, 220]
    read, at, own, _ = states.states(0)
    assert at == 192 and read == 1 and own not in (ZEROS, 1), "page 1 is a snapshot now"
    states.commit(0, ints(220), 220)
    states.free(0)
    assert states.allocate(1, ints(250), 249) == 192
    assert states.states(1)[:2] == (1, 192)


def test_a_next_turn_may_write_the_opening_of_an_answer_otherwise() -> None:
    """The prompt ends two tokens behind a multiple of 64, and the next one has other tokens from 190 on."""
    states = pool()
    states.allocate(0, ints(195), 194)
    assert run(states, 0, ints(195)) == [128, 192, 195]
    states.free(0)
    assert states.allocate(1, np.concatenate([ints(190), ints(60, 1000)]), 249) == 128
    assert states.allocate(2, ints(250), 249) == 192


def test_a_prefix_without_a_snapshot_at_its_end_is_shortened_and_gets_one() -> None:
    states = pool()
    states.allocate(0, ints(410), 409)
    assert run(states, 0, ints(410)) == [384, 410]
    other = np.concatenate([ints(140), ints(100, 1000)])
    assert states.allocate(1, other, len(other) - 1) == 0, "128 tokens are known, but no state"
    assert run(states, 1, other) == [128, 192, 240]
    assert states.allocate(2, ints(8), 7) is None, "both seats are taken"
    states.free(1)
    assert states.allocate(3, other, len(other) - 1) == 192
    states.free(3)
    third = np.concatenate([ints(140), ints(50, 2000)])
    assert states.allocate(4, third, len(third) - 1) == 128


def test_long_prompts_leave_snapshots_on_their_way() -> None:
    states = pool(snapshots=8)
    states.allocate(0, ints(3000), 2999)
    assert run(states, 0, ints(3000)) == [SNAPSHOT_TOKENS, 2 * SNAPSHOT_TOKENS, 2944, 3000]
    assert states.state_stats().snapshots == 3


def test_the_least_recently_used_snapshot_gives_way_unless_it_is_read() -> None:
    states = pool(snapshots=1)
    states.allocate(0, ints(100), 99)
    run(states, 0, ints(100))
    states.allocate(1, ints(100, 500), 99)
    run(states, 1, ints(100, 500))
    assert states.state_stats().snapshots == 1, "request 0 reads the only one"
    states.free(1)
    assert states.allocate(2, ints(110, 500), 109) == 0
    states.free(2)
    states.free(0)
    states.allocate(3, ints(110, 500), 109)
    run(states, 3, ints(110, 500))
    states.free(3)
    assert states.allocate(4, ints(120, 500), 119) == 64
    states.free(4)
    assert states.allocate(5, ints(120), 119) == 0


def test_a_request_that_ends_leaves_its_last_state() -> None:
    states = pool()
    tokens = ints(300)
    states.allocate(0, tokens[:100], 99)
    run(states, 0, tokens[:100])
    assert states.extend(0, 300)
    run(states, 0, tokens, 100)
    states.free(0)
    assert states.allocate(1, np.concatenate([tokens, ints(9)]), 308) == 256


@pytest.mark.parametrize("how", ["in a step", "not valid"])
def test_a_state_that_may_be_torn_is_not_kept(how: str) -> None:
    states = pool()
    tokens = ints(300)
    states.allocate(0, tokens[:100], 99)
    run(states, 0, tokens[:100])
    states.extend(0, 300)
    states.commit(0, tokens, 200)
    if how == "in a step":
        states.states(0)
    states.free(0, valid=how != "not valid")
    assert states.allocate(1, tokens, 299) == (64 if how == "in a step" else 0)


def test_a_failed_step_goes_back_to_a_snapshot_or_to_the_start() -> None:
    states = pool()
    tokens = ints(300)
    states.allocate(0, tokens[:100], 99)
    run(states, 0, tokens[:100])
    states.states(0)
    assert states.rewind(0, 100) == 64 and states.states(0)[1] == 64
    states.extend(0, 300)
    states.commit(0, tokens, 140)
    states.states(0)
    assert states.rewind(0, 140) == 0 and states.states(0)[:2] == (ZEROS, 0)


def test_without_prefix_reuse_there_are_no_snapshots() -> None:
    states = pool(reuse=False)
    states.allocate(0, ints(2000), 1999)
    assert run(states, 0, ints(2000)) == [2000]
    states.free(0)
    stats = states.state_stats()
    assert (stats.pages, stats.pages_free, stats.snapshots) == (2, 2, 0)


def test_no_seat() -> None:
    with pytest.raises(ConfigError, match="seats: got 0; allowed: at least 1"):
        StateBlocks(4, 16, True, 0, 1)


@pytest.mark.parametrize(("tokens", "read", "at"), [(200, 1, 192), (192, 1, 192), (63, ZEROS, 0)])
def test_received_states_stand_at_the_last_multiple_in_its_own_page(tokens: int, read: int, at: int) -> None:
    states = pool()
    states.allocate(0, ints(tokens + 1), tokens)
    states.restore(0, tokens)
    assert states.states(0) == (read, at, 1, 0)


def test_received_states_become_a_snapshot_and_do_not_keep_that_of_a_shorter_prefix() -> None:
    states = pool(snapshots=1)
    states.allocate(0, ints(100), 99)
    run(states, 0, ints(100))
    states.free(0)
    assert states.allocate(1, ints(201), 200) == 64
    states.restore(1, 200)
    states.commit(1, ints(201), 201)
    assert states.state_stats().snapshots == 1, "the shorter one gave way, since nobody reads it"
    states.free(1)
    assert states.allocate(2, ints(250), 249) == 192
