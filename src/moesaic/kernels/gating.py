"""How a gate chooses experts and weighs them. Model files fill this record, and every kernel takes it.

Question: How does a gate choose and weigh experts?
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Gating:
    """The rule of a top-k gate. An expert's product is that of the gate's weight and the row.

    An expert's score is computed from the products. What a bias, if the model has one, is added to is said by
    `bias_target`.
    """

    top_k: int
    normalise: bool = False
    """Whether the weights of the chosen experts are divided by their sum, plus `added`."""
    scale: float = 1.0
    """Factor of the weights."""
    groups: int = 1
    """Number of groups of consecutive experts, all of one size."""
    groups_kept: int = 1
    """Number of groups with the highest scores. Experts of other groups cannot be chosen."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """softmax: over all experts. sigmoid: of each expert's product alone."""
    group_scores: Literal["best", "two best"] = "best"
    """A group's score: the score of its best expert, or the sum of the two best."""
    sum_epsilon: float = 0.0
    """Added to the sum that divides the weights, so that it is not zero. DeepSeek-V3 has 1e-20."""
    bias_target: Literal["choice", "products"] = "choice"
    """choice: a correction bias is added to the scores that choose, and not to those that weigh. products: a
    bias is added to the products."""
