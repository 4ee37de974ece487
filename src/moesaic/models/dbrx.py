"""DBRX: sixteen experts, four a token, and norms that subtract the mean of a row (LayerNorm).

Mosaic Research, Introducing DBRX, 2024. An expert's down projection lies in columns in the files.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from moesaic.core.errors import CheckpointError
from moesaic.core.experts import DOWN_COLUMNS
from moesaic.kernels.gating import Gating
from moesaic.models import rope
from moesaic.models.config import MOST_LAYERS, Fields
from moesaic.models.gates import load_gate
from moesaic.models.known_keys import list_without_effect
from moesaic.models.layer_norm import Centring, LayerNormBlock
from moesaic.models.layers import Projection
from moesaic.models.loader import ExpertNames, Heads, Loader, columns_of
from moesaic.models.spec import KVLayout, ModelSpec
from moesaic.models.whole_norm import WholeNormAttention

UNUSED_TENSORS = (r".*\.rotary_emb\.inv_freq",)
"""Tensors of some checkpoints that are not needed."""
EPSILON = 1e-5
"""The epsilon of all norms. It is in no config.json."""
THETA = 10000.0
TRAINED = (
    *list_without_effect("dbrx"),
    *("model_type", "hidden_size", "tie_word_embeddings", "attn_pdrop", "moe_jitter_eps"),
)
TRAINED += ("moe_loss_weight", "uniform_expert_assignment")
"""Keys of attn_config and ffn_config that are read elsewhere, or that only training uses."""


@dataclass(frozen=True)
class Config:
    """config.json of a dbrx checkpoint."""

    vocab_size: int
    hidden_size: int
    expert_width: int
    num_layers: int
    heads: Heads
    clip: float | None
    """Greatest absolute value of a query, key or value."""
    num_experts: int
    gating: Gating
    max_position: int
    rope: rope.RopeConfig
    has_tied_embeddings: bool = False
    epsilon: float = EPSILON
    layer_norm: bool = True

    @property
    def spec(self) -> ModelSpec:
        return ModelSpec(
            model_type="dbrx",
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            moe_layers=tuple(range(self.num_layers)),
            num_experts=self.num_experts,
            top_k=self.gating.top_k,
            expert_width=self.expert_width,
            max_position=max(self.max_position, self.rope.reach),
            heads=self.heads.query,
            kv=KVLayout(self.heads.key, self.heads.width, self.heads.width),
            sliding_windows=(None,) * self.num_layers,
        )


def parse(raw: dict[str, Any]) -> Config:
    """Parses config.json. Raises CheckpointError for any key that is not understood."""
    fields = Fields(raw)
    fields.require_value("model_type", "dbrx")
    fields.require_value("tie_word_embeddings", False)
    attention = fields.child("attn_config") or Fields({}, "attn_config.")
    hidden, query = fields.integer("d_model", 2048), fields.integer("n_heads", 16)
    key = attention.integer("kv_n_heads", 1)
    fields.require_value("num_key_value_heads", key, reason="as attn_config.kv_n_heads")
    if query % key or hidden % query:
        raise CheckpointError(
            f"config.json: n_heads: got {query}; allowed: a divisor of d_model {hidden}, and a multiple of "
            f"attn_config.kv_n_heads {key}"
        )
    clip = None if attention.raw("clip_qkv", None) is None else attention.number_above("clip_qkv", 0.0)
    max_position = fields.integer("max_seq_len", 2048)
    theta = attention.maybe_number("rope_theta", minimum=1.0)
    attention.ignore(*TRAINED)
    attention.refuse_unread()
    rope_config = rope.read(fields, max_position, theta or THETA)
    if theta is not None and rope_config.theta != theta:
        raise CheckpointError(
            f"config.json: rope_parameters.rope_theta: got {rope_config.theta:g}; allowed: {theta:g}, as in "
            "attn_config"
        )
    config = _with_experts(
        fields,
        Config(
            vocab_size=fields.integer("vocab_size", 32000),
            hidden_size=hidden,
            expert_width=0,
            num_layers=fields.integer("n_layers", 24, maximum=MOST_LAYERS),
            heads=Heads(hidden, query, key, rope.rotary_width("d_model / n_heads", hidden // query)),
            clip=clip,
            num_experts=0,
            gating=Gating(1),
            max_position=max_position,
            rope=rope_config,
        ),
    )
    fields.refuse_unread()
    return config


def _with_experts(fields: Fields, config: Config) -> Config:
    """`config` with what ffn_config says."""
    ffn = fields.child("ffn_config") or Fields({}, "ffn_config.")
    experts = ffn.integer("moe_num_experts", 4)
    ffn.require_value("ffn_act_fn", {"name": "silu"}, None)
    ffn.require_value("moe_normalize_expert_weights", 1.0, 1, None, reason="the sum of the weights, or none")
    normalise = ffn.raw("moe_normalize_expert_weights", 1.0) is not None
    top_k = ffn.integer("moe_top_k", 1, maximum=experts)
    width = ffn.integer("ffn_hidden_size", 3584)
    ffn.ignore(*TRAINED)
    ffn.refuse_unread()
    return replace(config, expert_width=width, num_experts=experts, gating=Gating(top_k, normalise=normalise))


def expert_names(config: Config, layer: int) -> ExpertNames:
    """Returns the tensor names of a layer's routed experts."""
    return ExpertNames(
        f"model.layers.{layer}.ffn.experts.mlp",
        config.hidden_size,
        config.expert_width,
        config.num_experts,
        gate_name="w1",
        up_name="v1",
        down_name="w2",
        form=DOWN_COLUMNS,
    )


