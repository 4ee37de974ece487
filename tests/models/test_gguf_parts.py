"""Parts of a GGUF file's matrices, as ranks have them, and matrices with damaged blocks."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from tests.support import gguf_files, k_quants, model_configs, tiny_models

from moesaic.core.errors import CheckpointError, ConfigError
from moesaic.core.weight_types import BLOCK_TYPES, QUANTIZATIONS, is_integer, is_quantized, split_dtype
from moesaic.kernels import table
from moesaic.kernels.blocks import SCALES
from moesaic.kernels.matrix import QuantizedMatrix, kind_of
from moesaic.models import registry
from moesaic.models.checkpoint import Checkpoint
from moesaic.models.gguf.blocks import BLOCKS
from moesaic.models.loader import Loader
from moesaic.models.shard import Shard

kernels = table.pick("cpu", "auto")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not kernels.can_use_blocks, reason="these kernels read no blocks"),
]
SIZE = 512
QWEN3 = model_configs.qwen3(
    hidden_size=SIZE, moe_intermediate_size=SIZE, num_hidden_layers=1, num_experts=2, num_experts_per_tok=1
)
GPT_OSS = model_configs.gpt_oss(
    hidden_size=SIZE, intermediate_size=SIZE, num_hidden_layers=1, num_local_experts=2, num_experts_per_tok=1
)
NAME = "model.layers.0.self_attn.q_proj.weight"
Written = Callable[[str], Path]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Type -> a file in that type."""

    @cache
    def write(kind: str) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        model = tiny_models.build(*(("gpt_oss", GPT_OSS) if kind == "MXFP4" else ("qwen3_moe", QWEN3)))
        return gguf_files.write(tiny_models.save(model, folder / "source"), folder / "made", lambda _: kind)[
            0
        ]

    return write


def numbers(stored: torch.Tensor, dtype: str, columns: int) -> torch.Tensor:
    return QuantizedMatrix(stored, columns, dtype).floats() if is_quantized(dtype) else stored


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_part_keeps_blocks_or_groups_and_always_the_numbers(written: Written, kind: str) -> None:
    checkpoint, dtype = Checkpoint(written(kind)), BLOCKS[kind]
    rows = checkpoint._slice(NAME).get_shape()[0]
    matrix = checkpoint.find_quantized(NAME, rows, SIZE)
    assert matrix is not None and matrix.dtype == dtype and matrix.is_stored
    whole = checkpoint.tensor(NAME, rows, SIZE, dtype=torch.float32)
    other = BLOCK_TYPES[dtype].conversion
    for begin, end in ((0, SIZE), (256, SIZE), (0, 256), (32, 96), (0, 32), (480, SIZE), (16, 48), (0, 100)):
        part = (slice(3, 9), slice(begin, end))
        chosen = matrix.choose_type(part, can_use_blocks=True)
        allowed = (
            [dtype] if not (begin % BLOCK_TYPES[dtype].numbers or end % BLOCK_TYPES[dtype].numbers) else []
        )
        if other in QUANTIZATIONS and not (
            begin % QUANTIZATIONS[other].group or end % QUANTIZATIONS[other].group
        ):
            allowed.append(other)
        assert chosen == [*allowed, "float32"][0]
        assert matrix.choose_type(part, can_use_blocks=False) in (other, "float32")
        for one in allowed:
            stored = checkpoint.tensor(NAME, rows, SIZE, dtype=torch.uint8, part=part, packed_dtype=one)
            assert torch.equal(numbers(stored, one, end - begin), whole[part])


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", BLOCKS)
def test_ranks_share_experts_in_blocks_or_groups(written: Written, kind: str, ranks: int) -> None:
    file, dtype, width = written(kind), BLOCKS[kind], SIZE // ranks
    wanted = {0: [0, 1]}
    whole = registry.load_experts(file, kernels, wanted)[0]
    for rank in range(ranks):
        part = registry.load_experts(file, kernels, wanted, of_expert=Shard(rank, ranks))[0]
        first = part.matrices_of(0)[0]
        inner, outer = (
            split_dtype(part.packed_dtype) if first.dtype is torch.uint8 else ("float32", "float32")
        )
        narrow = BLOCK_TYPES[dtype].numbers > width
        assert (inner, outer) == ((dtype, dtype) if not narrow else (dtype, BLOCK_TYPES[dtype].conversion))
        mine = slice(rank * width, (rank + 1) * width)
        for expert in wanted[0]:
            gates, ups, downs = (numbers(each, dtype, SIZE) for each in whole.matrices_of(expert))
            gate, up, down = part.matrices_of(expert)
            assert torch.equal(numbers(gate, inner, SIZE), gates[mine])
            assert torch.equal(numbers(up, inner, SIZE), ups[mine])
            assert torch.equal(numbers(down, outer, width), downs[:, mine])


