"""Experts that a checkpoint stores in columns, with biases: the same rows for everybody who reads them."""

from __future__ import annotations

import ctypes
import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support import model_configs, tiny_models

from moesaic.config import ExpertServerConfig
from moesaic.core.errors import CheckpointError
from moesaic.core.experts import COLUMNS, Activation
from moesaic.core.messages import Layout
from moesaic.experts.store import Store
from moesaic.kernels import table
from moesaic.kernels.weights import ExpertWeights
from moesaic.models import compressing, gpt_oss, registry
from moesaic.models.fingerprint import ExpertDigests
from moesaic.models.shard import Shard
from moesaic.offload.arena import Arena
from moesaic.offload.converted_experts import StreamedConvertedExperts
from moesaic.transport.stream import decode, encode

EXPERTS, HIDDEN, WIDTH = 12, 48, 20
PREFIX = "model.layers.1.mlp.experts"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[torch.dtype], Path]:
    made: dict[torch.dtype, Path] = {}

    def make(dtype: torch.dtype = torch.float32) -> Path:
        if dtype not in made:
            model = tiny_models.build(*model_configs.CASES["gpt-oss"])
            made[dtype] = tiny_models.save(model, tmp_path_factory.mktemp("columns"), dtype)
        return made[dtype]

    return make


@functools.cache
def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")


def stored(path: Path, layer: int, expert: int) -> list[torch.Tensor]:
    """Gate, up, down and their biases, taken from the file's tensors as transformers does."""
    tensors = tensors_of(path)
    prefix = f"model.layers.{layer}.mlp.experts"
    gate_up, down = tensors[f"{prefix}.gate_up_proj"][expert], tensors[f"{prefix}.down_proj"][expert]
    inner, last = tensors[f"{prefix}.gate_up_proj_bias"][expert], tensors[f"{prefix}.down_proj_bias"][expert]
    assert gate_up.shape == (HIDDEN, 2 * WIDTH) and down.shape == (WIDTH, HIDDEN)
    return [gate_up[:, ::2].t(), gate_up[:, 1::2].t(), down.t(), inner[::2], inner[1::2], last]


def check(
    path: Path, layer: int, expert: int, parts: Sequence[torch.Tensor | None], dtype: torch.dtype
) -> None:
    for line, (found, wanted) in enumerate(zip(parts, stored(path, layer, expert), strict=True)):
        assert found is not None and found.is_contiguous()
        assert found.dtype == (dtype if line < 3 else torch.float32)
        assert torch.equal(found, wanted.to(found.dtype))


def of(weights: ExpertWeights, expert: int) -> list[torch.Tensor | None]:
    return [part[expert] for part in weights.parts]


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_model_has_rows(saved: Callable[..., Path], dtype: torch.dtype, mapped: bool) -> None:
    path = saved(dtype)
    model = registry.load(path, table.pick("cpu"), use_mmap=mapped)
    kept = torch.float32 if dtype is torch.float16 else dtype
    for layer, expert in ((0, 0), (2, EXPERTS - 1)):
        weights = model.experts[layer]
        assert weights.activation == Activation(1.702, 1.0, 1.0)
        check(path, layer, expert, of(weights, expert), kept)


def test_ranks_that_share_an_expert_add_up_and_count_its_last_bias_once(saved: Callable[..., Path]) -> None:
    kernels, rows, ids = table.pick("cpu"), torch.randn(9, HIDDEN), torch.full((9, 1), 3)
    whole = registry.load_experts(saved(), kernels, {1: [3]})[1]
    parts = [
        registry.load_experts(saved(), kernels, {1: [3]}, of_expert=Shard(rank, 3))[1] for rank in range(3)
    ]
    assert [len(part.gate_proj[3]) for part in parts] == [7, 7, 6]  # type: ignore[arg-type]
    found = sum(kernels.experts(part, rows, ids) for part in parts)
    torch.testing.assert_close(found, kernels.experts(whole, rows, ids), rtol=1e-5, atol=1e-5)
    assert whole.resident_ids == parts[2].resident_ids == (3,)


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("of_file", DTYPES, ids=str)
def test_a_server_has_the_rows_of_a_model(
    saved: Callable[..., Path], of_file: torch.dtype, dtype: str, mapped: bool
) -> None:
    path, wanted, kernels = saved(of_file), {0: [0, 5], 2: [11]}, table.pick("cpu")
    layout = registry.expert_layout(path, kernels, "cpu", dtype)
    assert layout.form == COLUMNS
    store = Store(path, layout, mapped)
    store.load(wanted)
    assert store.resident_experts == wanted
    for layer, weights in registry.load_experts(path, kernels, wanted, dtype=dtype).items():
        assert store.table(layer).shape == (6, EXPERTS)
        for expert in range(EXPERTS):
            for line, (part, size) in enumerate(zip(of(weights, expert), layout.matrix_bytes, strict=True)):
                address = int(store.table(layer)[line, expert])
                assert (address == 0) == (part is None)
                if part is not None:
                    found = ctypes.string_at(address, size)
                    assert found == part.view(-1).view(torch.uint8).numpy().tobytes()
    store.keep_only({0: [5]})
    assert store.resident_experts == {0: [5]} and not store.table(2).any()


