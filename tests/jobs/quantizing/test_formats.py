"""The layout of compressed-tensors, beside files that the library itself wrote."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tests.support import golden_formats, quantizers

from moesaic.core.errors import ConfigError
from moesaic.jobs.quantizing.formats import Format, QuantizedMatrix, choose_format, round_scales
from moesaic.models.config import Fields
from moesaic.models.quantization import compressed_tensors
from moesaic.models.quantization.scheme import unpack


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, None), (8, 32), (8, None)])
def test_the_library_writes_the_same_bytes(bits: int, group: int | None) -> None:
    rows, columns = golden_formats.ROWS, golden_formats.COLUMNS
    with safe_open(golden_formats.FILE, "pt") as file:
        packed, scales, shape = (
            file.get_tensor(f"pack-quantized {bits} {group} True.weight_{name}")
            for name in ("packed", "scale", "shape")
        )
    form = Format(bits, group)
    codes = np.ascontiguousarray(unpack(packed.numpy(), bits, columns))
    written = form.encode(QuantizedMatrix(codes, scales.float().numpy()), "BF16")
    assert written[0] == packed.numpy().tobytes()
    assert written[1] == scales.view(torch.uint16).numpy().tobytes()
    assert written[2] == shape.to(torch.int64).numpy().tobytes()
    tensors = form.tensors("x", rows, columns, "BF16")
    assert [tuple(one.shape) for one in tensors] == [packed.shape, scales.shape, shape.shape]
    assert [one.size for one in tensors] == [len(one) for one in written]


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_that_fill_no_word_are_padded_with_zeros(bits: int) -> None:
    codes = np.random.default_rng(0).integers(0, 2**bits, (5, 27), dtype=np.uint8)
    written = Format(bits, None).encode(QuantizedMatrix(codes, np.ones((5, 1), np.float32)), "F32")[0]
    assert written == quantizers.words(torch.from_numpy(codes).long(), bits).numpy().tobytes()
    assert len(written) == Format(bits, None).tensors("x", 5, 27, "F32")[0].size


@pytest.mark.parametrize("form", [Format(4, 64), Format(8, None)])
def test_our_reader_understands_the_config(form: Format) -> None:
    told = form.config(["lm_head", "model.layers.0.mlp.gate"])
    assert told["ignore"] == ["lm_head", "model.layers.0.mlp.gate"]
    found = compressed_tensors.parse(Fields(told, "quantization_config."))
    assert found == compressed_tensors.PackedIntegers(form.bits, form.group or -1, symmetric=True)


@pytest.mark.parametrize(("kind", "dtype"), [("BF16", torch.bfloat16), ("F16", torch.float16)])
def test_scales_are_rounded_as_torch_does(kind: str, dtype: torch.dtype) -> None:
    scales = torch.rand(4, 50, generator=torch.Generator().manual_seed(1)) * 2.0 ** torch.arange(
        -9, 41
    ).remainder(14)
    assert np.array_equal(round_scales(scales.numpy(), kind), scales.to(dtype).float().numpy())
    assert round_scales(np.array([[0.0]], np.float32), kind) == 1
    assert np.array_equal(round_scales(scales.numpy(), "F32"), scales.numpy())


@pytest.mark.parametrize(
    ("name", "group", "columns", "form"),
    [
        ("int4", None, (256, 128), Format(4, 128)),
        ("int4", None, (192, 64), Format(4, 64)),
        ("int4", None, (96, 160), Format(4, 32)),
        ("int4", 32, (96, 160), Format(4, 32)),
        ("int8", None, (7, 9), Format(8, None)),
        ("int8", 64, (64,), Format(8, 64)),
    ],
)
def test_group_sizes(name: str, group: int | None, columns: tuple[int, ...], form: Format) -> None:
    assert choose_format(name, group, columns) == form


@pytest.mark.parametrize(
    ("group", "columns", "says"),
    [
        (None, (40,), "got nothing; allowed: none: no multiple of 32 divides rows of 40 numbers"),
        (48, (96,), "got 48; allowed: 32, 96, which divide rows of 96 numbers"),
        (128, (96, 64), "got 128; allowed: 32, which divide rows of 64, 96 numbers"),
        (
            64,
            (40,),
            "got 64; allowed: none: no multiple of 32 divides rows of 40 numbers; --format int8 needs no",
        ),
    ],
)
def test_groups_that_do_not_divide_are_refused(
    group: int | None, columns: tuple[int, ...], says: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        choose_format("int4", group, columns)
    assert str(refused.value).startswith(f"--group-size: {says}")