def blocks(config: Config, loader: Loader) -> tuple[LayerNormBlock, ...]:
    """Loads every layer without its routed experts."""
    table = loader.rope_table(config.rope, config.heads.width, config.spec.max_position)
    centring = Centring.build(loader.kernels, config.hidden_size, loader.device)
    return tuple(_block(config, loader, table, centring, layer) for layer in range(config.num_layers))


def _block(
    config: Config, loader: Loader, table: rope.RopeTable, centring: Centring, layer: int
) -> LayerNormBlock:
    name, hidden = f"model.layers.{layer}", config.hidden_size
    gate = load_gate(loader, f"{name}.ffn.router.layer", config.gating, config.num_experts, hidden)
    return LayerNormBlock(
        kernels=loader.kernels,
        epsilon=config.epsilon,
        input_norm=loader.exact(f"{name}.norm_attn_norm.norm_1.weight", hidden),
        attention_part=_attention(config, loader, table, f"{name}.norm_attn_norm.attn"),
        post_norm=loader.exact(f"{name}.norm_attn_norm.norm_2.weight", hidden),
        router=gate,
        dense_part=None,
        centring=centring,
    )


def _attention(config: Config, loader: Loader, table: rope.RopeTable, name: str) -> WholeNormAttention:
    """Queries, keys and values of this rank's heads are rows of one matrix. Nothing is normalised."""
    sizes, hidden = config.heads, config.hidden_size
    query = columns_of(loader.shard.heads(sizes.query), sizes.width)
    key = columns_of(loader.shard.kv_heads(sizes.key), sizes.width)
    rows, keys = hidden + 2 * sizes.key * sizes.width, sizes.key * sizes.width

    def part(first: int, columns: slice) -> Projection:
        part_rows = slice(first + columns.start, first + columns.stop)
        return loader.input_projection(f"{name}.Wqkv", rows, hidden, part_rows)

    return WholeNormAttention(
        kernels=loader.kernels,
        rope=table,
        head_width=sizes.width,
        query=part(0, query),
        key=part(hidden, key),
        value=part(hidden + keys, key),
        out_proj=loader.output_projection(f"{name}.out_proj", hidden, hidden, query),
        # `part` has selected this rank's heads already.
        query_columns=slice(None),
        key_columns=slice(None),
        clip=config.clip,
    )
