"""Loads the layer that predicts the token after the next one, beside the rest of a model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from moesaic.core.errors import ConfigError
from moesaic.models.families import MODELS, Config, ModelFile
from moesaic.models.gguf.header import is_gguf
from moesaic.models.loader import Loader
from moesaic.models.model import Model
from moesaic.models.routed_experts import experts
from moesaic.models.spec import ModelSpec

LOADS = "prediction_layer"
"""The function of a model file that loads this layer, in families that have one."""


def check(path: Path, file: ModelFile, spec: ModelSpec) -> None:
    """Raises ConfigError for a model without such a layer."""
    if hasattr(file, LOADS) and spec.extra_layers and not is_gguf(path):
        return
    families = ", ".join(name for name, one in MODELS.items() if hasattr(one, LOADS))
    allowed = f"ngram; mtp for safetensors of {families} whose num_nextn_predict_layers is not 0"
    raise ConfigError.field("--speculative-config: method", "mtp", allowed)


def tensor_patterns(spec: ModelSpec) -> list[str]:
    """Patterns of the tensors of layers after the others. Those that are not read are no error."""
    first = spec.num_layers
    extra = range(first, first + spec.extra_layers)
    return [rf"(model\.layers|blk)\.{layer}\..*" for layer in extra]


def routed_layers(file: ModelFile, spec: ModelSpec) -> tuple[int, ...]:
    """The layers of the files with routed experts that can be loaded: also that layer's."""
    extra = (spec.num_layers,) if hasattr(file, LOADS) and spec.extra_layers else ()
    return (*spec.moe_layers, *extra)


def add_prediction_layer(
    model: Model, file: ModelFile, config: Config, loader: Loader, with_experts: bool
) -> Model:
    """The model with that layer. with_experts: also with its routed experts."""
    layer, held = model.spec.num_layers, model.experts
    if with_experts:
        held = {**held, layer: experts(loader, file.expert_names(config, layer), None)}
    return replace(
        model,
        spec=replace(model.spec, predicting=1),
        experts=held,
        prediction=getattr(file, LOADS)(config, loader),
    )
