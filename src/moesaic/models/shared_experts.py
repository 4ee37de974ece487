"""Models whose layers have a dense MLP, or routed experts with or without shared ones beside them.

Their files read config.json. What they read is one record, and this file loads the blocks that it describes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from moesaic.core.experts import ROWS
from moesaic.kernels.gating import Gating
from moesaic.models.block import Attention, DecoderBlock
from moesaic.models.config import MOST_LAYERS, Fields
from moesaic.models.gates import load_gate
from moesaic.models.layers import BiasedMLP, GatedMLP, TopKRouter
from moesaic.models.loader import ExpertNames, Loader
from moesaic.models.prediction import PredictionLayer
from moesaic.models.rope import RopeConfig, RopeTable
from moesaic.models.spec import NO_MULTIPLIERS, KVLayout, ModelSpec, Multipliers

UNUSED_TENSORS = (r".*\.rotary_emb\.inv_freq",)
"""Tensors of some checkpoints that are not needed."""
DENSE, SPARSE = "dense", "sparse"


class AttentionSizes(Protocol):
    """The dimensions of the attention, and how a layer's attention is loaded."""

    @property
    def heads(self) -> int: ...

    @property
    def kv(self) -> KVLayout: ...

    @property
    def rotated_width(self) -> int:
        """Numbers of a head that are rotated."""
        ...

    def load(self, loader: Loader, name: str, rope: RopeTable, window: int | None) -> Attention:
        """Loads the tensors under `name`. window: that of the layer."""
        ...


@dataclass(frozen=True)
class Keys:
    """Keys of config.json that families call differently."""

    experts: str = "n_routed_experts"
    shared_experts: str | None = "n_shared_experts"
    """None: the family has no shared experts."""
    expert_width: str = "moe_intermediate_size"


@dataclass(frozen=True)
class Names:
    """What the parts of a layer are called after "model.layers.N.". Of several names, files have one."""

    gates: tuple[str, ...] = ("mlp.gate",)
    corrections: tuple[str, ...] = ("mlp.gate.e_score_correction_bias",)
    """Names of the bias that only chooses; empty if the gate has none."""
    correction_axes: tuple[int, ...] = ()
    """Axes of that bias in front of the one of the experts."""
    shared_experts: tuple[str, ...] = ("mlp.shared_experts",)
    experts: str = "mlp.experts"
    words: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Names of an expert's gate, up and down projection."""
    form: str = ROWS
    """How the files have an expert, as `ExpertLayout.form` says."""


@dataclass(frozen=True)
class Config:
    """config.json of a checkpoint of these families."""

    model_type: str
    vocab_size: int
    hidden_size: int
    dense_width: int
    expert_width: int
    shared_experts: int
    num_layers: int
    attention: AttentionSizes
    epsilon: float
    has_tied_embeddings: bool
    num_experts: int
    gating: Gating
    moe_layers: tuple[int, ...]
    extra_layers: int
    max_position: int
    rope: RopeConfig
    names: Names = Names()
    windows: tuple[int | None, ...] = ()
    """The window of each layer; empty if no layer has one."""
    multipliers: Multipliers = NO_MULTIPLIERS
    local_rope: RopeConfig | None = None
    """The angles of layers with a window. None: they have those of `rope`."""
    fused_shared_width: int = 0
    """Width of a shared expert whose gate and up are one tensor (Granite); 0: there is none."""
    has_biases: bool = False
    """Whether dense MLPs, shared experts and the LM head have biases. Routed experts have none."""

    @property
    def spec(self) -> ModelSpec:
        return ModelSpec(
            model_type=self.model_type,
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            moe_layers=self.moe_layers,
            num_experts=self.num_experts,
            top_k=self.gating.top_k,
            expert_width=self.expert_width,
            max_position=max(self.max_position, self.rope.reach),
            heads=self.attention.heads,
            kv=self.attention.kv,
            sliding_windows=self.windows or (None,) * self.num_layers,
            extra_layers=self.extra_layers,
        )


def read(
    fields: Fields,
    model_type: str,
    attention: AttentionSizes,
    rope: RopeConfig,
    gating: Gating,
    moe_layers: tuple[int, ...],
    names: Names = Names(),
    windows: tuple[int | None, ...] = (),
    keys: Keys = Keys(),
) -> Config:
    """Reads the keys that these families have in common, and refuses those that were not read."""
    fields.require_value("hidden_act", "silu")
    config = Config(
        model_type=model_type,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        dense_width=fields.integer("intermediate_size"),
        expert_width=fields.integer(keys.expert_width),
        shared_experts=(fields.maybe_integer(keys.shared_experts, minimum=0) or 0)
        if keys.shared_experts
        else 0,
        num_layers=num_layers(fields),
        attention=attention,
        epsilon=fields.number("rms_norm_eps"),
        has_tied_embeddings=fields.flag("tie_word_embeddings", False),
        num_experts=fields.integer(keys.experts),
        gating=gating,
        moe_layers=moe_layers,
        extra_layers=fields.integer("num_nextn_predict_layers", 0, minimum=0, maximum=MOST_LAYERS),
        max_position=fields.integer("max_position_embeddings"),
        rope=rope,
        names=names,
        windows=windows,
    )
    fields.refuse_unread()
    return config


