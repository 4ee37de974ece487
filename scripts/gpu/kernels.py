"""Each kernel beside the bandwidth of the GPU's memory and its peak for bf16, by rows and format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import transformers
from scripts.gpu.plan import Found, Work

from moesaic.commands import bench_kernels
from moesaic.commands.options import KernelsBench
from moesaic.core.weight_types import QUANTIZATIONS

ROWS = (1, 8, 32, 128, 512, 2048)
SECONDS = 0.04
"""Seconds for each figure."""
CASES: dict[str, tuple[str, tuple[str, ...], str]] = {
    "grouped-query attention": ("qwen3-30b-a3b", ("bfloat16",), "bfloat16"),
    "fp8 and int8": ("qwen3-30b-a3b", ("fp8", "int8"), "int8"),
    "int4 and mxfp4": ("qwen3-30b-a3b", ("int4", "mxfp4"), "float32"),
    "latent attention": ("deepseek-v2-lite", ("bfloat16",), "bfloat16"),
    "delta rule": ("qwen3_next", ("bfloat16",), "bfloat16"),
    "short convolutions": ("lfm2_moe", ("bfloat16",), "bfloat16"),
    "other formats": (
        "qwen3-30b-a3b",
        tuple(name for name in QUANTIZATIONS if name not in ("fp8", "int8", "int4", "mxfp4")),
        "bfloat16",
    ),
}  # fmt: skip
"""Models, types of their experts, and the type of the cache."""
LAYERS = ["conv", "conv", "full_attention"] * 8
CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen3_next": transformers.Qwen3NextConfig,
    "lfm2_moe": lambda: transformers.Lfm2MoeConfig(num_hidden_layers=len(LAYERS), layer_types=LAYERS),
}
"""Models whose sizes are the ones that transformers takes if none are given."""


def cases(work: Work) -> Sequence[str]:
    """Names of CASES."""
    return list(CASES)


def run(work: Work, case: str) -> Found:
    """As `moesaic bench kernels`: all operations of one layer."""
    model, types, cache = CASES[case]
    if model in CONFIGS:
        folder = Path(work.folder) / model
        CONFIGS[model]().save_pretrained(folder)
        model = str(folder)
    rows = ROWS if work.device == "cuda" else (1, 8)
    options = KernelsBench(
        model, rows=rows, types=types, kv_cache_dtype=cache, kernels=work.kernels[0], device=work.device,
        seconds=SECONDS,
    )  # type: ignore[arg-type]  # fmt: skip
    return {"ok": True, **bench_kernels.report_json(bench_kernels.time_operations(options))}
