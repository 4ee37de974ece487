"""--hf-overrides changes what every reader sees of config.json, and writes nothing of the model."""

from __future__ import annotations

import doctest
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support import tiny_models

from moesaic import LLM, SamplingParams
from moesaic.core.errors import CheckpointError, ConfigError
from moesaic.models import files, overrides, registry

DROP = '{"attention_sinks": null}'
VALUES = st.recursive(
    st.one_of(st.booleans(), st.integers(), st.text(max_size=3)),
    lambda inner: st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(st.text(max_size=2), VALUES, max_size=4)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def strange(tmp_path: Path) -> Path:
    """The demo checkpoint with a key that is refused."""
    path = tmp_path / "strange"
    path.mkdir()
    for file in files.resolve("demo").iterdir():
        (path / file.name).symlink_to(file)
    config = path / "config.json"
    raw = json.loads(config.read_text())
    config.unlink()
    config.write_text(json.dumps(raw | {"attention_sinks": 4}))
    return path


@given(raw=OBJECTS, patch=OBJECTS)
def test_a_patch_replaces_what_it_names_and_nothing_else(raw: dict[str, Any], patch: dict[str, Any]) -> None:
    merged = overrides.merge(raw, patch)
    assert merged.keys() == raw.keys() | patch.keys()
    assert all(merged[key] == raw[key] for key in raw.keys() - patch.keys())
    assert overrides.merge(merged, patch) == merged
    assert overrides.merge(merged, dict.fromkeys(merged)) == {}


@pytest.mark.parametrize("text", ["", "null", "{}", "[1]", "key=null", "{'key': None}", "[" * 100_000])
def test_a_value_that_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(
        ConfigError, match="--hf-overrides: got .*; allowed: a JSON object, such as"
    ) as caught:
        overrides.parse(text)
    assert len(str(caught.value)) < 300


def test_a_key_to_drop_must_be_there() -> None:
    with pytest.raises(ConfigError, match="--hf-overrides: got 'typo'; allowed: keys of config.json"):
        overrides.merge({"type": 1}, {"typo": None})


def test_a_model_runs_without_the_key_and_the_log_names_it(
    strange: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(CheckpointError, match=re.escape(f"--hf-overrides '{DROP}'")):
        LLM(str(strange))
    overrides._say.cache_clear()
    with caplog.at_level(logging.WARNING):
        answers = LLM(str(strange), hf_overrides=DROP).generate(
            ["def"], SamplingParams(max_tokens=4, temperature=0)
        )
    assert caplog.messages.count("config.json: attention_sinks (4) is left out") == 1
    assert (
        answers[0].text == LLM("demo").generate(["def"], SamplingParams(max_tokens=4, temperature=0))[0].text
    )
    assert json.loads((strange / "config.json").read_text())["attention_sinks"] == 4


def test_a_changed_model_is_made_once(strange: Path) -> None:
    first = files.resolve(str(strange), None, DROP)
    assert files.resolve(str(strange), None, DROP) == first
    assert registry.read_spec(first) == registry.read_spec(files.resolve("demo"))
    assert {file.name for file in first.iterdir()} == {file.name for file in strange.iterdir()}
    assert list(first.parent.iterdir()) == [first]  # no drafts stay
    tiny_models.edit(strange, hidden_act="gelu")
    assert files.resolve(str(strange), None, DROP) != first


def test_a_gguf_file_has_no_config_to_change(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--hf-overrides: got .*, a GGUF file; allowed: a model with"):
        overrides.overlay(tmp_path / "x.gguf", {"a": 1}, {}, tmp_path)


def test_a_folder_that_cannot_be_written_is_named(strange: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ConfigError, match="--hf-overrides: .*: cannot be written"):
        files.resolve(str(strange), None, DROP)


def test_examples() -> None:
    assert doctest.testmod(overrides).failed == 0