def num_layers(fields: Fields) -> int:
    """Returns the number of layers that are loaded."""
    return fields.integer("num_hidden_layers", maximum=MOST_LAYERS)


def layers_after_dense(fields: Fields) -> tuple[int, ...]:
    """Returns the layers with routed experts: all but the first ones, which first_k_dense_replace counts."""
    return tuple(range(fields.integer("first_k_dense_replace", minimum=0), num_layers(fields)))


def layers_by_type(fields: Fields) -> tuple[int, ...]:
    """Returns the layers with routed experts: those that mlp_layer_types names, else all but the first."""
    layers = num_layers(fields)
    kinds = fields.words("mlp_layer_types", layers, (DENSE, SPARSE), [DENSE] + [SPARSE] * (layers - 1))
    first = kinds.index(SPARSE) if SPARSE in kinds else layers
    fields.require_value(
        "first_k_dense_replace", first, reason="as mlp_layer_types says, or else its default"
    )
    return tuple(layer for layer, kind in enumerate(kinds) if kind == SPARSE)


def expert_names(config: Config, layer: int) -> ExpertNames:
    """Returns the tensor names of a layer's routed experts."""
    prefix = f"model.layers.{layer}.{config.names.experts}"
    names, sizes = config.names, (config.hidden_size, config.expert_width, config.num_experts)
    return ExpertNames(prefix, *sizes, *names.words, form=names.form)


def blocks(config: Config, loader: Loader) -> tuple[DecoderBlock, ...]:
    """Loads every layer without its routed experts."""
    spec = config.spec
    table = loader.rope_table(config.rope, config.attention.rotated_width, spec.max_position)
    local = table
    if config.local_rope is not None and config.local_rope != config.rope:
        local = loader.rope_table(config.local_rope, config.attention.rotated_width, spec.max_position)
    return tuple(
        _block(config, loader, table if window is None else local, layer, layer in spec.moe_layers, window)
        for layer, window in enumerate(spec.sliding_windows)
    )


def prediction_layer(config: Config, loader: Loader) -> PredictionLayer:
    """Loads the first layer after the others, which predicts the token after the next one. It has routed
    experts."""
    name, hidden, spec = f"model.layers.{config.num_layers}", config.hidden_size, config.spec
    table = loader.rope_table(config.rope, config.attention.rotated_width, spec.max_position)
    return PredictionLayer(
        layer=config.num_layers,
        kernels=loader.kernels,
        epsilon=config.epsilon,
        block=_block(config, loader, table, config.num_layers, True, None),
        token_norm=loader.exact(f"{name}.enorm.weight", hidden),
        hidden_norm=loader.exact(f"{name}.hnorm.weight", hidden),
        projection=loader.matrix(f"{name}.eh_proj", hidden, 2 * hidden),
        final_norm=loader.exact(f"{name}.shared_head.norm.weight", hidden),
    )


def _block(
    config: Config, loader: Loader, table: RopeTable, layer: int, sparse: bool, window: int | None
) -> DecoderBlock:
    name, hidden = f"model.layers.{layer}", config.hidden_size
    return DecoderBlock(
        kernels=loader.kernels,
        epsilon=config.epsilon,
        input_norm=loader.exact(f"{name}.input_layernorm.weight", hidden),
        attention_part=config.attention.load(loader, f"{name}.self_attn", table, window),
        post_norm=loader.exact(f"{name}.post_attention_layernorm.weight", hidden),
        router=_router(config, loader, name) if sparse else None,
        dense_part=_dense(config, sparse, loader, name),
    )


def _router(config: Config, loader: Loader, name: str) -> TopKRouter:
    names, sizes = config.names, (config.num_experts, config.hidden_size)
    gate = loader.find_name(name, names.gates, ".weight")
    correction = loader.find_name(name, names.corrections) if names.corrections else None
    return load_gate(loader, gate, config.gating, *sizes, correction, names.correction_axes)


def _dense(config: Config, sparse: bool, loader: Loader, name: str) -> GatedMLP | BiasedMLP | None:
    """Loads the dense MLP of a dense layer, or the shared experts of a sparse layer as one wide MLP."""
    load = loader.mlp_with_biases if config.has_biases else loader.mlp
    if not sparse:
        return load(f"{name}.mlp", config.hidden_size, config.dense_width)
    if config.fused_shared_width:
        return loader.read_fused_mlp(f"{name}.shared_mlp", config.hidden_size, config.fused_shared_width)
    if not config.shared_experts:
        return None
    shared_name = loader.find_name(name, config.names.shared_experts, ".gate_proj.weight")
    return load(shared_name, config.hidden_size, config.expert_width * config.shared_experts)
