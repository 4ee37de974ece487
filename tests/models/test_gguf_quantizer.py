"""GGUF files that llama.cpp's own quantiser wrote.

They need llama.cpp: `benchmarks/setup_peer.sh llama DIR`, then MOESAIC_LLAMA=DIR/bin/python.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import gguf
import pytest
import torch
from tests.models.test_gguf import WIDE, logits
from tests.support import gguf_files, model_configs, tiny_models

LLAMA = os.environ.get("MOESAIC_LLAMA")
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(LLAMA is None, reason="MOESAIC_LLAMA names no python with llama-cpp-python"),
]
QUANTIZE = """
import sys, llama_cpp
settings = llama_cpp.llama_model_quantize_default_params()
settings.ftype, settings.nthread = int(sys.argv[3]), 2
sys.exit(llama_cpp.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), settings))
"""
KINDS = {
    "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q4_K_S": 14, "Q4_K_M": 15, "Q5_K_S": 16,
    "Q5_K_M": 17, "Q6_K": 18, "Q2_K": 10, "Q3_K_S": 11, "Q3_K_M": 12, "IQ4_NL": 25, "IQ4_XS": 30,
    "IQ3_XXS": 23, "IQ3_S": 26, "TQ1_0": 36, "TQ2_0": 37, "BF16": 32, "MXFP4_MOE": 38,
}  # fmt: skip
"""Name of a kind of file for llama.cpp -> its number."""
MODELS: dict[str, dict[str, int]] = {
    "qwen3": {},
    "deepseek3": {"q_lora_rank": 64},
    "qwen3-next": {},
    "qwen3.5": {},
}
"""llama.cpp reads a DeepSeek-V3 only with compressed queries."""


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", KINDS)
def test_files_of_llama_cpp_have_the_numbers_of_the_library(kind: str, name: str, tmp_path: Path) -> None:
    kind_of_model, options = WIDE[name]
    model = tiny_models.build(kind_of_model, options | MODELS[name])
    source = tiny_models.save(model, tmp_path / "source")
    whole, _ = gguf_files.write(source, tmp_path / "whole")
    file = tmp_path / f"{kind}.gguf"
    command = [str(LLAMA), "-c", QUANTIZE, str(whole), str(file), str(KINDS[kind])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    types = {tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors}
    assert len(types) > 1, "norms stay in float32"
    plain = gguf_files.dequantised(source, file, tmp_path / "plain")
    tokens = tiny_models.prompt(24, model_configs.VOCAB)
    found, wanted = logits(file, tokens), logits(plain, tokens)
    assert ((found - wanted).abs().max() / wanted.abs().max()) < 1e-4, types
    assert torch.equal(found.argmax(1), wanted.argmax(1))
