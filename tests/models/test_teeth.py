"""Each optional part matters: without it, the tokens are others. The identity tests can thus fail.

`test_parts.py` has the parts that can just be switched off.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import model_configs, tiny_models
from tests.support.model_driver import Driver

from moesaic.kernels.gating import Gating
from moesaic.kernels.reference import dense, gate
from moesaic.kernels.table import REFERENCE
from moesaic.kernels.weights import ExpertWeights
from moesaic.models import registry

pytestmark = pytest.mark.slow  # what is tested here are the tests of test_identity.py
LENGTH = 41
NEW = 24
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
FULL, DEEPSEEK3, GLM4_LITE, GPT_OSS = (
    model_configs.CASES[name][1]["rope_parameters"]
    for name in ("deepseek-full", "deepseek3-full", "glm4-lite-layers-groups-yarn", "gpt-oss")
)

DBRX = model_configs.CASES["dbrx"][1]

EDITS: dict[str, tuple[str, dict[str, Any]]] = {
    "clipped queries, keys and values of dbrx": (
        "dbrx",
        {"attn_config": {**DBRX["attn_config"], "clip_qkv": None}},
    ),
    "normalisation of dbrx": (
        "dbrx",
        {"ffn_config": {**DBRX["ffn_config"], "moe_normalize_expert_weights": None}},
    ),
    "theta of dbrx": ("dbrx", {"attn_config": {"kv_n_heads": 2, "clip_qkv": 1.2}, "rope_parameters": PLAIN}),
    "yarn": ("qwen3-odd-heads-yarn", {"rope_parameters": PLAIN}),
    "yarn of latent attention": ("deepseek-lite-yarn", {"rope_parameters": PLAIN}),
    "yarn's original length": (
        "deepseek-lite-yarn",
        {"rope_parameters": {**model_configs.YARN, "original_max_position_embeddings": 64}},
    ),
    "mscale": ("deepseek-full", {"rope_parameters": {**FULL, "mscale": 0.1}}),
    "mscale_all_dim": ("deepseek-full", {"rope_parameters": {**FULL, "mscale_all_dim": 0.1}}),
    "beta_fast": ("deepseek-full", {"rope_parameters": {**FULL, "beta_fast": 2}}),
    "beta_slow": ("deepseek-full", {"rope_parameters": {**FULL, "beta_slow": 0.4}}),
    "truncate": ("deepseek-full", {"rope_parameters": {**FULL, "truncate": False}}),
    "llama3": ("qwen3-llama3-tied", {"rope_parameters": PLAIN}),
    "longrope": ("qwen3-longrope", {"rope_parameters": PLAIN}),
    "longrope's factor": ("qwen3-longrope", {"rope_parameters": {**model_configs.LONGROPE, "factor": 1.0}}),
    "linear": ("mixtral-linear", {"rope_parameters": PLAIN}),
    "theta": ("mixtral", {"rope_parameters": PLAIN}),
    "window": ("mixtral-window", {"sliding_window": None}),
    "window of one more": ("mixtral-window", {"sliding_window": 8}),
    "window of qwen3": ("qwen3-window", {"use_sliding_window": False}),
    "group limit": ("deepseek-full", {"topk_method": "greedy"}),
    "one group more": ("deepseek-full", {"topk_group": 3}),
    "top-k normalisation": ("qwen3", {"norm_topk_prob": False}),
    "top-k normalisation, on": ("qwen3-k8-plain", {"norm_topk_prob": True}),
    "scaling factor": ("deepseek-full", {"routed_scaling_factor": 1.0}),
    "clipped queries, keys and values": ("olmoe-clip-bias-gqa", {"clip_qkv": None}),
    "top-k normalisation of olmoe": ("olmoe-clip-bias-gqa", {"norm_topk_prob": False}),
    "top-k normalisation of qwen2, on": ("qwen2", {"norm_topk_prob": True}),
    "windows of qwen2": ("qwen2-windows-odd-heads", {"layer_types": [model_configs.FULL] * 3}),
    "which layers of qwen2 have windows": (
        "qwen2-windows-odd-heads",
        {"layer_types": [model_configs.FULL, model_configs.SLIDING, model_configs.SLIDING]},
    ),
    "rotated part of qwen3.5": (
        "qwen3.5",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.25}},
    ),
    "top-k normalisation of qwen3-next": ("qwen3-next", {"norm_topk_prob": False}),
    "top-k normalisation of lfm2": ("lfm2", {"norm_topk_prob": False}),
    "top-k normalisation of lfm2, on": ("lfm2-no-bias-odd-heads-plain", {"norm_topk_prob": True}),
    "scaling factor of lfm2": ("lfm2-no-bias-odd-heads-plain", {"routed_scaling_factor": 1.0}),
    "theta of lfm2": ("lfm2", {"rope_parameters": PLAIN}),
    "one expert more": ("deepseek-k1-one-head", {"num_experts_per_tok": 2}),
    "epsilon": ("qwen3", {"rms_norm_eps": 0.1}),
    "group limit of deepseek3": ("deepseek3", {"n_group": 1, "topk_group": 1}),
    "one group more of deepseek3": ("deepseek3-full", {"topk_group": 2}),
    "top-k normalisation of deepseek3": ("deepseek3", {"norm_topk_prob": False}),
    "top-k normalisation of deepseek3, on": ("deepseek3-plain-odd-heads", {"norm_topk_prob": True}),
    "scaling factor of deepseek3": ("deepseek3-full", {"routed_scaling_factor": 1.0}),
    "pairs of numbers side by side": ("deepseek3", {"rope_interleave": False}),
    "pairs of numbers apart": ("deepseek3-plain-odd-heads", {"rope_interleave": True}),
    "mscale_all_dim of deepseek3": (
        "deepseek3-full",
        {"rope_parameters": {**DEEPSEEK3, "mscale_all_dim": 0.1}},
    ),
    "mscale_all_dim of glm4-lite": (
        "glm4-lite-layers-groups-yarn",
        {"rope_parameters": {**GLM4_LITE, "mscale_all_dim": 0.1}},
    ),
    "group limit of glm4": ("glm4-norm-bias-groups", {"n_group": 1, "topk_group": 1}),
    "scaling factor of glm4": ("glm4-norm-bias-groups", {"routed_scaling_factor": 1.0}),
    "the part of a head that is rotated": (
        "glm4",
        {"rope_parameters": {**PLAIN, "partial_rotary_factor": 1.0}},
    ),
    "windows of dots": ("dots-windows-bias-shared-groups", {"layer_types": [model_configs.FULL] * 4}),
    "which layers of dots have windows": (
        "dots-windows-bias-shared-groups",
        {"layer_types": [model_configs.SLIDING] * 2 + [model_configs.FULL] * 2},
    ),
    "group limit of dots": ("dots-windows-bias-shared-groups", {"n_group": 1, "topk_group": 1}),
    "scaling factor of dots": ("dots-windows-bias-shared-groups", {"routed_scaling_factor": 1.0}),
    "top-k normalisation of dots, on": ("dots", {"norm_topk_prob": True}),
    "scaling factor of solar": ("solar-bias-yarn-odd-heads-plain", {"routed_scaling_factor": 1.0}),
    "top-k normalisation of solar": ("solar", {"norm_topk_prob": False}),
    "yarn of solar": ("solar-bias-yarn-odd-heads-plain", {"rope_parameters": PLAIN}),
    "factor of embeddings": ("granite", {"embedding_multiplier": 1.0}),
    "factor of residuals": ("granite", {"residual_multiplier": 1.0}),
    "factor of attention scores": ("granite", {"attention_multiplier": 0.8}),
    "epsilon of granite": ("granite-bias-odd-heads-k1-yarn-tied", {"rms_norm_eps": 1e-6}),
    "angles of layers without windows": (
        "mellum",
        {"rope_parameters": {model_configs.FULL: PLAIN, model_configs.SLIDING: {"rope_theta": 100.0}}},
    ),
    "angles of layers with windows": (
        "mellum",
        {"rope_parameters": {model_configs.FULL: {"rope_theta": 1000.0}, model_configs.SLIDING: PLAIN}},
    ),
    "windows of mellum": ("mellum", {"layer_types": [model_configs.FULL] * 3}),
    "top-k normalisation of mellum": ("mellum", {"norm_topk_prob": False}),
    "angles of exaone": ("exaone", {"rope_parameters": {**PLAIN, "rope_theta": 100.0}}),
    "layers of exaone that rotate": ("exaone", {"sliding_window": 192}),
    "windows of exaone": (
        "exaone",
        {"layer_types": [model_configs.SLIDING, model_configs.SLIDING, model_configs.FULL]},
    ),
    "pattern of windows of exaone": (
        "exaone-pattern-groups-plain-tied",
        {"layer_types": [model_configs.FULL] * 4},
    ),
    "group limit of exaone": ("exaone-pattern-groups-plain-tied", {"n_group": 1, "topk_group": 1}),
    "yarn of ernie": ("ernie-layers-odd-heads-yarn-plain", {"rope_parameters": PLAIN}),
    "theta of ernie": ("ernie", {"rope_parameters": PLAIN}),
    "scaling factor of hy3": ("hy3", {"router_scaling_factor": 1.0}),
    "yarn of hy3": ("hy3-layers-bias-shared-yarn", {"rope_parameters": PLAIN}),
    "the part of a head of minimax that is rotated": (
        "minimax",
        {"rope_parameters": PLAIN, "rotary_dim": 16},
    ),
    "windows of gpt-oss": ("gpt-oss", {"layer_types": [model_configs.FULL] * 3}),
    "which layers of gpt-oss have windows": (
        "gpt-oss",
        {"layer_types": [model_configs.FULL, model_configs.SLIDING, model_configs.FULL]},
    ),
    "limit of gpt-oss": ("gpt-oss", {"swiglu_limit": 1e9}),
    "alpha of gpt-oss": ("gpt-oss", {"swiglu_alpha": 1.0}),
    "truncate of gpt-oss": ("gpt-oss", {"rope_parameters": {**GPT_OSS, "truncate": True}}),
    "yarn of a part of a head": (
        "glm4-plain-odd-heads-yarn",
        {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.7}},
    ),
}
Answer = tuple[torch.Tensor, list[int]]
Intact = Callable[[str], tuple[Path, Answer]]


def answer(model: Any) -> Answer:
    """Logits [LENGTH, V] of a prompt, and the NEW greedy tokens after it."""
    tokens = tiny_models.prompt(LENGTH, model_configs.VOCAB)
    return Driver(model).prefill(tokens), Driver(model).greedy(tokens, NEW)


@pytest.fixture(scope="module")
def intact(published: Callable[..., tuple[Any, Path]]) -> Intact:
    """Where the checkpoint of a case lies, and its model's answer."""

    @functools.cache
    def found(name: str) -> tuple[Path, Answer]:
        path = published(name, torch.float32)[1]
        return path, answer(registry.load(path, REFERENCE))

    return found


