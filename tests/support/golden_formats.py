"""Writes tests/models/compressed_tensors.safetensors with the library compressed-tensors itself.

    pip install compressed-tensors==0.20.0
    python -m tests.support.golden_formats

The file has matrices in each form that moesaic reads, and what the library makes of them in float32. Its
metadata has the quantization_config of each.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

FILE = Path(__file__).parent.parent / "models" / "compressed_tensors.safetensors"
FORMS = (
    ("pack-quantized", 4, "int"),
    ("pack-quantized", 8, "int"),
    ("int-quantized", 8, "int"),
    ("float-quantized", 8, "float"),
)
ROWS, COLUMNS = 13, 64
PLAIN = "plain"
"""Name of the dequantised matrix beside the tensors of each case."""


def main() -> None:
    """Writes the file."""
    from compressed_tensors.compressors import (  # type: ignore[import-not-found]
        FloatQuantizationCompressor,
        IntQuantizationCompressor,
        PackedQuantizationCompressor,
    )
    from compressed_tensors.quantization import (  # type: ignore[import-not-found]
        QuantizationArgs,
        QuantizationScheme,
    )

    writers = {
        "pack-quantized": PackedQuantizationCompressor,
        "int-quantized": IntQuantizationCompressor,
        "float-quantized": FloatQuantizationCompressor,
    }
    tensors: dict[str, torch.Tensor] = {}
    configs: dict[str, str] = {}
    matrix = 0.1 * torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    for form, bits, kind in FORMS:
        for group in (32, None):
            for symmetric in (True, False):
                if kind == "float" and (group or not symmetric):
                    continue
                case = f"{form} {bits} {group} {symmetric}"
                strategy = "group" if group else "channel"
                args = QuantizationArgs(
                    num_bits=bits, type=kind, symmetric=symmetric, strategy=strategy, group_size=group
                )
                scheme = QuantizationScheme(targets=["Linear"], weights=args, format=form)
                scales, zeros = parameters(matrix, bits, kind, group or COLUMNS, symmetric)
                given = {"weight": matrix.bfloat16(), "weight_scale": scales, "weight_zero_point": zeros}
                written = writers[form].compress(given, scheme)
                exact = written | {"weight_scale": written["weight_scale"].float()}
                tensors |= {f"{case}.{name}": one.contiguous() for name, one in written.items()}
                tensors[f"{case}.{PLAIN}"] = writers[form].decompress(exact, scheme)["weight"].float()
                configs[case] = json.dumps(config(form, args.model_dump(mode="json")))
    save_file(tensors, FILE, configs)


def parameters(
    matrix: torch.Tensor, bits: int, kind: str, size: int, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales in bf16 and zero points [rows, groups]."""
    groups = matrix.unflatten(1, (-1, size))
    most = 448 if kind == "float" else 2 ** (bits - 1) - 0.5
    if symmetric:
        return (groups.abs().amax(2) / most).bfloat16(), torch.zeros(groups.shape[:2], dtype=torch.int8)
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    scales = ((high - low) / (2**bits - 1)).bfloat16()
    zeros = (-(2 ** (bits - 1)) - low / scales.float()).round()
    return scales, zeros.clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1).to(torch.int8)


def config(form: str, weights: dict[str, Any]) -> dict[str, Any]:
    """The quantization_config of a checkpoint with such matrices."""
    group = {"targets": ["Linear"], "format": form, "weights": weights}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


if __name__ == "__main__":
    main()
