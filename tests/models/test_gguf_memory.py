"""A GGUF file takes its own size in memory: its blocks are read where the file is mapped, or as they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gguf
import pytest
import torch
from tests.models.test_gguf import like_q4_k_m, with_pairs
from tests.support import gguf_files, model_configs, tiny_models

from moesaic.config import ClusterConfig, ModelConfig, WorkerConfig
from moesaic.core.weight_types import row_bytes
from moesaic.experts.store import Store
from moesaic.kernels import table
from moesaic.kernels.matrix import QuantizedMatrix
from moesaic.kernels.weights import ExpertWeights
from moesaic.models import registry
from moesaic.models.conversion import conversion_of
from moesaic.models.gguf.blocks import BLOCKS
from moesaic.models.headers import Headers
from moesaic.offload.arena import Arena
from moesaic.offload.by_expert import StreamedByExpert
from moesaic.offload.pool import ExpertPool
from moesaic.offload.weights import StreamedExperts
from moesaic.planning.sizes import read_checkpoint_sizes
from moesaic.runtime import fitting, quick_fit

kernels = table.pick("cpu", "auto")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not kernels.can_use_blocks, reason="these kernels read no blocks"),
]
QWEN3 = (
    "qwen3_moe",
    model_configs.qwen3(
        hidden_size=256, moe_intermediate_size=256, num_hidden_layers=3, num_experts=8, head_dim=64,
        num_experts_per_tok=2, vocab_size=512,
    ),
)  # fmt: skip
GPT_OSS = (
    "gpt_oss",
    model_configs.gpt_oss(hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_local_experts=8),
)
MIXES: dict[str, gguf_files.Kinds] = {
    **{kind: lambda name, kind=kind: kind for kind in BLOCKS if kind != "MXFP4"},  # type: ignore[misc]
    "as Q4_K_M": like_q4_k_m,
    "MXFP4": lambda name: "MXFP4" if "_exps" in name else "Q8_0",
}


@pytest.fixture(scope="module", params=MIXES)
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    model = tiny_models.build(*(GPT_OSS if request.param == "MXFP4" else QWEN3))
    source = tiny_models.save(model, folder / "source")
    return gguf_files.write(source, folder / "made", MIXES[request.param])[0]


def bytes_of(file: Path, part: str = "") -> int:
    """Bytes of the file's tensors whose names have this part."""
    return sum(int(one.n_bytes) for one in gguf.GGUFReader(file).tensors if part in one.name)


