"""vLLM reads what `quantize` writes.

It needs vLLM: `benchmarks/setup_peer.sh vllm DIR`, then MOESAIC_VLLM=DIR/bin/python. Its CPU build has no
kernel for int8 without quantised activations, and those for experts in int4 need AMX. So its tokens are
compared where it has a kernel, and elsewhere the numbers that it loaded.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support import model_configs, tiny_models
from tests.support.model_driver import Driver

from moesaic.jobs.quantizing.options import QuantizeOptions
from moesaic.jobs.quantizing.run import run
from moesaic.kernels import table
from moesaic.models import registry
from moesaic.models.checkpoint import Checkpoint
from moesaic.testing import byte_tokenizer

VLLM = os.environ.get("MOESAIC_VLLM")
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(VLLM is None, reason="MOESAIC_VLLM names no python with vLLM"),
]
ENVIRONMENT = {
    "OMP_NUM_THREADS": "2", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR",
}  # fmt: skip
START = """
import json, sys
from vllm import LLM, SamplingParams

def start():
    return LLM(sys.argv[1], dtype="bfloat16", max_model_len=128, max_num_batched_tokens=128,
               enforce_eager=True, enable_prefix_caching=False)
"""
GENERATE = """
order = json.loads(sys.argv[2])
how = SamplingParams(temperature=0.0, max_tokens=order["new"], ignore_eos=True, detokenize=False)
prompts = [{"prompt_token_ids": prompt} for prompt in order["prompts"]]
answers = start().generate(prompts, how, use_tqdm=False)
print("tokens", json.dumps([list(answer.outputs[0].token_ids) for answer in answers]))
"""
LOAD = """
import torch
from safetensors.torch import save_file
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_wna16 as wna16,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import unpack_quantized_values_into_int32

seen = {}

def keep(self, layer):
    for name in ("w13", "w2"):
        packed, scale = getattr(layer, name + "_weight_packed"), getattr(layer, name + "_weight_scale")
        codes = unpack_quantized_values_into_int32(packed, self.quant_type, 2) - self.quant_type.bias
        groups = codes.shape[-1] // scale.shape[-1]
        numbers = codes.float() * scale.float().repeat_interleave(groups, dim=-1)
        seen[f"{len(seen) // 2}.{name}"] = numbers.contiguous()
    if len(seen) == 2 * int(sys.argv[3]):
        save_file(seen, sys.argv[2])
        print("loaded")
        raise SystemExit

wna16.select_wna16_moe_backend = lambda **how: (wna16.WNA16MoEBackend.MARLIN, None)
wna16.check_moe_marlin_supports_config = lambda *how, **more: True
wna16.CompressedTensorsWNA16MoEMethod.process_weights_after_loading = keep
start()
"""
SIZES: dict[str, Any] = {
    "hidden_size": 256, "moe_intermediate_size": 128, "intermediate_size": 128, "head_dim": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "num_experts": 8,
    "num_experts_per_tok": 2, "vocab_size": 257,
}  # fmt: skip
"""Multiples of what vLLM's kernels ask for."""
PROMPTS = [tiny_models.prompt(length, 257) for length in (9, 30)]
NEW = 16
NEAR = 0.2
"""Standard deviations of logits that vLLM's choice may be below ours."""


def quantized(folder: Path, **how: Any) -> Path:
    model = tiny_models.build("qwen3_moe", model_configs.qwen3(**SIZES), spread=0.05)
    source = tiny_models.save(model, folder / "source", torch.bfloat16)
    byte_tokenizer(source)
    options: dict[str, Any] = {"evaluation_tokens": 0, "threads": 2, "allow_growth": True, **how}
    run(QuantizeOptions(str(source), folder / "out", **options), lambda *_: None)
    return folder / "out"


def asked(script: str, *words: str) -> str:
    """What vLLM prints."""
    command = [str(VLLM), "-c", START + script, *words]
    done = subprocess.run(
        command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, timeout=600, check=False
    )
    if "No WNA16 MoE backend supports the deployment configuration" in done.stderr:
        pytest.skip("vLLM has no kernel for these experts on this machine")
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(("modules", "group"), [(("attention",), 128), (("experts", "attention"), 64)])
def test_its_tokens_are_ours_but_for_bf16(modules: Any, group: int, tmp_path: Path) -> None:
    """vLLM rounds rows to bf16. So a token of its answer may be one that ours has nearly as likely."""
    out = quantized(tmp_path, format="int4", group_size=group, modules=modules)
    printed = asked(GENERATE, str(out), json.dumps({"prompts": PROMPTS, "new": NEW}))
    line = next(line for line in printed.splitlines() if line.startswith("tokens "))
    model = registry.load(out, table.pick("cpu", "auto"))
    for prompt, answer in zip(PROMPTS, json.loads(line.removeprefix("tokens ")), strict=True):
        logits = Driver(model).prefill(prompt + answer)[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert ((logits.amax(1) - chosen) / logits.std(1)).max() < NEAR


@pytest.mark.parametrize(("form", "group"), [("int4", 128), ("int4", 32), ("int8", None), ("int8", 64)])
def test_it_loads_our_experts(form: Any, group: int | None, tmp_path: Path) -> None:
    out = quantized(tmp_path, format=form, group_size=group)
    asked(LOAD, str(out), str(tmp_path / "seen.safetensors"), str(SIZES["num_hidden_layers"]))
    seen, ours = load_file(tmp_path / "seen.safetensors"), Checkpoint(out)
    width, hidden = SIZES["moe_intermediate_size"], SIZES["hidden_size"]
    shapes = {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}
    for layer in range(SIZES["num_hidden_layers"]):
        for expert in range(SIZES["num_experts"]):
            gate, up = seen[f"{layer}.w13"][expert].split(width)
            found = {"gate_proj": gate, "up_proj": up, "down_proj": seen[f"{layer}.w2"][expert]}
            for word, shape in shapes.items():
                name = f"model.layers.{layer}.mlp.experts.{expert}.{word}.weight"
                assert torch.equal(found[word], ours.tensor(name, *shape, dtype=torch.float32)), name