def damage(file: Path, to: Path, tensor: str, dtype: str, offset: int) -> Path:
    """A copy of a file whose tensor has an infinite scale at a byte of its last block."""
    shutil.copyfile(file, to)
    found = next(one for one in GGUFReader(file).tensors if one.name == tensor)
    begin = int(found.data_offset) + int(found.n_bytes) - BLOCK_TYPES[dtype].size + offset
    block = np.memmap(to, np.uint8, "r+", begin - offset, (1, BLOCK_TYPES[dtype].size))
    if dtype in SCALES:
        k_quants.put_scales(dtype.upper(), block, offset, [np.inf])
    else:
        block[0, offset] = 0xFF
    block.flush()
    return to


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("kind", BLOCKS)
def test_a_damaged_block_is_one_line(written: Written, tmp_path: Path, kind: str, mapped: bool) -> None:
    dtype = BLOCKS[kind]
    got = "inf" if dtype in SCALES else "nan"
    for offset in SCALES.get(dtype, (0,)):
        file = damage(written(kind), tmp_path / "model.gguf", "blk.0.attn_q.weight", dtype, offset)
        with pytest.raises(CheckpointError) as refused:
            registry.load(file, kernels, use_mmap=mapped)
        says = f"{file}: tensor {NAME.removesuffix('.weight')}: got {got} in a scale; allowed: finite numbers"
        assert str(refused.value) == says


@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0"])
def test_damage_in_an_expert_is_found_when_it_is_computed_or_converted(
    written: Written, tmp_path: Path, kind: str
) -> None:
    file = damage(written(kind), tmp_path / "model.gguf", "blk.0.ffn_down_exps.weight", BLOCKS[kind], 0)
    weights = registry.load(file, kernels).experts[0]
    rows = kernels.experts(weights, torch.randn(2, SIZE), torch.tensor([[0], [1]]))
    assert rows[0].isfinite().all() and not rows[1].isfinite().all(), "the last expert is damaged"
    with pytest.raises(CheckpointError, match=r"experts.1.down_proj: got inf in a scale; allowed: finite"):
        registry.load(file, table.pick("cpu", "reference"))


@pytest.mark.parametrize("kind", [kind for kind in BLOCKS if kind != "MXFP4"])
def test_kernels_of_integers_round_the_same_numbers_together_in_ranks(written: Written, kind: str) -> None:
    """Types of integers stay such in a part of whole groups of 32 columns; else ranks are refused."""
    file, rounding = written(kind), replace(kernels, is_integer=True)
    loader = Loader(Checkpoint(file), rounding, "cpu", torch.bfloat16, Shard(0, 2))
    rows, name = loader.checkpoint._slice(NAME).get_shape()[0], NAME.removesuffix(".weight")
    for begin in range(0, SIZE, 16):
        part = slice(None), slice(begin, SIZE)
        if begin % 32:
            with pytest.raises(ConfigError, match=f"ranks with whole groups of 32 columns of {name}"):
                loader.weight(name, rows, SIZE, *part)
        else:
            assert is_integer(kind_of(loader.weight(name, rows, SIZE, *part)))
