"""How many bytes a model takes beside others, before and after it is loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import moesaic
from moesaic.commands.memory_need import PROCESS_BYTES, count_loaded_bytes, measure
from moesaic.commands.model_settings import ServedModel
from moesaic.commands.serve_several import choose_max_loaded
from moesaic.config import (
    CacheConfig,
    ClusterConfig,
    ConnectionConfig,
    ModelConfig,
    NamedModel,
    OffloadConfig,
    ServerConfig,
    SeveralModelsConfig,
    WorkerConfig,
)
from moesaic.core.errors import CheckpointError, ConfigError
from moesaic.models.files import is_hub_name
from moesaic.runtime import fitting
from moesaic.trace.options import RecordConfig

WEIGHTS = (Path(moesaic.__file__).parent / "demo" / "model.safetensors").stat().st_size
GIB = 1 << 30
DEMO = ServedModel(
    WorkerConfig(ModelConfig("demo", device="cpu", threads=1)),
    ClusterConfig(),
    ServerConfig(),
    ConnectionConfig(),
    RecordConfig(),
    OffloadConfig(),
)


def test_a_small_model_is_not_measured() -> None:
    assert WEIGHTS < measure(DEMO, 100 * GIB) - GIB < 3 * WEIGHTS


@pytest.mark.slow
def test_another_one_is_measured_by_its_headers() -> None:
    need = measure(DEMO, GIB)
    assert need == fitting.measure_bytes(DEMO.worker, DEMO.cluster)
    assert WEIGHTS - 2**16 < need - fitting.API_BYTES - fitting.WORKER_BYTES < 20 * WEIGHTS
    given = replace(DEMO, worker=replace(DEMO.worker, cache=CacheConfig("64MiB")))
    assert measure(given, GIB) == need + (64 << 20)


def test_a_given_memory_is_what_a_model_takes() -> None:
    given = replace(DEMO, offload=OffloadConfig("700MiB"))
    assert measure(given, 100 * GIB) == 700 << 20
    assert measure(replace(DEMO, offload=OffloadConfig("auto")), GIB) == GIB


def test_a_model_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "model.safetensors").write_bytes(b"")
    model = replace(DEMO, worker=WorkerConfig(ModelConfig(str(tmp_path))))
    with pytest.raises(CheckpointError, match="config.json: is not valid JSON"):
        measure(model, GIB)


def test_a_loaded_model_says_what_it_takes() -> None:
    info = {"weight_bytes": 1000, "kv_bytes": 200, "state_bytes": 30}
    assert count_loaded_bytes(DEMO, info, 5) == 1230 + PROCESS_BYTES
    several_workers = replace(DEMO, cluster=ClusterConfig(attention_workers=2, expert_servers=1))
    assert count_loaded_bytes(several_workers, info, 5) == 5 + 2 * 230
    assert count_loaded_bytes(replace(DEMO, offload=OffloadConfig("1GiB")), info, GIB) == GIB


def test_one_model_takes_a_gpu_unless_its_cache_has_a_size() -> None:
    models = [NamedModel.parse(text) for text in ("a=demo", "b=demo")]
    on_gpu = replace(DEMO, worker=replace(DEMO.worker, model=ModelConfig("demo", device="cuda")))
    with_size = replace(on_gpu, worker=replace(on_gpu.worker, cache=CacheConfig("1GiB")))
    counts = [choose_max_loaded(models, SeveralModelsConfig(), model) for model in (DEMO, on_gpu, with_size)]
    assert counts == [2, 1, 2]
    with pytest.raises(ConfigError, match="--max-loaded: got 2; allowed: 1 on a GPU"):
        choose_max_loaded(models, SeveralModelsConfig(max_loaded=2), on_gpu)


@pytest.mark.parametrize(
    ("text", "names", "source"),
    [
        ("demo", ("demo",), "demo"),
        ("a=demo", ("a",), "demo"),
        ("a, b=org/x:Q4_K_M", ("a", "b"), "org/x:Q4_K_M"),
        ("./a=b", ("./a=b",), "./a=b"),
        ("a=/models/x=y", ("a",), "/models/x=y"),
    ],
)
def test_a_model_may_have_names(text: str, names: tuple[str, ...], source: str) -> None:
    assert NamedModel.parse(text) == NamedModel(names, source)


def test_a_folder_with_an_equals_sign_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a=b").mkdir()
    assert NamedModel.parse("a=b").source == "a=b"


def test_names_on_a_hub(tmp_path: Path) -> None:
    assert all(map(is_hub_name, ("org/name", "name", "org/name:Q4_K_M")))
    assert not any(map(is_hub_name, ("demo", str(tmp_path), "/no/where", "./x", "~/x", "a/b/c", "x.gguf")))
