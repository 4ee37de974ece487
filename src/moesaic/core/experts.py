"""How a checkpoint stores the routed experts, and which servers serve them now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from moesaic.core.placement import fingerprint
from moesaic.core.stored import row_bytes


def model_name(layers: Sequence[int], num_experts: int, hidden: int, width: int, weights: str = "") -> str:
    """The name of a model in placements and profiles of its experts. See `fingerprint`."""
    return fingerprint("moe", layers, num_experts, hidden, width, weights)


@dataclass(frozen=True)
class ExpertLayout:
    """The sizes and tensor names of a checkpoint's routed experts.

    An expert server finds its weights with it.
    """

    prefixes: dict[int, str]
    """MoE layer -> prefix of its tensors.

    Expert E has the tensors `PREFIX.E.gate.weight`, and so for up and down.
    """
    gate: str
    up: str
    down: str
    """`gate`, `up` and `down` are the words for the three matrices in tensor names."""
    hidden: int
    """Size of a hidden state."""
    width: int
    """Size of an expert's intermediate row."""
    num_experts: int
    top_k: int
    dtype: str
    """The type that kernels read: "float32", "bfloat16", "compressed", or with torch "float16".

    Weights that are stored in another type are converted.
    """
    weights: str = ""
    """Fingerprint of the checkpoint (`models.fingerprint`). Empty where no checkpoint was read."""
    origin: str = ""
    """Fingerprint by which placements and profiles know it: of the checkpoint before it was compressed."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers with routed experts, ascending."""
        return tuple(sorted(self.prefixes))

    @property
    def fingerprint(self) -> str:
        """The name that placements and profiles of these experts have for the model."""
        return model_name(self.layers, self.num_experts, self.hidden, self.width, self.origin)

    @property
    def parameters(self) -> int:
        """Number of weights in all routed experts."""
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
        """(name, rows, columns) of the gate [w, h], up [w, h] and down [h, w] matrices."""
        prefix = f"{self.prefixes[layer]}.{expert}"
        return (
            (f"{prefix}.{self.gate}.weight", self.width, self.hidden),
            (f"{prefix}.{self.up}.weight", self.width, self.hidden),
            (f"{prefix}.{self.down}.weight", self.hidden, self.width),
        )


@dataclass(frozen=True)
class ServerEntry:
    """An expert server that clients can use."""

    server: int
    """Its id, which stays the same when its process is replaced."""
    incarnation: int
    """Counts the processes that had this id. When it grows, clients connect again."""
    address: str
    """unix:PATH, unix:@NAME or tcp:HOST:PORT."""


@dataclass(frozen=True)
class Directory:
    """Which servers serve which experts now. A new directory replaces the old one. Its version is higher."""

    version: int
    servers: list[ServerEntry]
    experts: dict[int, dict[int, list[int]]] = field(default_factory=dict)
    """Server -> layer -> its logical experts."""
