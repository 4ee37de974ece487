"""What the rest of the system knows about a model: its sizes, nothing of its math."""

from __future__ import annotations

from dataclasses import dataclass

from moesaic.core.experts import model_name
from moesaic.core.routing import RoutedModel


@dataclass(frozen=True)
class KVLayout:
    """What one token keeps in the KV cache of one layer."""

    kv_heads: int
    key_width: int
    """Numbers of a key, a head."""
    value_width: int
    """Numbers of a value, a head."""
    value_in_key: bool = False
    """The value is the first value_width numbers of the key; no value is stored (latent attention)."""

    @property
    def widths(self) -> tuple[int, ...]:
        """Numbers of each row that a head stores of one token: its key, and its value if there is one."""
        return (self.key_width,) if self.value_in_key else (self.key_width, self.value_width)


@dataclass(frozen=True)
class ModelSpec:
    """The sizes of a model; its heads are those of one rank where they are dealt out (models/shard.py)."""

    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    moe_layers: tuple[int, ...]
    """Layers with routed experts, ascending."""
    num_experts: int
    """Routed experts of each such layer; 0 when there is none."""
    top_k: int
    """Experts of a token."""
    expert_width: int
    """Inner width of a routed expert."""
    max_position: int
    """Context length in tokens."""
    heads: int
    """Query heads of the attention."""
    kv: KVLayout
    sliding_windows: tuple[int | None, ...]
    """Per layer: tokens that a row sees, itself among them; None sees all."""

    @property
    def routed(self) -> RoutedModel:
        """What its routing is recorded as."""
        name = model_name(self.moe_layers, self.num_experts, self.hidden_size, self.expert_width)
        sizes = self.vocab_size, self.num_experts, self.top_k
        return RoutedModel(name, *sizes, self.moe_layers, self.hidden_size)
