"""Before a weight is read it is decided whether a model fits, and how long its requests may be."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import model_configs, tiny_models

from moesaic import LLM, SamplingParams
from moesaic.config import CacheConfig, ClusterConfig, ModelConfig, SchedulerConfig, WorkerConfig
from moesaic.core.errors import ConfigError
from moesaic.models import registry
from moesaic.models.kvcache.paged_kv import bytes_per_token
from moesaic.models.shard import Shard
from moesaic.runtime import cache_size, fitting, quick_fit
from moesaic.testing import byte_tokenizer

MIB = 1 << 20
LONGEST = 2**31 - 1
"""A length for whose cache no machine has memory."""
FAMILIES = {"mixtral-linear": 3, "deepseek-lite": 2, "qwen3-next": 2}
"""Cases -> ranks among which their heads can be divided."""
Available = Callable[[float], None]


def save(path: Path, name: str = "mixtral-linear", **changes: Any) -> Path:
    tiny_models.save(tiny_models.build(*model_configs.CASES[name]), path)
    byte_tokenizer(path)
    return tiny_models.edit(path, **changes) if changes else path


@pytest.fixture
def available(monkeypatch: pytest.MonkeyPatch) -> Available:
    """Sets the memory that is available, in MiB."""

    def set_available(mib: float) -> None:
        for module in (fitting, quick_fit, cache_size):
            monkeypatch.setattr(module, "available_memory", lambda: int(mib * MIB))

    return set_available


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker must not come to its weights."""
    monkeypatch.setattr(registry, "load", lambda *given, **named: pytest.fail("weights are read"))


def mib_beside_experts(path: Path, **processes: int) -> float:
    config, cluster = WorkerConfig(ModelConfig(str(path))), ClusterConfig(**processes)
    need = fitting.measure_need(config, cluster, registry.read_spec(path))
    return (need.working + need.attention) / MIB


def check_fits(config: WorkerConfig, cluster: ClusterConfig, mib: float, longest: int) -> str:
    """Checks what was decided. Returns which of the four outcomes it is."""
    try:
        fitted = fitting.fit(config, cluster)
    except ConfigError as error:
        message = str(error)
        return "refused" if "of memory are available; allowed: a smaller model" in message else message
    if fitted.streamed_bytes is not None:
        assert 0 < fitted.streamed_bytes < mib * MIB
        return "streamed"
    ranks, path = cluster.tensor_parallel_size, Path(config.model.model)
    spec = registry.read_spec(path, Shard(0, ranks))
    need = fitting.measure_need(config, cluster, spec)
    dtype = config.cache.kv_cache_dtype
    number = registry.CACHE_DTYPES["float32" if dtype == "auto" else dtype]
    limit = fitted.config.model.max_model_len or longest
    # What a worker finds when its weights are there. An error says that a request of the limit does not fit.
    found = int(cache_size.AUTO_SHARE * (mib * MIB - need.private))
    settings = replace(fitted.config, parallel=cluster.parallel)
    size = cache_size._size(settings, spec, torch.device("cpu"), limit, number, found)
    cache = size.num_blocks * 16 * bytes_per_token(spec.kv, spec.kv_layers, number)
    caches = cache * ranks * cluster.attention_workers
    assert need.weights + need.working + caches <= mib * MIB
    assert bool(fitted.notice) == (limit < longest)
    return "shortened" if fitted.notice else "fits"


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_decided_fits(name: str, available: Available, tmp_path: Path) -> None:
    longest = 1 << 20
    path = save(tmp_path, name, max_position_embeddings=longest)
    scheduler, outcomes = SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=4), set()
    sizes = (300, 700, 1000, 2500, 6000, 60_000, 10**7)
    for mib, workers, ranks, dtype in product(
        sizes, (1, 2), (1, FAMILIES[name]), ("auto", "bfloat16", "int8")
    ):
        available(mib)
        config = WorkerConfig(ModelConfig(str(path)), CacheConfig(kv_cache_dtype=dtype), scheduler)
        cluster = ClusterConfig(attention_workers=workers, tensor_parallel_size=ranks)
        outcomes.add(check_fits(config, cluster, mib, longest))
    assert outcomes - {"streamed"} == {"refused", "shortened", "fits"}


