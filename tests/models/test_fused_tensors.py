"""Experts in two tensors of a layer and experts one by one: the same numbers for everybody who reads them."""

from __future__ import annotations

import ctypes
import doctest
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support import model_configs, pairs, tiny_models
from tests.support.model_driver import Driver

from moesaic.core.errors import CheckpointError
from moesaic.experts.store import Store
from moesaic.kernels import table
from moesaic.models import compressing, fingerprint, fused_tensors, registry
from moesaic.models.fingerprint import ExpertDigests
from moesaic.models.headers import Headers
from moesaic.models.shard import Shard

pytestmark = pytest.mark.slow

CASES = (
    "mixtral",
    "qwen3-bias-dense-layers",
    "olmoe",
    "qwen2",
    "deepseek-lite",
    "minimax",
    "hy3",
    "ernie",
    "granite",
    "granite-shared",
    "internvl-qwen3",
    "qwen3.5",
)
BITS = CASES, (True, False), (torch.float32, torch.bfloat16, torch.float16)
SERVED = CASES, ("float32", "bfloat16"), (True, False)
GATE_UP, DOWN = "model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"


@dataclass(frozen=True)
class Forms:
    one_by_one: Path
    fused: Path


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Forms]:
    made: dict[tuple[str, torch.dtype], Forms] = {}

    def make(case: str, dtype: torch.dtype = torch.bfloat16) -> Forms:
        if (case, dtype) not in made:
            model = tiny_models.build(*model_configs.CASES[case])
            one = tiny_models.save(model, tmp_path_factory.mktemp("one"), dtype)
            made[case, dtype] = Forms(
                one, tiny_models.save_fused(model, tmp_path_factory.mktemp("two"), dtype)
            )
            names = [load_file(path / "model.safetensors").keys() for path in (one, made[case, dtype].fused)]
            assert [any(name.endswith(fused_tensors.GATE_UP) for name in each) for each in names] == [
                False,
                True,
            ]
        return made[case, dtype]

    return make


