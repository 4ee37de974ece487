"""The signature that all solvers share, and how many experts each rank gets.

Question: What does a solver look like, and how is one added?
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from moesaic.core.coclusters import Coclusters
from moesaic.core.errors import ConfigError
from moesaic.core.profile import Profile
from moesaic.core.tokens import IntArray

Progress = Callable[[int, int], None]
"""A callback that is called with (done, total). total is the same in all calls."""


class Solver(Protocol):
    """A solver. Equal arguments give equal clusters."""

    def __call__(
        self, profile: Profile, ranks: int, seed: int = 0, progress: Progress | None = None
    ) -> Coclusters:
        """Find clusters of tokens and experts.

        Raises ConfigError unless `ranks` is 1 to the number of experts.
        """


def experts_per_rank(num_experts: int, ranks: int) -> IntArray:
    """[ranks] number of experts of a layer on each rank.

    If the division has a remainder, the first ranks get one more. Raises ConfigError unless ranks is 1 to
    num_experts. Example: 8 experts, 3 ranks -> 3 3 2.
    """
    if not 1 <= ranks <= num_experts:
        raise ConfigError.field("--ranks", ranks, f"1 to {num_experts}, the experts of a layer")
    return num_experts // ranks + (np.arange(ranks) < num_experts % ranks).astype(np.int64)
