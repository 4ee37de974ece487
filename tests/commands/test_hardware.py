from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.test_quantized import CASES, FORMATS, STORED
from tests.support import model_configs, quantizers, tiny_models

from moesaic.commands import cli, hardware, hardware_report
from moesaic.commands.options import MeasureHardware
from moesaic.commands.plan import find_hardware
from moesaic.core.errors import ConfigError
from moesaic.core.weight_types import QUANT_METHOD
from moesaic.cost.hardware import GIB, Hardware, Level, Link, Processor
from moesaic.models.headers import Headers
from moesaic.planning.hardware import measure
from moesaic.planning.hardware.measure import FULL, SHORT, Effort

DISK = [
    {"repeated": False, "block_kib": 8192, "readers": 1, "gib": 0.5},
    {"repeated": True, "block_kib": 8192, "readers": 1, "gib": 1.0},
    {"repeated": True, "block_kib": 8192, "readers": 2, "gib": 1.75},
]
READ = [{"threads": 1, "dtype": "bfloat16", "gib": 9.5}, {"threads": 2, "dtype": "bfloat16", "gib": 11.25}]
RATES = [
    {"shape": shape, "dtype": "bfloat16", "rows": rows, "gflops": rows * scale}
    for shape, scale in (("experts", 1.5), ("dense", 2.25))
    for rows in (1, 64)
]
THIS = Hardware(
    name="two cores",
    fast=Level("RAM", 0.007 * GIB, 11.25 * GIB, Processor(144e9, 0.875)),
    slow=Level("disk", 256 * GIB, 1.0 * GIB, None),
    link=Link(1.0 * GIB, 0.25 * GIB),
    source="measured in 9 s by microbenchmarks; weights in bfloat16",
    measurements={
        "memory": READ,
        "products": RATES,
        "disk": DISK,
        "file": "a temporary file in /data",
        "direct": True,
        "write_gib": 0.25,
    },
)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[MeasureHardware, Effort]]:
    """Replaces the measurement. Returns the list of its calls."""
    calls: list[tuple[MeasureHardware, Effort]] = []

    def measure(options: MeasureHardware, effort: Effort) -> Hardware:
        calls.append((options, effort))
        return THIS

    monkeypatch.setattr(hardware, "measure", measure)
    return calls


