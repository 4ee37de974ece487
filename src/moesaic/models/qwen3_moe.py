"""Qwen3-MoE: grouped-query attention with a norm on each query and key head, many small experts.

Yang et al., Qwen3 technical report, 2025.
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
from moesaic.models.qwen import sparse_layers
from moesaic.models.spec import KVLayout, ModelSpec

UNUSED_TENSORS = (r".*\.rotary_emb\.inv_freq",)
"""Tensors of some checkpoints that are not needed."""


@dataclass(frozen=True)
class Config:
    """config.json of a qwen3_moe checkpoint."""

    vocab_size: int
    hidden_size: int
    dense_width: int
    expert_width: int
    num_layers: int
    heads: Heads
    epsilon: float
    has_tied_embeddings: bool
    num_experts: int
    top_k: int
    normalise: bool
    sparse_step: int
    dense_layers: tuple[int, ...]
    window: int | None
    max_position: int
    rope: rope.RopeConfig

    @property
    def spec(self) -> ModelSpec:
        return ModelSpec(
            model_type="qwen3_moe",
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            moe_layers=sparse_layers(self.num_layers, self.dense_layers, self.sparse_step),
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
    fields.require_value("model_type", "qwen3_moe")
    fields.require_value("hidden_act", "silu")
    # Keys of Qwen3-Coder that repeat what all models of this type have in common.
    fields.require_value("qkv_bias", False)
    fields.require_value("use_qk_norm", True)
    fields.require_value("shared_expert_intermediate_size", 0, None)
    experts = fields.integer("num_experts" if "num_experts" in raw else "num_local_experts")
    fields.require_value("num_local_experts", experts)
    max_position = fields.integer("max_position_embeddings", 32768)
    window = fields.maybe_integer("sliding_window")
    has_windows = fields.flag("use_sliding_window", False) and window is not None
    if has_windows:
        reason = "transformers gives every layer the window, the makers' code only those from this one on"
        fields.require_value("max_window_layers", 0, None, reason=reason)
    fields.ignore("max_window_layers")
    config = Config(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        dense_width=fields.integer("intermediate_size", 6144),
        expert_width=fields.integer("moe_intermediate_size"),
        num_layers=fields.integer("num_hidden_layers", maximum=MOST_LAYERS),
        heads=read_heads(fields, has_head_norms=True, epsilon=fields.number("rms_norm_eps", 1e-6)),
        epsilon=fields.number("rms_norm_eps", 1e-6),
        has_tied_embeddings=fields.flag("tie_word_embeddings", False),
        num_experts=experts,
        top_k=fields.integer("num_experts_per_tok", maximum=experts),
        normalise=fields.flag("norm_topk_prob", False),
        sparse_step=fields.integer("decoder_sparse_step", 1),
        dense_layers=fields.integers("mlp_only_layers"),
        window=window if has_windows else None,
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
    spec = config.spec
    table = loader.rope_table(config.rope, config.heads.width, spec.max_position)
    return tuple(_block(config, spec, loader, table, layer) for layer in range(config.num_layers))


def _block(
    config: Config, spec: ModelSpec, loader: Loader, table: rope.RopeTable, layer: int
) -> DecoderBlock:
    name, hidden = f"model.layers.{layer}", config.hidden_size
    sparse = layer in spec.moe_layers
    window = spec.sliding_windows[layer]
    gating = Gating(config.top_k, config.normalise)
    return DecoderBlock(
        kernels=loader.kernels,
        epsilon=config.epsilon,
        input_norm=loader.exact(f"{name}.input_layernorm.weight", hidden),
        attention_part=grouped_query_attention(loader, f"{name}.self_attn", config.heads, table, window),
        post_norm=loader.exact(f"{name}.post_attention_layernorm.weight", hidden),
        router=load_gate(loader, f"{name}.mlp.gate", gating, config.num_experts, hidden) if sparse else None,
        dense_part=None if sparse else loader.mlp(f"{name}.mlp", hidden, config.dense_width),
    )
