"""Qwen3-Next and Qwen3.5: gated DeltaNet in most layers, gated attention in the others, a shared expert.

The text model of Qwen3.5 (qwen3_5_moe_text) differs in the names of its tensors and in a few keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moesaic.core.errors import CheckpointError
from moesaic.kernels.gating import Gating
from moesaic.kernels.states import StateSizes
from moesaic.models import delta_net, rope
from moesaic.models.block import DecoderBlock
from moesaic.models.config import MOST_LAYERS, Fields
from moesaic.models.gated_attention import gated_attention
from moesaic.models.gates import load_gate
from moesaic.models.loader import ExpertNames, Heads, Loader, read_heads
from moesaic.models.qwen import dense_part, sparse_layers
from moesaic.models.spec import KVLayout, ModelSpec, Multipliers

UNUSED_TENSORS = (r".*\.rotary_emb\.inv_freq", r"mtp\..*")
"""Tensors that are not needed: mtp predicts several tokens at once."""
KINDS = ("qwen3_next", "qwen3_5_moe_text")
"""The values of model_type, the older one first."""
LINEAR, FULL = "linear_attention", "full_attention"
PARTIAL = 0.25
"""Default fraction of a head that is rotated."""
ONE_ADDED = Multipliers(norm_offset=1.0)
MOST_TAPS = 8
"""Largest width of the convolution."""


@dataclass(frozen=True)
class Config:
    """config.json of a qwen3_next or qwen3_5_moe_text checkpoint."""

    model_type: str
    vocab_size: int
    hidden_size: int
    dense_width: int
    expert_width: int
    shared_width: int
    num_layers: int
    heads: Heads
    states: StateSizes
    linear_layers: tuple[int, ...]
    epsilon: float
    has_tied_embeddings: bool
    num_experts: int
    top_k: int
    normalise: bool
    sparse_step: int
    dense_layers: tuple[int, ...]
    max_position: int
    rope: rope.RopeConfig
    extra_layers: int
    """Layers of GGUF files that are not loaded, after the others. They predict several tokens at once."""
    multipliers: Multipliers = ONE_ADDED

    @property
    def spec(self) -> ModelSpec:
        return ModelSpec(
            model_type=self.model_type,
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
            sliding_windows=(None,) * self.num_layers,
            state_layers=self.linear_layers,
            states=self.states if self.linear_layers else None,
            extra_layers=self.extra_layers,
        )


def parse(raw: dict[str, Any]) -> Config:
    """Parses config.json. Raises CheckpointError for any key that is not understood."""
    fields = Fields(_text_angles(raw))
    fields.require_value("model_type", *KINDS)
    fields.require_value("hidden_act", "silu")
    fields.require_value("attn_output_gate", True)
    fields.require_value("use_sliding_window", False)
    # transformers has no such key: linear attention's output is gated by silu, which makers also call swish.
    fields.require_value("output_gate_type", "swish", "silu", None)
    kind, epsilon = raw.get("model_type", KINDS[0]), fields.number("rms_norm_eps", 1e-6)
    newer = kind != KINDS[0]
    layers = fields.integer("num_hidden_layers", maximum=MOST_LAYERS)
    experts = fields.integer("num_experts", 256 if newer else 512)
    max_position = fields.integer("max_position_embeddings", 32768)
    partial = fields.number_above("partial_rotary_factor", 0.0, PARTIAL)
    if newer:
        fields.require_value("norm_topk_prob", True)
    config = Config(
        model_type=kind,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        dense_width=fields.integer("intermediate_size", 5632),
        expert_width=fields.integer("moe_intermediate_size", 512),
        shared_width=fields.integer("shared_expert_intermediate_size", 512),
        num_layers=layers,
        heads=read_heads(fields, has_head_norms=True, epsilon=epsilon),
        states=_states(fields),
        linear_layers=_linear_layers(fields, layers),
        epsilon=epsilon,
        has_tied_embeddings=fields.flag("tie_word_embeddings", False),
        num_experts=experts,
        top_k=fields.integer("num_experts_per_tok", 8 if newer else 10, maximum=experts),
        normalise=True if newer else fields.flag("norm_topk_prob", True),
        sparse_step=fields.integer("decoder_sparse_step", 1),
        dense_layers=fields.integers("mlp_only_layers"),
        max_position=max_position,
        rope=rope.read(fields, max_position, 10000.0, partial),
        extra_layers=fields.integer("num_nextn_predict_layers", 0, minimum=0, maximum=MOST_LAYERS),
    )
    fields.refuse_unread()
    config.rope.count_rotated(config.heads.width)
    return config


def _text_angles(raw: dict[str, Any]) -> dict[str, Any]:
    """Leaves out the keys that divide angles among time, height and width. All are equal for text."""
    config = dict(raw)
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(config.get(name), dict):
            config[name] = {
                key: value
                for key, value in config[name].items()
                if key not in ("mrope_section", "mrope_interleaved")
            }
    return config


def _states(fields: Fields) -> StateSizes:
    sizes = StateSizes(
        key_heads=fields.integer("linear_num_key_heads", 16),
        value_heads=fields.integer("linear_num_value_heads", 32),
        key_width=fields.integer("linear_key_head_dim", 128),
        value_width=fields.integer("linear_value_head_dim", 128),
        taps=fields.integer("linear_conv_kernel_dim", 4, minimum=2, maximum=MOST_TAPS),
    )
    if sizes.value_heads % sizes.key_heads:
        raise CheckpointError(
            f"config.json: linear_num_value_heads: got {sizes.value_heads}; allowed: a multiple of "
            f"{sizes.key_heads} key heads"
        )
    for name, width in ("linear_key_head_dim", sizes.key_width), ("linear_value_head_dim", sizes.value_width):
        if width % 8 or width > 256:
            raise CheckpointError(f"config.json: {name}: got {width}; allowed: a multiple of 8 up to 256")
    return sizes


def _linear_layers(fields: Fields, layers: int) -> tuple[int, ...]:
    step = fields.integer("full_attention_interval", 4)
    usual = [FULL if (layer + 1) % step == 0 else LINEAR for layer in range(layers)]
    kinds = fields.words("layer_types", layers, (FULL, LINEAR), usual)
    return tuple(layer for layer, kind in enumerate(kinds) if kind == LINEAR)


def expert_names(config: Config, layer: int) -> ExpertNames:
    """Returns the tensor names of a layer's routed experts."""
    prefix = f"model.layers.{layer}.mlp.experts"
    return ExpertNames(prefix, config.hidden_size, config.expert_width, config.num_experts)


