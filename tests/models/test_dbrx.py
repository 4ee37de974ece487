"""What only DBRX has: experts as rows of one tensor, down in columns, and norms that subtract the mean."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support import model_configs, tiny_models

from moesaic.core.errors import CheckpointError
from moesaic.experts.store import Store
from moesaic.kernels import table
from moesaic.models import registry
from moesaic.models.conversion import conversion_of
from moesaic.models.headers import Headers
from moesaic.models.layer_norm import Centring
from moesaic.models.shard import Shard
from moesaic.offload.arena import Arena
from moesaic.offload.converted_experts import StreamedConvertedExperts

kernels = table.pick("cpu", "auto")
WIDTH, EXPERTS = 20, 6
Saved = Callable[..., Path]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    made: dict[torch.dtype, Path] = {}

    def path(dtype: torch.dtype = torch.bfloat16) -> Path:
        if dtype not in made:
            model = tiny_models.build(*model_configs.CASES["dbrx"])
            made[dtype] = tiny_models.save(model, tmp_path_factory.mktemp("dbrx"), dtype)
        return made[dtype]

    return path


def stored(path: Path, layer: int, expert: int) -> list[torch.Tensor]:
    """Gate, up and down of an expert, as rows."""
    tensors, rows = load_file(path / "model.safetensors"), slice(expert * WIDTH, (expert + 1) * WIDTH)
    name = f"transformer.blocks.{layer}.ffn.experts.mlp"
    gate, up, down = (tensors[f"{name}.{word}"][rows] for word in ("w1", "v1", "w2"))
    return [gate, up, down.T]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mapped", [True, False])
def test_a_model_and_a_server_have_rows(saved: Saved, dtype: torch.dtype, mapped: bool) -> None:
    path = saved(dtype)
    model, layout = registry.load(path, kernels, use_mmap=mapped), registry.expert_layout(path, kernels)
    store = Store(path, layout, mapped)
    store.load({2: [0, 5]})
    for expert in (0, 5):
        loaded = model.experts[2].matrices_of(expert)
        for mine, held, wanted in zip(
            loaded, store._matrices[2, expert], stored(path, 2, expert), strict=True
        ):
            assert mine.is_contiguous() and torch.equal(mine, wanted.to(mine.dtype))
            assert held.tobytes() == mine.view(torch.uint8).numpy().tobytes()
    assert model.experts[2].matrices_of(0)[0].dtype == (torch.float32 if dtype is torch.float16 else dtype)


def test_ranks_that_share_an_expert_add_up(saved: Saved) -> None:
    rows, ids = torch.randn(9, 48), torch.full((9, 1), 3)
    whole = registry.load_experts(saved(), kernels, {1: [3]})[1]
    parts = [
        registry.load_experts(saved(), kernels, {1: [3]}, of_expert=Shard(rank, 3))[1] for rank in range(3)
    ]
    assert [len(part.matrices_of(3)[0]) for part in parts] == [7, 7, 6]
    found = sum(kernels.experts(part, rows, ids) for part in parts)
    torch.testing.assert_close(found, kernels.experts(whole, rows, ids), rtol=1e-5, atol=1e-5)


def test_streamed_experts_have_the_bytes_of_the_loader(saved: Saved) -> None:
    path = saved()
    layout, static = registry.expert_layout(path, kernels), {0: [3], 1: [0], 2: []}
    found = conversion_of(Headers(path), layout)
    assert found is not None and (found.name, found.read) == ("columns", 3 * 2 * WIDTH * 48)
    memory = StreamedConvertedExperts.memory_for(path, layout, static)
    streamed = StreamedConvertedExperts(path, layout, static, Arena(memory.total))
    streamed.load_static()
    loaded = registry.load_experts(path, kernels, dict.fromkeys(layout.layers, range(EXPERTS)))
    for layer in range(3):
        streamed.load_page(layer, layer, 0, 1)
        for mine, theirs in zip(streamed.experts(layer, layer).parts, loaded[layer].parts, strict=True):
            assert all(torch.equal(*pair) for pair in zip(mine, theirs, strict=True))  # type: ignore[arg-type]
    streamed.close()


@pytest.mark.parametrize("picked", ["reference", "auto"])
def test_a_norm_of_centred_rows_is_layer_norm(picked: str) -> None:
    chosen = table.pick("cpu", picked)  # type: ignore[arg-type]
    rows, weight = torch.randn(17, 50) * 3 + 40, torch.randn(50)
    found = chosen.rms_norm(Centring.build(chosen, 50, "cpu").apply(rows), weight, 1e-5)
    wanted = torch.nn.functional.layer_norm(rows.double(), (50,), weight.double(), eps=1e-5)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another activation": ({"ffn_act_fn": {"name": "gelu"}}, r"ffn_config.ffn_act_fn: got {'name': 'gelu'}"),
    "another norm of weights": (
        {"moe_normalize_expert_weights": 2.0},
        r"ffn_config.moe_normalize_expert_weights: got 2.0; allowed: 1.0, 1, None",
    ),
    "too many experts a token": ({"moe_top_k": 7}, r"moe_top_k: got 7; allowed: .* at most 6"),
    "an unknown key": (
        {"moe_secret": 1},
        r"ffn_config.moe_secret: got 1; allowed: keys that this model_type",
    ),
    "another theta": ({"rope_theta": 1e4}, r"rope_parameters.rope_theta: got 50000; allowed: 10000, as in"),
    "key heads": ({"kv_n_heads": 4}, r"num_key_value_heads: got 2; allowed: 4 .as attn_config.kv_n"),
    "wider experts": ({"ffn_hidden_size": 21}, r"mlp\.w1: got shape \[120, 48\]; allowed: \[126, 48\]"),
    "narrower experts": ({"ffn_hidden_size": 10}, r"mlp\.w1: got shape \[120, 48\]; allowed: \[60, 48\]"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_understood_is_one_line(what: str, saved: Saved, tmp_path: Path) -> None:
    change, says = REFUSED[what]
    (tmp_path / "model.safetensors").symlink_to(saved() / "model.safetensors")
    (tmp_path / "config.json").write_bytes((saved() / "config.json").read_bytes())
    config = model_configs.CASES["dbrx"][1]
    for part in ("attn_config", "ffn_config"):
        mine = {key: one for key, one in change.items() if (key[0] in "kr") == (part == "attn_config")}
        tiny_models.edit(tmp_path, **{part: config[part] | mine})
    with pytest.raises(CheckpointError, match=says) as refused:
        registry.load(tmp_path, kernels)
    assert "\n" not in str(refused.value)


def test_a_tensor_of_another_shape_is_named(saved: Saved, tmp_path: Path) -> None:
    tensors = load_file(saved() / "model.safetensors")
    name = "transformer.blocks.1.ffn.experts.mlp.v1"
    tensors[name] = tensors[name][:-1].clone()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((saved() / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"1\.ffn\.experts\.mlp\.v1: got shape \[119, 48\]; allowed"):
        registry.load(tmp_path, kernels)


def test_attention_is_split_among_ranks(saved: Saved) -> None:
    """Each rank has the rows of its own heads in the one matrix of queries, keys and values."""
    path = saved()
    whole = registry.load(path, kernels).blocks[1].attention_part
    parts = [registry.load(path, kernels, shard=Shard(rank, 2)).blocks[1].attention_part for rank in range(2)]
    for word in ("query", "key", "value"):
        joined = torch.cat([getattr(part, word).weight for part in parts])
        assert torch.equal(joined, getattr(whole, word).weight)
