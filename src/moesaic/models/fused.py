"""The matrices of routed experts inside two tensors of a layer, the form in which transformers computes.

`gate_up_proj` is [E, 2w, h]: each expert's gate, then its up. `down_proj` is [E, h, w]. save_pretrained of
transformers writes them with save_original_format=False. Granite's files call the two input_linear.weight and
output_linear.weight. Elsewhere in moesaic each matrix has the name that
it has in a checkpoint with experts one by one. Readers look here for a name that a checkpoint does not have.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

MATRIX = re.compile(r"(.+)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
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
class Inside:
    """Which part of a fused tensor a matrix is."""

    tensor: str
    expert: int
    number: int
    """Which of the expert's `count` matrices in the tensor, in order of rows."""
    count: int

    def whole(self, experts: int, rows: int, columns: int) -> tuple[int, int, int]:
        """Shape of the tensor for matrices [rows, columns]. experts: how many it seems to have."""
        return max(experts, self.expert + 1), self.count * rows, columns

    def rows(self, rows: int) -> slice:
        """The rows of the matrix among those of its expert."""
        return slice(self.number * rows, (self.number + 1) * rows)

    def first(self, rows: int, columns: int) -> int:
        """Numbers of the tensor before the matrix."""
        return (self.expert * self.count + self.number) * rows * columns


def inside(name: str, has: Callable[[str], bool]) -> Inside | None:
    """Where a matrix is that has no tensor of its own; None if no fused tensor has it.

    has: whether the checkpoint has a tensor of a name.
    >>> inside("mlp.experts.3.up_proj.weight", {"mlp.experts.gate_up_proj"}.__contains__)
    Inside(tensor='mlp.experts.gate_up_proj', expert=3, number=1, count=2)
    """
    found = None if has(name) else MATRIX.fullmatch(name)
    if found is None:
        return None
    prefix, expert, word = found.groups()
    tensor, number, count = WHERE[word]
    granite = f"{prefix.removesuffix('.experts')}.{GRANITE[tensor]}"
    for each in (f"{prefix}.{tensor}", f"{prefix.replace(*RENAMED)}.{tensor}", granite):
        if has(each):
            return Inside(each, int(expert), number, count)
    return None
