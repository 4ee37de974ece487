"""A key that no family reads is known, generic at its default, neutral, or refused with the way out."""

from __future__ import annotations

import doctest
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripts import generic_keys
from tests.models import test_published as published

from moesaic.core.errors import CheckpointError
from moesaic.core.text_config import WRAPPERS
from moesaic.models import config, known_keys, overrides, registry
from moesaic.models.families import MODELS

HERE = Path("x")
TABLE = json.loads(known_keys.TABLE.read_text())
CONFIGS: dict[str, dict[str, Any]] = {
    value["model_type"]: value
    for value in vars(published).values()
    if isinstance(value, dict) and "model_type" in value
}
GGUF = {"quantization_config": {"quant_method": "gguf"}}
WRAPPED = {"model_type": "internvl", "text_config": published.QWEN3_30B_A3B, "tie_word_embeddings": False}
GENERIC = sorted({(key, json.dumps(value)) for half in TABLE.values() for key, value in half.items()})


def unread(raw: dict[str, Any]) -> config.UnreadKeyError:
    with pytest.raises(config.UnreadKeyError) as caught:
        registry.understand(raw, HERE)
    assert "\n" not in str(caught.value)
    return caught.value


def test_every_family_is_here() -> None:
    without_config = {"granitemoeshared", "qwen3_5_moe_text", "qwen3_vl_moe_text"}
    assert CONFIGS.keys() - WRAPPERS.keys() == MODELS.keys() - without_config


@pytest.mark.parametrize("kind", sorted(CONFIGS))
@pytest.mark.parametrize("version", sorted(TABLE))
def test_a_file_with_every_generic_key_is_read_as_one_without(kind: str, version: str) -> None:
    raw, text = CONFIGS[kind], "text_config"
    full = {**TABLE[version], **raw}
    if text in raw:
        full[text] = {**TABLE[version], **raw[text]}
    assert registry.understand(full, HERE) == registry.understand(raw, HERE)


@pytest.mark.parametrize("place", ["", "text_config"])
@given(key=st.sampled_from(sorted({key for key, _ in GENERIC})), value=st.sampled_from([7, 1.5, "x", [3]]))
def test_a_generic_key_with_another_value_is_refused_with_its_default(
    place: str, key: str, value: object
) -> None:
    if key in known_keys.list_without_effect("qwen3_moe"):
        return
    raw: dict[str, Any] = WRAPPED if place else published.QWEN3_30B_A3B
    raw = overrides.merge(raw, {place: {key: value}} if place else {key: value})
    message = str(unread(raw))
    defaults = [json.loads(default) for name, default in GENERIC if name == key]
    assert all(json.dumps(default) in message for default in defaults)
    assert "transformers' default" in message


@given(
    key=st.text(min_size=1, max_size=30),
    value=st.one_of(st.integers(), st.booleans(), st.text(max_size=5), st.lists(st.integers(), max_size=2)),
    kind=st.sampled_from(sorted(MODELS)),
)
def test_an_unknown_key_is_neutral_or_the_message_says_how_to_leave_it_out(
    key: str, value: object, kind: str
) -> None:
    raw = CONFIGS.get(kind, CONFIGS["qwen3_5_moe"])
    inner = "text_config" in raw
    if key in (raw["text_config"] if inner else raw):
        return
    changed = overrides.merge(raw, {"text_config": {key: value}} if inner else {key: value})
    if known_keys.is_neutral(value):
        assert registry.understand(changed, HERE) == registry.understand(raw, HERE)
        return
    error = unread(changed)
    assert error.path == (("text_config", key) if inner else (key,))
    flag, patch = shlex.split(config.leave_out(error.path)) if len(key) < 20 else ("", "{}")
    if flag:
        assert config.leave_out(error.path) in str(error)
        assert overrides.merge(changed, overrides.parse(patch)) == raw


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"text_config": {"output_gate_type": "sigmoid"}},
            "output_gate_type: got 'sigmoid'; allowed: 'swish'",
        ),
        ({"text_config": {"new": 1}}, "text_config.new: got 1"),
        ({"new": 1}, "config.json: new: got 1"),
        (
            {"text_config": {"quantization_config": {"quant_method": "fp8", "new": [1]}}},
            "quantization_config.new",
        ),
        ({"hidden_size": 5}, "hidden_size: got 5; allowed: 2048, as in text_config"),
        ({"new": True, "text_config": {"new": 2}}, "new: got True; allowed: 2, as in text_config"),
    ],
)
def test_a_message_says_where_the_key_stands(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(words)):
        registry.understand(overrides.merge(CONFIGS["qwen3_5_moe"], changes), HERE)


@pytest.mark.parametrize(
    "changes",
    [
        {"text_config": {"output_gate_type": "swish"}},
        {"text_config": {"image_token_id": 248056, "vision_start_token_id": 5}},
        {"hidden_size": 0},
        {"use_cache": False, "text_config": {"use_cache": True}},
        {"is_decoder": False, "text_config": {"is_decoder": False}},
    ],
)
def test_what_makers_write_around_a_text_model_is_read(changes: dict[str, Any]) -> None:
    raw = CONFIGS["qwen3_5_moe"]
    assert registry.understand(overrides.merge(raw, changes), HERE) == registry.understand(raw, HERE)


def test_a_row_has_a_reason_and_keys_of_its_own() -> None:
    for family in MODELS:
        rows = [row for row in known_keys.WITHOUT_EFFECT if not row.families or family in row.families]
        keys = [key for row in rows for key in row.keys]
        assert len(keys) == len(set(keys)) and all(row.reason for row in rows)
    assert {name for row in known_keys.WITHOUT_EFFECT for name in row.families} <= MODELS.keys()


@pytest.mark.slow
def test_the_table_has_the_defaults_of_the_installed_transformers() -> None:
    version, defaults = generic_keys.read_defaults()
    assert TABLE[version] == defaults and {"4.57", version} == TABLE.keys()


def test_examples() -> None:
    assert doctest.testmod(known_keys).failed == 0
    assert doctest.testmod(config).failed == 0


def test_gguf_files_of_deepseek_v2_mean_what_llama_cpp_does() -> None:
    raw = CONFIGS["deepseek_v2"] | {"norm_topk_prob": True}
    with pytest.raises(CheckpointError, match="norm_topk_prob: got True.*transformers leaves it out"):
        registry.understand(raw, HERE)
    from_gguf = MODELS["deepseek_v2"].parse(
        published.DEEPSEEK_V2_LITE | raw | {"routed_scaling_factor": 1.0} | GGUF
    )
    assert from_gguf.gating.normalise
