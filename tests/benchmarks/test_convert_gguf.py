"""What convert_gguf.py writes is the same model, for moesaic and for llama.cpp.

llama.cpp is asked where MOESAIC_LLAMA names a python with it: see tests/models/test_gguf_quantizer.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from moesaic.kernels import table
from moesaic.models import registry
from tests.models.test_gguf import WIDE, logits
from tests.support import model_configs, tiny_models
from tests.support.model_driver import Driver

from .conftest import FOLDER

LLAMA = os.environ.get("MOESAIC_LLAMA")
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: WIDE[name] for name in ("qwen3", "qwen3-next", "qwen3.5")},
    "mixtral": ("mixtral", model_configs.mixtral(num_attention_heads=4, num_key_value_heads=2, head_dim=16)),
}
PROMPTS = [tiny_models.prompt(length, model_configs.VOCAB) for length in (7, 40)]
NEW = 24


def converted(name: str, folder: Path, kind: str = "f32") -> tuple[Path, Path]:
    """A checkpoint and its file."""
    source, file = tiny_models.save(tiny_models.build(*MODELS[name]), folder / "source"), folder / "a.gguf"
    command = [sys.executable, str(FOLDER / "convert_gguf.py"), str(source), str(file), "--type", kind]
    subprocess.run(command, check=True, capture_output=True)
    return source, file


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_moesaic_reads_the_same_numbers(name: str, tmp_path: Path) -> None:
    """But for the last bit of a decay, which numpy rounds in another way than torch."""
    source, file = converted(name, tmp_path)
    found, wanted = logits(file, PROMPTS[1]), logits(source, PROMPTS[1])
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=4e-4)


@pytest.mark.full
@pytest.mark.skipif(LLAMA is None, reason="MOESAIC_LLAMA names no python with llama-cpp-python")
@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_has_the_same_tokens(name: str, tmp_path: Path) -> None:
    _, file = converted(name, tmp_path)
    order = json.dumps({"do": "run", "prompts": PROMPTS, "new": NEW})
    command = [str(LLAMA), str(FOLDER / "peer_llama.py"), str(file), "2", "f32"]
    done = subprocess.run(command, input=order, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    model = registry.load(file, table.pick("cpu", "auto"))
    assert json.loads(done.stdout)["tokens"] == [Driver(model).greedy(prompt, NEW) for prompt in PROMPTS]