def test_a_table_and_a_file(tmp_path: Path, asked: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "this.toml"
    line = [
        "hardware",
        "measure",
        "-o",
        str(path),
        "--path",
        str(tmp_path),
        "--threads",
        "2",
        "--name",
        "box",
    ]
    assert cli.main(line) == 0
    shown = capsys.readouterr().out
    for text in ("two cores: measured in 9 s", "11.25", "144.0", "88%", "8.0 MiB", "first time", "1.75"):
        assert text in shown, text
    assert "Repeated reads are 2.0 times as fast" in shown
    assert f"moesaic plan MODEL --hardware {path}" in shown
    assert find_hardware(str(path)).measurements == THIS.measurements
    wanted = MeasureHardware(output_file=path, path=tmp_path, threads=2, name="box")
    assert asked == [(wanted, FULL)]


def test_for_machines(asked: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["hardware", "measure", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(THIS.to_tables()))


def test_a_plan_measures_first_and_says_so(asked: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    line = ["plan", "demo", "--hardware", "this", "--prompt-len", "8", "--gen-len", "2", "--json"]
    assert cli.main([*line, "--policy", "flexgen"]) == 2, "FlexGen's search wants a slow level that computes"
    assert cli.main(line) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["hardware"]["machine"]["name"] == "two cores"
    said = "two cores: measured in 9 s by microbenchmarks; weights in bfloat16; `moesaic hardware measure` is"
    assert said in printed.err
    assert asked[-1] == (MeasureHardware(path=Path()), SHORT)


def test_the_disk_of_the_model_is_measured(tmp_path: Path, asked: list[Any]) -> None:
    (tmp_path / "config.json").write_text("{}")
    for model, folder in (
        (str(tmp_path), tmp_path),
        (str(tmp_path / "config.json"), tmp_path),
        ("mixtral-8x7b", Path()),
    ):
        hardware.now(model)
        assert asked[-1][0].path == folder


def test_a_disk_that_cannot_be_measured_is_said_for_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(options: MeasureHardware, effort: Effort) -> Hardware:
        raise ConfigError.field("--path", str(options.path), "a directory to write to")

    monkeypatch.setattr(hardware, "measure", measure)
    with pytest.raises(ConfigError, match=r"--hardware this: --path: got '\.'.* hardware measure --path"):
        hardware.now("dbrx")


def test_a_model_that_is_not_there_is_not_measured_for(
    asked: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["plan", "no/such/model", "--hardware", "this", "--prompt-len", "8", "--gen-len", "2"]
    assert cli.main(line) == 2 and asked == []
    assert "model: got 'no/such/model'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["--threads", "0"], "--threads: got 0; allowed: an integer of at least 1"),
        (["--threads", "99999"], "--threads: got 99999; allowed: an integer of at least 1 and at most 1024"),
        (["-o", "this.json"], "--output-file: got 'this.json'; allowed: a file that ends in .toml"),
        (["--device", "tpu"], "--device: got 'tpu'; allowed: auto, cpu, cuda"),
    ],
)
def test_mistakes_are_one_line(
    line: list[str], message: str, asked: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["hardware", "measure", *line]) == 2 and asked == []
    shown = capsys.readouterr().err
    assert message in shown and len(shown.splitlines()) == 1


class Measuring:
    """Replaces the measurement and records what was asked of it."""

    def __init__(self, effort: Effort, show: object, threads: int | None) -> None:
        self.asked = effort, threads

    def ram_over_disk(self, path: Path, name: str) -> Hardware:
        return replace(THIS, name=f"{name} over {path} {self.asked[1]}")

    def gpu_over_ram(self, device: Any, name: str) -> Hardware:
        return replace(THIS, name=f"{name} on {device.title}")


class Gpu:
    title = "H100"


def test_the_kind_of_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "Measuring", Measuring)

    def name(gpu: Gpu | None, **options: Any) -> str:
        monkeypatch.setattr(hardware, "find_device", lambda: gpu)
        return hardware.measure(MeasureHardware(**options), FULL).name

    assert name(None, name="a", path=Path("/x"), threads=3) == "a over /x 3"
    assert name(Gpu()) == "H100 on H100" and name(Gpu(), name="a") == "a on H100"
    assert name(Gpu(), name="a", device="cpu").startswith("a over .")
    with pytest.raises(ConfigError, match="--device: got 'cuda'; allowed: auto, cpu: torch sees no GPU"):
        name(None, device="cuda")


def test_remarks() -> None:
    assert len(hardware_report.remarks(THIS)) == 1
    steady = replace(THIS, link=Link(0.7 * GIB, 0.25 * GIB))
    assert hardware_report.remarks(steady) == []
    poor = {key: value for key, value in THIS.measurements.items() if key != "write_gib"} | {"direct": False}
    cached, silent = hardware_report.remarks(replace(steady, measurements=poor))
    assert "has no O_DIRECT" in cached and "Writing was not measured" in silent


def test_both_levels_of_a_gpu_and_its_link_are_shown() -> None:
    link = [{"way": "down", "pinned": True, "gib": 21.5}, {"way": "down", "pinned": False, "gib": 6.125}]
    measured: dict[str, Any] = {"link": link}
    for level in ("fast", "slow"):
        measured |= {f"{level}_memory": READ, f"{level}_products": RATES}
    shown = hardware_report.as_text(
        replace(THIS, link=replace(THIS.link, staging=4.5 * GIB), measurements=measured), None
    )
    for text in (
        "Matrix products, Gflops/s, fast level",
        "Weights read for one row, slow level",
        "pageable",
        "6.12",
    ):
        assert text in shown, text
    assert "copy into pinned memory" in shown and "4.50" in shown and "moesaic plan" not in shown


def test_products_are_those_of_the_checkpoints_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path is a directory, one of its shards, a path without a checkpoint, or a compressed checkpoint."""
    seen: list[Effort] = []

    def measuring(effort: Effort, *others: Any) -> Measuring:
        seen.append(effort)
        return Measuring(effort, *others)

    monkeypatch.setattr(hardware, "Measuring", measuring)
    plain, model, small = tmp_path / "plain", tmp_path / "model", tmp_path / "small"
    for folder in (plain, model, small):
        folder.mkdir()
    tiny_models.save(
        tiny_models.build("qwen3_moe", model_configs.qwen3(hidden_size=128, moe_intermediate_size=96)), model
    )
    (plain / "config.json").write_text('{"model_type": "unknown"}')
    config = json.loads((model / "config.json").read_text()) | {"torch_dtype": "bfloat16"}
    config["quantization_config"] = {"quant_method": QUANT_METHOD}
    (small / "config.json").write_text(json.dumps(config))
    for path in (model, model / "model.safetensors", plain, small):
        hardware.measure(MeasureHardware(path=path, device="cpu"), SHORT)
    sizes = [one.products for one in seen]
    shapes = [(one.hidden, one.width, one.top_k, one.matrices) for one in sizes]
    assert shapes == [(128, 96, 4, 64), (128, 96, 4, 64), (2048, 768, 8, 16), (128, 96, 4, 64)]
    assert [one.packed_type for one in sizes] == [None, None, None, "compressed"]
    assert sizes[0].rows == SHORT.products.rows
    assert all(one.converting is None for one in seen)
    assert SHORT.products.with_experts(4096, 14336, 2).matrices == 2


@pytest.mark.parametrize(
    ("name", "form"), [("qwen3", "packed int4"), ("gpt-oss", "mxfp4"), ("gpt-oss", None)]
)
def test_conversion_of_the_checkpoints_experts_is_measured(
    name: str, form: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """form: None: experts in columns."""
    path = tiny_models.save(tiny_models.build(*CASES[name]), tmp_path / "source", torch.bfloat16)
    if form is not None:
        path, _ = quantizers.quantize(path, tmp_path, FORMATS[form])
    seen: list[Effort] = []
    measuring = measure.Measuring
    monkeypatch.setattr(measuring, "ram_over_disk", lambda self, *_: seen.append(self.effort))
    hardware.measure(MeasureHardware(path=path, device="cpu"), SHORT)
    found = seen[0].converting
    kind = None if form is None else STORED[form]
    assert found is not None and found.name == (kind or "columns") and seen[0].products.packed_type == kind
    found.run()
    every = Headers(path).list_tensors().items()
    experts = sum(place.size for name, place in every if name.startswith("model.layers.0.mlp.experts."))
    assert found.size == experts / 12
    [(named, rate)] = measuring(replace(seen[0], seconds=1e-9), lambda *_: None)._conversions()
    assert named == found.name and rate > 0
