"""A KV cache that cannot fit is refused before a weight is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support import model_configs, tiny_models

from moesaic import LLM
from moesaic.core.errors import ConfigError
from moesaic.models import registry
from moesaic.runtime import cache_size
from moesaic.runtime.fitting import Fit
from moesaic.testing import byte_tokenizer


def refused(model: str, **settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        LLM(model, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker must not come to its weights."""
    monkeypatch.setattr(registry, "load", lambda *given, **named: pytest.fail("weights are read"))


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("size", ["1000TiB", str(2**62)])
def test_a_cache_larger_than_the_machine(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_size, "total_memory", lambda: 3 << 30)
    monkeypatch.setattr(cache_size, "describe_total_memory", lambda: "memory.max of the control group /a")
    said = refused("demo", kv_cache_memory=size)
    assert (
        said
        == f"--kv-cache-memory: got '{size}'; allowed: at most 3.0GiB, memory.max of the control group /a"
    )


@pytest.mark.parametrize("size", ["9" * 400, f"{2**63}", "9" * 300 + "GiB"])
def test_a_size_that_no_machine_has(size: str) -> None:
    assert "--kv-cache-memory: got '" in refused("demo", kv_cache_memory=size)


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("size", ["auto", "1MiB"])
def test_a_context_longer_than_memory(size: str, tmp_path: Path) -> None:
    path = tiny_models.save(tiny_models.build(*model_configs.CASES["mixtral-linear"]), tmp_path)
    byte_tokenizer(path)
    tiny_models.edit(path, max_position_embeddings=2**31 - 1)
    said = refused(str(path), kv_cache_memory=size, max_model_len=2**31 - 1)
    assert said.startswith("--max-model-len: got 2147483647; allowed: at most ")


@pytest.mark.usefixtures("no_weights")
def test_a_worker_refuses_a_context_longer_than_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker of another host has the settings that it gets."""
    path = tiny_models.save(tiny_models.build(*model_configs.CASES["mixtral-linear"]), tmp_path)
    byte_tokenizer(path)
    monkeypatch.setattr("moesaic.llm.fit", Fit)
    said = refused(str(path), kv_cache_memory="1KiB")
    assert "--kv-cache-memory: 1KiB" in said
    assert "less than one request of the maximum length 192; allowed: at least " in said


def test_memory_that_runs_out_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: object, **named: object) -> None:
        raise MemoryError("Unable to allocate 1.00 TiB. More words")

    monkeypatch.setattr("moesaic.models.kvcache.memory.PagedKV", full)
    said = refused("demo", kv_cache_memory="8MiB")
    assert said.startswith("--kv-cache-memory: got '8MiB'; allowed: less, or a smaller model")