def check_differs(found: Any, wanted: Answer) -> None:
    """Logits of two models ten times further apart than the identity tests allow, and other tokens."""
    (logits, tokens), (wanted_logits, wanted_tokens) = answer(found), wanted
    assert float((logits - wanted_logits).abs().max() / wanted_logits.abs().max()) > 1e-3
    assert tokens != wanted_tokens


@pytest.mark.parametrize("part", EDITS)
def test_a_part_of_the_config_matters(part: str, tmp_path: Path, intact: Intact) -> None:
    name, changes = EDITS[part]
    path, wanted = intact(name)
    edited = tiny_models.edit(Path(shutil.copytree(path, tmp_path / "edited")), **changes)
    check_differs(registry.load(edited, REFERENCE), wanted)


def test_a_factor_of_logits_matters(tmp_path: Path, intact: Intact) -> None:
    """It divides them all, so the greedy tokens stay."""
    path, (wanted, tokens) = intact("granite")
    edited = tiny_models.edit(Path(shutil.copytree(path, tmp_path / "edited")), logits_scaling=3.0)
    found, others = answer(registry.load(edited, REFERENCE))
    assert tokens == others
    torch.testing.assert_close(found, 2 * wanted)


def without(model: Any, **changes: Any) -> Any:
    """The model with fields of each block's attention or of the block itself replaced."""
    blocks = []
    for block in model.blocks:
        names = {name: value for name, value in changes.items() if hasattr(block.attention_part, name)}
        part = replace(
            block.attention_part, **{k: v(getattr(block.attention_part, k)) for k, v in names.items()}
        )
        rest = {k: v(getattr(block, k)) for k, v in changes.items() if k not in names and hasattr(block, k)}
        blocks.append(replace(block, attention_part=part, **rest))
    return replace(model, blocks=tuple(blocks))


