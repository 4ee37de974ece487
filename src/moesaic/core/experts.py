"""Routed experts as nouns: how a checkpoint spells them, and who serves them now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from moesaic.core.placement import fingerprint
from moesaic.core.stored import row_bytes


def model_name(layers: Sequence[int], num_experts: int, hidden: int, width: int) -> str:
    """What files about a model's experts say they are for: placements and profiles; see `fingerprint`."""
    return fingerprint("moe", layers, num_experts, hidden, width)


@dataclass(frozen=True)
class ExpertLayout:
    """Where the routed experts of a checkpoint lie: all that an expert server needs to find its weights."""

    prefixes: dict[int, str]
    """MoE layer -> prefix of its tensors, which go on with `.E.WORD.weight` for expert E."""
    gate: str
    up: str
    down: str
    """The three words."""
    hidden: int
    width: int
    num_experts: int
    top_k: int
    dtype: str
    """What the weights are computed from: "float32", "bfloat16", "compressed", or with torch "float16";
    another stored type is converted."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers with routed experts, ascending."""
        return tuple(sorted(self.prefixes))

    @property
    def fingerprint(self) -> str:
        """What placements and profiles of these experts say they are for."""
        return model_name(self.layers, self.num_experts, self.hidden, self.width)

    @property
    def parameters(self) -> int:
        """Numbers in all routed experts."""
        return len(self.prefixes) * self.num_experts * 3 * self.hidden * self.width

    @property
    def expert_bytes(self) -> int:
        """Of one expert."""
        return sum(self.matrix_bytes)

    @property
    def matrix_bytes(self) -> tuple[int, int, int]:
        """Of one expert's gate, up and down."""
        inner = self.width * row_bytes(self.dtype, self.hidden)
        return inner, inner, self.hidden * row_bytes(self.dtype, self.width)

    @property
    def num_bytes(self) -> int:
        """Of all of them."""
        return len(self.prefixes) * self.num_experts * self.expert_bytes

    def tensors(self, layer: int, expert: int) -> tuple[tuple[str, int, int], ...]:
        """Name, rows and columns of gate [w, h], up [w, h] and down [h, w]."""
        prefix = f"{self.prefixes[layer]}.{expert}"
        return (
            (f"{prefix}.{self.gate}.weight", self.width, self.hidden),
            (f"{prefix}.{self.up}.weight", self.width, self.hidden),
            (f"{prefix}.{self.down}.weight", self.hidden, self.width),
        )


@dataclass(frozen=True)
class ServerEntry:
    """An expert server that can be asked."""

    server: int
    """Its id: for ever, whatever process has it."""
    incarnation: int
    """Counts the processes that had this id: a client that knew the one before connects anew."""
    address: str
    """unix:PATH, unix:@NAME or tcp:HOST:PORT."""


@dataclass(frozen=True)
class Directory:
    """Who serves which experts now. A new one replaces the old one whole; versions only grow."""

    version: int
    servers: list[ServerEntry]
    experts: dict[int, dict[int, list[int]]] = field(default_factory=dict)
    """Server -> layer -> its logical experts."""
