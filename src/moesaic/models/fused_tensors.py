"""The matrices of routed experts inside two tensors of a layer, the form in which transformers computes.

`gate_up_proj` is [E, 2w, h]: each expert's gate, then its up. `down_proj` is [E, h, w]. save_pretrained of
transformers writes them with save_original_format=False. Granite's files call the two input_linear.weight and
output_linear.weight. Elsewhere in moesaic each matrix has the name that
it has in a checkpoint with experts one by one. Readers look here for a name that a checkpoint does not have.
GGUF files have the same matrix of all experts in one tensor, which is called as that of one expert, without
its number: `experts.up_proj.weight` [E, w, h].

gpt-oss has other tensors of these names, in columns (`core.experts.ExpertLayout.form`): [E, h, 2w] and
[E, w, h], beside `gate_up_proj_bias` [E, 2w] and `down_proj_bias` [E, h]. The part of one expert is called
`experts.3.gate_up_proj`, and so on.

DBRX has the rows of all experts one after another: `experts.mlp.w1`, `v1` and `w2`, [E * w, h] each. Those of
one expert are called `experts.mlp.3.w1`, and so on.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

MATRIX = re.compile(r"(.+)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
WHOLE = re.compile(r"(.+)\.(\d+)\.((?:gate_up|down)_proj(?:_bias)?)")
"""All that a fused tensor has of one expert, in columns."""
FLAT = re.compile(r"(.+\.experts\.mlp)\.(\d+)\.(w1|v1|w2)")
"""A matrix of an expert among the rows of all experts."""
GATE_UP, DOWN = "gate_up_proj", "down_proj"
WHERE = {
    "gate_proj": (GATE_UP, 0, 2), "w1": (GATE_UP, 0, 2), "up_proj": (GATE_UP, 1, 2), "w3": (GATE_UP, 1, 2),
    "down_proj": (DOWN, 0, 1), "w2": (DOWN, 0, 1),
}  # fmt: skip
"""Word of a matrix -> its tensor, its number among the expert's matrices there, and how many these are."""
RENAMED = ("block_sparse_moe.experts", "mlp.experts")
"""How Mixtral's files and transformers call the same part."""
GRANITE = {GATE_UP: "input_linear.weight", DOWN: "output_linear.weight"}
"""How Granite's files call the two tensors, which are in no part of their own."""


@dataclass(frozen=True, slots=True)
class FusedPart:
    """Which part of a fused tensor a matrix is."""

    tensor: str
    expert: int
    number: int
    """Which of the expert's `count` matrices in the tensor, in order of rows."""
    count: int
    flat: bool = False
    """Whether the tensor has no axis of experts, but the rows of all of them."""

    def tensor_shape(self, experts: int, rows: int, *columns: int) -> tuple[int, ...]:
        """Shape of the tensor for parts [rows, columns] or [rows]. experts: how many it seems to have."""
        # A tensor with too few experts must not fit: then a message names its shape and the one that is
        # allowed.
        num_experts = max(experts, self.expert + 1)
        return (num_experts * rows, *columns) if self.flat else (num_experts, self.count * rows, *columns)

    def experts(self, shape: Sequence[Any], rows: int) -> int:
        """How many experts a tensor of this shape seems to have."""
        first = shape[0] if shape and isinstance(shape[0], int) else 0
        return first // rows if self.flat else first

    def index(self, rows: int) -> tuple[int | slice, ...]:
        """Where in the tensor the matrix is."""
        if self.flat:
            return (slice(self.expert * rows, (self.expert + 1) * rows),)
        return self.expert, slice(self.number * rows, (self.number + 1) * rows)

    def first(self, *shape: int) -> int:
        """Numbers of the tensor before the part, which has this shape."""
        return (self.expert * self.count + self.number) * math.prod(shape)


def find_fused_part(name: str, has_tensor: Callable[[str], bool]) -> FusedPart | None:
    """Where a part of an expert is that has no tensor of its own; None if no fused tensor has it.

    has_tensor: whether the checkpoint has a tensor of a name.
    >>> find_fused_part("mlp.experts.3.up_proj.weight", {"mlp.experts.gate_up_proj"}.__contains__)
    FusedPart(tensor='mlp.experts.gate_up_proj', expert=3, number=1, count=2, flat=False)
    """
    if has_tensor(name):
        return None
    match = MATRIX.fullmatch(name)
    if match is None:
        return _find_column_part(name, has_tensor)
    prefix, expert, word = match.groups()
    tensor, number, count = WHERE[word]
    granite = f"{prefix.removesuffix('.experts')}.{GRANITE[tensor]}"
    stacked_name = f"{prefix}.{word}.weight"
    if has_tensor(stacked_name):
        return FusedPart(stacked_name, int(expert), 0, 1)
    for candidate in (f"{prefix}.{tensor}", f"{prefix.replace(*RENAMED)}.{tensor}", granite):
        if has_tensor(candidate):
            return FusedPart(candidate, int(expert), number, count)
    return None


def _find_column_part(name: str, has_tensor: Callable[[str], bool]) -> FusedPart | None:
    flat_match = FLAT.fullmatch(name)
    if flat_match is not None and has_tensor(f"{flat_match[1]}.{flat_match[3]}"):
        return FusedPart(f"{flat_match[1]}.{flat_match[3]}", int(flat_match[2]), 0, 1, flat=True)
    match = WHOLE.fullmatch(name)
    if match is None or not has_tensor(f"{match[1]}.{match[3]}"):
        return None
    return FusedPart(f"{match[1]}.{match[3]}", int(match[2]), 0, 1)
