"""Configurations of models that see images around a text model, of which moesaic serves the text model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moesaic.core.errors import CheckpointError

TEXT = "text_config"
ANGLES = ("mrope_section", "mrope_interleaved", "interleaved")
"""Keys that divide angles among time, height and width. All are equal for text."""
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Keys of special tokens, of which those beside text_config count."""


@dataclass(frozen=True)
class Wrapper:
    """A model_type whose config.json has its text model's in `text_config`."""

    image_keys: tuple[str, ...]
    """Keys about images."""
    ties_embeddings: bool
    """Default of tie_word_embeddings."""
    text_types: Mapping[str, str] = field(default_factory=dict)
    """model_type of a text_config -> the model_type that computes the same from text alone."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of text_config that its model_type has and the other one has not."""


WRAPPERS: Mapping[str, Wrapper] = {
    "glm4v_moe": Wrapper(
        image_keys=(
            *("vision_config", "image_token_id", "video_token_id", "image_start_token_id"),
            *("image_end_token_id", "video_start_token_id", "video_end_token_id"),
        ),
        ties_embeddings=False,
        text_types={"glm4v_moe_text": "glm4_moe", "Glm4vMoe_text": "glm4_moe"},
        defaults={"attention_bias": True, "max_position_embeddings": 65536, "partial_rotary_factor": 1.0},
    ),
    "internvl": Wrapper(
        image_keys=(
            *("vision_config", "image_token_id", "image_seq_length", "downsample_ratio"),
            *("projector_hidden_act", "vision_feature_layer", "vision_feature_select_strategy"),
        ),
        ties_embeddings=True,
    ),
    "kimi_k25": Wrapper(
        image_keys=(
            *("vision_config", "image_token_id", "video_token_id", "vision_start_token_id"),
            *("vision_end_token_id", "projection_hidden_size", "projection_layer_norm_eps", "ignore_index"),
            *("media_placeholder_token_id", "use_unified_vision_chunk", "video_placeholder"),
        ),
        ties_embeddings=True,
    ),
    "qwen3_5_moe": Wrapper(
        image_keys=(
            *("vision_config", "image_token_id", "video_token_id", "vision_start_token_id"),
            *("vision_end_token_id", "vision_token_id", "language_model_only"),
        ),
        ties_embeddings=False,
    ),
    "qwen3_vl_moe": Wrapper(
        image_keys=(
            *("vision_config", "image_token_id", "video_token_id", "vision_start_token_id"),
            "vision_end_token_id",
        ),
        ties_embeddings=False,
        text_types={"qwen3_vl_moe_text": "qwen3_vl_moe_text"},
    ),
}


def read_text_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a parsed config.json says about text: itself, or the text_config of a wrapper.

    Keys beside text_config that are not about images are among the keys of the result, so that its reader
    refuses those that it does not know. If both have a key, that of text_config counts, as in transformers;
    see `find_contradictions`. Raises CheckpointError for a text_config that is no object.
    """
    wrapper = WRAPPERS.get(str(raw.get("model_type")))
    if wrapper is None:
        return dict(raw)
    text = raw.get(TEXT)
    if not isinstance(text, Mapping):
        raise CheckpointError(f"config.json: {TEXT}: got {repr(text)[:80]}; allowed: an object")
    kind = str(text.get("model_type"))
    text = {key: value for key, value in text.items() if key not in wrapper.image_keys}
    outer_keys = {
        key: value
        for key, value in raw.items()
        if key not in (*wrapper.image_keys, TEXT, "model_type")
        and value is not None
        and (key not in text or key in TOKENS)
    }
    ties_embeddings = raw.get("tie_word_embeddings", wrapper.ties_embeddings) or text.get(
        "tie_word_embeddings", False
    )
    config = {**wrapper.defaults, **text, **outer_keys, "tie_word_embeddings": ties_embeddings}
    for name in ("rope_parameters", "rope_scaling"):
        angles = config.get(name)
        if kind in wrapper.text_types and isinstance(angles, Mapping):
            config[name] = {key: value for key, value in angles.items() if key not in ANGLES}
    return {**config, "model_type": wrapper.text_types.get(kind, text.get("model_type"))}


def find_contradictions(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of a wrapper that its text_config has with another value, and that value."""
    wrapper, text = WRAPPERS.get(str(raw.get("model_type"))), raw.get(TEXT)
    if wrapper is None or not isinstance(text, Mapping):
        return {}
    read = (*wrapper.image_keys, *TOKENS, "model_type", "tie_word_embeddings")
    return {
        key: text[key]
        for key, value in raw.items()
        if key in text and key not in read and value is not None and value != text[key]
    }
