"""Every command that reads a checkpoint takes --hf-overrides."""

from __future__ import annotations

import dataclasses
import importlib
import json
import pkgutil
from pathlib import Path

import numpy as np
import pytest
from tests.commands.test_place import demo_profile
from tests.jobs.profiling.test_importing import answer, routes

import moesaic
from moesaic.commands import cli
from moesaic.commands.plan import find_model
from moesaic.core.profile import Profile
from moesaic.models import files, registry

DROP = '{"attention_sinks": null}'
ELSEWHERE = {
    "Chat": "the name by which a server knows its model",
    "ServeBench": "the name by which a server knows its model",
    "KernelsBench": "the sizes of a known model",
    "Scenario": "the sizes of a model in virtual time",
}
"""Classes of settings whose `model` is no checkpoint, and what it is."""


@pytest.fixture
def strange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The demo checkpoint with a key that is refused."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "strange"
    path.mkdir()
    for file in files.resolve("demo").iterdir():
        if file.name != "config.json":
            (path / file.name).symlink_to(file)
    raw = json.loads((files.resolve("demo") / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(raw | {"attention_sinks": 4}))
    return path


def test_every_class_of_settings_with_a_checkpoint_has_the_flag() -> None:
    lacking = set()
    for room in ("commands", "config", "jobs"):
        for module in pkgutil.walk_packages([f"{moesaic.__path__[0]}/{room}"], f"moesaic.{room}."):
            if not module.name.endswith(("options", "worker", "commands.serve_bench")):
                continue
            for name, value in vars(importlib.import_module(module.name)).items():
                fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
                kinds = {field.name: str(field.type) for field in fields}
                if kinds.get("model", "").startswith("str") and "hf_overrides" not in kinds:
                    lacking.add(name)
    assert lacking <= ELSEWHERE.keys()


@pytest.mark.parametrize("words", [("compress",), ("quantize", "--format", "int8", "--allow-growth")])
def test_a_written_checkpoint_is_without_the_key(
    words: tuple[str, ...], strange: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command, *flags = words
    written = tmp_path / "written"
    assert cli.main([command, str(strange), str(written), *flags]) == 2
    assert f"--hf-overrides '{DROP}'" in capsys.readouterr().err
    assert cli.main([command, str(strange), str(written), *flags, "--hf-overrides", DROP]) in (0, 1)
    assert "attention_sinks" not in json.loads((written / "config.json").read_text())
    assert registry.read_spec(written) == registry.read_spec(files.resolve("demo"))


def test_a_plan_is_that_of_the_changed_model(strange: Path) -> None:
    unchanged = find_model("demo")
    assert find_model(str(strange), hf_overrides=DROP).layers == unchanged.layers
    fewer = json.dumps({"num_hidden_layers": 2})
    assert find_model(str(strange / "config.json"), hf_overrides=fewer).layers == 2 < unchanged.layers


def test_a_placement_takes_nearest_tokens_of_the_changed_model(
    strange: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    demo_profile().save(tmp_path / "live.npz")
    words = ["place", str(tmp_path / "live.npz"), "--ranks", "2", "--solver", "kmeans", "--json"]
    words += ["-o", str(tmp_path / "placement.json"), "--model", str(strange)]
    assert cli.main(words) == 2
    assert f"--hf-overrides '{DROP}'" in capsys.readouterr().err
    assert cli.main([*words, "--hf-overrides", DROP]) == 0
    assert json.loads(capsys.readouterr().out)["nearest_known"]


def test_an_imported_profile_is_that_of_the_changed_model(
    strange: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    routed = registry.routed_model(files.resolve("demo"))
    experts = routes(3, routed).astype(np.uint8)
    (tmp_path / "answers.jsonl").write_text(json.dumps(answer([5, 6], [7, 8], experts)))
    words = ["profile", "import", str(tmp_path / "answers.jsonl"), "--from", "vllm", "--model", str(strange)]
    words += ["-o", str(tmp_path / "profile.npz")]
    assert cli.main(words) == 2
    assert f"--hf-overrides '{DROP}'" in capsys.readouterr().err
    assert cli.main([*words, "--hf-overrides", DROP]) == 0
    assert Profile.load(tmp_path / "profile.npz").model == routed.model


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("plan", "dbrx", "--hardware", "t4", "--prompt-len", "8", "--gen-len", "8"), "dbrx, which has no"),
        (("place", "p.npz", "--ranks", "2", "--compare"), "nothing without --model"),
        (("join", "host:1", "--secret-file", "s"), "nothing without --model"),
    ],
)
def test_a_flag_without_a_config_is_refused(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*words, "--hf-overrides", DROP]) == 2
    assert "--hf-overrides" in (error := capsys.readouterr().err) and message in error
