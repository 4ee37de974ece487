"""Expert weights for kernels: a table of pointers with one row for each logical expert."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from moesaic.core.stored import COMPRESSED, OF_EXPERTS, row_bytes

NAMES = {torch.bfloat16: "bfloat16", torch.float32: "float32", torch.uint8: COMPRESSED}


@dataclass(frozen=True)
class PointerTable:
    """The addresses of one layer's experts, for kernels that read them in place."""

    memory: torch.Tensor
    """[3, E] int64 addresses of gate, up and down; 0 for an expert that is not held."""
    hidden: int
    width: int
    stored: int
    """Index into OF_EXPERTS of their dtype."""

    @property
    def addresses(self) -> tuple[int, int, int]:
        """Addresses of the three lines of `memory`."""
        first, line = self.memory.data_ptr(), self.memory.stride(0) * 8
        return first, first + line, first + 2 * line


@dataclass(frozen=True)
class ExpertWeights:
    """The routed experts of one layer that this process holds.

    Indexed by logical expert id; None if another process holds the expert. Each tensor may be a view of the
    memory-mapped checkpoint. Compressed experts are uint8: a row holds its bytes instead of its numbers.
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
        """Gate, up and down of one expert. Raises KeyError if it is not held here."""
        gate, up, down = self.gate[expert], self.up[expert], self.down[expert]
        if gate is None or up is None or down is None:
            raise KeyError(f"expert {expert} is not held here")
        return gate, up, down

    @property
    def compressed_numbers(self) -> int:
        """Number of compressed numbers held here."""
        held = (self.of(expert) for expert in self.held)
        return sum(3 * len(gate) * len(down) for gate, _, down in held if gate.dtype is torch.uint8)

    @cached_property
    def table(self) -> PointerTable:
        """The table of pointers, made once. Raises TypeError if the experts differ in shape or dtype, or
        are not dense."""
        lines = [[0 if one is None else one.data_ptr() for one in part] for part in self._parts]
        held = [self.of(expert) for expert in self.held]
        if not held:
            return PointerTable(torch.tensor(lines), 0, 0, 0)
        width, hidden, dtype = len(held[0][0]), len(held[0][2]), held[0][0].dtype
        if dtype not in NAMES:
            raise TypeError(f"experts: got {dtype}; allowed: float32, bfloat16, uint8 (compressed)")
        inner, outer = (self._row(dtype, numbers) for numbers in (hidden, width))
        for gate, up, down in held:
            alike = gate.shape == up.shape == (width, inner) and down.shape == (hidden, outer)
            if not alike or any(one.dtype != dtype or not one.is_contiguous() for one in (gate, up, down)):
                raise TypeError("the experts of a layer differ in shape or type, or are not dense")
        return PointerTable(torch.tensor(lines), hidden, width, OF_EXPERTS.index(NAMES[dtype]))

    @staticmethod
    def _row(dtype: torch.dtype, numbers: int) -> int:
        """Size of a row with this number of columns."""
        return row_bytes(COMPRESSED, numbers) if dtype is torch.uint8 else numbers

    @property
    def _parts(self) -> tuple[tuple[torch.Tensor | None, ...], ...]:
        return self.gate, self.up, self.down