def _without_gates(part: Any) -> Any:
    """Queries of Qwen3.5 whose gates are zero."""
    weight = part.weight.view(-1, 2, 16, part.weight.shape[1]).clone()
    weight[:, 1] = 0
    return replace(part, weight=weight.view(part.weight.shape))


def gating(**changes: Any) -> Any:
    """Changes how a gate chooses and weighs. Dense layers have none."""
    return lambda router: router and replace(router, gating=replace(router.gating, **changes))


class Unchanged:
    """Stands for a norm's centring."""

    def apply(self, rows: torch.Tensor) -> torch.Tensor:
        return rows


def test_means_before_the_final_norm_matter(intact: Intact) -> None:
    path, wanted = intact("dbrx")
    check_differs(replace(registry.load(path, REFERENCE), centring=None), wanted)


WEIGHTS = {
    "means before the norms of a layer": ("dbrx", {"centring": lambda _: Unchanged()}),
    "query latent norm": ("deepseek-full", {"query_norm": torch.ones_like}),
    "latent norm": ("deepseek-lite", {"latent_norm": torch.ones_like}),
    "softmax of ernie": ("ernie", {"router": gating(scores="sigmoid")}),
    "gates of the shared experts": ("qwen2", {"dense_part": lambda shared: shared.expert}),
    "groups by their two best": ("deepseek3", {"router": gating(group_scores="best")}),
    "gates of qwen3-next": ("qwen3-next", {"gates": lambda gates: gates.flip(0)}),
    "gate of the attention of qwen3.5": ("qwen3.5", {"query": _without_gates}),
    "gates of the shared experts of qwen3.5": ("qwen3.5", {"dense_part": lambda shared: shared.expert}),
    "gates before and after the convolution": (
        "lfm2",
        {"inputs": lambda inputs: (*inputs[1::-1], inputs[2])},
    ),
    "bias of the gate's products that only chooses": ("gpt-oss", {"router": gating(bias_target="choice")}),
}