def test_a_model_that_fits_keeps_its_settings(tmp_path: Path) -> None:
    config = WorkerConfig(ModelConfig(str(save(tmp_path))))
    assert quick_fit.surely_fits(config) and fitting.fit(config) == fitting.Fit(config)


@pytest.mark.parametrize("name", FAMILIES)
def test_nothing_changes_what_surely_fits(
    name: str, available: Available, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, answers = save(tmp_path, name), set()
    for mib, cache in product((100, 500, 1000, 1030, 1100, 1200, 2000, 20_000), ("auto", "100MiB")):
        available(mib)
        config = WorkerConfig(ModelConfig(str(path)), CacheConfig(kv_cache_memory=cache))
        surely = quick_fit.surely_fits(config)
        answers.add(surely)
        with monkeypatch.context() as patch:
            patch.setattr(fitting, "surely_fits", lambda *given: False)
            assert not surely or fitting.fit(config) == fitting.Fit(config)
    assert answers == {False, True}


def test_a_context_longer_than_memory_is_lowered(
    tmp_path: Path, available: Available, caplog: pytest.LogCaptureFixture
) -> None:
    path = save(tmp_path, max_position_embeddings=LONGEST)
    available(1500)
    with caplog.at_level(logging.WARNING):
        llm = LLM(str(path), threads=1)
    limit = llm.info.max_model_len
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith(f"requests have at most {limit} of the model's {LONGEST} tokens")
    assert "float32 KV cache" in line and "with --kv-cache-dtype bfloat16" in line
    assert 512 < limit < LONGEST
    params, prompt = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True), [[3, 1, 4, 1, 5]]
    given = LLM(str(path), threads=1, max_model_len=64)
    answers = [model.generate(prompt, params)[0].outputs[0].token_ids for model in (llm, given)]
    assert answers[0] == answers[1]


@pytest.mark.usefixtures("no_weights")
def test_a_given_length_that_does_not_fit_is_refused(tmp_path: Path, available: Available) -> None:
    path = save(tmp_path, max_position_embeddings=LONGEST)
    available(1500)
    with pytest.raises(ConfigError, match=r"--max-model-len: got 99999999; allowed: at most \d+, for which"):
        LLM(str(path), max_model_len=99_999_999)


@pytest.mark.usefixtures("no_weights")
def test_free_memory_does_not_decide_which_factors_apply(tmp_path: Path, available: Available) -> None:
    path = save(tmp_path, "qwen3-longrope", max_position_embeddings=LONGEST)
    scaling = json.loads((path / "config.json").read_text())["rope_parameters"]
    tiny_models.edit(path, rope_parameters={**scaling, "original_max_position_embeddings": 2**30})
    available(1500)
    with pytest.raises(
        ConfigError, match=r"--max-model-len: requests have at most \d+ .*; allowed: a given one"
    ):
        LLM(str(path))


@pytest.mark.usefixtures("no_weights")
def test_a_model_that_does_not_fit_is_refused_in_python(tmp_path: Path, available: Available) -> None:
    path = save(tmp_path, max_position_embeddings=64)
    available(mib_beside_experts(path) + 0.3)
    with pytest.raises(
        ConfigError, match=r"model: the model takes .*; allowed: a smaller model, or serve and"
    ):
        LLM(str(path))


def test_servers_share_what_is_left(tmp_path: Path, available: Available) -> None:
    path = save(tmp_path, max_position_embeddings=64)
    config, cluster = WorkerConfig(ModelConfig(str(path))), ClusterConfig(expert_servers=2)
    least = mib_beside_experts(path, expert_servers=2)
    available(least + 10)
    assert fitting.fit(config, cluster).streamed_bytes is None
    available(least + 0.3)
    fitted = fitting.fit(config, cluster)
    assert fitted.streamed_bytes is not None and 0 < fitted.streamed_bytes < 0.15 * MIB
    assert 2 * fitted.streamed_bytes + int(fitted.config.cache.kv_cache_memory) <= 0.3 * MIB
