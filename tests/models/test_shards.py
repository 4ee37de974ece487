"""Attention heads dealt out to ranks: partial sums that add up, the same logits and tokens, fewer bytes."""

from __future__ import annotations

import doctest
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import model_configs, pairs, tiny_models
from tests.support.model_driver import Driver

from moesaic.core.errors import ConfigError
from moesaic.core.tokens import TokenBatch
from moesaic.kernels.batch import AttentionBatch
from moesaic.kernels.table import pick
from moesaic.models import mixtral, registry, shard
from moesaic.models.model import Model
from moesaic.models.shard import WHOLE, Shard

SHARDED: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", model_configs.mixtral(num_attention_heads=8, num_key_value_heads=4)),
    "mixtral-mqa": (
        "mixtral",
        model_configs.mixtral(num_attention_heads=4, num_key_value_heads=1, sliding_window=7),
    ),
    "qwen3-bias": (
        "qwen3_moe",
        model_configs.qwen3(num_attention_heads=8, attention_bias=True, decoder_sparse_step=2),
    ),
    "olmoe": ("olmoe", model_configs.olmoe(num_attention_heads=4, num_key_value_heads=4, clip_qkv=0.9)),
    "olmoe-gqa-bias": (
        "olmoe",
        model_configs.olmoe(
            num_attention_heads=8, num_key_value_heads=2, attention_bias=True, norm_topk_prob=True
        ),
    ),
    "dots": (
        "dots1",
        model_configs.dots(
            num_attention_heads=8, num_key_value_heads=4, sliding_window=9, num_hidden_layers=2
        ),
    ),
    "ernie": ("ernie4_5_moe", model_configs.ernie(num_attention_heads=4, num_key_value_heads=2)),
    "granite": ("granitemoe", model_configs.granite(num_attention_heads=4, attention_bias=True)),
    "granite-shared": (
        "granitemoeshared",
        model_configs.granite(shared_intermediate_size=36, num_attention_heads=4),
    ),
    "hy3": (
        "hy_v3",
        model_configs.hy3(num_attention_heads=4, num_key_value_heads=1, attention_bias=True),
    ),
    "minimax": ("minimax_m2", model_configs.minimax(num_attention_heads=8, num_key_value_heads=4)),
    "qwen2": ("qwen2_moe", model_configs.qwen2(num_key_value_heads=2)),
    "deepseek-lite": model_configs.CASES["deepseek-lite"],
    "deepseek-full": model_configs.CASES["deepseek-full"],
    "deepseek3": model_configs.CASES["deepseek3"],
    "dbrx": ("dbrx", model_configs.dbrx(n_heads=8)),
    "gpt-oss": ("gpt_oss", model_configs.gpt_oss(num_attention_heads=8, num_key_value_heads=2)),
    "glm4": (
        "glm4_moe",
        model_configs.glm4(
            num_attention_heads=8, num_key_value_heads=4, attention_bias=True, use_qk_norm=True
        ),
    ),
}
LENGTH, GREEDY = 23, 24
NAMED = pytest.mark.parametrize("name", SHARDED)


class Ranks(Driver):
    """The ranks of a group, one after the other in this process: only the sum stands between their parts."""

    def __init__(self, models: list[Model]) -> None:
        super().__init__(replace(models[0]))
        self.ranks = [Driver(model) for model in models]

    @torch.no_grad()
    def _forward(self, batch: TokenBatch) -> torch.Tensor:
        model = self.model
        attention = AttentionBatch.build(batch, self.block_size)
        positions = torch.from_numpy(batch.positions)
        hidden = model.embed(torch.from_numpy(batch.token_ids))
        for layer, block in enumerate(model.blocks):
            parts = [partial(rank, layer, hidden, positions, attention) for rank in self.ranks]
            gated = block.gate(hidden, torch.stack(parts).sum(0))
            routed = None
            if gated.expert_ids is not None:
                routed = model.kernels.experts(
                    model.expert_weights(layer), gated.normed_rows, gated.expert_ids
                )
            hidden = block.merge(gated, block.dense(gated.normed_rows), routed)
        return model.logits(hidden)


