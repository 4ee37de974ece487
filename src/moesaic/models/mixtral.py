"""Mixtral: grouped-query attention and a few large experts, two per token.

Jiang et al., Mixtral of Experts, 2024.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moesaic.kernels.gating import Gating
from moesaic.models import rope
from moesaic.models.block import DecoderBlock
from moesaic.models.config import MOST_LAYERS, Fields
from moesaic.models.gates import load_gate
from moesaic.models.loader import ExpertNames, Heads, Loader, grouped_query_attention, read_heads
from moesaic.models.spec import KVLayout, ModelSpec

UNUSED_TENSORS = (r".*\.rotary_emb\.inv_freq",)
"""Tensors of some checkpoints that are not needed."""


@dataclass(frozen=True)
class Config:
    """config.json of a mixtral checkpoint."""

    vocab_size: int
    hidden_size: int
    expert_width: int
    num_layers: int
    heads: Heads
    epsilon: float
    has_tied_embeddings: bool
    num_experts: int
    top_k: int
    window: int | None
    max_position: int
    rope: rope.RopeConfig

    @property
    def spec(self) -> ModelSpec:
        return ModelSpec(
            model_type="mixtral",
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            moe_layers=tuple(range(self.num_layers)),
            num_experts=self.num_experts,
            top_k=self.top_k,
            expert_width=self.expert_width,
            max_position=max(self.max_position, self.rope.reach),
            heads=self.heads.query,
            kv=KVLayout(self.heads.key, self.heads.width, self.heads.width),
            sliding_windows=(self.window,) * self.num_layers,
        )


def parse(raw: dict[str, Any]) -> Config:
    """Parses config.json. Raises CheckpointError for any key that is not understood."""
    fields = Fields(raw)
    fields.require_value("model_type", "mixtral")
    fields.require_value("hidden_act", "silu")
    max_position = fields.integer("max_position_embeddings", 131072)
    experts = fields.integer("num_local_experts", 8)
    config = Config(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        expert_width=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers", maximum=MOST_LAYERS),
        heads=read_heads(fields, epsilon=fields.number("rms_norm_eps", 1e-5)),
        epsilon=fields.number("rms_norm_eps", 1e-5),
        has_tied_embeddings=fields.flag("tie_word_embeddings", False),
        num_experts=experts,
        top_k=fields.integer("num_experts_per_tok", 2, maximum=experts),
        window=fields.maybe_integer("sliding_window"),
        max_position=max_position,
        rope=rope.read(fields, max_position, 1e6),
    )
    fields.refuse_unread()
    return config


def expert_names(config: Config, layer: int) -> ExpertNames:
    """Returns the tensor names of a layer's routed experts."""
    prefix = f"model.layers.{layer}.block_sparse_moe.experts"
    hidden, width = config.hidden_size, config.expert_width
    return ExpertNames(
        prefix, hidden, width, config.num_experts, gate_name="w1", up_name="w3", down_name="w2"
    )


def blocks(config: Config, loader: Loader) -> tuple[DecoderBlock, ...]:
    """Loads every layer without its routed experts."""
    table = loader.rope_table(config.rope, config.heads.width, config.spec.max_position)
    return tuple(_block(config, loader, table, layer) for layer in range(config.num_layers))


def _block(config: Config, loader: Loader, table: rope.RopeTable, layer: int) -> DecoderBlock:
    name, hidden = f"model.layers.{layer}", config.hidden_size
    has_other_name = f"{name}.mlp.gate.weight" in loader.checkpoint.names  # beside fused experts
    gate = f"{name}.mlp.gate" if has_other_name else f"{name}.block_sparse_moe.gate"
    router = load_gate(loader, gate, Gating(config.top_k, normalise=True), config.num_experts, hidden)
    return DecoderBlock(
        kernels=loader.kernels,
        epsilon=config.epsilon,
        input_norm=loader.exact(f"{name}.input_layernorm.weight", hidden),
        attention_part=grouped_query_attention(
            loader, f"{name}.self_attn", config.heads, table, config.window
        ),
        post_norm=loader.exact(f"{name}.post_attention_layernorm.weight", hidden),
        router=router,
        dense_part=None,
    )
