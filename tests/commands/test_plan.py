from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from moesaic.commands import cli, plan_picture
from moesaic.commands.plan import find_hardware, find_model, plan
from moesaic.commands.plan_options import Plan
from moesaic.commands.plan_report import Report, as_json, as_text
from moesaic.core.errors import ConfigError
from moesaic.cost.hardware import GIB
from moesaic.cost.machines import MACHINES, machine
from moesaic.cost.sizes import PUBLISHED_MODELS
from moesaic.policy.offloading.policies import Policy, Workload
from moesaic.policy.offloading.pricing import Pricing

MACHINE = """
[machine]
name = "two cores"
[fast]
name = "arena"
memory_gib = 0.007
bandwidth_gib = 10
tflops = 0.05
prefill_efficiency = 0.5
[slow]
name = "RAM"
memory_gib = 4
bandwidth_gib = 8
tflops = 0.02
[link]
down_gib = 1
staging_gib = 4
"""
LINE = ["plan", "mixtral-8x7b", "--hardware", "l4", "--prompt-len", "77", "--gen-len", "128"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "this.toml"
    path.write_text(MACHINE, encoding="utf-8")
    return path


@pytest.fixture
def small(tmp_path: Path) -> str:
    """A model of few experts, since a search tries every number of experts in fast memory."""
    config = {
        "model_type": "mixtral", "num_hidden_layers": 6, "hidden_size": 192, "intermediate_size": 192,
        "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 4096, "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(tmp_path)


@pytest.mark.slow
def test_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(LINE) == 0
    shown = capsys.readouterr().out
    for text in (
        "mixtral-8x7b (46.7 billion parameters",
        "cgopipe",
        "attention computed at",
        "RAM, 24 cores",
        "usable",
        "link down",
        "bottleneck",
        "end to end",
        "What would help most: ",
        "concurrent requests on. With fewer, leave the weights",
        "Source of the machine's figures: MoE-Lightning's artifact: peaks",
    ):
        assert text in shown, text


@pytest.mark.slow
def test_for_machines_and_with_another_host(
    file: Path, small: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(MACHINE.replace("0.007", "0.0035"), encoding="utf-8")
    line = ["plan", small, "--hardware", str(file), "--prompt-len", "64", "--gen-len", "16", "--json"]
    assert cli.main([*line, "--host-memory", "64MiB", "--host-bandwidth", "5GiB", "--gpus", "2"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["hardware"]["slow"]["memory_gib"] == 1 / 16
    assert found["hardware"]["slow"]["bandwidth_gib"] == 5
    assert found["hardware"]["fast"]["memory_gib"] == 0.007
    assert found["hardware"]["machine"]["name"] == "2 x two cores"
    policy = found["policy"]
    assert policy["batch"] == policy["micro_batch"] * policy["micro_batches"]
    assert found["workload"] == {"prompt": 64, "generate": 16, "cache_number": 2.0, "unfilled": 0}
    assert sum(found["memory"]["slow"].values()) <= 0.9 * GIB / 16
    step = found["decode_step"]
    assert step["bottleneck"] == max(step["layer_seconds"], key=lambda name: step["layer_seconds"][name])
    layers = json.loads((Path(small) / "config.json").read_text())["num_hidden_layers"]
    assert 0.3 < layers * step["layer_seconds"][step["bottleneck"]] / step["seconds"] <= 1.0
    assert found["helps"][0]["gain"] >= found["helps"][-1]["gain"] and found["advice"]


@pytest.mark.slow
def test_flexgen_has_its_own_search(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*LINE, "--policy", "flexgen", "--json"]) == 0
    theirs = json.loads(capsys.readouterr().out)
    assert theirs["policy"]["schedule"] == "s4" and theirs["flexgen_predicts"] > 0
    assert theirs["helps"] == []
    [said] = theirs["advice"]
    assert said.startswith("This policy does not fit: it needs 150.7 GiB of RAM, 24 cores, and 147.4 GiB of")
    assert cli.main([*LINE, "--policy", "flexgen"]) == 0
    assert said in capsys.readouterr().out
    assert cli.main(["plan", "demo", *LINE[2:], "--policy", "flexgen", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["advice"] == []


@pytest.mark.slow
def test_flexgens_search_knows_the_type_of_the_cache(capsys: pytest.CaptureFixture[str]) -> None:
    """With fewer bytes for each token more requests fit."""
    batches = []
    for dtype in ("bfloat16", "int8", "int4"):
        assert cli.main([*LINE, "--policy", "flexgen", "--json", "--kv-cache-dtype", dtype]) == 0
        batches.append(json.loads(capsys.readouterr().out)["policy"]["batch"])
    assert 1.5 * batches[0] < batches[1] < batches[2] / 1.5


@pytest.mark.slow
def test_a_hardware_file(file: Path, small: str) -> None:
    report = plan(Plan(small, hardware=str(file), prompt_len=64, gen_len=16, policy="flexgen"))
    assert report.hardware.name == "two cores" and report.hardware.link.staging == 4 * GIB
    text = as_text(report)
    assert "arena" in text and "figures: its file" in text and "MiB" in text


@pytest.mark.slow
def test_offloading_that_is_not_worth_it_is_said() -> None:
    text = as_text(plan(Plan("mixtral-8x7b", hardware="h200", prompt_len=77, gen_len=32)))
    assert "Offloading is not worth it here: everything fits" in text


def test_models_by_name_directory_and_file(tmp_path: Path) -> None:
    config = {
        "model_type": "dbrx",
        "n_layers": 2,
        "d_model": 64,
        "n_heads": 4,
        "vocab_size": 100,
        "attn_config": {"kv_n_heads": 2},
        "ffn_config": {"moe_num_experts": 4, "moe_top_k": 2, "ffn_hidden_size": 32},
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    assert find_model(str(tmp_path)).weights == find_model(str(path)).weights
    assert find_model("dbrx").layers == 40 and find_model("demo").layers == 6
    assert find_model("demo").experts == 24


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (LINE[:1], "MODEL: got 'nothing'"),
        (LINE[:2], "--hardware: got 'nothing'"),
        ([*LINE[:3], "b200", *LINE[4:]], "--hardware: got 'b200'; allowed: t4, l4"),
        ([*LINE[:3], "none.toml", *LINE[4:]], "--hardware: got 'none.toml'; allowed: a file to read"),
        (["plan", "no/such/model", *LINE[2:]], "model: got 'no/such/model'; allowed: a directory with"),
        (LINE[:6], "--gen-len: got 'nothing'"),
        ([*LINE[:5], "0", *LINE[6:]], "--prompt-len: got 0; allowed: an integer of at least 1"),
        ([*LINE[:7], "1"], "--gen-len: got 1; allowed: an integer of at least 2"),
        ([*LINE, "--gpus", "0"], "--gpus: got 0"),
        ([*LINE, "--plot", "x.png"], "--plot: got 'x.png'; allowed: a file that ends in .svg"),
        ([*LINE, "--host-memory", "much"], "--host-memory: got 'much'"),
        ([*LINE, "--host-memory", "-1GiB"], "--host-memory: got '-1GiB'"),
        ([*LINE, "--host-memory=-1GiB"], "--host-memory: got '-1GiB'; allowed: a positive size"),
        ([*LINE, "--host-memory", "--host-bandwidth", "2GiB"], "--host-memory: got nothing"),
        (["plan", "deepseek-v3", *LINE[2:]], "deepseek-v3 does not fit on l4: one request needs"),
    ],
)
def test_mistakes_are_one_line(line: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(line) == 2
    shown = capsys.readouterr().err
    assert message in shown and len(shown.splitlines()) == 1


def test_broken_files_are_named(tmp_path: Path) -> None:
    broken = tmp_path / "this.toml"
    broken.write_text("[fast", encoding="utf-8")
    with pytest.raises(ConfigError, match="not a TOML file"):
        find_hardware(str(broken))
    (tmp_path / "config.json").write_text("[1", encoding="utf-8")
    with pytest.raises(ConfigError, match="not a JSON file"):
        find_model(str(tmp_path))
    (tmp_path / "config.json").write_text("[1]", encoding="utf-8")
    with pytest.raises(ConfigError, match="not a JSON object"):
        find_model(str(tmp_path))


def test_known_machines_can_be_asked_for_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert find_hardware("t4") is machine("t4")
    assert cli.main(["plan", "--help"]) == 0
    shown = capsys.readouterr().out
    assert all(re.search(rf"\b{name}[,)]", shown) for name in MACHINES)


# ---- pictures


@pytest.mark.slow
def test_the_picture_has_every_chart_and_the_turning_points(
    file: Path, small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_picture, "FACTORS", (1, 4))
    monkeypatch.setattr(plan_picture, "MEMORIES", (0.5, 1.0))
    target = tmp_path / "plan.svg"
    line = ["plan", small, "--hardware", str(file), "--prompt-len", "64", "--gen-len", "16"]
    line += ["--host-memory", "64MiB"]  # so that batches are small, and each search short
    assert cli.main([*line, "--json", "--plot", str(target)]) == 0
    root = ET.fromstring(target.read_text(encoding="utf-8"))
    text = " ".join(node.text or "" for node in root.iter("{http://www.w3.org/2000/svg}text"))
    for wanted in ("bf16", "int8", "int4", "link", "P1: ", "P2", "tokens/s", "FlexGen's policy"):
        assert wanted in text, wanted
    assert text.count("100%") + text.count(" 0% 0%") >= 3 and "nan" not in target.read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_picture_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_picture, "draw", lambda report: "<svg/>")
    assert cli.main([*LINE, "--policy", "flexgen", "--plot", "/no/such/place.svg"]) == 2


def test_a_plan_that_splits_experts_says_that_both_processors_compute_them() -> None:
    model, hardware, job = PUBLISHED_MODELS["qwen3-30b-a3b"], machine("l4"), Workload(77, 128)
    policy = Policy("split", 4, 1, slow_attention=False, static_experts=38, slow_cache=0.0)
    found = Report(model, hardware, job, Pricing(model, hardware, job).price(policy), None)
    shown = re.sub(r"\s+", " ", as_text(found))
    assert "experts computed at GPU memory and RAM, 24 cores (in decode)" in shown
    assert json.loads(as_json(found))["policy"]["experts"] == "both"
