"""DeepSeek-V2 and V2-Lite: latent attention, shared experts, device-limited routing.

DeepSeek-AI, DeepSeek-V2, 2024.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moesaic.core.errors import CheckpointError
from moesaic.models import rope
from moesaic.models.block import DecoderBlock
from moesaic.models.config import MOST_LAYERS, Fields
from moesaic.models.latent import LatentSizes, latent_attention
from moesaic.models.layers import GatedMLP, TopKRouter
from moesaic.models.loader import ExpertNames, Loader
from moesaic.models.spec import KVLayout, ModelSpec

UNUSED = (r".*\.rotary_emb\.inv_freq",)
"""Tensors of some checkpoints that are not needed."""


@dataclass(frozen=True)
class Config:
    """config.json of a deepseek_v2 checkpoint."""

    vocab_size: int
    hidden_size: int
    dense_width: int
    expert_width: int
    shared_experts: int
    num_layers: int
    attention: LatentSizes
    epsilon: float
    tied: bool
    num_experts: int
    top_k: int
    scale: float
    groups: int
    groups_kept: int
    dense_first: int
    """Number of dense layers before the first layer with routed experts."""
    sparse_step: int
    max_position: int
    rope: rope.RopeConfig

    @property
    def spec(self) -> ModelSpec:
        sizes, layers = self.attention, range(self.dense_first, self.num_layers)
        return ModelSpec(
            model_type="deepseek_v2",
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            moe_layers=tuple(layer for layer in layers if layer % self.sparse_step == 0),
            num_experts=self.num_experts,
            top_k=self.top_k,
            expert_width=self.expert_width,
            max_position=max(self.max_position, self.rope.reach),
            heads=sizes.heads,
            kv=KVLayout(1, sizes.kv_rank + sizes.rope_width, sizes.kv_rank, value_in_key=True),
            sliding_windows=(None,) * self.num_layers,
        )


def parse(raw: dict[str, Any]) -> Config:
    """Parses config.json. Raises CheckpointError for any key that is not understood."""
    fields = Fields(raw)
    fields.only("model_type", "deepseek_v2")
    fields.only("hidden_act", "silu")
    fields.only("scoring_func", "softmax")
    fields.only("mlp_bias", False)
    fields.only("norm_topk_prob", False, None, why="implementations of deepseek_v2 disagree on what it does")
    # Losses and parallelism of training; widths that follow from other keys.
    fields.ignore("aux_loss_alpha", "seq_aux", "ep_size", "head_dim", "qk_head_dim", "num_key_value_heads")
    max_position = fields.integer("max_position_embeddings", 2048)
    rope_config = rope.read(fields, max_position, 10000.0)
    experts = fields.integer("n_routed_experts")
    groups, kept = _groups(fields, experts)
    config = Config(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        dense_width=fields.integer("intermediate_size", 11008),
        expert_width=fields.integer("moe_intermediate_size"),
        shared_experts=fields.maybe_integer("n_shared_experts", minimum=0) or 0,
        num_layers=fields.integer("num_hidden_layers", maximum=MOST_LAYERS),
        attention=_attention(fields, rope_config),
        epsilon=fields.number("rms_norm_eps", 1e-6),
        tied=fields.flag("tie_word_embeddings", False),
        num_experts=experts,
        top_k=fields.integer("num_experts_per_tok", maximum=experts * kept // groups),
        scale=fields.number("routed_scaling_factor", 1.0),
        groups=groups,
        groups_kept=kept,
        dense_first=fields.integer("first_k_dense_replace", 0, minimum=0),
        sparse_step=fields.integer("moe_layer_freq", 1),
        max_position=max_position,
        rope=rope_config,
    )
    fields.done()
    return config


def _groups(fields: Fields, experts: int) -> tuple[int, int]:
    """Returns the number of expert groups, and how many of them a token may use. (1, 1) means no limit."""
    fields.only("topk_method", "greedy", "group_limited_greedy")
    groups, kept = fields.maybe_integer("n_group"), fields.maybe_integer("topk_group")
    if fields.raw("topk_method", "greedy") == "greedy":
        return 1, 1
    if groups is None or kept is None or experts % groups or kept > groups:
        raise CheckpointError(
            f"config.json: n_group, topk_group: got {groups}, {kept}; allowed: a divisor of {experts} "
            "experts, and at most as many groups"
        )
    return groups, kept


def _attention(fields: Fields, rope_config: rope.RopeConfig) -> LatentSizes:
    nope_width = fields.integer("qk_nope_head_dim")
    rope_width = rope.rotary_width("qk_rope_head_dim", fields.integer("qk_rope_head_dim"))
    stretch = 1.0
    if rope_config.mscale_all_dim:
        stretch = rope.mscale(rope_config.factor, rope_config.mscale_all_dim)
    return LatentSizes(
        hidden=fields.integer("hidden_size"),
        heads=fields.integer("num_attention_heads"),
        query_rank=fields.maybe_integer("q_lora_rank"),
        kv_rank=fields.integer("kv_lora_rank"),
        nope_width=nope_width,
        rope_width=rope_width,
        value=fields.integer("v_head_dim"),
        bias=fields.flag("attention_bias", False),
        scale=(nope_width + rope_width) ** -0.5 * stretch * stretch,
    )


def expert_names(config: Config, layer: int) -> ExpertNames:
    """Returns the tensor names of a layer's routed experts."""
    prefix = f"model.layers.{layer}.mlp.experts"
    return ExpertNames(prefix, config.hidden_size, config.expert_width, config.num_experts)


def blocks(config: Config, loader: Loader) -> tuple[DecoderBlock, ...]:
    """Loads every layer without its routed experts."""
    spec = config.spec
    table = loader.rope_table(config.rope, config.attention.rope_width, spec.max_position)
    return tuple(
        _block(config, layer in spec.moe_layers, loader, table, f"model.layers.{layer}")
        for layer in range(config.num_layers)
    )


def _block(config: Config, sparse: bool, loader: Loader, table: rope.RopeTable, name: str) -> DecoderBlock:
    hidden = config.hidden_size
    return DecoderBlock(
        kernels=loader.kernels,
        epsilon=config.epsilon,
        input_norm=loader.exact(f"{name}.input_layernorm.weight", hidden),
        attention_part=latent_attention(loader, f"{name}.self_attn", config.attention, table),
        post_norm=loader.exact(f"{name}.post_attention_layernorm.weight", hidden),
        router=_router(config, loader, f"{name}.mlp.gate.weight") if sparse else None,
        dense_part=_dense(config, sparse, loader, f"{name}.mlp"),
    )


def _router(config: Config, loader: Loader, name: str) -> TopKRouter:
    return TopKRouter(
        kernels=loader.kernels,
        weight=loader.exact(name, config.num_experts, config.hidden_size),
        top_k=config.top_k,
        normalise=False,
        scale=config.scale,
        groups=config.groups,
        groups_kept=config.groups_kept,
    )


def _dense(config: Config, sparse: bool, loader: Loader, name: str) -> GatedMLP | None:
    """Loads the dense MLP of a dense layer, or the shared experts of a sparse layer as one wide MLP."""
    if not sparse:
        return loader.mlp(name, config.hidden_size, config.dense_width)
    if not config.shared_experts:
        return None
    width = config.expert_width * config.shared_experts
    return loader.mlp(f"{name}.shared_experts", config.hidden_size, width)
