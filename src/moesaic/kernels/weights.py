"""Expert weights as kernels see them: a table of pointers, one row per logical expert."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True)
class PointerTable:
    """Where the experts of one layer lie, for kernels that read them in place."""

    memory: torch.Tensor
    """[3, E] int64 addresses of gate, up and down; 0 where an expert is not held."""
    hidden: int
    width: int
    wide: bool
    """Stored in float32, else in bf16."""

    @property
    def addresses(self) -> tuple[int, int, int]:
        """Of the three lines of `memory`."""
        first, line = self.memory.data_ptr(), self.memory.stride(0) * 8
        return first, first + line, first + 2 * line


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

    @cached_property
    def table(self) -> PointerTable:
        """Made once. Raises TypeError when the experts differ in shape or type, or are not dense."""
        lines = [[0 if one is None else one.data_ptr() for one in part] for part in self._parts]
        held = [self.of(expert) for expert in self.held]
        if not held:
            return PointerTable(torch.tensor(lines), 0, 0, wide=True)
        width, hidden = held[0][0].shape
        dtype = held[0][0].dtype
        for gate, up, down in held:
            alike = gate.shape == up.shape == (width, hidden) and down.shape == (hidden, width)
            if not alike or any(one.dtype != dtype or not one.is_contiguous() for one in (gate, up, down)):
                raise TypeError("the experts of a layer differ in shape or type, or are not dense")
        if dtype not in (torch.float32, torch.bfloat16):
            raise TypeError(f"experts: got {dtype}; allowed: float32, bfloat16")
        return PointerTable(torch.tensor(lines), hidden, width, wide=dtype is torch.float32)

    @property
    def _parts(self) -> tuple[tuple[torch.Tensor | None, ...], ...]:
        return self.gate, self.up, self.down
