"""Models whose layers have a dense MLP, or routed experts beside shared ones: the DeepSeek and GLM families.

Their files read config.json. What they read is one record, and this file loads the blocks that it describes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from moesaic.kernels.gating import Gating
from moesaic.models.block import Attention, DecoderBlock
from moesaic.models.config import MOST_LAYERS, Fields
from moesaic.models.gates import load_gate
from moesaic.models.layers import GatedMLP
from moesaic.models.loader import ExpertNames, Loader
from moesaic.models.rope import RopeConfig, RopeTable
from moesaic.models.spec import KVLayout, ModelSpec

UNUSED = (r".*\.rotary_emb\.inv_freq",)
"""Tensors of some checkpoints that are not needed."""


class AttentionSizes(Protocol):
    """The dimensions of the attention, and how a layer's attention is loaded."""

    @property
    def heads(self) -> int: ...

    @property
    def kv(self) -> KVLayout: ...

    @property
    def rotated(self) -> int:
        """Numbers of a head that are rotated."""
        ...

    def load(self, loader: Loader, name: str, rope: RopeTable) -> Attention:
        """Loads the tensors under `name`."""
        ...


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
    tied: bool
    num_experts: int
    gating: Gating
    corrected: bool
    """Whether the gate has a bias that only chooses."""
    moe_layers: tuple[int, ...]
    extra_layers: int
    max_position: int
    rope: RopeConfig

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
            sliding_windows=(None,) * self.num_layers,
            extra_layers=self.extra_layers,
        )


def read(
    fields: Fields,
    model_type: str,
    attention: AttentionSizes,
    rope: RopeConfig,
    gating: Gating,
    moe_layers: tuple[int, ...],
    corrected: bool = True,
) -> Config:
    """Reads the keys that these families have in common, and refuses those that were not read."""
    fields.only("hidden_act", "silu")
    config = Config(
        model_type=model_type,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        dense_width=fields.integer("intermediate_size"),
        expert_width=fields.integer("moe_intermediate_size"),
        shared_experts=fields.maybe_integer("n_shared_experts", minimum=0) or 0,
        num_layers=num_layers(fields),
        attention=attention,
        epsilon=fields.number("rms_norm_eps"),
        tied=fields.flag("tie_word_embeddings", False),
        num_experts=fields.integer("n_routed_experts"),
        gating=gating,
        corrected=corrected,
        moe_layers=moe_layers,
        extra_layers=fields.integer("num_nextn_predict_layers", 0, minimum=0, maximum=MOST_LAYERS),
        max_position=fields.integer("max_position_embeddings"),
        rope=rope,
    )
    fields.done()
    return config


def num_layers(fields: Fields) -> int:
    """Returns the number of layers that are loaded."""
    return fields.integer("num_hidden_layers", maximum=MOST_LAYERS)


def layers_after_dense(fields: Fields) -> tuple[int, ...]:
    """Returns the layers with routed experts: all but the first ones, which first_k_dense_replace counts."""
    return tuple(range(fields.integer("first_k_dense_replace", minimum=0), num_layers(fields)))


def expert_names(config: Config, layer: int) -> ExpertNames:
    """Returns the tensor names of a layer's routed experts."""
    prefix = f"model.layers.{layer}.mlp.experts"
    return ExpertNames(prefix, config.hidden_size, config.expert_width, config.num_experts)


def blocks(config: Config, loader: Loader) -> tuple[DecoderBlock, ...]:
    """Loads every layer without its routed experts."""
    table = loader.rope_table(config.rope, config.attention.rotated, config.spec.max_position)
    return tuple(
        _block(config, layer in config.moe_layers, loader, table, f"model.layers.{layer}")
        for layer in range(config.num_layers)
    )


def _block(config: Config, sparse: bool, loader: Loader, table: RopeTable, name: str) -> DecoderBlock:
    hidden, experts = config.hidden_size, config.num_experts
    gate = f"{name}.mlp.gate"
    return DecoderBlock(
        kernels=loader.kernels,
        epsilon=config.epsilon,
        input_norm=loader.exact(f"{name}.input_layernorm.weight", hidden),
        attention_part=config.attention.load(loader, f"{name}.self_attn", table),
        post_norm=loader.exact(f"{name}.post_attention_layernorm.weight", hidden),
        router=load_gate(loader, gate, config.gating, experts, hidden, config.corrected) if sparse else None,
        dense_part=_dense(config, sparse, loader, f"{name}.mlp"),
    )


def _dense(config: Config, sparse: bool, loader: Loader, name: str) -> GatedMLP | None:
    """Loads the dense MLP of a dense layer, or the shared experts of a sparse layer as one wide MLP."""
    if not sparse:
        return loader.mlp(name, config.hidden_size, config.dense_width)
    if not config.shared_experts:
        return None
    width = config.expert_width * config.shared_experts
    return loader.mlp(f"{name}.shared_experts", config.hidden_size, width)
