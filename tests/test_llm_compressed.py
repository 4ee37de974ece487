"""Compressed experts: the floats of the checkpoint that they were compressed from, wherever they are."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from moesaic import LLM
from moesaic.core.errors import CheckpointError
from moesaic.experts.backend import CallPairs
from moesaic.kernels import table
from moesaic.models import registry
from moesaic.models.compressing import compress
from moesaic.models.shard import Shard
from tests.support.cluster_driver import Answer, cluster
from tests.support.native_kernels import native_sets
from tests.support.tiny_checkpoints import Written
from tests.test_llm_offload import POLICIES, answers, params, prompts

try:
    from moesaic.experts.native_backend import NativeBackend
except ImportError:  # installed without a compiler
    pass

CASES = ("qwen3-bias-dense-layers", "deepseek-full")
"""Stored in bf16."""
SETS = native_sets()
needs_native = pytest.mark.skipif(not table.instruction_sets(), reason="no native kernels in this build")
Both = tuple[Path, Path]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Both]:
    """Case -> as it is stored, and compressed."""
    paths, folder = Written(tmp_path_factory.mktemp), tmp_path_factory.mktemp("compressed")
    for name in CASES:
        compress(paths[name], folder / name, 1, lambda done, total: None)
    return {name: (paths[name], folder / name) for name in CASES}


@pytest.mark.parametrize("kernels", SETS)
@pytest.mark.parametrize("name", CASES)
def test_in_memory(written: dict[str, Both], name: str, kernels: str) -> None:
    stored, compressed = (answers(path, "auto", kernels=kernels) for path in written[name])
    assert compressed == stored
    layout = registry.expert_layout(written[name][1], table.pick("cpu", kernels))
    assert layout.dtype == ("bfloat16" if kernels in table.TILED else "compressed")


@pytest.mark.parametrize(
    "settings", [{"kernels": "reference"}, {"dtype": "float32"}, {"mmap": False}], ids=str
)
def test_where_they_are_decompressed_or_copied(written: dict[str, Both], settings: dict[str, Any]) -> None:
    stored, compressed = (answers(path, "auto", **settings) for path in written[CASES[0]])
    assert compressed == stored


@needs_native
@pytest.mark.parametrize(
    "policy",
    ["pages", "some experts stay", *(pytest.param(p, marks=pytest.mark.slow) for p in POLICIES if "," in p)],
)
def test_streamed(written: dict[str, Both], policy: str) -> None:
    name = CASES[len(policy) % 2]
    offload = POLICIES[policy]
    seats = {"max_num_seqs": offload.batch, "max_num_batched_tokens": 64}
    stored, compressed = written[name]
    assert answers(compressed, "auto", offload=offload, **seats) == answers(stored, "auto")


@pytest.mark.parametrize(
    ("policy", "settings"),
    [
        ("pages", {"kernels": "reference"}),
        pytest.param("on demand, hot ones stay", {"dtype": "float32"}, marks=pytest.mark.slow),
    ],
)
def test_streamed_experts_are_decompressed_for_kernels_that_read_numbers(
    written: dict[str, Both], policy: str, settings: dict[str, Any]
) -> None:
    offload, (stored, compressed) = POLICIES[policy], written[CASES[0]]
    seats = {"max_num_seqs": offload.batch, "max_num_batched_tokens": 64}
    found = answers(compressed, "auto", offload=offload, **settings, **seats)
    wanted = answers(stored, "auto", **settings)
    assert [one[0] for one in found] == [one[0] for one in wanted]


@needs_native
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"expert_servers": 2}, marks=pytest.mark.full),
        pytest.param({"expert_servers": 2, "schedule": "async"}, marks=pytest.mark.slow),
        pytest.param({"expert_servers": 0, "tensor_parallel_size": 2}, marks=pytest.mark.full),
        pytest.param(
            {"expert_servers": 0, "tensor_parallel_size": 2, "expert_tensor_parallel_size": 2},
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
@pytest.mark.usefixtures("quick_workers")
def test_in_processes(written: dict[str, Both], settings: dict[str, Any]) -> None:
    assert served(written[CASES[0]][1], settings) == served(written[CASES[0]][0], settings)


def served(path: Path, settings: dict[str, Any]) -> list[Answer]:
    with cluster(str(path), max_model_len=128, kv_cache_memory="8MiB", **settings) as processes:
        processes.submit(prompts(), [params(i) for i in range(len(prompts()))])
        return processes.finish()


@needs_native
@pytest.mark.parametrize("mapped", [True, False])
def test_of_an_expert_server(written: dict[str, Both], mapped: bool) -> None:
    """Slots of memory of its own, or the mapped files."""
    found = []
    for path in written[CASES[0]]:
        layout = registry.expert_layout(path, table.pick("cpu"))
        server = NativeBackend(path, layout, "auto", 1, mapped)
        server.load({layout.layers[0]: [3, 1]})
        hidden = np.random.default_rng(0).standard_normal((5, layout.hidden)).astype(np.float32)
        out = np.zeros_like(hidden)
        rows = np.arange(5)
        server.run(layout.layers[0], [CallPairs(hidden, rows, np.array([3, 1, 1, 3, 1]), out, rows)])
        found.append(out.tobytes())
    assert found[0] == found[1]


def test_the_reference_server_decompresses(written: dict[str, Both]) -> None:
    """Its layout may be that of a worker whose kernels need not."""
    path, reference = written[CASES[0]][1], table.REFERENCE
    layer = registry.read_spec(path).moe_layers[0]
    [weights] = registry.load_experts(path, reference, {layer: [2]}, dtype="compressed").values()
    [same] = registry.load_experts(written[CASES[0]][0], reference, {layer: [2]}).values()
    assert all(
        torch.equal(one, other)
        for one, other in zip(weights.matrices_of(2), same.matrices_of(2), strict=True)
    )
    assert weights.matrices_of(2)[0].dtype is torch.float32


@pytest.mark.parametrize("kernels", ["reference", pytest.param("auto", marks=needs_native)])
def test_a_rank_holds_its_part_of_each_alone(written: dict[str, Both], kernels: str) -> None:
    """Rows of gate and up, columns of down, and no more memory."""
    stored, path = written[CASES[0]]
    layer, picked = registry.read_spec(path).moe_layers[0], table.pick("cpu", kernels)
    [whole] = registry.load_experts(stored, picked, {layer: [2]}).values()
    for rank in range(3):
        [weights] = registry.load_experts(path, picked, {layer: [2]}, of_expert=Shard(rank, 3)).values()
        for place, (part, all_of_it) in enumerate(
            zip(weights.matrices_of(2), whole.matrices_of(2), strict=True)
        ):
            assert torch.equal(part, all_of_it.tensor_split(3, dim=int(place == 2))[rank])
            assert part.is_contiguous() and part.untyped_storage().nbytes() == part.nbytes


@needs_native
def test_what_is_told_of_them(written: dict[str, Both]) -> None:
    stored, compressed = (LLM(str(path), max_model_len=64).info for path in written[CASES[0]])
    assert (stored.dtype, compressed.dtype) == ("bfloat16", "bfloat16, experts compressed")
    assert compressed.num_parameters == stored.num_parameters
    assert compressed.weight_bytes != stored.weight_bytes  # more: rows are short


def test_only_matrices_are_compressed(written: dict[str, Both], tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(written[CASES[0]][1], path)
    tensors = load_file(path / "model.safetensors")
    tensors["model.norm.weight"] = torch.zeros(len(tensors["model.norm.weight"]), dtype=torch.uint8)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match="model.norm.weight: got dtype U8; allowed: only for matrices"):
        LLM(str(path))
