"""Tokens and experts that belong together, rank by rank: what a solver finds in a profile.

A rank is a locality domain: an attention worker and the expert server beside it. Layers are counted from 0
over those with routed experts, as in a profile.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moesaic.core.placement import Placement
from moesaic.core.profile import SmallArray


@dataclass(frozen=True)
class Coclusters:
    """A solver's answer. Numbers of ranks mean the same in every layer, since a request stays on its rank."""

    ranks: int
    experts: SmallArray
    """[layers, E] the rank of each logical expert; of each layer every rank has as many, give or take one."""
    tokens: SmallArray
    """[layers, V] the rank on which a token of that id is best off in that layer."""
    confidence: npt.NDArray[np.float32]
    """[layers, V] 0 to 1: how sure that is; 0 for tokens that the profile never saw."""
    notes: tuple[str, ...] = ()
    """What its user should be told of how it was found, a line each: a limit that was hit, say."""

    def placement(self, layers: tuple[int, ...], model: str, tables: str = "") -> Placement:
        """Where the experts live, as a file has it. layers: their numbers in the model. tables: beside it."""
        held = {
            layer: {rank: np.flatnonzero(row == rank).tolist() for rank in range(self.ranks)}
            for layer, row in zip(layers, self.experts, strict=True)
        }
        return Placement(0, self.experts.shape[1], held, model, tables)
