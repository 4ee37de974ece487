"""Tokens and experts that belong together: what a solver finds in a profile.

Each of them belongs to a rank, a locality domain: an attention worker and the expert server beside it.
Layers are counted from 0 over those with routed experts, as in a profile.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moesaic.core.placement import Placement
from moesaic.core.profile import SmallArray


@dataclass(frozen=True)
class Coclusters:
    """A solver's result. A rank is the same one in every layer, since a request stays on its rank."""

    ranks: int
    experts: SmallArray
    """[layers, E] the rank of each logical expert. In each layer the ranks' numbers of experts differ by at
    most one."""
    tokens: SmallArray
    """[layers, V] the rank that has most of the experts which a token of this id is expected to choose."""
    confidence: npt.NDArray[np.float32]
    """[layers, V] confidence of that rank, 0 to 1; 0 for tokens that the profile has never seen."""
    notes: tuple[str, ...] = ()
    """Notes for the user, one line each; for example that a limit was reached."""

    def placement(self, layers: tuple[int, ...], model: str, tables: str = "") -> Placement:
        """The placement to be written to a file.

        layers: numbers of the layers in the model. tables: name of the file with the tables.
        """
        held = {
            layer: {rank: np.flatnonzero(row == rank).tolist() for rank in range(self.ranks)}
            for layer, row in zip(layers, self.experts, strict=True)
        }
        return Placement(0, self.experts.shape[1], held, model, tables)
