"""Expert weights as kernels see them: a table of pointers, one row per logical expert."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ExpertWeights:
    """The routed experts of one layer that this process holds.

    Indexed by logical expert id; None stands where another process holds the expert. Each tensor
    may be a view of the memory-mapped checkpoint.
    """

    gate: tuple[torch.Tensor | None, ...]
    """[w, h] each."""
    up: tuple[torch.Tensor | None, ...]
    """[w, h] each."""
    down: tuple[torch.Tensor | None, ...]
    """[h, w] each."""

    @property
    def num_experts(self) -> int:
        """Logical experts of the layer, held here or not."""
        return len(self.gate)

    @property
    def held(self) -> tuple[int, ...]:
        """Ids of the experts whose weights are here."""
        return tuple(index for index, tensor in enumerate(self.gate) if tensor is not None)

    def of(self, expert: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gate, up and down of one expert. Raises KeyError when it is not held here."""
        gate, up, down = self.gate[expert], self.up[expert], self.down[expert]
        if gate is None or up is None or down is None:
            raise KeyError(f"expert {expert} is not held here")
        return gate, up, down
