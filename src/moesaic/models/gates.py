"""Reads how a gate chooses and weighs experts from config.json, and loads the gate."""

from __future__ import annotations

from moesaic.core.errors import CheckpointError
from moesaic.kernels.gating import Gating
from moesaic.models.config import Fields
from moesaic.models.layers import TopKRouter
from moesaic.models.loader import Loader

ADDED = 1e-20
"""What DeepSeek-V3 adds to the sum that divides the weights of the chosen experts."""


def read_groups(fields: Fields, experts: int, least: int = 1) -> tuple[int, int]:
    """Returns n_group and topk_group: the number of expert groups, and how many of them a token may use.

    least: minimum number of experts in a group. Raises CheckpointError for numbers that do not fit.
    """
    groups, groups_kept = fields.maybe_integer("n_group"), fields.maybe_integer("topk_group")
    if (
        groups is None
        or groups_kept is None
        or experts % groups
        or experts // groups < least
        or groups_kept > groups
    ):
        condition = f" that leaves at least {least} in a group" if least > 1 else ""
        raise CheckpointError(
            f"config.json: n_group, topk_group: got {groups}, {groups_kept}; allowed: a divisor of {experts} "
            f"experts{condition}, and at most as many groups"
        )
    return groups, groups_kept


def read_corrected(fields: Fields, experts: int) -> Gating:
    """Reads the gate of DeepSeek-V3 (2024, section 2.1.2): sigmoids, and a bias that only chooses."""
    fields.require_value("scoring_func", "sigmoid")
    fields.require_value("topk_method", "noaux_tc")
    groups, groups_kept = read_groups(fields, experts, least=2)
    return Gating(
        top_k=fields.integer("num_experts_per_tok", maximum=experts * groups_kept // groups),
        normalise=fields.flag("norm_topk_prob"),
        scale=fields.number("routed_scaling_factor"),
        groups=groups,
        groups_kept=groups_kept,
        scores="sigmoid",
        group_scores="two best",
        sum_epsilon=ADDED,
    )


def load_gate(
    loader: Loader,
    name: str,
    gating: Gating,
    experts: int,
    hidden: int,
    correction: str | None = None,
    axes: tuple[int, ...] = (),
) -> TopKRouter:
    """Loads `name`.weight, and the tensor `correction` [*axes, experts], the bias that chooses, if given.

    A bias of the products is `name`.bias.
    """
    weight, bias = loader.exact(f"{name}.weight", experts, hidden), None
    if correction is not None:
        bias = loader.exact(correction, *axes, experts).flatten()
    elif gating.bias_target == "products":
        bias = loader.exact(f"{name}.bias", experts)
    return TopKRouter(loader.kernels, weight, gating, bias)
