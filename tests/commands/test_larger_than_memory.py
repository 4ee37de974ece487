"""What does not fit into memory is planned without a flag, and this machine is measured once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.commands.test_run_batch_offload import MACHINE
from tests.support import model_configs, tiny_models

from moesaic.commands import hardware, larger_than_memory
from moesaic.config import ClusterConfig, ModelConfig, OffloadConfig, SchedulerConfig, WorkerConfig
from moesaic.core.errors import ConfigError
from moesaic.cost.hardware import Hardware
from moesaic.kernels import table
from moesaic.models import registry
from moesaic.planning.hardware import file
from moesaic.runtime import fitting
from moesaic.testing import byte_tokenizer
from moesaic.trace.options import RecordConfig

pytestmark = pytest.mark.skipif(not table.instruction_sets(), reason="no native kernels in this build")
MIB = 1 << 20


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model with as much memory as most of its experts need."""
    folder = tmp_path / "model"
    folder.mkdir()
    tiny_models.save(tiny_models.build(*model_configs.CASES["qwen3"]), folder)
    byte_tokenizer(folder)
    config = worker(folder)
    need = fitting.measure_need(config, ClusterConfig(), registry.read_spec(folder))
    available = need.working + need.attention + need.experts * 9 // 10
    monkeypatch.setattr(fitting, "surely_fits", lambda *given: False)
    monkeypatch.setattr(fitting, "available_memory", lambda: available)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The paths whose disk was measured."""
    paths: list[str] = []
    toml = tmp_path / "this.toml"
    toml.write_text(MACHINE)

    def measure(path: str, device: str) -> Hardware:
        paths.append(path)
        return larger_than_memory.find_hardware(str(toml))

    monkeypatch.setattr(hardware, "now", measure)
    return paths


def worker(model: Path, **scheduler: Any) -> WorkerConfig:
    return WorkerConfig(ModelConfig(str(model), max_model_len=64), scheduler=SchedulerConfig(**scheduler))


def settle(model: Path, **scheduler: Any) -> WorkerConfig:
    settings = worker(model, **scheduler), ClusterConfig(), OffloadConfig(), RecordConfig()
    return larger_than_memory.settle(*settings)[0]


def test_a_plan_is_made_and_the_machine_is_measured_once(
    model: Path, measurements: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    plans = [settle(model).offload for _ in range(2)]
    assert plans[0] is not None and 5 * MIB < plans[0].fast_memory < 12 * MIB
    assert len(measurements) == 1
    # Files have six digits of each figure.
    assert plans[1] is not None and plans[1].schedule == plans[0].schedule
    said = capsys.readouterr().err
    assert said.count("experts are read from the disk, as with --fast-memory ") == 2
    assert said.count("delete it to measure again\n") == 1 and said.count("predicted for") == 2


def test_a_cache_that_cannot_be_written_is_told(
    model: Path,
    measurements: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*given: object) -> None:
        raise ConfigError("no room")

    monkeypatch.setattr(file, "save", refuse)
    assert settle(model).offload is not None and settle(model).offload is not None
    assert len(measurements) == 2
    assert capsys.readouterr().err.count("the next start measures again") == 2


def test_what_a_plan_refuses_is_told_with_the_reason(model: Path, measurements: list[str]) -> None:
    drafting = '{"method": "mtp", "num_speculative_tokens": 1}'
    refusal = r"^model: it does not fit .* is refused: --speculative-config: method: got"
    with pytest.raises(ConfigError, match=refusal):
        settle(model, speculative_config=drafting)
    assert measurements == []


def test_servers_read_from_the_disk(model: Path, measurements: list[str]) -> None:
    settings = worker(model), ClusterConfig(expert_servers=2), OffloadConfig(), RecordConfig()
    with pytest.raises(
        ConfigError, match=r"of memory are available; allowed: a smaller model, or more memory"
    ):
        larger_than_memory.settle(*settings)
    assert measurements == []
