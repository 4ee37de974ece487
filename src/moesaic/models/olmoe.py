"""OLMoE: attention whose norms of queries and keys span all heads, and many small experts.

Muennighoff et al., OLMoE: Open mixture-of-experts language models, 2024.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moesaic.kernels.gating import Gating
from moesaic.models import rope
from moesaic.models.block import DecoderBlock
from moesaic.models.config import MOST_LAYERS, Fields
from moesaic.models.gates import load_gate
from moesaic.models.loader import ExpertNames, Heads, Loader, read_heads
from moesaic.models.spec import KVLayout, ModelSpec
from moesaic.models.whole_norm import whole_norm_attention

UNUSED_TENSORS = (r".*\.rotary_emb\.inv_freq",)
"""Tensors of some checkpoints that are not needed."""


@dataclass(frozen=True)
class Config:
    """config.json of an olmoe checkpoint."""

    vocab_size: int
    hidden_size: int
    expert_width: int
    num_layers: int
    heads: Heads
    clip: float | None
    """Greatest absolute value of a query, key or value."""
    epsilon: float
    has_tied_embeddings: bool
    num_experts: int
    top_k: int
    normalise: bool
    max_position: int
    rope: rope.RopeConfig

    @property
    def spec(self) -> ModelSpec:
        return ModelSpec(
            model_type="olmoe",
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
            sliding_windows=(None,) * self.num_layers,
        )


def parse(raw: dict[str, Any]) -> Config:
    """Parses config.json. Raises CheckpointError for any key that is not understood."""
    fields = Fields(raw)
    fields.require_value("model_type", "olmoe")
    fields.require_value("hidden_act", "silu")
    experts = fields.integer("num_experts" if "num_experts" in raw else "num_local_experts", 64)
    fields.require_value("num_local_experts", experts)
    max_position = fields.integer("max_position_embeddings", 4096)
    clip = None if fields.raw("clip_qkv", None) is None else fields.number_above("clip_qkv", 0.0)
    epsilon = fields.number("rms_norm_eps", 1e-5)
    heads = read_heads(fields, has_head_norms=True, epsilon=epsilon)
    fields.require_value(
        "head_dim", heads.hidden // heads.query, None, reason="hidden_size / num_attention_heads"
    )
    config = Config(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=heads.hidden,
        expert_width=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers", maximum=MOST_LAYERS),
        heads=heads,
        clip=clip,
        epsilon=epsilon,
        has_tied_embeddings=fields.flag("tie_word_embeddings", False),
        num_experts=experts,
        top_k=fields.integer("num_experts_per_tok", 8, maximum=experts),
        normalise=fields.flag("norm_topk_prob", False),
        max_position=max_position,
        rope=rope.read(fields, max_position, 10000.0),
    )
    fields.refuse_unread()
    return config


def expert_names(config: Config, layer: int) -> ExpertNames:
    """Returns the tensor names of a layer's routed experts."""
    prefix = f"model.layers.{layer}.mlp.experts"
    return ExpertNames(prefix, config.hidden_size, config.expert_width, config.num_experts)


def blocks(config: Config, loader: Loader) -> tuple[DecoderBlock, ...]:
    """Loads every layer without its routed experts."""
    table = loader.rope_table(config.rope, config.heads.width, config.spec.max_position)
    return tuple(_block(config, loader, table, layer) for layer in range(config.num_layers))


def _block(config: Config, loader: Loader, table: rope.RopeTable, layer: int) -> DecoderBlock:
    name, hidden = f"model.layers.{layer}", config.hidden_size
    gating = Gating(config.top_k, config.normalise)
    router = load_gate(loader, f"{name}.mlp.gate", gating, config.num_experts, hidden)
    return DecoderBlock(
        kernels=loader.kernels,
        epsilon=config.epsilon,
        input_norm=loader.exact(f"{name}.input_layernorm.weight", hidden),
        attention_part=whole_norm_attention(loader, f"{name}.self_attn", config.heads, table, config.clip),
        post_norm=loader.exact(f"{name}.post_attention_layernorm.weight", hidden),
        router=router,
        dense_part=None,
    )
