"""Chooses the scheme of a checkpoint by the quantization_config in its config.json.

Question: How is a quantised matrix read, and how is a format added?
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from moesaic.core.errors import CheckpointError
from moesaic.core.text_config import TEXT
from moesaic.core.weight_types import QUANT_METHOD, is_unquantized
from moesaic.models.config import Fields, shorten
from moesaic.models.files import read_config
from moesaic.models.gguf import scheme as gguf
from moesaic.models.gguf.header import is_gguf
from moesaic.models.gguf.model import METHOD as GGUF
from moesaic.models.quantization import compressed_tensors, fp8, gptq, modelopt, mxfp4, quark
from moesaic.models.quantization.scheme import Kinds, Matrix, Scheme

METHODS: Mapping[str, Callable[[Fields], Scheme]] = {
    "auto-round": gptq.parse_auto_round,
    "awq": gptq.parse_awq,
    "compressed-tensors": compressed_tensors.parse,
    "fp8": fp8.parse,
    "gptq": gptq.parse_gptq,
    "mxfp4": mxfp4.parse,
    "quark": quark.parse,
}
"""quant_method -> what reads the rest of quantization_config."""
STATIC_SCALES = r".*\.input_(global_scale|scale|zero_point)"
"""Names of static scales of activations."""
CACHE_SCALES = r".*\.(self_attn|attn|attention)\.(\w+\.)?((q|k|v|kv|prob)_(scale|zero_point)|output_scale)"
"""Names of scales of an FP8 KV cache. Some programs name them after a projection."""
OTHER_FORMATS = "allowed: the model itself, or its version in FP8, GPTQ, AWQ, compressed-tensors or GGUF"
PLAIN_KEYS = ("ignore", "ignored_layers", "modules_to_not_convert", "exclude_modules", "exclude")
"""Keys of a quantization_config with names of modules that are not quantised."""
CACHE_KEYS = ("kv_cache_scheme", "kv_cache_quant_algo")
SKIP_REASONS: Mapping[str, str] = {
    STATIC_SCALES: "the scales of activations (input_scale) are not used: activations are not quantised",
    CACHE_SCALES: "the scales of an FP8 KV cache (k_scale, v_scale) are not used: --kv-cache-dtype says what "
    "the cache stores",
}
"""Pattern of the names of tensors that are not read -> what the log says about them."""


def parse(raw: Mapping[str, Any]) -> Scheme | None:
    """The scheme of a parsed config.json; None if its matrices are not quantised, or moesaic's own.

    In a model that sees images, the text model's own config may name it.

    Raises CheckpointError that names the key, the value and what is allowed.
    """
    inner = raw.get(TEXT)
    configs = [raw, inner] if isinstance(inner, dict) else [raw]
    if any(map(_is_mlx, configs)):
        raise CheckpointError(f"config.json: quantization: this is an MLX checkpoint; {OTHER_FORMATS}")
    raw = raw if "quantization_config" in raw else configs[-1]
    if is_unquantized(raw):
        return None
    quantization = raw["quantization_config"]
    method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
    if method == GGUF and isinstance(quantization, dict):
        return gguf.parse(Fields(quantization, "quantization_config."))
    if (settings := modelopt.read_settings(quantization)) is not None:
        return modelopt.parse(settings)
    if not isinstance(quantization, dict) or not isinstance(method, str) or method not in METHODS:
        allowed_methods = ", ".join([*METHODS, modelopt.NAME, QUANT_METHOD])
        raise CheckpointError(
            f"config.json: quantization_config: got quant_method {shorten(repr(method))}; "
            f"allowed: {allowed_methods}"
        )
    return METHODS[method](Fields(quantization, "quantization_config."))


def _is_mlx(config: Mapping[str, Any]) -> bool:
    """Whether a config has MLX's settings, which name no method, under one of its two keys."""
    return any(
        isinstance(settings := config.get(key), dict)
        and "group_size" in settings
        and "bits" in settings
        and "quant_method" not in settings
        for key in ("quantization", "quantization_config")
    )


