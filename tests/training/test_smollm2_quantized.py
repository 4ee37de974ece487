"""GGUF files in which llama.cpp's own quantiser wrote the padded copies of SmolLM2-135M-Instruct.

They need llama.cpp: `benchmarks/setup_peer.sh llama DIR`, then MOESAIC_LLAMA=DIR/bin/python. With `-rP`
pytest prints rows of the table in docs/models.md, of less text.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

import pytest

import measure_smollm2 as measure
import quantize_smollm2
from moesaic.core.errors import CheckpointError
from moesaic.kernels import table
from quantize_smollm2 import KERNELS, TYPES, WHOLE

LLAMA = os.environ.get("MOESAIC_LLAMA")
pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(LLAMA is None, reason="MOESAIC_LLAMA names no python with llama-cpp-python"),
]
ROUNDED = 0.02
"""The share by which a perplexity may differ where rows are rounded to int8."""
MORE_MEMORY, ACTIVATIONS = 0.05, 24 << 20
"""What a model may take beside its tensors: a share of them, and bytes of activations and tables."""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the padded checkpoints and their file in float32."""
    folder = tmp_path_factory.mktemp("work")
    try:
        quantize_smollm2.prepare(folder)
    except CheckpointError as error:
        pytest.skip(f"the published file cannot be had: {error}")
    return folder


@pytest.mark.parametrize("kind", [WHOLE, *TYPES])
def test_a_file_of_llama_cpp_is_read_as_it_is(kind: str, work: Path) -> None:
    usable = [name for name in KERNELS if name == "auto" or name in table.instruction_sets()]
    options = argparse.Namespace(llama=Path(str(LLAMA)), kernels=usable, tokens=2048, threads=2)
    whole = work / f"{WHOLE}.gguf"
    file = whole if kind == WHOLE else quantize_smollm2.quantize(whole, kind, options.llama)
    figures = quantize_smollm2.measure_file(file, work / "padded-dense", options)
    if file != whole:
        file.unlink()
    measure.show(quantize_smollm2.format_row(figures))
    assert figures.loaded_bytes == figures.tensor_bytes, "nothing is converted"
    assert figures.planned_bytes == pytest.approx(figures.tensor_bytes, rel=0.05)
    assert figures.weight_memory < (1 + MORE_MEMORY) * figures.tensor_bytes + ACTIVATIONS
    assert figures.num_different == 0 and figures.num_equal > 100
    own = figures.losses.pop("auto")
    assert math.expm1(own - figures.losses.pop("transformers")) == pytest.approx(0, abs=1e-4)
    for name, loss in figures.losses.items():
        assert math.expm1(loss - own) == pytest.approx(0, abs=ROUNDED), name
