"""ModelOpt (NVIDIA): NVFP4, and FP8 with one scale for each matrix.

Question: Which ModelOpt checkpoints are read?
"""

from __future__ import annotations

from typing import Any

from moesaic.core.errors import CheckpointError
from moesaic.models.config import Fields, shorten
from moesaic.models.quantization.fp8 import Fp8
from moesaic.models.quantization.nvfp4 import GROUP, Nvfp4
from moesaic.models.quantization.scheme import Groups, Scheme

NAME = "modelopt"
FP8, MIXTURE = "FP8", "MIXED_PRECISION"
WITHOUT_ACTIVATIONS = "W4A16_NVFP4"
"""NVFP4 whose activations no program quantises."""
NVFP4 = ("NVFP4", WITHOUT_ACTIVATIONS)
ALGORITHMS = (*NVFP4, FP8)
WEIGHT_NVFP4 = Nvfp4("weight", "weight_scale_2", divides=False)


def read_settings(quantization: Any) -> dict[str, Any] | None:
    """What a quantization_config says of ModelOpt, also under "quantization". None: nothing."""
    if not isinstance(quantization, dict):
        return None
    inner = quantization.get("quantization")
    settings = {**quantization, **inner} if isinstance(inner, dict) else quantization
    is_modelopt = str(quantization.get("quant_method")).startswith(NAME) or "quant_algo" in settings
    return settings if is_modelopt else None


def parse(settings: dict[str, Any]) -> Scheme:
    """Reads what `read_settings` returns. The tensors say which matrices are quantised.

    What is said of activations and of the KV cache is not used.
    """
    fields = Fields(settings, "quantization_config.")
    algorithm = fields.raw("quant_algo", None)
    layers = fields.raw("quantized_layers", None)
    fields.ignore("quant_method", "producer", "quantization", "ignore", "exclude_modules", "config_groups")
    fields.ignore(
        "modules_to_not_convert", "kv_cache_scheme", "kv_cache_quant_algo", "packed_modules_mapping"
    )
    sizes = [fields.raw("group_size", None)]
    fields.refuse_unread()
    algorithms = [algorithm]
    if algorithm == MIXTURE and isinstance(layers, dict) and layers:
        algorithms = [
            layer.get("quant_algo") if isinstance(layer, dict) else layer for layer in layers.values()
        ]
        sizes += [layer.get("group_size") for layer in layers.values() if isinstance(layer, dict)]
    wrong = next((name for name in algorithms if name not in ALGORITHMS), None)
    if wrong is not None or None in algorithms:
        raise CheckpointError(
            f"config.json: quantization_config.quant_algo: got {shorten(repr(wrong))}; "
            f"allowed: {', '.join(ALGORITHMS)}, and {MIXTURE} of these in quantized_layers"
        )
    size = next((size for size in sizes if size not in (None, GROUP)), None)
    if size is not None and not {*algorithms} <= {FP8}:
        raise CheckpointError(
            f"config.json: quantization_config.group_size: got {shorten(repr(size))}; allowed: {GROUP}"
        )
    schemes: list[Scheme] = [WEIGHT_NVFP4] if {*algorithms} & {*NVFP4} else []
    schemes += [Fp8(None)] if FP8 in algorithms else []
    return Groups(tuple(schemes)) if len(schemes) > 1 else schemes[0]
