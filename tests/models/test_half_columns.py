"""What only Qwen3-VL has: experts in columns, all gates before all ups, in the files of its makers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support import model_configs, tiny_models
from tests.support.model_driver import Driver

from moesaic.core.errors import CheckpointError
from moesaic.core.experts import HALF_COLUMNS, ROWS
from moesaic.experts.store import Store
from moesaic.kernels import table
from moesaic.models import registry
from moesaic.models.conversion import conversion_of
from moesaic.models.headers import Headers
from moesaic.models.shard import Shard
from moesaic.offload.arena import Arena
from moesaic.offload.converted_experts import StreamedConvertedExperts

kernels = table.pick("cpu", "auto")
HIDDEN, WIDTH, EXPERTS = 48, 20, 12
TOKENS = tiny_models.prompt(23, model_configs.VOCAB)
Saved = Callable[..., Path]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    made: dict[torch.dtype, Path] = {}

    def path(dtype: torch.dtype = torch.bfloat16) -> Path:
        if dtype not in made:
            model = tiny_models.build(*model_configs.CASES["qwen3-vl"])
            made[dtype] = tiny_models.save(model, tmp_path_factory.mktemp("vl"), dtype)
        return made[dtype]

    return path


def read_rows(path: Path, layer: int, expert: int) -> list[torch.Tensor]:
    """Gate, up and down of an expert, as rows."""
    tensors, name = load_file(path / "model.safetensors"), f"model.language_model.layers.{layer}.mlp.experts"
    gate_up, down = (tensors[f"{name}.{word}_proj"][expert].T for word in ("gate_up", "down"))
    assert gate_up.shape == (2 * WIDTH, HIDDEN)
    return [gate_up[:WIDTH], gate_up[WIDTH:], down]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mapped", [True, False])
def test_a_model_and_a_server_have_rows(saved: Saved, dtype: torch.dtype, mapped: bool) -> None:
    path = saved(dtype)
    model, layout = registry.load(path, kernels, use_mmap=mapped), registry.expert_layout(path, kernels)
    assert layout.form == HALF_COLUMNS
    store = Store(path, layout, mapped)
    store.load({2: [0, 5]})
    for expert in (0, 5):
        loaded = model.experts[2].matrices_of(expert)
        for matrix, served, wanted in zip(
            loaded, store._matrices[2, expert], read_rows(path, 2, expert), strict=True
        ):
            assert matrix.is_contiguous() and torch.equal(matrix, wanted.to(matrix.dtype))
            assert served.tobytes() == matrix.view(torch.uint8).numpy().tobytes()


def test_ranks_that_share_an_expert_add_up(saved: Saved) -> None:
    rows, ids = torch.randn(9, HIDDEN), torch.full((9, 1), 3)
    whole = registry.load_experts(saved(), kernels, {1: [3]})[1]
    parts = [
        registry.load_experts(saved(), kernels, {1: [3]}, of_expert=Shard(rank, 3))[1] for rank in range(3)
    ]
    assert [len(part.matrices_of(3)[0]) for part in parts] == [7, 7, 6]
    total = sum(kernels.experts(part, rows, ids) for part in parts)
    torch.testing.assert_close(total, kernels.experts(whole, rows, ids), rtol=1e-5, atol=1e-5)


def test_streamed_experts_have_the_bytes_of_the_loader(saved: Saved) -> None:
    path = saved()
    layout, static = registry.expert_layout(path, kernels), {0: [3], 1: [0], 2: []}
    conversion = conversion_of(Headers(path), layout)
    assert conversion is not None and (conversion.name, conversion.read) == ("columns", 6 * WIDTH * HIDDEN)
    memory = StreamedConvertedExperts.memory_for(path, layout, static)
    streamed = StreamedConvertedExperts(path, layout, static, Arena(memory.total))
    streamed.load_static()
    loaded = registry.load_experts(path, kernels, dict.fromkeys(layout.layers, range(EXPERTS)))
    for layer in range(3):
        streamed.load_page(layer, layer, 0, 1)
        for parts, wanted in zip(streamed.experts(layer, layer).parts, loaded[layer].parts, strict=True):
            assert all(torch.equal(*pair) for pair in zip(parts, wanted, strict=True))  # type: ignore[arg-type]
    streamed.close()


@pytest.mark.parametrize("width", [20, 24, 48])
def test_both_forms_give_the_same_bits(width: int, tmp_path: Path) -> None:
    """Gate and up fit both forms at a width of 24, and down does at 48."""
    text = model_configs.qwen3_vl(num_hidden_layers=2, moe_intermediate_size=width)
    config = model_configs.around("qwen3_vl_moe_text", text, model_configs.QWEN3_VL_VISION)
    columns = tiny_models.save(tiny_models.build("qwen3_vl_moe", config), tmp_path / "columns")
    rows = tiny_models.transpose_experts(Path(shutil.copytree(columns, tmp_path / "rows")))
    forms = [registry.expert_layout(path, kernels).form for path in (columns, rows)]
    assert forms == [HALF_COLUMNS, ROWS]
    logits, wanted = (Driver(registry.load(path, kernels)).prefill(TOKENS) for path in (columns, rows))
    assert torch.equal(logits, wanted)


def test_gates_are_before_ups(saved: Saved, tmp_path: Path) -> None:
    path = Path(shutil.copytree(saved(torch.float32), tmp_path / "other"))
    wanted = Driver(registry.load(path, kernels)).greedy(TOKENS, 24)
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("gate_up_proj"):
            tensors[name] = torch.cat(tensor.chunk(2, dim=2)[::-1], dim=2)
    save_file(tensors, path / "model.safetensors")
    assert Driver(registry.load(path, kernels)).greedy(TOKENS, 24) != wanted


def test_a_tensor_of_another_shape_is_named(saved: Saved, tmp_path: Path) -> None:
    path = Path(shutil.copytree(saved(), tmp_path / "other"))
    name = "model.language_model.layers.1.mlp.experts.down_proj"
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {name: tensors[name][:, :-1].clone()}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"experts.down_proj: got shape \[12, 19, 48\]; allowed: "):
        registry.load(path, kernels)


def test_weights_that_are_not_normalised_are_refused(saved: Saved, tmp_path: Path) -> None:
    path = Path(shutil.copytree(saved(), tmp_path / "other"))
    text = model_configs.CASES["qwen3-vl"][1]["text_config"]
    tiny_models.edit(path, text_config=text | {"norm_topk_prob": False})
    with pytest.raises(CheckpointError, match="norm_topk_prob: got False; allowed: True"):
        registry.load(path, kernels)
