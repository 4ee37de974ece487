"""Routed experts: how a checkpoint names them, and which servers serve them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from moesaic.core.placement import fingerprint
from moesaic.core.stored import row_bytes


def model_name(layers: Sequence[int], num_experts: int, hidden: int, width: int) -> str:
    """The name by which placements and profiles identify a model's experts; see `fingerprint`."""
    return fingerprint("moe", layers, num_experts, hidden, width)


@dataclass(frozen=True)
class ExpertLayout:
    """Where the routed experts of a checkpoint are: all that an expert server needs to find its weights."""

    prefixes: dict[int, str]
    """MoE layer -> prefix of its tensor names, which continue with `.E.WORD.weight` for expert E."""
    gate: str
    up: str
    down: str
    """The words for the gate, up and down projections."""
    hidden: int
    width: int
    num_experts: int
    top_k: int
    dtype: str
    """Dtype that is computed from: "float32", "bfloat16", "compressed", or with torch "float16". Other
    stored dtypes are converted."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers with routed experts, ascending."""
        return tuple(sorted(self.prefixes))

    @property
    def fingerprint(self) -> str:
        """Identifies the model that a placement or a profile was made for."""
        return model_name(self.layers, self.num_experts, self.hidden, self.width)

    @property
    def parameters(self) -> int:
        """Number of parameters of all routed experts."""
        return len(self.prefixes) * self.num_experts * 3 * self.hidden * self.width

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert."""
        return sum(self.matrix_bytes)

    @property
    def matrix_bytes(self) -> tuple[int, int, int]:
        """Bytes of one expert's gate, up and down matrices."""
        inner = self.width * row_bytes(self.dtype, self.hidden)
        return inner, inner, self.hidden * row_bytes(self.dtype, self.width)

    @property
    def num_bytes(self) -> int:
        """Bytes of all routed experts."""
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
    """An expert server that accepts calls."""

    server: int
    """Id of the server. It stays the same when the process is restarted."""
    incarnation: int
    """Number of processes that have had this id. Clients reconnect when it changes."""
    address: str
    """unix:PATH, unix:@NAME or tcp:HOST:PORT."""


@dataclass(frozen=True)
class Directory:
    """Which servers serve which experts. A new directory replaces the old one completely; versions only
    grow."""

    version: int
    servers: list[ServerEntry]
    experts: dict[int, dict[int, list[int]]] = field(default_factory=dict)
    """Server -> layer -> its logical experts."""
