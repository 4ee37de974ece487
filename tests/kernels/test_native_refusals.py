"""The native kernels refuse arguments that do not fit before they touch any memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.support.paged_steps import cache, tokens

from moesaic.kernels.batch import AttentionBatch
from moesaic.kernels.gating import Gating
from moesaic.kernels.table import Kernels
from moesaic.kernels.weights import ExpertWeights

torch.set_num_threads(1)

Call = Callable[[Kernels], object]
HALF, BRAIN = torch.float16, torch.bfloat16


def f(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def experts(dtype: torch.dtype = torch.float32, up: tuple[int, int] = (6, 8)) -> ExpertWeights:
    def make(*shape: int) -> tuple[torch.Tensor, ...]:
        return tuple(f(*shape).to(dtype) for _ in range(4))

    return ExpertWeights(make(6, 8), make(*up), make(8, 6))


LINEAR: dict[str, Call] = {
    "rows of another width": lambda k: k.linear(f(3, 8), f(4, 9)),
    "rows in bf16": lambda k: k.linear(f(3, 8).to(BRAIN), f(4, 8)),
    "rows in float64": lambda k: k.linear(f(3, 8).double(), f(4, 8)),
    "one row without its axis": lambda k: k.linear(f(8), f(4, 8)),
    "a weight in float16": lambda k: k.linear(f(3, 8), f(4, 8).to(HALF)),
    "a weight of integers": lambda k: k.linear(f(3, 8), f(4, 8).int()),
    "a transposed weight": lambda k: k.linear(f(3, 8), f(8, 4).t()),
    "a weight with gaps": lambda k: k.linear(f(3, 8), f(4, 16)[:, ::2]),
    "a weight with three axes": lambda k: k.linear(f(3, 8), f(2, 4, 8)),
    "a weight with one axis": lambda k: k.linear(f(3, 8), f(8)),
    "a weight without columns": lambda k: k.linear(f(3, 0), f(4, 0)),
    "a short bias": lambda k: k.linear(f(3, 8), f(4, 8), f(3)),
    "a long bias": lambda k: k.linear(f(3, 8), f(4, 8), f(5)),
    "a bias in bf16": lambda k: k.linear(f(3, 8), f(4, 8), f(4).to(BRAIN)),
    "a bias with gaps": lambda k: k.linear(f(3, 8), f(4, 8), f(8)[::2]),
}
LINEARS: dict[str, Call] = {
    "a weight of another width": lambda k: k.linears(f(3, 8), [f(4, 8), f(4, 8), f(4, 7)], [None] * 3),
    "a weight in float16": lambda k: k.linears(f(3, 8), [f(4, 8)] * 2 + [f(4, 8).to(HALF)], [None] * 3),
    "a weight with gaps": lambda k: k.linears(f(3, 8), [f(4, 8), f(4, 16)[:, ::2], f(4, 8)], [None] * 3),
    "rows in float64": lambda k: k.linears(f(3, 8).double(), [f(4, 8)] * 3, [None] * 3),
    "a short bias": lambda k: k.linears(f(3, 8), [f(4, 8)] * 3, [None, f(3), None]),
    "a bias in bf16": lambda k: k.linears(f(3, 8), [f(4, 8)] * 3, [None, f(4).to(BRAIN), None]),
    "too few biases": lambda k: k.linears(f(3, 8), [f(4, 8)] * 3, [None] * 2),
    "too many biases": lambda k: k.linears(f(3, 8), [f(4, 8)] * 3, [None] * 4),
}
HEADS: dict[str, Call] = {
    "another width": lambda k: k.head_linear(f(3, 2, 8), f(2, 7, 5)),
    "another number of heads": lambda k: k.head_linear(f(3, 2, 8), f(3, 8, 5)),
    "a weight in float16": lambda k: k.head_linear(f(3, 2, 8), f(2, 8, 5).to(HALF)),
    "rows in bf16": lambda k: k.head_linear(f(3, 2, 8).to(BRAIN), f(2, 8, 5)),
    "a weight with gaps": lambda k: k.head_linear(f(3, 2, 8), f(2, 16, 10)[:, ::2, ::2]),
    "rows without heads": lambda k: k.head_linear(f(3, 8), f(1, 8, 5)),
}
NORMS: dict[str, Call] = {
    "another width": lambda k: k.rms_norm(f(3, 8), f(9), 1e-6),
    "rows in bf16": lambda k: k.rms_norm(f(3, 8).to(BRAIN), f(8), 1e-6),
    "rows in float64": lambda k: k.rms_norm(f(3, 8).double(), f(8), 1e-6),
    "a weight in bf16": lambda k: k.rms_norm(f(3, 8), f(8).to(BRAIN), 1e-6),
    "a weight with gaps": lambda k: k.rms_norm(f(3, 8), f(16)[::2], 1e-6),
    "a weight with two axes": lambda k: k.rms_norm(f(3, 8), f(2, 8), 1e-6),
    "no numbers": lambda k: k.rms_norm(f(3, 0), f(0), 1e-6),
    "a sum of other shapes": lambda k: k.add_norm(f(3, 8), f(2, 8), f(8), 1e-6),
    "a sum of other widths": lambda k: k.add_norm(f(3, 8), f(3, 7), f(8), 1e-6),
    "a sum with one row": lambda k: k.add_norm(f(3, 8), f(1, 8), f(8), 1e-6),
    "a sum with bf16": lambda k: k.add_norm(f(3, 8), f(3, 8).to(BRAIN), f(8), 1e-6),
    "a sum and a weight with gaps": lambda k: k.add_norm(f(3, 8), f(3, 8), f(16)[::2], 1e-6),
}
ROPE: dict[str, Call] = {
    "more pairs than a head has": lambda k: k.rope(f(3, 2, 8), f(9, 5), f(9, 5), ids(1, 2, 3)),
    "another sine": lambda k: k.rope(f(3, 2, 8), f(9, 4), f(9, 3), ids(1, 2, 3)),
    "a shorter sine": lambda k: k.rope(f(3, 2, 8), f(9, 4), f(2, 4), ids(1, 2, 3)),
    "an odd width": lambda k: k.rope(f(3, 2, 9), f(9, 4), f(9, 4), ids(1, 2, 3)),
    "a table with gaps": lambda k: k.rope(f(3, 2, 8), f(9, 8)[:, ::2], f(9, 8)[:, ::2], ids(1, 2, 3)),
    "a table in float64": lambda k: k.rope(f(3, 2, 8), f(9, 4).double(), f(9, 4).double(), ids(1, 2, 3)),
    "rows in bf16": lambda k: k.rope(f(3, 2, 8).to(BRAIN), f(9, 4), f(9, 4), ids(1, 2, 3)),
    "rows without heads": lambda k: k.rope(f(3, 8), f(9, 4), f(9, 4), ids(1, 2, 3)),
    "too few positions": lambda k: k.rope(f(3, 2, 8), f(9, 4), f(9, 4), ids(1, 2)),
    "positions in int32": lambda k: k.rope(f(3, 2, 8), f(9, 4), f(9, 4), ids(1, 2, 3).int()),
    "positions with gaps": lambda k: k.rope(f(3, 2, 8), f(9, 4), f(9, 4), ids(1, 2, 3, 4, 5, 6)[::2]),
    "a norm of another width": lambda k: k.rope(f(3, 2, 8), f(9, 4), f(9, 4), ids(1, 2, 3), norm=f(7)),
    "a norm in bf16": lambda k: k.rope(f(3, 2, 8), f(9, 4), f(9, 4), ids(1, 2, 3), norm=f(8).to(BRAIN)),
    "a norm with gaps": lambda k: k.rope(f(3, 2, 8), f(9, 4), f(9, 4), ids(1, 2, 3), norm=f(16)[::2]),
    "very wide heads": lambda k: k.rope(f(3, 2, 2048), f(9, 1024), f(9, 1024), ids(1, 2, 3), norm=f(2048)),
}
MLP: dict[str, Call] = {
    "rows of another width": lambda k: k.gated_mlp(f(3, 7), f(6, 8), f(6, 8), f(8, 6)),
    "rows in bf16": lambda k: k.gated_mlp(f(3, 8).to(BRAIN), f(6, 8), f(6, 8), f(8, 6)),
    "an up of another shape": lambda k: k.gated_mlp(f(3, 8), f(6, 8), f(5, 8), f(8, 6)),
    "an up of another width": lambda k: k.gated_mlp(f(3, 8), f(6, 8), f(6, 7), f(8, 6)),
    "a down of another shape": lambda k: k.gated_mlp(f(3, 8), f(6, 8), f(6, 8), f(7, 6)),
    "a transposed down": lambda k: k.gated_mlp(f(3, 8), f(6, 8), f(6, 8), f(6, 8)),
    "weights of two types": lambda k: k.gated_mlp(f(3, 8), f(6, 8), f(6, 8).to(BRAIN), f(8, 6)),
    "an up with gaps": lambda k: k.gated_mlp(f(3, 8), f(6, 8), f(6, 16)[:, ::2], f(8, 6)),
    "no inner numbers": lambda k: k.gated_mlp(f(3, 8), f(0, 8), f(0, 8), f(8, 0)),
}
GATE: dict[str, Call] = {
    "rows of another width": lambda k: k.gate(f(3, 7), f(6, 8), Gating(2, True)),
    "rows in bf16": lambda k: k.gate(f(3, 8).to(BRAIN), f(6, 8), Gating(2, True)),
    "a weight in bf16": lambda k: k.gate(f(3, 8), f(6, 8).to(BRAIN), Gating(2, True)),
    "more chosen than there are": lambda k: k.gate(f(3, 8), f(6, 8), Gating(7, True)),
    "none chosen": lambda k: k.gate(f(3, 8), f(6, 8), Gating(-1, True)),
    "groups that do not divide": lambda k: k.gate(f(3, 8), f(6, 8), Gating(2, True, 1.0, 4, 2)),
    "more chosen than groups keep": lambda k: k.gate(f(3, 8), f(6, 8), Gating(3, True, 1.0, 3, 1)),
    "no groups": lambda k: k.gate(f(3, 8), f(6, 8), Gating(2, True, 1.0, 0, -1)),
    "no experts": lambda k: k.gate(f(3, 8), f(0, 8), Gating(1, True)),
}
EXPERTS: dict[str, Call] = {
    "rows of another width": lambda k: k.experts(experts(), f(3, 7), torch.zeros(3, 2).long()),
    "rows in bf16": lambda k: k.experts(experts(), f(3, 8).to(BRAIN), torch.zeros(3, 2).long()),
    "experts in float16": lambda k: k.experts(experts(dtype=HALF), f(3, 8), torch.zeros(3, 2).long()),
    "experts of two shapes": lambda k: k.experts(experts(up=(5, 8)), f(3, 8), torch.zeros(3, 2).long()),
    "ids in int32": lambda k: k.experts(experts(), f(3, 8), torch.zeros(3, 2).int()),
    "ids in float32": lambda k: k.experts(experts(), f(3, 8), f(3, 2)),
    "too few ids": lambda k: k.experts(experts(), f(3, 8), torch.zeros(2, 2).long()),
    "ids with one axis": lambda k: k.experts(experts(), f(3, 8), ids(1, 2, 3)),
    "an answer of another shape": lambda k: k.experts(
        experts(), f(3, 8), torch.zeros(3, 2).long(), f(2, 2, 8)
    ),
    "an answer with gaps": lambda k: k.experts(
        experts(), f(3, 8), torch.zeros(3, 2).long(), f(3, 2, 16)[..., ::2]
    ),
    "an answer in bf16": lambda k: k.experts(
        experts(), f(3, 8), torch.zeros(3, 2).long(), f(3, 2, 8).to(BRAIN)
    ),
    "an answer in float64": lambda k: k.experts(
        experts(), f(3, 8), torch.zeros(3, 2).long(), f(3, 2, 8).double()
    ),
}
MERGE: dict[str, Call] = {
    "rows of another width": lambda k: k.merge(f(3, 8), None, f(3, 2, 7), f(3, 2)),
    "fewer rows": lambda k: k.merge(f(3, 8), None, f(2, 2, 8), f(3, 2)),
    "fewer weights": lambda k: k.merge(f(3, 8), None, f(3, 2, 8), f(3, 1)),
    "rows in bf16": lambda k: k.merge(f(3, 8), None, f(3, 2, 8).to(BRAIN), f(3, 2)),
    "a dense part of another width": lambda k: k.merge(f(3, 8), f(3, 7), f(3, 2, 8), f(3, 2)),
    "a dense part of one row": lambda k: k.merge(f(3, 8), f(1, 8), f(3, 2, 8), f(3, 2)),
    "a dense part in bf16": lambda k: k.merge(f(3, 8), f(3, 8).to(BRAIN), None, None),
}
SIGMOID_GATE: dict[str, Call] = {
    "a weight of another width": lambda k: k.sigmoid_gate(f(3, 8), f(1, 7), f(3, 5)),
    "two weights": lambda k: k.sigmoid_gate(f(3, 8), f(2, 8), f(3, 5)),
    "a weight in bf16": lambda k: k.sigmoid_gate(f(3, 8), f(1, 8).to(BRAIN), f(3, 5)),
    "fewer values": lambda k: k.sigmoid_gate(f(3, 8), f(1, 8), f(2, 5)),
    "values in bf16": lambda k: k.sigmoid_gate(f(3, 8), f(1, 8), f(3, 5).to(BRAIN)),
    "rows in float64": lambda k: k.sigmoid_gate(f(3, 8).double(), f(1, 8), f(3, 5)),
}
CLIP: dict[str, Call] = {
    "rows in bf16": lambda k: k.clip(f(3, 8).to(BRAIN), 0.5),
    "rows with three axes": lambda k: k.clip(f(3, 2, 8), 0.5),
}
COPIES: dict[str, Call] = {
    "ids in int32": lambda k: k.embed(f(9, 8), ids(1, 2).int()),
    "ids with gaps": lambda k: k.embed(f(9, 8), ids(1, 2, 3, 4)[::2]),
    "a table in float16": lambda k: k.embed(f(9, 8).to(HALF), ids(1, 2)),
    "a table with gaps": lambda k: k.embed(f(9, 16)[:, ::2], ids(1, 2)),
    "other heads": lambda k: k.join(f(3, 2, 8), f(3, 1, 8)),
    "other rows": lambda k: k.join(f(3, 2, 8), f(2, 2, 8)),
    "a part in bf16": lambda k: k.join(f(3, 2, 8), f(3, 2, 8).to(BRAIN)),
    "rows of another width": lambda k: k.store(f(5, 4, 2, 8), f(3, 2, 7), ids(1, 2, 3)),
    "rows of other heads": lambda k: k.store(f(5, 4, 2, 8), f(3, 1, 8), ids(1, 2, 3)),
    "rows in bf16": lambda k: k.store(f(5, 4, 2, 8), f(3, 2, 8).to(BRAIN), ids(1, 2, 3)),
    "a cache in float16": lambda k: k.store(f(5, 4, 2, 8).to(HALF), f(3, 2, 8), ids(1, 2, 3)),
    "a cache in uint8": lambda k: k.store(f(5, 4, 2, 8).byte(), f(3, 2, 8), ids(1, 2, 3)),
    "a cache in int8 without scales": lambda k: k.store(f(5, 4, 2, 8).char(), f(3, 2, 8), ids(1, 2, 3)),
    "a cache in int8 with more": lambda k: k.store(f(5, 4, 2, 13).char(), f(3, 2, 8), ids(1, 2, 3)),
    "a cache in int8 of less than scales": lambda k: k.store(f(5, 4, 2, 3).char(), f(3, 2, 8), ids(1, 2, 3)),
    "a cache in int8 with gaps": lambda k: k.store(f(5, 4, 2, 24).char()[..., ::2], f(3, 2, 8), ids(1, 2, 3)),
    "a cache with gaps": lambda k: k.store(f(5, 4, 2, 16)[..., ::2], f(3, 2, 8), ids(1, 2, 3)),
    "too few slots": lambda k: k.store(f(5, 4, 2, 8), f(3, 2, 8), ids(1, 2)),
    "slots in int32": lambda k: k.store(f(5, 4, 2, 8), f(3, 2, 8), ids(1, 2, 3).int()),
}


def attend(k: Kernels, **changes: object) -> torch.Tensor:
    """Calls attention for two sequences, three rows, and four heads over two, with one argument changed."""
    batch = AttentionBatch.build(tokens([1, 2], [9, 5], 4, num_blocks=10), 4)
    known = {
        "query": f(3, 4, 8),
        "keys": cache(4, 2, 8, num_blocks=10),
        "values": cache(4, 2, 6, num_blocks=10),
        "batch": batch,
        "scale": 0.3,
    }
    return k.paged_attention(**{**known, **changes})


ATTENTION: dict[str, Call] = {
    "a query of another width": lambda k: attend(k, query=f(3, 4, 7)),
    "a query in bf16": lambda k: attend(k, query=f(3, 4, 8).to(BRAIN)),
    "a query with two axes": lambda k: attend(k, query=f(3, 32)),
    "fewer rows than the step has": lambda k: attend(k, query=f(2, 4, 8)),
    "more rows than the step has": lambda k: attend(k, query=f(4, 4, 8)),
    "heads that share no key head": lambda k: attend(k, query=f(3, 3, 8)),
    "fewer heads than keys have": lambda k: attend(k, query=f(3, 1, 8)),
    "keys in float16": lambda k: attend(k, keys=cache(4, 2, 8, HALF, 10)),
    "keys in int8, values in float32": lambda k: attend(k, keys=cache(4, 2, 8, torch.int8, 10)),
    "keys in int8 without scales": lambda k: attend(k, keys=f(10, 4, 2, 8).char()),
    "values in int8, keys in float32": lambda k: attend(k, values=cache(4, 2, 6, torch.int8, 10)),
    "values in int8 within the keys": lambda k: attend(k, **middle(torch.int8, 0)),
    "values in int8 wider than keys": lambda k: attend(
        k, keys=cache(4, 2, 8, torch.int8, 10), values=None, value_width=9
    ),
    "keys with gaps": lambda k: attend(k, keys=cache(4, 2, 16, num_blocks=10)[..., ::2]),
    "keys with three axes": lambda k: attend(k, keys=f(40, 2, 8)),
    "keys of other blocks": lambda k: attend(
        k, keys=cache(8, 2, 8, num_blocks=10), values=cache(8, 2, 6, num_blocks=10)
    ),
    "values of two types": lambda k: attend(k, values=cache(4, 2, 6, BRAIN, 10)),
    "values with gaps": lambda k: attend(k, values=cache(4, 2, 12, num_blocks=10)[..., ::2]),
    "fewer values than keys": lambda k: attend(k, values=cache(4, 2, 6, num_blocks=5)),
    "values of other heads": lambda k: attend(k, values=cache(4, 1, 6, num_blocks=10)),
    "values narrower than asked": lambda k: attend(k, value_width=7),
    "values wider than keys": lambda k: attend(k, values=None, value_width=9),
    "values in the middle of keys": lambda k: attend(k, **middle(torch.float32, 2)),
}


def middle(dtype: torch.dtype, begin: int) -> dict[str, torch.Tensor]:
    """Values that are six numbers in the middle of the keys."""
    keys = cache(4, 2, 8, dtype, 10)
    return {"keys": keys, "values": keys[..., begin : begin + 6]}


CALLS = {
    f"{name}: {what}": call
    for name, calls in {
        "linear": LINEAR,
        "linears": LINEARS,
        "head_linear": HEADS,
        "norms": NORMS,
        "rope": ROPE,
        "gated_mlp": MLP,
        "gate": GATE,
        "experts": EXPERTS,
        "merge": MERGE,
        "sigmoid_gate": SIGMOID_GATE,
        "clip": CLIP,
        "copies": COPIES,
        "attention": ATTENTION,
    }.items()
    for what, call in calls.items()
}


@pytest.mark.parametrize("call", CALLS)
def test_what_does_not_fit_is_refused(native: Kernels, call: str) -> None:
    with pytest.raises((TypeError, ValueError)):
        CALLS[call](native)


def test_the_types_of_a_cache_are_named(native: Kernels) -> None:
    line = r"^a KV cache: got torch.float16; allowed: float32, bfloat16, int8$"
    for call in (COPIES["a cache in float16"], ATTENTION["keys in float16"]):
        with pytest.raises(TypeError, match=line):
            call(native)
