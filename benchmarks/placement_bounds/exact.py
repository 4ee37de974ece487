"""The best placement of a small layer, by an integer program.

It is about given counts, each token id on its best rank, and placements that give each rank E / R experts,
give or take one. The program (HiGHS) is over all groups of experts that a rank can hold: which are taken, and
which of them each token goes to. With a variable for each expert and rank instead, the linear relaxation
would put 1 / R of everything everywhere and HiGHS would try it all. It is for a dozen experts and tens of
token ids.
"""

from __future__ import annotations

from itertools import combinations
from math import comb

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import block_array, csr_array, eye_array, kron

from moesaic.core.errors import ConfigError
from moesaic.core.profile import Counts
from moesaic.core.tokens import IntArray
from moesaic.policy.placement.solvers.annealing import dense
from moesaic.policy.placement.solvers.solver import experts_per_rank

GROUPS = 1000
"""As many as the program is solved for."""


def exact(counts: Counts, num_experts: int, ranks: int, seconds: float = np.inf) -> tuple[float, IntArray]:
    """The best local activation rate of a small layer, and ranks [E] that reach it.

    Raises ConfigError where `ranks` is not in 1 .. num_experts or can be filled in more than GROUPS ways,
    TimeoutError where the optimum was not proved in `seconds`.
    Example: a token that chooses experts 0 and 2, one that chooses 1 and 3, 2 ranks -> 1.0, ranks 0 1 0 1.
    """
    room = experts_per_rank(num_experts, ranks)
    if sum(comb(num_experts, size) for size in set(room.tolist())) > GROUPS:
        raise ConfigError.field("experts", num_experts, f"{GROUPS} ways to fill one of {ranks} ranks at most")
    held = np.array(
        [
            np.isin(np.arange(num_experts), group)
            for size in sorted(set(room.tolist()))
            for group in combinations(range(num_experts), size)
        ],
        dtype=np.float64,
    )
    rows = dense(counts, num_experts).astype(np.float64)
    tokens, groups = len(rows), len(held)
    # one variable for each group: a rank holds it; one for each token and group: the token goes there
    there = kron(np.ones((tokens, 1)), eye_array(groups)), -eye_array(tokens * groups)
    once = csr_array(np.vstack([held.T, np.ones(groups)])), None
    somewhere = None, kron(eye_array(tokens), np.ones((1, groups)))
    ones = np.ones(num_experts + 1 + tokens)
    ones[num_experts] = ranks
    found = milp(
        np.concatenate([np.zeros(groups), -(rows @ held.T).ravel()]),
        constraints=LinearConstraint(
            block_array([there, once, somewhere], format="csr"),
            np.concatenate([np.zeros(tokens * groups), ones]),
            np.concatenate([np.full(tokens * groups, np.inf), ones]),
        ),
        integrality=np.repeat([1, 0], [groups, tokens * groups]),
        bounds=Bounds(0.0, 1.0),
        options={"mip_rel_gap": 0.0, "time_limit": seconds},
    )
    if found.status != 0:
        raise TimeoutError(f"no optimum was proved in {seconds} seconds")
    taken = held[found.x[:groups] > 0.5]
    return float(-found.fun / rows.sum()), taken.argmax(axis=0).astype(np.int64)
