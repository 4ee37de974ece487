"""What the keys about the gate mean for each family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support import model_configs

from moesaic.kernels import table
from moesaic.kernels.gating import Gating
from moesaic.models import registry

DEEPSEEK_V2 = model_configs.deepseek(topk_method="group_limited_greedy", n_group=4, topk_group=2)
FEW = {"norm_topk_prob": False, "routed_scaling_factor": 1.5, "n_group": 2, "topk_group": 1}


def corrected(top_k: int, normalise: bool, scale: float, groups: int, kept: int) -> Gating:
    return Gating(top_k, normalise, scale, groups, kept, "sigmoid", "two best", 1e-20)


@pytest.mark.parametrize(
    ("kind", "options", "wanted"),
    [
        ("deepseek_v2", model_configs.deepseek(n_group=4, topk_group=2), Gating(6)),
        ("deepseek_v2", DEEPSEEK_V2, Gating(6, groups=4, groups_kept=2)),
        ("deepseek_v3", model_configs.deepseek3(), corrected(6, True, 2.5, 4, 2)),
        ("kimi_k2", model_configs.deepseek3(), corrected(6, True, 2.5, 4, 2)),
        ("deepseek_v3", model_configs.deepseek3(**FEW), corrected(6, False, 1.5, 2, 1)),
        ("dots1", model_configs.dots(), corrected(4, False, 1.0, 1, 1)),
        ("dots1", model_configs.dots(scoring_func="noaux_tc", **FEW), corrected(4, False, 1.5, 2, 1)),
        ("solar_open", model_configs.solar(), corrected(4, True, 1.0, 1, 1)),
        ("ernie4_5_moe", model_configs.ernie(), Gating(4, normalise=True, sum_epsilon=1e-12)),
        ("ernie4_5_moe", model_configs.ernie(moe_norm_min=0), Gating(4, normalise=True)),
        ("exaone_moe", model_configs.exaone(), corrected(4, True, 2.5, 1, 1)),
        ("mellum", model_configs.mellum(), Gating(4, normalise=True)),
        ("granitemoe", model_configs.granite(), Gating(4, normalise=True)),
        (
            "hy_v3",
            model_configs.hy3(),
            Gating(4, normalise=True, scale=2.826, scores="sigmoid", sum_epsilon=1e-20),
        ),
        ("minimax_m2", model_configs.minimax(), Gating(4, normalise=True, scores="sigmoid")),
        ("glm4_moe", model_configs.glm4(), corrected(4, True, 1.0, 1, 1)),
        ("glm4_moe", model_configs.glm4(**FEW), corrected(4, False, 1.5, 2, 1)),
        ("glm4_moe_lite", model_configs.glm4_lite(), corrected(6, True, 1.8, 1, 1)),
        ("glm4_moe_lite", model_configs.glm4_lite(**FEW), corrected(6, False, 1.5, 2, 1)),
    ],
)
def test_the_rule_of_a_family(kind: str, options: dict[str, Any], wanted: Gating) -> None:
    config = registry.MODELS[kind].parse({"model_type": kind, **options})
    assert config.gating == wanted
    assert bool(config.names.corrections) == (kind not in ("deepseek_v2", "granitemoe", "mellum"))


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, (1, 2)),
        ({"moe_layer_start_index": 0, "moe_layer_end_index": 1}, (0, 1)),
        ({"moe_layer_interval": 2, "moe_layer_end_index": 99}, (1,)),
        ({"num_hidden_layers": 8, "moe_layer_interval": 3, "moe_layer_start_index": 3}, (5,)),
    ],
)
def test_which_layers_of_ernie_have_experts(options: dict[str, Any], wanted: tuple[int, ...]) -> None:
    raw = {"model_type": "ernie4_5_moe", **model_configs.ernie(**options)}
    assert registry.MODELS["ernie4_5_moe"].parse(raw).spec.moe_layers == wanted


@pytest.mark.parametrize("kernels", [*table.instruction_sets()[:1], "reference"])
def test_tiny_scores_that_a_bias_chooses_weigh_nothing(kernels: str) -> None:
    """As with ERNIE's clamp: 0 divided by moe_norm_min is 0, and not 0 divided by 0."""
    gating = (
        registry.MODELS["ernie4_5_moe"].parse({"model_type": "ernie4_5_moe", **model_configs.ernie()}).gating
    )
    weight = torch.zeros(12, 8)
    weight[0] = 100.0
    bias = torch.zeros(12)
    bias[3:7] = 2.0
    ids, weights = table.pick("cpu", kernels).gate(torch.ones(1, 8), weight, gating, bias)
    assert ids.tolist() == [[3, 4, 5, 6]] and 0.0 <= weights.min() <= weights.max() < 1e-20
