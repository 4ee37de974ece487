"""Config files as their makers published them: each goes through doctor, and as a tiny model to tokens.

The files in the folder `published` have every key of the original. They are called ORGANIZATION--NAME.json.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support import shrunk, tiny_models
from tests.support.model_driver import Driver

from moesaic.commands import doctor_model
from moesaic.commands.model_options import Doctor
from moesaic.commands.model_report import judge, show
from moesaic.core.errors import CheckpointError
from moesaic.core.text_config import WRAPPERS, read_text_config
from moesaic.kernels.table import pick
from moesaic.models import files, registry
from moesaic.models.checkpoint import IndexClaims
from moesaic.models.families import MODELS
from moesaic.planning.sizes import read_config_sizes, type_by_config

FOLDER = Path(__file__).parent / "published"
PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BESIDE = {
    file.stem.replace("--", "/"): json.loads(file.read_text())
    for file in sorted((FOLDER / "beside").glob("*.json"))
}
"""Model -> name of another published file -> what it has; and "tensors": names of its index, with ranges."""
RANGE = re.compile(r"(\d+)-(\d+)")
FILES = {file.stem.replace("--", "/"): file for file in sorted(FOLDER.glob("*.json"))}
NVFP4 = {name for name in FILES if name.endswith("NVFP4")}
"""Checkpoints in NVFP4, of ModelOpt and of compressed-tensors. Most are versions of models above."""
NOT_HERE = {"granitemoeshared", "internvl", "qwen3_5_moe_text", "qwen3_vl_moe_text"}
"""Of these no whole published config is known: Granite with a shared expert, InternVL with experts, and
Qwen3.5 and Qwen3-VL without images."""
BY_HAND: dict[str, dict[str, Any]] = {"QuantTrio/MiniMax-M2-AWQ": {"model_type": "minimax_m2"}}
"""Models that are read with --hf-overrides, and its value: this one is called `mixtral`."""
FAST = ("MiniMaxAI/MiniMax-M2.7", "moonshotai/Kimi-K2.5", "zai-org/GLM-4.5V")
COMPARED = sorted(FILES.keys() - NVFP4)


TENSORS = {"tencent/Hy3": 47138}
"""How many tensors a published index is said to have."""
QUANTISED = [name for name in COMPARED if shrunk.find_quantization(json.loads(FILES[name].read_text()))]
QUANTISED += ["RedHatAI/Qwen3-Coder-Next-NVFP4", "nvidia/GLM-4.7-NVFP4", "nvidia/Qwen3.6-35B-A3B-NVFP4"]


def read(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(FILES[name].read_text())
    return config | BY_HAND.get(name, {})


def write_files(name: str, folder: Path) -> Path:
    """Writes config.json and what else is here of a model's small files. Returns config.json."""
    folder.mkdir()
    contents = {"config.json": read(name)} | BESIDE.get(name, {})
    for file, content in contents.items():
        if file != "tensors":
            (folder / file).write_text(json.dumps(content))
    return folder / "config.json"


def list_tensors(name: str) -> list[str]:
    """The names of all tensors in a model's index, such as those that "layers.0-3" stands for."""
    names: list[str] = []
    waiting = list(BESIDE[name]["tensors"])
    while waiting:
        pattern = waiting.pop()
        match = RANGE.search(pattern)
        if match is None:
            names.append(pattern)
            continue
        first, last = map(int, match.groups())
        waiting += [f"{pattern[: match.start()]}{n}{pattern[match.end() :]}" for n in range(first, last + 1)]
    return names


@pytest.mark.parametrize("name", FILES)
def test_doctor_judges_a_published_config(name: str, tmp_path: Path) -> None:
    file = write_files(name, tmp_path / "model")
    report = doctor_model.examine_model(Doctor(str(file), hardware="none"), tmp_path)
    assert not report.problems, report.problems
    assert report.spec is not None and report.sizes is not None and report.sizes_error is None
    assert (name in NVFP4) == str(report.sizes.quantized_dtype).startswith("nvfp4")


def test_what_a_config_leaves_unquantised_has_the_price_of_bf16() -> None:
    sizes = read_config_sizes(read("moonshotai/Kimi-K2.5"), "k")
    assert sizes.quantized_dtype == "int4_g32"
    assert sizes.other_bytes == 2 * sizes.other_parameters + 2 * sizes.gates  # gates are float32


