"""Which tokens and experts belong together, rank by rank: the result of a placement solver.

A rank is an attention worker and the expert server beside it. Layers are counted from 0 over those with
routed experts, as in a profile.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moesaic.core.placement import Placement
from moesaic.core.profile import SmallArray


@dataclass(frozen=True)
class Coclusters:
    """A solver's result. A rank number means the same in every layer, since a request stays on its rank."""

    ranks: int
    experts: SmallArray
    """[layers, E] the rank of each logical expert.

    In each layer the ranks have equal numbers, up to a difference of one.
    """
    tokens: SmallArray
    """[layers, V] the best rank for a token with that id in that layer."""
    confidence: npt.NDArray[np.float32]
    """[layers, V] confidence of that rank, 0 to 1. It is 0 for tokens that the profile does not contain."""
    notes: tuple[str, ...] = ()
    """Lines for the user about how the result was found, for example that a limit was reached."""

    def placement(self, layers: tuple[int, ...], model: str, tables: str = "") -> Placement:
        """The placement of the experts.

        layers: their indices in the model. tables: name of the file with the tables, which is beside the
        placement.
        """
        experts_by_layer = {
            layer: {rank: np.flatnonzero(row == rank).tolist() for rank in range(self.ranks)}
            for layer, row in zip(layers, self.experts, strict=True)
        }
        return Placement(0, self.experts.shape[1], experts_by_layer, model, tables)