def mapped_ranges(file: Path) -> list[tuple[int, int]]:
    """Addresses at which this process has mapped the file."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = [line.split()[0].split("-") for line in lines if line.endswith(str(file))]
    return [(int(begin, 16), int(end, 16)) for begin, end in ranges]


def is_mapped(address: int, file: Path) -> bool:
    return any(begin <= address < end for begin, end in mapped_ranges(file))


def matrices(weights: ExpertWeights) -> Iterator[torch.Tensor]:
    for expert in weights.resident_ids:
        yield from weights.matrices_of(expert)


def test_one_process_maps_what_it_computes_from(file: Path) -> None:
    model = registry.load(file, kernels)
    assert model.num_bytes <= 1.02 * bytes_of(file)
    assert sum(matrix.nbytes for weights in model.experts.values() for matrix in matrices(weights)) == (
        bytes_of(file, "_exps.weight")
    )
    for matrix in (
        model.embedding,
        model.head,
        *(part for one in model.experts.values() for part in matrices(one)),
    ):
        assert isinstance(matrix, QuantizedMatrix) or matrix.dtype is torch.uint8
        assert is_mapped(matrix.data_ptr(), file)


def test_without_mapping_the_copies_have_the_same_size(file: Path) -> None:
    mapped, copies = registry.load(file, kernels), registry.load(file, kernels, use_mmap=False)
    assert copies.num_bytes == mapped.num_bytes
    for layer, weights in copies.experts.items():
        for mine, theirs in zip(matrices(weights), matrices(mapped.experts[layer]), strict=True):
            assert torch.equal(mine, theirs) and not is_mapped(mine.data_ptr(), file)


@pytest.mark.parametrize("mapped", [True, False])
def test_expert_servers_have_the_bytes_of_the_file(file: Path, mapped: bool) -> None:
    layout = registry.expert_layout(file, kernels)
    assert layout.num_bytes == bytes_of(file, "_exps")
    store = Store(file, layout, mapped)
    store.load({layer: range(layout.num_experts) for layer in layout.layers})
    for layer in layout.layers:
        for addresses in store.table(layer)[:3]:
            assert {is_mapped(int(address), file) for address in addresses} == {mapped}
    if not mapped:
        assert store._slots is not None
        sizes = {layout.bytes_of(layout.dtype_of(layer)) for layer in layout.layers}
        assert set(store._slots) == sizes, "a slot has the size of its layer's experts"


def test_streamed_experts_are_the_bytes_of_the_file(file: Path) -> None:
    layout = registry.expert_layout(file, kernels)
    assert conversion_of(Headers(file), layout) is None
    loaded = registry.load_experts(file, kernels, {layer: range(8) for layer in layout.layers})
    static = {layer: [0, 3] for layer in layout.layers}
    for kind in (StreamedExperts, StreamedByExpert):
        memory = kind.memory_for(file, layout, static)
        streamed = kind(file, layout, static, Arena(memory.total))
        streamed.load_static()
        for count, layer in enumerate(layout.layers):
            streamed.load_page(count, layer, 0, 1)
            weights = streamed.experts(count, layer)
            assert weights.table.dtype_code == loaded[layer].table.dtype_code
            assert weights.activation == layout.activation
            for mine, theirs in zip(weights.parts, loaded[layer].parts, strict=True):
                for one, other in zip(mine, theirs, strict=True):
                    assert one is not None and other is not None and torch.equal(one, other)
        streamed.close()


def test_all_experts_in_fast_memory_take_the_size_of_the_file(file: Path) -> None:
    """But for a block of 4 KiB at both ends of what lies together in the file."""
    layout = registry.expert_layout(file, kernels)
    static = {layer: list(range(8)) for layer in layout.layers}
    memory = StreamedExperts.memory_for(file, layout, static)
    num_ends = 2 * len(layout.layers) * (6 if layout.form == "biased rows" else 3)
    assert (memory.staging, memory.slot) == (0, 0)
    assert memory.static <= bytes_of(file, "_exps") + 4096 * num_ends


def test_a_pool_has_places_of_each_layer_s_size(file: Path) -> None:
    layout = registry.expert_layout(file, kernels)
    pool = ExpertPool(file, layout, bytes_of(file, "_exps") // 2)
    loaded = registry.load_experts(file, kernels, {layer: range(8) for layer in layout.layers})
    for _ in range(2):
        for layer in layout.layers:
            for expert in range(8):
                weights = pool.load_experts(layer, [expert])
                for mine, theirs in zip(weights.parts, loaded[layer].parts, strict=True):
                    assert torch.equal(mine[expert], theirs[expert])  # type: ignore[arg-type]
    places = {pool._sizes[layer]: pool.count_places(layer) for layer in layout.layers}
    assert sum(size * count for size, count in places.items()) <= bytes_of(file, "_exps") // 2
    pool.close()


def test_plans_count_the_bytes_of_the_file(file: Path) -> None:
    layout, model = registry.expert_layout(file, kernels), read_checkpoint_sizes(file, "x", kernels)
    assert model.moe_layers * model.routed_bytes == bytes_of(file, "_exps") == layout.num_bytes
    assert (model.conversion, model.read, model.staging) == (None, None, 0.0)
    assert model.weights == pytest.approx(registry.load(file, kernels).num_bytes)


def test_a_start_counts_mapped_blocks_as_no_memory_of_its_own(file: Path) -> None:
    config, spec = WorkerConfig(ModelConfig(str(file))), registry.read_spec(file)
    need = fitting.measure_need(config, ClusterConfig(), spec)
    two = fitting.measure_need(config, ClusterConfig(attention_workers=2), spec)
    assert need.weights <= 1.02 * bytes_of(file) and two.weights == need.weights + two.private - need.private
    assert need.experts == bytes_of(file, "_exps")
    assert need.private <= 0.02 * bytes_of(file)
    copies = fitting.measure_need(WorkerConfig(ModelConfig(str(file), mmap=False)), ClusterConfig(), spec)
    assert copies.private == copies.weights == need.weights


@pytest.fixture(scope="module")
def file_with_pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    source = tiny_models.save(tiny_models.build(*QWEN3), folder / "source")
    return gguf_files.write(source, folder / "made", with_pairs)[0]


def test_gates_and_ups_of_two_types_are_counted_as_converted(
    file_with_pairs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of layers 0 and 2 take 1.5 bytes a number; layer 1 has no such pair."""
    file, name = file_with_pairs, "model.layers.0.mlp.experts.gate_proj.weight"
    model, layout = registry.load(file, kernels), registry.expert_layout(file, kernels)
    assert f"gate and up in two types for 2 MLPs: {name} and its up are converted to" in caplog.text
    matrix_numbers = 8 * 256 * 256
    converted = 2 * 2 * matrix_numbers * row_bytes("int8_16_offset", 256) // 256
    of_file = sum(
        bytes_of(file, f"blk.{layer}.ffn_{part}_exps") for layer in (0, 2) for part in ("gate", "up")
    )
    assert layout.num_bytes == bytes_of(file, "_exps") - of_file + converted
    assert layout.num_bytes == sum(part.nbytes for one in model.experts.values() for part in matrices(one))
    sizes = read_checkpoint_sizes(file, "x", kernels)
    assert sizes.moe_layers * sizes.routed_bytes == layout.num_bytes
    assert sizes.weights == pytest.approx(model.num_bytes)
    assert sizes.conversion == layout.largest and sizes.read == bytes_of(file, "_exps") // 3 // 8
    need = fitting.measure_need(
        WorkerConfig(ModelConfig(str(file))), ClusterConfig(), registry.read_spec(file)
    )
    assert need.experts == layout.num_bytes and need.private >= layout.num_bytes


def test_a_file_with_two_types_of_gate_and_up_does_not_surely_fit(
    file_with_pairs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = quick_fit.PROCESS_BYTES + 12 * file_with_pairs.stat().st_size
    monkeypatch.setattr(quick_fit, "available_memory", lambda: room)
    assert not quick_fit.surely_fits(WorkerConfig(ModelConfig(str(file_with_pairs), max_model_len=64)))


def test_kernels_that_make_weights_float32_do_not_surely_fit(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = quick_fit.PROCESS_BYTES + 12 * file.stat().st_size
    monkeypatch.setattr(quick_fit, "available_memory", lambda: room)
    for name, fits in (("auto", True), ("reference", False), ("amx_bf16x2", False)):
        config = WorkerConfig(ModelConfig(str(file), kernels=name, max_model_len=64))  # type: ignore[arg-type]
        assert quick_fit.surely_fits(config) == fits
