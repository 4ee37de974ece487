from __future__ import annotations

import numpy as np
import pytest

from moesaic.core.errors import ConfigError
from moesaic.core.profile import NO_TOPIC, Profile, Routes
from moesaic.policy.placement.held_out import measure_placement, split, unseen
from moesaic.policy.placement.redundancy import place
from moesaic.policy.placement.solvers import SOLVERS


def profile(kinds: list[int], length: int = 4) -> Profile:
    """Requests of tokens 2 * kind and 2 * kind + 1, which choose the experts with the same numbers."""
    tokens = np.repeat(kinds, length) * 2 + np.tile([0, 1], len(kinds) * length // 2)
    routes = Routes(
        tokens.astype(np.int32),
        np.arange(len(kinds) + 1, dtype=np.int64) * length,
        np.full(len(kinds), length, dtype=np.int64),
        np.full(len(kinds), NO_TOPIC, dtype=np.int16),
        tokens.astype(np.int16)[:, None, None],
    )
    return Profile.from_routes("moe", 8, 8, (0,), routes)


def test_requests_are_on_one_side_each_in_random_order() -> None:
    made = profile([0] * 20 + [1] * 20)
    learned, others = split(made, 0.25, 3)
    assert learned.routes.requests == 10 and others.requests == 30
    both = np.concatenate([learned.routes.tokens, others.tokens])
    assert (np.bincount(both) == np.bincount(made.routes.tokens)).all()
    assert (learned.loads == [np.bincount(learned.routes.tokens, minlength=8)]).all()
    firsts = others.tokens[others.starts[:-1]] // 2
    assert 0 < np.flatnonzero(np.diff(firsts)).size > 5, "topics are mixed"
    again = split(made, 0.25, 3)[1]
    assert (again.tokens == others.tokens).all()


def test_unseen_tokens_are_counted_as_often_as_they_come() -> None:
    learned = profile([0, 1])
    assert unseen(learned, profile([0, 1, 1]).routes) == 0
    assert unseen(learned, profile([0, 2, 3, 3]).routes) == 0.75


def test_request_level_is_below_token_level_where_rounds_decide() -> None:
    """A request's tokens choose experts of one rank. Rounds send some requests to the other rank."""
    made = profile([0, 1, 2, 3] * 6)
    learned, others = split(made, 0.5, 0)
    clusters = SOLVERS["vanilla"](learned, 2, 0)
    found = measure_placement(learned, clusters, place(learned, clusters), others)
    assert found.token.rate == 1.0
    assert 0.5 < found.request.rate <= 1.0
    assert (found.token.loads.sum(), found.request.loads.sum()) == (len(others.tokens),) * 2


@pytest.mark.parametrize(("requests", "share", "field"), [(1, 0.5, "recorded routes"), (4, 0.99, "--share")])
def test_nothing_left_on_a_side(requests: int, share: float, field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        split(profile([0] * requests), share, 0)