@pytest.fixture
def copy(
    forms: Callable[..., Forms], tmp_path: Path
) -> Callable[[Callable[[dict[str, torch.Tensor]], object]], Path]:
    """A qwen2_moe checkpoint with fused experts, whose tensors a function has changed."""

    def make(change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
        path = forms("qwen2").fused
        (tmp_path / "config.json").write_bytes((path / "config.json").read_bytes())
        tensors = load_file(path / "model.safetensors")
        change(tensors)
        save_file(tensors, tmp_path / "model.safetensors")
        return tmp_path

    return make


@pytest.mark.parametrize(("case", "mapped", "dtype"), pairs.params(*BITS, fast=pairs.cover(*BITS)))
def test_a_model_has_the_same_bits(
    case: str, mapped: bool, dtype: torch.dtype, forms: Callable[..., Forms]
) -> None:
    both = forms(case, dtype)
    one, two = (
        registry.load(path, table.pick("cpu"), use_mmap=mapped) for path in (both.one_by_one, both.fused)
    )
    assert (one.spec, one.num_parameters, one.num_bytes) == (two.spec, two.num_parameters, two.num_bytes)
    tokens = tiny_models.prompt(23, model_configs.VOCAB)
    assert torch.equal(Driver(one).prefill(tokens), Driver(two).prefill(tokens))
    for layer in one.spec.moe_layers:
        for expert in range(one.spec.num_experts):
            pairs = zip(
                one.experts[layer].matrices_of(expert), two.experts[layer].matrices_of(expert), strict=True
            )
            assert all(torch.equal(first, second) for first, second in pairs)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_loads_the_same_part_of_each_expert(rank: int, forms: Callable[..., Forms]) -> None:
    both, wanted = forms("qwen2"), {0: [1, 11], 2: [0]}
    one, two = (
        registry.load_experts(path, table.pick("cpu"), wanted, of_expert=Shard(rank, 2))
        for path in (both.one_by_one, both.fused)
    )
    for layer, experts in wanted.items():
        for expert in experts:
            pairs = list(zip(one[layer].matrices_of(expert), two[layer].matrices_of(expert), strict=True))
            assert all(torch.equal(first, second) for first, second in pairs)
            assert [tuple(second.shape) for _, second in pairs] == [(10, 48), (10, 48), (48, 10)]


@pytest.mark.parametrize(("case", "dtype", "mapped"), pairs.params(*SERVED, fast=pairs.cover(*SERVED)))
def test_a_server_finds_the_same_bits(
    case: str, dtype: str, mapped: bool, forms: Callable[..., Forms]
) -> None:
    both = forms(case)
    layouts = [
        registry.expert_layout(path, table.pick("cpu"), "cpu", dtype)
        for path in (both.one_by_one, both.fused)
    ]
    one, two = (
        Store(path, layout, mapped)
        for path, layout in zip((both.one_by_one, both.fused), layouts, strict=True)
    )
    layer = layouts[0].layers[-1]
    for store in (one, two):
        store.load({layer: [0, 3, 4]})
    for expert in (0, 3, 4):
        for line, size in enumerate(layouts[0].matrix_bytes):
            first, second = (
                ctypes.string_at(int(store.table(layer)[line, expert]), size) for store in (one, two)
            )
            assert first == second


def test_an_expert_has_the_same_digest(forms: Callable[..., Forms]) -> None:
    both = forms("mixtral")
    one, two = (
        ExpertDigests(path, registry.expert_layout(path, table.pick("cpu")))
        for path in (both.one_by_one, both.fused)
    )
    found = [
        [digests.digest_of(layer, expert) for layer in (0, 2) for expert in range(5)]
        for digests in (one, two)
    ]
    assert found[0] == found[1] and len(set(found[0])) == 10


@pytest.mark.parametrize("shard", [pytest.param("1GB", marks=pytest.mark.slow), "20KB"])
@pytest.mark.parametrize("case", ["mixtral", "qwen2", "granite", "internvl-qwen3"])
def test_compressed_experts_are_those_of_experts_one_by_one(case: str, shard: str, tmp_path: Path) -> None:
    model = tiny_models.build(*model_configs.CASES[case]).to(torch.bfloat16)
    for name, form in (("one", True), ("two", False)):
        model.save_pretrained(tmp_path / name, save_original_format=form, max_shard_size=shard)
        compressing.compress(tmp_path / name, tmp_path / f"{name}-small", 2, lambda done, total: None)
    assert fingerprint.origin(tmp_path / "two-small") == fingerprint.compute_fingerprint(tmp_path / "two")
    one, two = (registry.load(tmp_path / f"{name}-small", table.pick("cpu")) for name in ("one", "two"))
    assert one.num_bytes == two.num_bytes and one.experts[0].gate_proj[0].dtype is torch.uint8
    for layer in one.spec.moe_layers:
        for expert in range(one.spec.num_experts):
            pairs = zip(
                one.experts[layer].matrices_of(expert), two.experts[layer].matrices_of(expert), strict=True
            )
            assert all(torch.equal(first, second) for first, second in pairs)
    if shard != "1GB":
        index = json.loads((tmp_path / "two-small" / "model.safetensors.index.json").read_text())
        assert len(set(index["weight_map"].values())) > 3
        assert index["weight_map"].keys() == Headers(tmp_path / "two-small").list_tensors().keys()


REFUSED: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "an expert too many": (
        lambda tensors: tensors.update({DOWN: torch.zeros(13, 48, 20, dtype=torch.bfloat16)}),
        f"tensor {DOWN}: got shape [13, 48, 20]; allowed: [12, 48, 20]",
    ),
    "an expert too few": (
        lambda tensors: tensors.update({GATE_UP: tensors[GATE_UP][:11].contiguous()}),
        f"tensor {GATE_UP}: got shape [11, 40, 48]; allowed: [12, 40, 48]",
    ),
    "the other orientation": (
        lambda tensors: tensors.update({GATE_UP: tensors[GATE_UP].transpose(1, 2).contiguous()}),
        f"tensor {GATE_UP}: got shape [12, 48, 40]; allowed: [12, 40, 48]",
    ),
    "two axes": (
        lambda tensors: tensors.update({GATE_UP: tensors[GATE_UP].flatten(0, 1)}),
        f"tensor {GATE_UP}: got shape [480, 48]; allowed: [12, 40, 48]",
    ),
    "no down": (
        lambda tensors: tensors.pop(DOWN),
        "tensor model.layers.1.mlp.experts.0.down_proj.weight is missing",
    ),
    "bytes": (
        lambda tensors: tensors.update({DOWN: torch.zeros(12, 48, 20, dtype=torch.uint8)}),
        f"tensor {DOWN}: got dtype U8; allowed: only for matrices",
    ),
    "both forms": (
        lambda tensors: tensors.update(
            {
                f"model.layers.1.mlp.experts.{expert}.{word}.weight": torch.zeros(shape, dtype=torch.bfloat16)
                for expert in range(12)
                for word, shape in (
                    ("gate_proj", (20, 48)), ("up_proj", (20, 48)), ("down_proj", (48, 20))
                )
            }
        ),
        f"tensor {DOWN} is not expected by this model (and 1 more)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused_by_name(what: str, copy: Callable[..., Path]) -> None:
    change, words = REFUSED[what]
    with pytest.raises(CheckpointError, match=re.escape(words)) as caught:
        registry.load(copy(change), table.pick("cpu"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "what", [what for what in REFUSED if what not in ("an expert too many", "both forms")]
)
def test_headers_refuse_it_too(what: str, copy: Callable[..., Path], forms: Callable[..., Forms]) -> None:
    layout = registry.expert_layout(forms("qwen2").fused, table.pick("cpu"))
    headers = Headers(copy(REFUSED[what][0]))
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.experts") as caught:
        for part in layout.tensors(1, 11):
            headers.find(*part)
    assert "\n" not in str(caught.value)


def test_examples() -> None:
    assert doctest.testmod(fused_tensors).failed == 0