def blocks(config: Config, loader: Loader) -> tuple[DecoderBlock, ...]:
    """Loads every layer without its routed experts."""
    width = config.rope.count_rotated(config.heads.width)
    table = loader.rope_table(config.rope, width, config.spec.max_position)
    return tuple(_block(config, loader, table, layer) for layer in range(config.num_layers))


def _block(config: Config, loader: Loader, table: rope.RopeTable, layer: int) -> DecoderBlock:
    name, hidden = f"model.layers.{layer}", config.hidden_size
    sparse = layer in config.spec.moe_layers
    gating = Gating(config.top_k, config.normalise)
    if layer in config.linear_layers:
        part: Any = delta_net.load(loader, f"{name}.linear_attn", config.states, hidden, config.epsilon)
    else:
        part = gated_attention(loader, f"{name}.self_attn", config.heads, table)
    return DecoderBlock(
        kernels=loader.kernels,
        epsilon=config.epsilon,
        input_norm=1.0 + loader.exact(f"{name}.input_layernorm.weight", hidden),
        attention_part=part,
        post_norm=1.0 + loader.exact(f"{name}.post_attention_layernorm.weight", hidden),
        router=load_gate(loader, f"{name}.mlp.gate", gating, config.num_experts, hidden) if sparse else None,
        dense_part=dense_part(
            loader, f"{name}.mlp", hidden, config.dense_width, config.shared_width if sparse else None
        ),
    )