def partial(
    rank: Driver, layer: int, hidden: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch
) -> torch.Tensor:
    """What one rank adds to the attention of a layer: [n, h]."""
    block, kernels = rank.model.blocks[layer], rank.model.kernels
    projected = block.pre_attention(hidden, positions)
    kernels.store(rank.keys[layer], projected.key, batch.slots)
    values = None
    if rank.values is not None and projected.value is not None:
        kernels.store(rank.values[layer], projected.value, batch.slots)
        values = rank.values[layer]
    attended = block.attention(projected.query, rank.keys[layer], values, batch)
    return block.output_projection(attended).clone()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Path]]:
    """Each case: transformers' model, and its checkpoint."""
    built = {name: tiny_models.build(*case) for name, case in SHARDED.items()}
    return {
        name: (model, tiny_models.save(model, tmp_path_factory.mktemp(name))) for name, model in built.items()
    }


def load(path: Path, size: int, kernels: str = "reference") -> list[Model]:
    picked = pick("cpu", kernels)
    picked.set_threads(1, False)
    return [registry.load(path, picked, shard=Shard(rank, size)) for rank in range(size)]


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 4])
@NAMED
def test_partial_sums_add_up_to_the_whole_attention(name: str, size: int, saved: Any) -> None:
    _, path = saved[name]
    whole = Driver(registry.load(path, pick("cpu", "reference")))
    ranks = [Driver(model) for model in load(path, size)]
    batch = whole._batch({0: tiny_models.prompt(LENGTH, model_configs.VOCAB)})
    attention, positions = AttentionBatch.build(batch, whole.block_size), torch.from_numpy(batch.positions)
    hidden = torch.randn(LENGTH, 48, generator=torch.Generator().manual_seed(0))
    for layer in range(whole.model.spec.num_layers):
        wanted = partial(whole, layer, hidden, positions, attention)
        parts = [partial(rank, layer, hidden, positions, attention) for rank in ranks]
        assert float((sum(parts[1:], parts[0]) - wanted).abs().max()) < 1e-5 * float(wanted.abs().max())
        assert all(float((part - wanted).abs().max()) > 1e-2 for part in parts)


@pytest.mark.parametrize("name", ["olmoe", "olmoe-gqa-bias", "minimax"])
def test_norms_over_all_heads_give_a_ranks_heads_the_bits_of_one_process(name: str, saved: Any) -> None:
    _, path = saved[name]
    whole, ranks = registry.load(path, pick("cpu")), load(path, 2, "auto")
    rows, positions = torch.randn(9, 48, generator=torch.Generator().manual_seed(0)), torch.arange(9)
    for layer, block in enumerate(whole.blocks):
        wanted = block.pre_attention(rows, positions)
        parts = [rank.blocks[layer].pre_attention(rows, positions) for rank in ranks]
        assert torch.equal(torch.cat([part.query for part in parts], dim=1), wanted.query)
        assert torch.equal(torch.cat([part.key for part in parts], dim=1), wanted.key)
        assert torch.equal(torch.cat([part.value for part in parts], dim=1), wanted.value)


@pytest.mark.parametrize(("name", "size", "kernels"), pairs.params(SHARDED, (2, 4), ("reference", "auto")))
def test_logits_and_greedy_tokens_are_those_of_one_rank(
    name: str, size: int, kernels: str, saved: Any
) -> None:
    theirs, path = saved[name]
    tokens = tiny_models.prompt(LENGTH, model_configs.VOCAB)
    wanted = tiny_models.reference_logits(theirs, tokens)
    models = load(path, size, kernels)
    found = Ranks(models).prefill(tokens, chunk=6)
    assert float((found - wanted).abs().max() / wanted.abs().max()) < 1e-4
    alone = Driver(registry.load(path, pick("cpu", kernels)))
    answer = alone.greedy(tokens, GREEDY)
    assert len(set(answer)) > 5
    assert Ranks(models).greedy(tokens, GREEDY) == answer