@pytest.mark.parametrize("part", WEIGHTS)
def test_a_part_of_the_weights_matters(part: str, intact: Intact) -> None:
    name, changes = WEIGHTS[part]
    path, wanted = intact(name)
    check_differs(without(registry.load(path, REFERENCE), **changes), wanted)


def zeros(line: int) -> Any:
    """Replaces a part of the experts, by its place in `parts`, by zeros."""

    def change(weights: ExpertWeights) -> ExpertWeights:
        parts = list(weights.parts)
        parts[line] = tuple(None if one is None else torch.zeros_like(one) for one in parts[line])
        return weights.with_parts(parts)

    return change


EXPERTS = {
    "gate biases": zeros(3),
    "up biases": zeros(4),
    "down biases": zeros(5),
    "gate and up in turn": lambda weights: replace(
        weights, gate_proj=weights.up_proj, up_proj=weights.gate_proj
    ),
    "what is added to up": lambda weights: replace(
        weights, activation=replace(weights.activation, up_offset=0.0)
    ),
}


@pytest.mark.parametrize("part", EXPERTS)
def test_a_part_of_the_experts_matters(part: str, intact: Intact) -> None:
    path, wanted = intact("gpt-oss")
    model = registry.load(path, REFERENCE)
    changed = {layer: EXPERTS[part](weights) for layer, weights in model.experts.items()}
    check_differs(replace(model, experts=changed), wanted)


@pytest.mark.parametrize("name", ["deepseek-lite", "qwen3", "ernie"])
def test_the_order_of_rotated_pairs_matters(name: str, intact: Intact) -> None:
    path, wanted = intact(name)

    def other(*arguments: Any, is_interleaved: bool = False, **options: Any) -> torch.Tensor:
        return dense.rope(*arguments, is_interleaved=not is_interleaved, **options)

    check_differs(registry.load(path, replace(REFERENCE, rope=other)), wanted)


def test_a_correction_bias_that_weighs_too_is_noticed(intact: Intact) -> None:
    path, wanted = intact("deepseek3-plain-odd-heads")

    def other(
        rows: torch.Tensor, weight: torch.Tensor, rule: Gating, bias: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ids, weights = gate.gate(rows, weight, rule, bias)
        return ids, weights + rule.scale * bias[ids]

    check_differs(registry.load(path, replace(REFERENCE, gate=other)), wanted)


def test_groups_left_out_by_zeros_are_noticed(intact: Intact, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros would be chosen before the negative scores of the groups that are kept."""
    path, wanted = intact("deepseek3")
    limit = gate._limit
    monkeypatch.setattr(gate, "_limit", lambda *given: limit(*given).nan_to_num(neginf=0.0))
    check_differs(registry.load(path, REFERENCE), wanted)


def test_a_norm_of_all_heads_together_is_not_one_of_each_head(intact: Intact) -> None:
    path, wanted = intact("olmoe-clip-bias-gqa")
    width, keys = 8, 2 * 8

    def other(rows: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        if len(weight) != keys:
            return dense.rms_norm(rows, weight, epsilon)
        return dense.rms_norm(rows.unflatten(1, (-1, width)), weight.view(-1, width), epsilon).flatten(1)

    check_differs(registry.load(path, replace(REFERENCE, rms_norm=other)), wanted)
