"""What other packages know about a model: its sizes, but not its math."""

from __future__ import annotations

from dataclasses import dataclass

from moesaic.core.experts import model_name
from moesaic.core.routing import RoutedModel
from moesaic.kernels.states import StateSizes


@dataclass(frozen=True)
class KVLayout:
    """What the KV cache stores for one token and layer."""

    kv_heads: int
    key_width: int
    """Width of a key head."""
    value_width: int
    """Width of a value head."""
    value_in_key: bool = False
    """True (latent attention): the value is the first value_width numbers of the key. No value is stored."""

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths of what is stored per head and token: the key, and the value if it is stored."""
        return (self.key_width,) if self.value_in_key else (self.key_width, self.value_width)


@dataclass(frozen=True)
class Multipliers:
    """Numbers outside of the layers."""

    embedding: float = 1.0
    logits: float = 1.0
    residual: float = 1.0
    """The number by which the blocks divide the model's own hidden states (models/granitemoe.py)."""
    norm_offset: float = 0.0
    """What is added to the weights of the norm before the LM head (models/qwen3_next.py)."""


NO_MULTIPLIERS = Multipliers()


@dataclass(frozen=True)
class ModelSpec:
    """The sizes of a model. With tensor parallelism the heads are those of one rank (models/shard.py)."""

    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    moe_layers: tuple[int, ...]
    """Layers with routed experts, in ascending order."""
    num_experts: int
    """Routed experts per such layer; 0 if no layer has routed experts."""
    top_k: int
    """Routed experts per token."""
    expert_width: int
    """Inner width of a routed expert."""
    max_position: int
    """Context length in tokens."""
    heads: int
    """Query heads of the attention."""
    kv: KVLayout
    sliding_windows: tuple[int | None, ...]
    """Per layer: tokens that a token attends to, including itself. None means all."""
    state_layers: tuple[int, ...] = ()
    """Layers with linear attention or a short convolution. They keep a state of each sequence in place of
    keys and values."""
    states: StateSizes | None = None
    """Sizes of that state in one layer. None if no layer has one."""
    extra_layers: int = 0
    """Layers of the files after the others, which predict several tokens at once. They are not loaded, but
    for the first one where it drafts tokens."""
    predicting: int = 0
    """1 if that layer is loaded, else 0. Its keys and values are in the cache behind those of the others."""

    @property
    def kv_layers(self) -> int:
        """Layers that have keys and values in the KV cache."""
        return self.num_layers - len(self.state_layers) + self.predicting

    def to_routed_model(self, origin: str) -> RoutedModel:
        """How recorded routing describes this model. origin: see `models.fingerprint.origin`."""
        name = model_name(self.moe_layers, self.num_experts, self.hidden_size, self.expert_width, origin)
        sizes = self.vocab_size, self.num_experts, self.top_k
        return RoutedModel(name, *sizes, self.moe_layers, self.hidden_size)
