"""Quantised experts that are streamed have the bytes of those in memory, and little memory converts them."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.models.test_quantized import CASES, FORMATS
from tests.support import quantizers, tiny_models

from moesaic.core.errors import CheckpointError
from moesaic.kernels import table
from moesaic.models import registry
from moesaic.models.conversion import conversion_of
from moesaic.models.headers import Headers
from moesaic.models.quantization.scheme import Matrix
from moesaic.offload.arena import Arena
from moesaic.offload.converted_experts import StreamedConvertedExperts

kernels = table.pick("cpu", "auto")
STATIC = {0: [3], 1: [0, 5]}


def quantised(form: str, to: Path) -> Path:
    model = tiny_models.build(*CASES["gpt-oss" if form == "mxfp4" else "qwen3"])
    source = tiny_models.save(model, to / "source", torch.bfloat16)
    return quantizers.quantize(source, to, FORMATS[form])[0]


@pytest.mark.parametrize(
    "form",
    [
        *("fp8 blocks", "mxfp4"),
        *(
            pytest.param(form, marks=pytest.mark.slow)
            for form in ("packed int4", "gptq", "gptq v2, act order")
        ),
    ],
)
def test_pages_and_chosen_experts_have_the_bytes_of_the_loader(form: str, tmp_path: Path) -> None:
    path = quantised(form, tmp_path)
    layout = registry.expert_layout(path, kernels)
    conversion = conversion_of(Headers(path), layout)
    assert conversion is not None and conversion.name == layout.dtype
    memory = StreamedConvertedExperts.memory_for(path, layout, STATIC)
    assert conversion.read < memory.staging < conversion.staging
    streamed = StreamedConvertedExperts(path, layout, STATIC, Arena(memory.total))
    total = streamed.load_static()
    loaded = registry.load_experts(path, kernels, dict.fromkeys(layout.layers, range(layout.num_experts)))
    for count in range(4):
        layer = count % 2
        if count < 2:
            total += sum(streamed.load_page(count, layer, page, 3) for page in (2, 0, 1))
        else:
            total += streamed.load_chosen(count, layer, range(layout.num_experts))
        found, wanted = streamed.experts(count, layer), loaded[layer]
        assert found.packed_dtype == wanted.packed_dtype and found.table.dtype_code == wanted.table.dtype_code
        for mine, theirs in zip(found.parts, wanted.parts, strict=True):
            assert all(torch.equal(*pair) for pair in zip(mine, theirs, strict=True))  # type: ignore[arg-type]
    assert streamed.bytes_read == total > 0
    streamed.close()


def test_a_number_that_is_nan_is_one_line_when_its_expert_is_read(tmp_path: Path) -> None:
    path = quantised("fp8 blocks", tmp_path)
    file = path / "model.safetensors"
    tensors = quantizers.load_file(file)
    tensors["model.layers.1.mlp.experts.2.up_proj.weight_scale_inv"].fill_(torch.nan)
    save_file(tensors, file, {"format": "pt"})
    layout = registry.expert_layout(path, kernels)
    streamed = StreamedConvertedExperts(
        path, layout, {}, Arena(StreamedConvertedExperts.memory_for(path, layout, {}).total)
    )
    streamed.load_chosen(1, 1, [1])
    with pytest.raises(CheckpointError, match=r"tensor .*experts\.2\.up_proj: got nan in a scale") as refused:
        streamed.load_chosen(1, 1, [2])
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("form", ["fp8 blocks", "packed int4", "gptq v2, act order", "awq"])
def test_conversion_takes_the_memory_that_plans_count(form: str, tmp_path: Path) -> None:
    """Of a matrix of 512 x 2048, with its result in memory that the plan counts elsewhere."""
    rows, columns = 512, 2048
    numbers = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    tensors, _ = FORMATS[form].write("some", numbers)
    save_file({name: one.contiguous() for name, one in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(
        quantizers.json.dumps({"quantization_config": FORMATS[form].config})
    )
    headers = Headers(tmp_path)
    matrix = headers.find_quantized("some.weight", rows, columns)
    assert isinstance(matrix, Matrix)
    data = np.fromfile(tmp_path / "model.safetensors", np.uint8)
    read = headers.reader(lambda place: data[place.offset : place.offset + place.size])
    out = np.empty_like(matrix.pack_rows(read))
    tracemalloc.start()
    try:
        matrix.pack_rows(read, out)
        assert tracemalloc.get_traced_memory()[1] < matrix.scratch(matrix.dtype)
    finally:
        tracemalloc.stop()