@NAMED
def test_a_rank_caches_its_own_heads(name: str, saved: Any) -> None:
    _, path = saved[name]
    whole = registry.read_spec(path)
    for size in (2, 4):
        spec = registry.read_spec(path, Shard(size - 1, size))
        assert spec == registry.load(path, pick("cpu", "reference"), shard=Shard(size - 1, size)).spec
        assert spec.heads * size == whole.heads
        assert spec.kv == replace(whole.kv, kv_heads=max(1, whole.kv.kv_heads // size))


def bytes_read(path: Path, part: Shard) -> int:
    """By a rank without routed experts, as progress tells."""
    told: list[int] = []
    registry.load(
        path, pick("cpu"), with_experts=False, progress=lambda done, _: told.append(done), shard=part
    )
    return told[-1]


@pytest.mark.parametrize(
    ("name", "split"),
    [
        # numbers of q and o, k and v, and with what the two shrink at 4 ranks
        ("mixtral", (2 * 8 * 8 * 48, 2 * 4 * 8 * 48, 4)),
        ("mixtral-mqa", (2 * 4 * 8 * 48, 2 * 8 * 48, 1)),
        ("qwen3-bias", (2 * 8 * 16 * 48, 2 * 2 * 16 * 48, 2)),
        # v and o are split; q and k are whole, since their norms are
        ("olmoe", (4 * 12 * 48, 4 * 12 * 48, 4)),
        ("olmoe-gqa-bias", (8 * 6 * 48, 2 * 6 * 48, 2)),
        # q and o and kv_b are split, the latent is not
        ("deepseek-lite", (4 * (12 + 12) * 48 + 4 * 20 * 16, 0, 1)),
    ],
)
def test_a_rank_reads_its_share_of_the_attention(name: str, split: tuple[int, int, int], saved: Any) -> None:
    _, path = saved[name]
    heads, kv_heads, shrink = split
    saving = 3 * 4 * (heads - heads // 4 + kv_heads - kv_heads // shrink)  # layers, bytes
    for rank in range(4):
        assert bytes_read(path, WHOLE) - bytes_read(path, Shard(rank, 4)) == saving


def test_parts_of_mapped_tensors_stay_mapped(saved: Any) -> None:
    """A rank's rows of a matrix lie in the page cache, which the other processes share."""
    _, path = saved["mixtral"]
    parts: list[Any] = [model.blocks[0] for model in load(path, 2)]
    first, second = (block.attention_part.query.weight for block in parts)
    assert not torch.equal(first, second)
    assert in_file(first.data_ptr()) and in_file(second.data_ptr())
    assert not in_file(parts[0].attention_part.out_proj.weight.data_ptr())  # columns are copied


def test_copied_weights_need_no_file(saved: Any) -> None:
    _, path = saved["mixtral"]
    mapped, copied = (
        registry.load(path, pick("cpu", "reference"), use_mmap=mapped) for mapped in (True, False)
    )
    assert in_file(mapped.embedding.data_ptr()) and not in_file(copied.embedding.data_ptr())
    for layer, experts in copied.experts.items():
        for one, other in zip(experts.matrices_of(0), mapped.experts[layer].matrices_of(0), strict=True):
            assert torch.equal(one, other) and in_file(other.data_ptr()) and not in_file(one.data_ptr())


def in_file(address: int) -> bool:
    """Whether this process maps a checkpoint there."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(part, 16) for part in line.partition(" ")[0].split("-"))
        if start <= address < stop:
            return line.endswith(".safetensors")
    return False


@pytest.mark.parametrize(
    ("name", "part", "words"),
    [
        ("mixtral", Shard(0, 3), "--tensor-parallel-size: got 3; allowed: 1, 2, 4, 8 for 8 query and 4"),
        ("qwen3-bias", Shard(0, 16), "got 16; allowed: 1, 2, 4, 8 for 8 query and 2 key-value heads"),
        ("deepseek-lite", Shard(0, 8), "got 8; allowed: 1, 2, 4 for 4 query and 1 key-value heads"),
        ("mixtral", Shard(2, 2), "rank: got 2; allowed: 0 to 1"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_read(
    name: str, part: Shard, words: str, saved: Any
) -> None:
    _, path = saved[name]
    calls: list[int] = []
    look: list[Callable[[], object]] = [
        lambda: registry.read_spec(path, part),
        lambda: registry.load(path, pick("cpu"), progress=lambda done, _: calls.append(done), shard=part),
    ]
    for read in look:
        with pytest.raises(ConfigError, match=words):
            read()
    assert not calls


def test_heads_that_straddle_two_key_value_heads_are_refused() -> None:
    spec = mixtral.parse({"model_type": "mixtral", **model_configs.mixtral()}).spec
    with pytest.raises(ConfigError, match="got 2; allowed: 1, 3, 6 for 6 query and 3 key-value heads"):
        Shard(0, 2).spec(spec)


def test_examples() -> None:
    assert doctest.testmod(shard).failed == 0