def test_a_layout_counts_biases_and_travels(saved: Callable[..., Path]) -> None:
    layout = registry.expert_layout(saved(), table.pick("cpu"))
    model = registry.load(saved(), table.pick("cpu"))
    held = sum(
        part.numel()
        for each in model.experts.values()
        for line in each.parts
        for part in line
        if part is not None
    )
    assert (layout.parameters, layout.num_bytes) == (held, 4 * held)
    config = ExpertServerConfig(model="x", layout=layout, address="unix:@")
    assert ExpertServerConfig.from_json(config.to_json()).layout == layout
    assert decode(encode(Layout(layout))) == Layout(layout)


def test_every_number_of_an_expert_is_digested(saved: Callable[..., Path], tmp_path: Path) -> None:
    kernels = table.pick("cpu")
    before = ExpertDigests(saved(), registry.expert_layout(saved(), kernels)).digest_of(1, 3)
    for word in ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"):
        path = tmp_path / word
        path.mkdir()
        (path / "config.json").write_bytes((saved() / "config.json").read_bytes())
        tensors = load_file(saved() / "model.safetensors")
        tensors[f"{PREFIX}.{word}"][3].view(-1)[-1] += 1.0
        save_file(tensors, path / "model.safetensors")
        digests = ExpertDigests(path, registry.expert_layout(path, kernels))
        assert digests.digest_of(1, 3) != before
        assert digests.digest_of(1, 4) == ExpertDigests(
            saved(), registry.expert_layout(saved(), kernels)
        ).digest_of(1, 4)


# ---- streamed


@pytest.mark.parametrize(
    ("dtype", "static", "pages"),
    [
        (torch.float32, {}, 5),
        (torch.bfloat16, {0: [1, 4], 1: range(EXPERTS)}, 1),
        (torch.bfloat16, {0: [1, 4], 1: range(EXPERTS)}, 30),
    ],
    ids=["none stay", "some stay", "more pages than experts"],
)
def test_pages_in_any_order_bring_every_expert(
    saved: Callable[..., Path], dtype: torch.dtype, static: Mapping[int, Sequence[int]], pages: int
) -> None:
    path = saved(dtype)
    layout = registry.expert_layout(path, table.pick("cpu"))
    streamed = StreamedConvertedExperts(
        path, layout, static, Arena(StreamedConvertedExperts.memory_for(path, layout, static).total)
    )
    total = streamed.load_static()
    for count in range(6):
        layer = count % 3
        total += sum(streamed.load_page(count, layer, page, pages) for page in reversed(range(pages)))
        weights = streamed.experts(count, layer)
        assert weights.resident_ids == tuple(range(EXPERTS)) and weights.table.width == WIDTH
        assert weights.activation == layout.activation
        for expert in range(EXPERTS):
            check(path, layer, expert, of(weights, expert), dtype)
    assert streamed.bytes_read == total > 0
    streamed.close()


def test_chosen_experts_leave_those_before_them(saved: Callable[..., Path]) -> None:
    path = saved()
    layout = registry.expert_layout(path, table.pick("cpu"))
    owned = {layer: [0, 1, 5, 7] for layer in range(3)}
    arguments = (path, layout, {2: [5]})
    arena = Arena(StreamedConvertedExperts.memory_for(*arguments, owned_experts=owned).total)
    streamed = StreamedConvertedExperts(*arguments, arena, owned_experts=owned)
    streamed.load_static()
    streamed.load_chosen(2, 2, [7])
    streamed.load_chosen(2, 2, [0, 5])
    for expert in (0, 5, 7):
        check(path, 2, expert, of(streamed.experts(2, 2), expert), torch.float32)
    assert streamed.experts(2, 2).resident_ids == (0, 1, 5, 7)
    assert streamed.load_chosen(2, 2, [5]) == 0
    with pytest.raises(KeyError):
        streamed.load_chosen(2, 2, [2])
    with pytest.raises(ValueError, match="page 3 of 3"):
        streamed.load_page(2, 2, 3, 3)