def find_skipped_patterns(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """Patterns of tensors that are not used, of a parsed config.json: static scales of activations, and
    scales of an FP8 KV cache."""
    quantization = _find_quantization(raw)
    method = quantization.get("quant_method")
    groups = quantization.get("config_groups")
    input_settings = (
        [settings.get("input_activations") for settings in groups.values() if isinstance(settings, dict)]
        if isinstance(groups, dict)
        else []
    )
    dynamics = [settings.get("dynamic") for settings in input_settings if isinstance(settings, dict)]
    is_modelopt = modelopt.read_settings(quantization) is not None
    # NVFP4's scales of groups are computed from the activations ("local"), and that of a matrix is stored.
    is_static = (
        any(dynamic is False or dynamic == "local" for dynamic in dynamics)
        or (method == "fp8" and quantization.get("activation_scheme") == "static")
        or (is_modelopt and quantization.get("quant_algo") != modelopt.WITHOUT_ACTIVATIONS)
    )
    has_cache_scales = is_modelopt or method in ("fp8", "compressed-tensors")
    return (*([STATIC_SCALES] if is_static else []), *([CACHE_SCALES] if has_cache_scales else []))


def describe_unused(raw: Mapping[str, Any], names: Collection[str]) -> list[str]:
    """Says which tensors of a checkpoint are not used, one sentence each.

    raw: its parsed config.json. names: those of its tensors; empty if they are not known.
    """
    is_cache_named = any(_find_quantization(raw).get(key) for key in CACHE_KEYS)
    return [
        SKIP_REASONS[pattern]
        for pattern in find_skipped_patterns(raw)
        if any(re.fullmatch(pattern, name) for name in names)
        or (not names and (pattern != CACHE_SCALES or is_cache_named))
    ]


def _find_quantization(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The quantization_config, or that of the text model; empty if there is none."""
    inner = raw.get(TEXT)
    raw = inner if "quantization_config" not in raw and isinstance(inner, dict) else raw
    quantization = raw.get("quantization_config")
    settings = modelopt.read_settings(quantization)
    return settings or (quantization if isinstance(quantization, dict) else {})


def is_left_plain(raw: Mapping[str, Any], module: str) -> bool:
    """Whether a parsed config.json names a module among those that are not quantised.

    Only prices ask this: what is read follows the tensors. module: as "model.layers.0.self_attn.o_proj".
    """
    quantization = _find_quantization(raw)
    names = [name for key in PLAIN_KEYS if isinstance(names := quantization.get(key), list) for name in names]
    return any(isinstance(name, str) and _is_named(module, name) for name in names)


def _is_named(module: str, name: str) -> bool:
    """Whether a name, a part of a name between dots, one with asterisks, or a pattern behind "re:" means a
    module.

    >>> [_is_named("model.layers.0.self_attn.o_proj", x) for x in ("self_attn", "attn", "re:.*self_attn.*")]
    [True, False, True]
    >>> _is_named("model.layers.0.self_attn.o_proj", "language_model.model.layers.0.self_attn*")
    True
    """
    if "*" in name and not name.startswith("re:"):
        return fnmatch.fnmatchcase(module, name.replace("language_model.", ""))
    if not name.startswith("re:"):
        return f".{name.strip('.')}." in f".{module}."
    try:
        return re.match(name.removeprefix("re:"), module) is not None
    except re.error:
        return False


def read_skipped_patterns(path: Path) -> tuple[str, ...]:
    """Patterns of the tensors in the checkpoint at `path` that are not used."""
    has_config = is_gguf(path) or (path / "config.json").is_file()
    return find_skipped_patterns(read_config(path)) if has_config else ()


def scheme_of(path: Path) -> Scheme | None:
    """The scheme of the checkpoint at `path`. A directory without config.json has none."""
    has_config = is_gguf(path) or (path / "config.json").is_file()
    return parse(read_config(path)) if has_config else None


def find(scheme: Scheme | None, name: str, shape: Sequence[int], kinds: Kinds) -> Matrix | None:
    """The tensor `name` [rows, columns] as a quantised matrix; None if the checkpoint has it as it is.

    Vectors of a GGUF file may also be put together from others, or have other numbers than ours.
    """
    if len(shape) != 2 and isinstance(scheme, gguf.Gguf):
        return scheme.find_tensor(name, shape, kinds)
    if scheme is None or len(shape) != 2 or not name.endswith(".weight"):
        return None
    rows, columns = shape
    return scheme.find(name.removesuffix(".weight"), rows, columns, kinds)
