"""Expert weights for kernels: a table of pointers with one row for each logical expert."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from moesaic.core.experts import SILU, Activation
from moesaic.core.weight_types import COMPRESSED_DTYPE, expert_code, is_native, row_bytes, split_dtype

Part = tuple[torch.Tensor | None, ...]
"""A tensor of each expert, by logical id."""
NAMES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}


ALIGNMENT = 16
"""Bytes that a thread of a GPU loads at once."""
PARTS = ("gate_proj", "up_proj", "down_proj", "gate_bias", "up_bias", "down_bias")
"""Fields of ExpertWeights, and lines of its table of pointers."""


@dataclass(frozen=True)
class PointerTable:
    """The addresses of one layer's experts, for kernels that read them in place."""

    memory: torch.Tensor
    """[3, E] int64 addresses of gate, up and down; 0 for an expert that is not held. With biases it is
    [6, E], in the order of PARTS."""
    hidden: int
    width: int
    dtype_code: int
    """`core.weight_types.expert_code` of their dtype."""

    @cached_property
    def addresses(self) -> tuple[int, ...]:
        """Addresses of six lines of `memory`; 0 for lines that it does not have."""
        first, line, lines = self.memory.data_ptr(), self.memory.stride(0) * 8, len(self.memory)
        return tuple(first + index * line if index < lines else 0 for index in range(6))


@dataclass(frozen=True)
class DeviceTable:
    """A table of pointers for kernels on a GPU. It lies on the device of the experts."""

    addresses: torch.Tensor
    """[3, E] or [6, E] int64, as `PointerTable.memory`."""
    hidden: int
    width: int
    kinds: tuple[str, str]
    """The types of gate and up, and of down, as `core.weight_types` or torch names them."""
    gate_line: int
    """Bytes of a row of gate and up."""
    down_line: int
    """Bytes of a row of down."""
    is_aligned: bool
    """Whether all addresses of gate, up and down are multiples of 16."""


