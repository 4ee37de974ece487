"""Quark (AMD): MXFP4, with one setting for all quantised matrices."""

from __future__ import annotations

from typing import Any

from moesaic.core.errors import CheckpointError
from moesaic.models.config import Fields, shorten
from moesaic.models.quantization.nvfp4 import PackedMxfp4

MXFP4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
"""What the settings of weights in MXFP4 say."""


def parse(fields: Fields) -> PackedMxfp4:
    """Reads quantization_config with quant_method "quark". The tensors say which matrices are quantised.

    What is said of activations and of the KV cache is not used.
    """
    settings = fields.raw("global_quant_config", None)
    fields.require_value("layer_quant_config", {}, None)
    fields.require_value("layer_type_quant_config", {}, None)
    fields.ignore("quant_method", "quant_mode", "algo_config", "exclude", "export", "version")
    fields.ignore("softmax_quant_spec", "kv_cache_quant_config", "kv_cache_post_rope")
    fields.refuse_unread()
    weights: Any = settings.get("weight") if isinstance(settings, dict) else None
    if isinstance(weights, list) and len(weights) == 1:
        weights = weights[0]
    got = {key: weights.get(key) for key in MXFP4} if isinstance(weights, dict) else weights
    if got != MXFP4:
        raise CheckpointError(
            f"config.json: quantization_config.global_quant_config.weight: got {shorten(repr(got))}; "
            f"allowed: {MXFP4}"
        )
    return PackedMxfp4("weight")
