"""Checkpoints that `moesaic quantize` wrote, through whole engines: the same tokens in every mode.

tests/test_llm_quantized.py takes the files of other programs through the same modes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moesaic import LLM
from moesaic.jobs.quantizing.options import QuantizeOptions
from moesaic.jobs.quantizing.run import run
from moesaic.kernels import table
from moesaic.models.checkpoint import Checkpoint
from moesaic.testing import byte_tokenizer
from tests.models.test_quantized import CASES
from tests.support import model_configs, pairs, tiny_models
from tests.support.cluster_driver import Answer, cluster
from tests.support.thread_groups import group_of_threads
from tests.test_llm_families import LONGEST, NEW, WAYS, answers, params, prompts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("quick_workers"),
    pytest.mark.skipif(not table.instruction_sets(), reason="no native kernels in this build"),
]
FORMS: dict[str, dict[str, Any]] = {
    "int4": {"format": "int4", "group_size": 32},
    "int8 of fused experts": {"format": "int8"},
    "int8 of all modules": {"format": "int8", "modules": ("experts", "attention", "mlp")},
    "int4, calibrated": {"format": "int4", "group_size": 32, "least_tokens": 8},
}
Run = Callable[[str], list[Answer]]


def in_process(way: str) -> Run:
    return lambda path: answers(LLM(path, threads=1, max_model_len=LONGEST, **WAYS[way]))


def servers(path: str) -> list[Answer]:
    with cluster(path, min_replicas=2, max_model_len=LONGEST) as served:
        served.submit(prompts(), params())
        return served.finish()


def ranks(**more: int) -> Run:
    def found(path: str) -> list[Answer]:
        settings = {"tensor_parallel_size": 2, "max_model_len": LONGEST, **more}
        with group_of_threads(path, **settings) as (model, _, _):
            return answers(model)

    return found


MODES: dict[str, Run] = {
    "chunks": in_process("chunks"),
    "expert servers": servers,
    "two ranks": ranks(),
    "two ranks, halves of experts": ranks(expert_tensor_parallel_size=2),
    "experts on disk": in_process("experts on disk"),
    "experts on demand": in_process("experts on demand"),
}


class Models(dict[tuple[str, str], Path]):
    """By family and form, and the answers of one process."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.known: dict[tuple[str, str], list[Answer]] = {}

    def __missing__(self, key: tuple[str, str]) -> Path:
        family, form = key
        how, folder = FORMS[form], self.root / f"{family} {form}"
        save = tiny_models.save_fused if "fused" in form else tiny_models.save
        source = save(tiny_models.build(*CASES[family]), folder / "source", torch.float32)
        byte_tokenizer(source)
        if "calibrated" in form:
            file = folder / "prompts.jsonl"
            drawn = [tiny_models.prompt(40, model_configs.VOCAB, seed=seed) for seed in range(16)]
            file.write_text("".join(json.dumps({"prompt": one}) + "\n" for one in drawn))
            how = how | {"calibrate": (file,)}
        options = QuantizeOptions(str(source), folder / "out", threads=1, evaluation_tokens=0, **how)
        run(options, lambda *_: None)
        self[key] = folder / "out"
        return self[key]

    def wanted(self, key: tuple[str, str]) -> list[Answer]:
        if key not in self.known:
            self.known[key] = answers(LLM(str(self[key]), threads=1, max_model_len=LONGEST))
        return self.known[key]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("written"))


@pytest.mark.parametrize(("mode", "form", "family"), pairs.params(MODES, FORMS, ("qwen3", "deepseek3")))
def test_the_tokens_of_one_process(models: Models, mode: str, form: str, family: str) -> None:
    found, expected = MODES[mode](str(models[family, form])), models.wanted((family, form))
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]


def greedy(found: list[Answer]) -> list[tuple[list[int], list[int]]]:
    """The prompts that are not sampled, and their tokens."""
    every = zip(prompts(), params(), found, strict=True)
    return [(prompt, tokens) for prompt, one, (tokens, _) in every if one.temperature == 0]


@pytest.mark.parametrize("form", [form for form in FORMS if "fused" not in form])
def test_the_tokens_of_transformers_with_these_numbers(models: Models, form: str, tmp_path: Path) -> None:
    path = models["qwen3", form]
    source, checkpoint = path.parent / "source", Checkpoint(path)
    plain = {
        name: checkpoint.tensor(name, *one.shape, dtype=torch.float32)
        for name, one in load_file(source / "model.safetensors").items()
    }
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file(plain, tmp_path / "model.safetensors", {"format": "pt"})
    theirs = tiny_models.KINDS["qwen3_moe"][1].from_pretrained(tmp_path, dtype=torch.float32)
    for prompt, tokens in greedy(models.wanted(("qwen3", form))):
        assert tokens == tiny_models.reference_greedy(theirs, prompt, NEW)


READ = """
import json, sys, torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
model.generation_config.eos_token_id = None
for prompt in json.loads(sys.argv[2]):
    made = model.generate(torch.tensor([prompt]), max_new_tokens=int(sys.argv[3]), do_sample=False)
    print(json.dumps(made[0, len(prompt):].tolist()))
"""


@pytest.mark.full
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ["qwen3", "deepseek3"])
def test_transformers_reads_the_files_itself(models: Models, family: str, form: str) -> None:
    """It needs the library: pip install 'compressed-tensors>=0.20'."""
    pytest.importorskip("compressed_tensors")
    expected = greedy(models.wanted((family, form)))
    asked = json.dumps([prompt for prompt, _ in expected])
    command = [sys.executable, "-c", READ, str(models[family, form]), asked, str(NEW)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert [json.loads(line) for line in said.splitlines()] == [tokens for _, tokens in expected]