@dataclass(frozen=True)
class ExpertWeights:
    """The routed experts of one layer that this process holds.

    Indexed by logical expert id; None if another process holds the expert. Each tensor may be a view of the
    memory-mapped checkpoint. Compressed and quantised experts are uint8: a row holds its bytes instead of its
    numbers.
    """

    gate_proj: Part
    """[w, h] each."""
    up_proj: Part
    """[w, h] each."""
    down_proj: Part
    """[h, w] each."""
    gate_bias: Part = ()
    """[w] float32 each, added to the gate's products. Empty, as the next two: the experts have no biases."""
    up_bias: Part = ()
    """[w] float32 each."""
    down_bias: Part = ()
    """[h] float32 each."""
    activation: Activation = field(default=SILU, kw_only=True)
    packed_dtype: str = field(default=COMPRESSED_DTYPE, kw_only=True)
    """Type of experts that are uint8: one for which `core.weight_types.is_packed` holds."""
    page_table: DeviceTable | None = field(default=None, kw_only=True)
    """A table on a GPU that has these experts, and that gets others when they take their places. None:
    `on_device` makes one."""

    @classmethod
    def from_resident(
        cls,
        num_experts: int,
        tensors: Mapping[int, Sequence[torch.Tensor]],
        parts: int = 3,
        activation: Activation = SILU,
        packed_dtype: str = COMPRESSED_DTYPE,
    ) -> ExpertWeights:
        """tensors: expert -> its tensors in the order of PARTS. parts: their number, 3, or 6 with biases."""
        part_tensors = (
            tuple(tensors[expert][part] if expert in tensors else None for expert in range(num_experts))
            for part in range(parts)
        )
        return cls(*part_tensors, activation=activation, packed_dtype=packed_dtype)

    @property
    def num_experts(self) -> int:
        """Logical experts of the layer, held here or not."""
        return len(self.gate_proj)

    @property
    def resident_ids(self) -> tuple[int, ...]:
        """Ids of the experts whose weights are here."""
        return tuple(index for index, tensor in enumerate(self.gate_proj) if tensor is not None)

    def matrices_of(self, expert: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gate, up and down of one expert. Raises KeyError if it is not held here."""
        gate_proj, up_proj, down_proj = self.gate_proj[expert], self.up_proj[expert], self.down_proj[expert]
        if gate_proj is None or up_proj is None or down_proj is None:
            raise KeyError(f"expert {expert} is not held here")
        return gate_proj, up_proj, down_proj

    def biases_of(self, expert: int) -> tuple[torch.Tensor | None, ...]:
        """The biases of gate, up and down of one expert; None where the experts have none."""
        biases = self.gate_bias, self.up_bias, self.down_bias
        return tuple(part[expert] if part else None for part in biases)

    def with_replacements(self, replacements: ExpertWeights) -> ExpertWeights:
        """These experts and those of `replacements`, which replace these where both have them."""
        pairs = zip(self.parts, replacements.parts, strict=True)
        parts = [tuple(old if new is None else new for old, new in zip(*pair, strict=True)) for pair in pairs]
        return replace(
            self.with_parts(parts),
            packed_dtype=replacements.packed_dtype if replacements.resident_ids else self.packed_dtype,
        )

    def select(self, expert_ids: Collection[int]) -> ExpertWeights:
        """The experts of this object whose ids are in `expert_ids`."""
        return self.with_parts(
            [
                tuple(tensor if expert in expert_ids else None for expert, tensor in enumerate(part))
                for part in self.parts
            ]
        )

    def with_parts(self, parts: Sequence[Part]) -> ExpertWeights:
        """Other experts of the same layer. parts: as `parts`."""
        return ExpertWeights(*parts, activation=self.activation, packed_dtype=self.packed_dtype)

    @property
    def packed_numbers(self) -> int:
        """Number of compressed and quantised numbers held here."""
        matrices = (self.matrices_of(expert) for expert in self.resident_ids)
        return sum(
            3 * len(gate_proj) * len(down_proj)
            for gate_proj, _, down_proj in matrices
            if gate_proj.dtype is torch.uint8
        )

    @cached_property
    def table(self) -> PointerTable:
        """The table of pointers, made once. Raises TypeError if the experts differ in shape or dtype, or
        are not dense."""
        lines, matrices = self.addresses, [self.matrices_of(expert) for expert in self.resident_ids]
        if not matrices:
            return PointerTable(torch.tensor(lines), 0, 0, 0)
        width, hidden, dtype = len(matrices[0][0]), len(matrices[0][2]), matrices[0][0].dtype
        kind = self.packed_dtype if dtype is torch.uint8 else NAMES.get(dtype)
        if kind is None or not is_native(kind):
            raise TypeError(f"experts: got {dtype}; allowed: float32, bfloat16, uint8")
        types = split_dtype(self.packed_dtype) if dtype is torch.uint8 else (None, None)
        inner, outer = _row_elements(types[0], hidden), _row_elements(types[1], width)
        for gate_proj, up_proj, down_proj in matrices:
            alike = gate_proj.shape == up_proj.shape == (width, inner) and down_proj.shape == (hidden, outer)
            if not alike or any(
                matrix.dtype != dtype or not matrix.is_contiguous()
                for matrix in (gate_proj, up_proj, down_proj)
            ):
                raise TypeError("the experts of a layer differ in shape or type, or are not dense")
        self._check_biases(hidden, width)
        return PointerTable(torch.tensor(lines), hidden, width, expert_code(kind))

    @cached_property
    def on_device(self) -> DeviceTable:
        """The table of pointers on the experts' device, made once. Raises KeyError if none is held."""
        if self.page_table is not None:
            return self.page_table
        if not self.resident_ids:
            raise KeyError("no expert of the layer is held here")
        device = self.matrices_of(self.resident_ids[0])[0].device
        return self.table_over(torch.tensor(self.addresses, device=device))

    def table_over(self, addresses: torch.Tensor) -> DeviceTable:
        """A table for experts like these, of which at least one is held. addresses: see DeviceTable."""
        gate_proj, _, down_proj = self.matrices_of(self.resident_ids[0])
        name = str(gate_proj.dtype).removeprefix("torch.")
        kinds = split_dtype(self.packed_dtype) if gate_proj.dtype is torch.uint8 else (name, name)
        strides = (
            gate_proj.stride(0) * gate_proj.element_size(),
            down_proj.stride(0) * down_proj.element_size(),
        )
        is_aligned = not any(address % ALIGNMENT for part in self.addresses[:3] for address in part)
        return DeviceTable(addresses, len(down_proj), len(gate_proj), kinds, *strides, is_aligned)

    @property
    def addresses(self) -> list[list[int]]:
        """The address of each tensor of `parts`, 0 for one of an expert that is not held."""
        return [[0 if tensor is None else tensor.data_ptr() for tensor in part] for part in self.parts]

    @property
    def parts(self) -> tuple[Part, ...]:
        """The tensors, in the order of PARTS: three parts, or six with biases."""
        tensors: tuple[Part, ...] = tuple(getattr(self, name) for name in PARTS)
        return tensors if self.gate_bias else tensors[:3]

    def _check_biases(self, hidden: int, width: int) -> None:
        """Raises TypeError unless every held expert has the biases that the kernels read, or none has any."""
        for part, size in zip(self.parts[3:], (width, width, hidden), strict=False):
            for expert in self.resident_ids:
                bias = part[expert]
                good = bias is not None and bias.shape == (size,) and bias.dtype is torch.float32
                if bias is None or not good or not bias.is_contiguous():
                    raise TypeError(f"the biases of expert {expert}: allowed: dense float32 [{size}]")


def _row_elements(packed_dtype: str | None, columns: int) -> int:
    """Size of a row with this number of columns. packed_dtype: type of its bytes; None: it has numbers."""
    return columns if packed_dtype is None else row_bytes(packed_dtype, columns)
