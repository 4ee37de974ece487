"""Each part that a family's layers have matters: switched off, the greedy tokens are others.

`test_teeth.py` has what needs more than switching off: angles, sizes, orders, factors outside of the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import model_configs, tiny_models
from tests.support.model_driver import Driver

from moesaic.kernels.gating import Gating
from moesaic.kernels.table import REFERENCE
from moesaic.models import registry

pytestmark = pytest.mark.slow  # what is tested here are the tests of test_identity.py
LENGTH, NEW = 41, 24
FAMILIES = {
    "dbrx": "clip normalise",
    "deepseek_v2": "query_norm latent_bias query_down_bias out_bias groups scale normalise dense shared",
    "deepseek_v3": "query_norm latent_bias query_down_bias out_bias groups scale sigmoid correction "
    "normalise dense shared",
    "dots1": "query_norm key_norm query_bias key_bias value_bias out_bias sliding_window groups scale "
    "sigmoid correction normalise dense shared",
    "ernie4_5_moe": "query_bias key_bias value_bias out_bias correction normalise dense shared",
    "exaone_moe": "query_norm key_norm sliding_window groups scale sigmoid correction normalise dense shared",
    "glm4_moe": "query_norm key_norm query_bias key_bias value_bias groups scale sigmoid correction "
    "normalise dense shared",
    "glm4_moe_lite": "query_norm latent_bias query_down_bias out_bias groups scale sigmoid correction "
    "normalise dense shared",
    "gpt_oss": "query_bias key_bias value_bias out_bias sinks sliding_window correction normalise",
    "granitemoe": "query_bias key_bias value_bias out_bias normalise",
    "granitemoeshared": "query_bias key_bias value_bias out_bias normalise shared",
    "hy_v3": "query_norm key_norm query_bias key_bias value_bias out_bias scale sigmoid correction "
    "normalise dense shared",
    "lfm2_moe": "query_norm key_norm taps scale sigmoid correction normalise dense",
    "mellum": "query_norm key_norm query_bias key_bias value_bias out_bias sliding_window normalise dense",
    "minimax_m2": "query_norm key_norm sigmoid correction normalise",
    "mixtral": "sliding_window normalise",
    "olmoe": "query_norm key_norm clip query_bias key_bias value_bias out_bias normalise",
    "qwen2_moe": "query_bias key_bias value_bias sliding_window normalise dense shared",
    "qwen3_5_moe_text": "query_norm key_norm taps decay bias norm output_gate normalise shared",
    "qwen3_moe": "query_norm key_norm query_bias key_bias value_bias out_bias sliding_window normalise dense",
    "qwen3_next": "query_norm key_norm taps decay bias norm output_gate normalise dense shared",
    "solar_open": "query_bias key_bias value_bias scale sigmoid correction normalise shared",
}
"""model_type -> the parts of its layers. Those that another family's file loads are not named again."""


def last_tap(taps: torch.Tensor) -> torch.Tensor:
    return taps * torch.eye(taps.shape[1])[-1]


ATTENTION: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("key_norm", "sinks", "sliding_window", "clip"), lambda _: None),
    **dict.fromkeys(("query_norm", "decay", "bias"), torch.zeros_like),
    **dict.fromkeys(("norm", "output_gate"), torch.ones_like),
    "taps": last_tap,
}
"""Fields of a layer's attention -> what switches them off."""
GATE: dict[str, Callable[[Gating], dict[str, Any]]] = {
    "normalise": lambda rule: {"normalise": not rule.normalise},
    "scale": lambda _: {"scale": 1.0},
    "sigmoid": lambda _: {"scores": "softmax"},
    "groups": lambda _: {"groups": 1, "groups_kept": 1},
}
"""Changes of a gate's rule. Weights that are not normalised become so."""


def switched_off(block: Any) -> dict[str, Any]:
    """The parts of a layer -> the layer without this part."""
    part, found = block.attention_part, {}
    for field, change in ATTENTION.items():
        if getattr(part, field, None) is not None:
            found[field] = replace(
                block, attention_part=replace(part, **{field: change(getattr(part, field))})
            )
    for field in ("query", "key", "value", "out_proj", "latent", "query_down"):
        if getattr(getattr(part, field, None), "bias", None) is not None:
            plain = replace(getattr(part, field), bias=None)
            found[f"{field.removesuffix('_proj')}_bias"] = replace(
                block, attention_part=replace(part, **{field: plain})
            )
    if block.dense_part is not None:
        found["dense" if block.router is None else "shared"] = replace(block, dense_part=None)
    if block.router is not None:
        rule = block.router.gating
        for name, changes in GATE.items():
            other = replace(rule, **changes(rule))
            if other != rule:
                found[name] = replace(block, router=replace(block.router, gating=other))
        if block.router.bias is not None:
            found["correction"] = replace(block, router=replace(block.router, bias=None))
    return found


def without(model: Any) -> Iterator[tuple[str, Any]]:
    """The parts of a model, each with the model whose layers all lack it."""
    layers = [switched_off(block) for block in model.blocks]
    for name in sorted({name for layer in layers for name in layer}):
        blocks = (layer.get(name, block) for layer, block in zip(layers, model.blocks, strict=True))
        yield name, replace(model, blocks=tuple(blocks))


def greedy(model: Any) -> list[int]:
    return Driver(model).greedy(tiny_models.prompt(LENGTH, model_configs.VOCAB), NEW)


@pytest.mark.parametrize("kind", FAMILIES)
def test_tokens_change_without_a_part(kind: str, published: Callable[..., tuple[Any, Path]]) -> None:
    """In one of the family's cases at least: a bias of keys may move no token of a short answer."""
    changed: dict[str, bool] = {}
    for name in (name for name, (other, _) in model_configs.CASES.items() if other == kind):
        model = registry.load(published(name)[1], REFERENCE)
        wanted = greedy(model)
        for part, other in without(model):
            changed[part] = changed.get(part, False) or greedy(other) != wanted
    assert set(changed) == set(FAMILIES[kind].split())
    assert [part for part, seen in changed.items() if not seen] == []


def test_every_family_is_here() -> None:
    assert set(FAMILIES) == {kind for kind, _ in model_configs.CASES.values()} - set(tiny_models.AROUND)