# ---- refusals

REFUSED: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "rows": (
        lambda tensors: tensors.update({f"{PREFIX}.gate_up_proj": torch.zeros(EXPERTS, 2 * WIDTH, HIDDEN)}),
        f"tensor {PREFIX}.gate_up_proj: got shape [12, 40, 48]; allowed: [12, 48, 40]",
    ),
    "an expert too many": (
        lambda tensors: tensors.update({f"{PREFIX}.down_proj_bias": torch.zeros(13, HIDDEN)}),
        f"tensor {PREFIX}.down_proj_bias: got shape [13, 48]; allowed: [12, 48]",
    ),
    "no bias": (
        lambda tensors: tensors.pop(f"{PREFIX}.gate_up_proj_bias"),
        f"tensor {PREFIX}.0.gate_up_proj_bias is missing",
    ),
    "mxfp4": (
        lambda tensors: (
            tensors.update(
                {
                    f"{PREFIX}.gate_up_proj_blocks": torch.zeros(EXPERTS, 40, 2, 16, dtype=torch.uint8),
                    f"{PREFIX}.gate_up_proj_scales": torch.zeros(EXPERTS, 40, 2, dtype=torch.uint8),
                }
            )
            or tensors.pop(f"{PREFIX}.gate_up_proj")
        ),
        f"tensor {PREFIX}.0.gate_up_proj is missing",
    ),
    "sinks of other heads": (
        lambda tensors: tensors.update({"model.layers.1.self_attn.sinks": torch.zeros(2)}),
        "tensor model.layers.1.self_attn.sinks: got shape [2]; allowed: [6]",
    ),
    "no bias of the gate": (
        lambda tensors: tensors.pop("model.layers.1.mlp.router.bias"),
        "tensor model.layers.1.mlp.router.bias is missing",
    ),
    "sinks that are none": (
        lambda tensors: tensors["model.layers.1.self_attn.sinks"].fill_(torch.nan),
        "tensor model.layers.1.self_attn.sinks: got nan",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused_by_name(what: str, saved: Callable[..., Path], tmp_path: Path) -> None:
    change, words = REFUSED[what]
    (tmp_path / "config.json").write_bytes((saved() / "config.json").read_bytes())
    tensors = load_file(saved() / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=re.escape(words)) as caught:
        registry.load(tmp_path, table.pick("cpu"))
    assert "\n" not in str(caught.value)


def test_they_are_not_compressed(saved: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="stored in columns; allowed: in rows"):
        compressing.compress(saved(torch.bfloat16), tmp_path / "small", 1, lambda done, total: None)
    assert not list(tmp_path.iterdir())


# ---- config.json


def parsed(saved: Callable[..., Path], without: Iterable[str] = (), **changes: object) -> gpt_oss.Config:
    raw = json.loads((saved() / "config.json").read_text()) | changes
    return gpt_oss.parse({name: value for name, value in raw.items() if name not in without})


def test_what_a_config_leaves_out_is_that_of_transformers(saved: Callable[..., Path]) -> None:
    least = ("layer_types", "sliding_window", "rope_parameters", "swiglu_limit", "swiglu_alpha", "head_dim")
    found = parsed(
        saved, without=(*least, "attention_bias", "num_experts_per_tok"), max_position_embeddings=131072
    )
    config = tiny_models.KINDS["gpt_oss"][0]()
    assert found.windows == (128, None, 128)
    assert found.activation == Activation(config.swiglu_alpha, 1.0, config.swiglu_limit)
    assert (found.heads.width, found.heads.bias, found.heads.out_bias) == (config.head_dim, True, True)
    assert found.gating.top_k == config.num_experts_per_tok
    yarn = config.rope_parameters
    rope = found.rope
    assert (rope.kind, rope.theta, rope.factor, rope.original, rope.truncate) == (
        *("yarn", yarn["rope_theta"], yarn["factor"]),
        *(yarn["original_max_position_embeddings"], yarn["truncate"]),
    )
    scaling = {name: value for name, value in yarn.items() if name != "rope_theta"}
    older = parsed(saved, without=("rope_parameters",), rope_scaling=scaling, rope_theta=yarn["rope_theta"])
    assert replace(older.rope, partial=rope.partial) == rope
