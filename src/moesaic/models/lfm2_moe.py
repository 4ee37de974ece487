"""LFM2-8B-A1B (lfm2_moe): gated short convolutions in most layers, grouped-query attention in the others.

Liquid AI, LFM2 technical report, 2025. The first layers are dense. The gate has sigmoids, and a bias that
only chooses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moesaic.core.errors import CheckpointError
from moesaic.kernels.gating import Gating
from moesaic.kernels.states import StateSizes
from moesaic.models import rope, short_convolution
from moesaic.models.block import DecoderBlock
from moesaic.models.config import MOST_LAYERS, Fields
from moesaic.models.gates import load_gate
from moesaic.models.layers import GroupedQueryAttention
from moesaic.models.loader import ExpertNames, Heads, Loader, columns_of, read_heads
from moesaic.models.qwen3_next import MOST_TAPS
from moesaic.models.spec import KVLayout, ModelSpec

UNUSED_TENSORS: tuple[str, ...] = ()
CONVOLUTION, FULL = "conv", "full_attention"
ADDED = 1e-6
"""What is added to the sum that divides the weights of the chosen experts."""
WORDS = "w1", "w3", "w2"
"""Names of a dense layer's gate, up and down projection."""


@dataclass(frozen=True)
class Config:
    """config.json of a lfm2_moe checkpoint."""

    vocab_size: int
    hidden_size: int
    dense_width: int
    expert_width: int
    num_layers: int
    heads: Heads
    taps: int
    """Rows that a convolution mixes, with the row itself."""
    convolutions: tuple[int, ...]
    """Layers with a convolution in place of attention."""
    epsilon: float
    has_tied_embeddings: bool
    num_experts: int
    gating: Gating
    has_correction: bool
    """Whether the gate has a bias that chooses."""
    dense_layers: int
    max_position: int
    rope: rope.RopeConfig

    @property
    def spec(self) -> ModelSpec:
        states = StateSizes.of_convolution(self.hidden_size, self.taps)
        return ModelSpec(
            model_type="lfm2_moe",
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            moe_layers=tuple(range(self.dense_layers, self.num_layers)),
            num_experts=self.num_experts,
            top_k=self.gating.top_k,
            expert_width=self.expert_width,
            max_position=max(self.max_position, self.rope.reach),
            heads=self.heads.query,
            kv=KVLayout(self.heads.key, self.heads.width, self.heads.width),
            sliding_windows=(None,) * self.num_layers,
            state_layers=self.convolutions,
            states=states if self.convolutions else None,
        )


def parse(raw: dict[str, Any]) -> Config:
    """Parses config.json. Raises CheckpointError for any key that is not understood."""
    fields = Fields(raw)
    fields.require_value("model_type", "lfm2_moe")
    fields.require_value("hidden_act", "silu")
    fields.require_value("conv_bias", False)
    layers = fields.integer("num_hidden_layers", 32, maximum=MOST_LAYERS)
    experts, epsilon = fields.integer("num_experts", 32), fields.number("norm_eps", 1e-5)
    max_position = fields.integer("max_position_embeddings", 128000)
    kinds = fields.words("layer_types", layers, (FULL, CONVOLUTION), [])
    gating = Gating(
        top_k=fields.integer("num_experts_per_tok", 4, maximum=experts),
        normalise=fields.flag("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", 1.0),
        scores="sigmoid",
        sum_epsilon=ADDED,
    )
    has_tied_embeddings = fields.flag("tie_word_embeddings", True)
    config = Config(
        vocab_size=fields.integer("vocab_size", 65536),
        hidden_size=fields.integer("hidden_size", 2048),
        dense_width=fields.integer("intermediate_size", 7168),
        expert_width=fields.integer("moe_intermediate_size", 1792),
        num_layers=layers,
        heads=read_heads(fields, epsilon, has_head_norms=True),
        taps=fields.integer("conv_L_cache", 3, minimum=2, maximum=MOST_TAPS),
        convolutions=tuple(layer for layer, kind in enumerate(kinds) if kind == CONVOLUTION),
        epsilon=epsilon,
        has_tied_embeddings=fields.flag("tie_embedding", has_tied_embeddings),
        num_experts=experts,
        gating=gating,
        has_correction=fields.flag("use_expert_bias", True),
        dense_layers=fields.integer("num_dense_layers", 2, minimum=0, maximum=layers),
        max_position=max_position,
        rope=rope.read(fields, max_position, 1e6),
    )
    fields.refuse_unread()
    if len(config.convolutions) == layers:
        raise CheckpointError(
            f"config.json: layer_types: got {CONVOLUTION} alone; allowed: {FULL} in a layer"
        )
    return config


def expert_names(config: Config, layer: int) -> ExpertNames:
    """Returns the tensor names of a layer's routed experts."""
    prefix = f"model.layers.{layer}.feed_forward.experts"
    return ExpertNames(prefix, config.hidden_size, config.expert_width, config.num_experts, "w1", "w3", "w2")


def blocks(config: Config, loader: Loader) -> tuple[DecoderBlock, ...]:
    """Loads every layer without its routed experts."""
    table = loader.rope_table(config.rope, config.heads.width, config.spec.max_position)
    return tuple(_block(config, loader, table, layer) for layer in range(config.num_layers))


def _block(config: Config, loader: Loader, table: rope.RopeTable, layer: int) -> DecoderBlock:
    name, hidden = f"model.layers.{layer}", config.hidden_size
    sparse = layer >= config.dense_layers
    if layer in config.convolutions:
        part: Any = short_convolution.load(loader, f"{name}.conv", hidden, config.taps)
    else:
        part = _attention(loader, f"{name}.self_attn", config.heads, table)
    gate, bias = f"{name}.feed_forward.gate", f"{name}.feed_forward.expert_bias"
    correction = bias if config.has_correction else None
    sizes = config.num_experts, hidden
    return DecoderBlock(
        kernels=loader.kernels,
        epsilon=config.epsilon,
        input_norm=loader.exact(f"{name}.operator_norm.weight", hidden),
        attention_part=part,
        post_norm=loader.exact(f"{name}.ffn_norm.weight", hidden),
        router=load_gate(loader, gate, config.gating, *sizes, correction) if sparse else None,
        dense_part=None if sparse else loader.mlp(f"{name}.feed_forward", hidden, config.dense_width, WORDS),
    )


def _attention(loader: Loader, name: str, sizes: Heads, table: rope.RopeTable) -> GroupedQueryAttention:
    """Loads what `loader.grouped_query_attention` loads, by this family's names."""
    hidden, width = sizes.hidden, sizes.width
    columns = columns_of(loader.shard.heads(sizes.query), width)
    key_columns = columns_of(loader.shard.kv_heads(sizes.key), width)
    return GroupedQueryAttention(
        kernels=loader.kernels,
        rope=table,
        head_width=width,
        query=loader.input_projection(f"{name}.q_proj", sizes.query * width, hidden, columns),
        key=loader.input_projection(f"{name}.k_proj", sizes.key * width, hidden, key_columns),
        value=loader.input_projection(f"{name}.v_proj", sizes.key * width, hidden, key_columns),
        out_proj=loader.output_projection(f"{name}.out_proj", hidden, sizes.query * width, columns),
        query_norm=loader.exact(f"{name}.q_layernorm.weight", width),
        key_norm=loader.exact(f"{name}.k_layernorm.weight", width),
        epsilon=sizes.epsilon,
    )
