"""gpt-oss: attention with sinks and windows by layer, experts with biases and a limited activation.

OpenAI, gpt-oss-120b & gpt-oss-20b model card, 2025.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from moesaic.core.errors import CheckpointError
from moesaic.core.experts import BIASED_ROWS, COLUMNS, Activation
from moesaic.kernels.gating import Gating
from moesaic.models import rope
from moesaic.models.block import DecoderBlock
from moesaic.models.config import MOST_LAYERS, Fields, shorten
from moesaic.models.gates import load_gate
from moesaic.models.gguf.model import METHOD
from moesaic.models.loader import ExpertNames, Heads, Loader, grouped_query_attention, read_heads
from moesaic.models.spec import KVLayout, ModelSpec

UNUSED_TENSORS = (r".*\.rotary_emb\.inv_freq",)
"""Tensors of some checkpoints that are not needed."""
SLIDING, FULL = "sliding_attention", "full_attention"
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
"""rope_scaling of a config that has none, as in transformers."""


@dataclass(frozen=True)
class Config:
    """config.json of a gpt_oss checkpoint."""

    vocab_size: int
    hidden_size: int
    expert_width: int
    num_layers: int
    heads: Heads
    epsilon: float
    has_tied_embeddings: bool
    num_experts: int
    gating: Gating
    activation: Activation
    windows: tuple[int | None, ...]
    """The window of each layer: how many tokens a token attends to. None means all."""
    max_position: int
    rope: rope.RopeConfig
    rows: bool
    """Whether experts are stored in rows: in MXFP4, or in a GGUF file."""

    @property
    def spec(self) -> ModelSpec:
        return ModelSpec(
            model_type="gpt_oss",
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
            sliding_windows=self.windows,
        )


def parse(raw: dict[str, Any]) -> Config:
    """Parses config.json. Raises CheckpointError for any key that is not understood."""
    has_scaling = raw.get("rope_parameters") is not None or raw.get("rope_scaling") is not None
    fields = Fields(
        {"head_dim": 64, "attention_bias": True} | raw | ({} if has_scaling else {"rope_scaling": YARN})
    )
    fields.require_value("model_type", "gpt_oss")
    fields.require_value("hidden_act", "silu")
    experts, max_position = (
        fields.integer("num_local_experts", 128),
        fields.integer("max_position_embeddings", 131072),
    )
    fields.require_value("num_experts", experts)
    top_k = fields.integer("num_experts_per_tok", 4, maximum=experts)
    fields.require_value("experts_per_token", top_k)
    layers, epsilon = (
        fields.integer("num_hidden_layers", 36, maximum=MOST_LAYERS),
        fields.number("rms_norm_eps", 1e-5),
    )
    config = Config(
        vocab_size=fields.integer("vocab_size", 201088),
        hidden_size=fields.integer("hidden_size", 2880),
        expert_width=fields.integer("intermediate_size", 2880),
        num_layers=layers,
        heads=replace(read_heads(fields, epsilon), sinks=True),
        epsilon=epsilon,
        has_tied_embeddings=fields.flag("tie_word_embeddings", False),
        num_experts=experts,
        gating=Gating(top_k, normalise=True, bias_target="products"),
        activation=Activation(
            alpha=fields.number_above("swiglu_alpha", 0.0, 1.702),
            up_offset=1.0,
            limit=fields.number_above("swiglu_limit", 0.0, 7.0),
        ),
        windows=_windows(fields, layers),
        max_position=max_position,
        rope=rope.read(fields, max_position, 150000.0),
        rows=_in_rows(raw),
    )
    fields.refuse_unread()
    return config


def _in_rows(raw: dict[str, Any]) -> bool:
    quantization = raw.get("quantization_config")
    return isinstance(quantization, dict) and quantization.get("quant_method") in ("mxfp4", METHOD)


def _windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """Returns each layer's window. Without `layer_types` the first and every second layer have one."""
    window, kinds = fields.integer("sliding_window", 128), fields.raw("layer_types", None)
    if kinds is None:
        kinds = [FULL if layer % 2 else SLIDING for layer in range(layers)]
    if (
        not isinstance(kinds, list)
        or len(kinds) != layers
        or not all(kind in (SLIDING, FULL) for kind in kinds)
    ):
        raise CheckpointError(
            f"config.json: layer_types: got {shorten(repr(kinds))}; allowed: a list of {layers} "
            f"of {SLIDING}, {FULL}"
        )
    return tuple(window if kind == SLIDING else None for kind in kinds)


def expert_names(config: Config, layer: int) -> ExpertNames:
    """Returns the tensor names of a layer's routed experts."""
    return ExpertNames(
        f"model.layers.{layer}.mlp.experts",
        config.hidden_size,
        config.expert_width,
        config.num_experts,
        form=BIASED_ROWS if config.rows else COLUMNS,
        activation=config.activation,
    )


def blocks(config: Config, loader: Loader) -> tuple[DecoderBlock, ...]:
    """Loads every layer without its routed experts."""
    table = loader.rope_table(config.rope, config.heads.width, config.spec.max_position)
    return tuple(_block(config, loader, table, layer) for layer in range(config.num_layers))


def _block(config: Config, loader: Loader, table: rope.RopeTable, layer: int) -> DecoderBlock:
    name, hidden, window = f"model.layers.{layer}", config.hidden_size, config.windows[layer]
    return DecoderBlock(
        kernels=loader.kernels,
        epsilon=config.epsilon,
        input_norm=loader.exact(f"{name}.input_layernorm.weight", hidden),
        attention_part=grouped_query_attention(loader, f"{name}.self_attn", config.heads, table, window),
        post_norm=loader.exact(f"{name}.post_attention_layernorm.weight", hidden),
        router=load_gate(loader, f"{name}.mlp.router", config.gating, config.num_experts, hidden),
        dense_part=None,
    )