@pytest.mark.parametrize(
    ("name", "listed"),
    [
        ("Qwen/Qwen3-30B-A3B", ["int8_g128 (GPTQ", "int4_g128 (GPTQ"]),
        ("allenai/OLMoE-1B-7B-0125", ["int8_g128 (GPTQ", "int4_g128 (GPTQ"]),
        ("openai/gpt-oss-20b", ["bfloat16", "mxfp4_e8m0 (this"]),
    ],
)
def test_doctor_lists_versions_as_they_are_published(
    name: str, listed: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = doctor_model.examine_model(Doctor(str(FILES[name]), hardware="none"), tmp_path)
    show(report)
    printed = capsys.readouterr().out
    assert all(version in printed for version in listed)
    assert not re.search(r"_offset|^ int[48] ", printed, re.MULTILINE)
    assert ("GPTQ" in printed) == ("GPTQ" in "".join(listed))


@pytest.mark.parametrize("name", BY_HAND)
def test_doctor_says_what_to_change_by_hand(name: str, tmp_path: Path) -> None:
    flag = f"--hf-overrides '{json.dumps(BY_HAND[name])}'"
    report = doctor_model.examine_model(Doctor(str(FILES[name]), hardware="none"), tmp_path)
    assert judge(report).startswith("not supported: config.json: model_type: got 'mixtral'; ")
    assert judge(report).endswith(flag)


@pytest.mark.parametrize("name", [name for name in BESIDE if "generation_config.json" in BESIDE[name]])
def test_an_answer_ends_at_the_tokens_of_published_files(name: str, tmp_path: Path) -> None:
    directory = write_files(name, tmp_path / "model").parent
    said: set[int] = set()
    for raw in (read_text_config(read(name)), read(name), BESIDE[name]["generation_config.json"]):
        ends = raw.get("eos_token_id")
        said |= set(ends if isinstance(ends, list) else [] if ends is None else [ends])
    assert said and set(files.generation_defaults(directory).join_ends(())) == said


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in BESIDE if "tensors" in BESIDE[name]])
def test_the_names_of_a_published_index_are_those_that_are_loaded(name: str, tmp_path: Path) -> None:
    names = list_tensors(name)
    assert len(names) == len(set(names)) == TENSORS[name]
    config = write_files(name, tmp_path / "model")
    index = config.parent / files.INDEX
    weight_map = dict.fromkeys(names, "model.safetensors")
    index.write_text(json.dumps({"weight_map": weight_map}))
    registry.understand(read(name), config.parent, IndexClaims(config.parent))
    loaded = "model.layers.5.mlp.experts.7.up_proj.weight"
    index.write_text(json.dumps({"weight_map": {key: weight_map[key] for key in names if key != loaded}}))
    with pytest.raises(CheckpointError, match=re.escape(f"tensor {loaded} is missing")):
        registry.understand(read(name), config.parent, IndexClaims(config.parent))


def test_each_family_has_a_published_config_or_is_named() -> None:
    kinds = {read(name)["model_type"] for name in COMPARED}
    assert kinds | NOT_HERE == MODELS.keys() | WRAPPERS.keys()
    assert not kinds & NOT_HERE


def test_the_page_marks_families_without_a_published_config() -> None:
    section = PAGE.read_text(encoding="utf-8").partition("\n## Families\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    marked = {name for row in rows if "not compared" in row for name in re.findall(r"`(\w+)`", row)[:1]}
    assert marked == NOT_HERE and len(rows) > 20


def test_the_page_marks_formats_without_a_published_config() -> None:
    published = set[tuple[str, str]]()
    for name in QUANTISED:
        quantization, spec = shrunk.find_quantization(read(name)), registry.understand(read(name), FOLDER)
        expert_type = type_by_config(read(name), spec.hidden_size, spec.expert_width)
        assert quantization is not None and expert_type is not None
        published.add((quantization["quant_method"], expert_type))
    table = PAGE.read_text(encoding="utf-8").partition("| published config |\n")[2].partition("\n\n")[0]
    for row in table.splitlines()[1:]:
        _, stored, memory, _, mark, _ = row.split("|")
        has_config = any(
            f"`{method}`" in stored
            and (
                expert_type in memory or "these" in memory or (expert_type[:4] == "int4" and "int4" in memory)
            )
            for method, expert_type in published
        )
        assert mark.strip() == ("yes" if has_config else "not compared"), row


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in COMPARED]
)
def test_a_tiny_model_of_a_published_config_has_transformers_tokens(name: str, tmp_path: Path) -> None:
    theirs, path = shrunk.write(read(name), tmp_path)
    tokens = tiny_models.prompt(24, shrunk.VOCABULARY)
    ours = Driver(registry.load(path, pick("cpu")))
    assert ours.greedy(tokens, 12) == tiny_models.reference_greedy(theirs, tokens, 12)


@pytest.mark.slow
@pytest.mark.parametrize("name", QUANTISED)
def test_a_tiny_quantised_model_has_the_tokens_of_its_dequantised_weights(name: str, tmp_path: Path) -> None:
    theirs, path = shrunk.write_quantised(read(name), tmp_path)
    parts = (
        load_file(path / "model.safetensors").keys()
        - load_file(tmp_path / "plain" / "model.safetensors").keys()
    )
    assert any("experts" in part for part in parts)
    tokens = tiny_models.prompt(24, shrunk.VOCABULARY)
    ours = Driver(registry.load(path, pick("cpu")))
    logits = ours.prefill(tokens)
    torch.testing.assert_close(logits, tiny_models.reference_logits(theirs, tokens), rtol=1e-3, atol=1e-3)
