"""The operations of a model's layer, as calls of the engine's kernels that can be timed.

Weights and caches are random. Each call takes other weights, so that none is found in a processor's cache.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from moesaic.core.stored import COMPRESSED, NUMBER_BYTES, is_packed, of_matrices, row_bytes
from moesaic.core.tokens import TokenBatch
from moesaic.cost.mixed import DeltaRule, Mixed, Recurrent, ShortConvolution
from moesaic.cost.ops import Work
from moesaic.cost.sizes import GroupedQuery, Latent, ModelSizes
from moesaic.kernels.batch import AttentionBatch
from moesaic.kernels.cache import stored_width
from moesaic.kernels.gating import Gating
from moesaic.kernels.reference.cache import encode
from moesaic.kernels.states import CHUNK, LayerStates, StateSizes
from moesaic.kernels.table import Kernels
from moesaic.kernels.weights import ExpertWeights
from moesaic.planning.hardware import products

BLOCK = 16
"""Tokens of a block of the cache."""
MOST_DECODES = 64
"""Steps of up to so many rows are decode steps of as many requests. Larger ones are one prompt."""
MEMORY = 1 << 30
"""Bytes of the experts of one type, at most. Of a larger layer fewer experts are made."""


@dataclass(frozen=True)
class Call:
    """An operation with so many rows, to be timed."""

    operation: str
    stored: str
    """The type of its weights, or of its cache."""
    rows: int
    context: int | None
    """Cached tokens of each request with the step's own, for attention."""
    work: Work
    """What one run computes and reads: weights and cache once. Rows are not counted: caches hold them."""
    run: Callable[[], object]


@dataclass(frozen=True)
class Sizes:
    """What is measured."""

    model: ModelSizes
    types: tuple[str, ...]
    """Types of the experts, of `core.stored.OF_EXPERTS`."""
    dense: str
    """Type of all other matrices: "bfloat16" or "float32"."""
    cache: str
    """Type of the cache: "float32", "bfloat16" or "int8"."""
    rows: tuple[int, ...]
    """Rows of a step."""
    context: int
    """Cached tokens of each request of a decode step."""
    beyond: int
    """Bytes of weights that a processor's caches cannot hold."""
    device: str = "cpu"
    """Where the kernels compute: "cpu" or "cuda"."""

    def random(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Random numbers on the device."""
        return products.random(shape, dtype, self.device)

    def requests(self, rows: int) -> tuple[int, int]:
        """Requests of a step with so many rows, and cached tokens of each.

        >>> sizes = Sizes(None, (), "bfloat16", "float32", (), 1024, 0)
        >>> sizes.requests(8), sizes.requests(512)
        ((8, 1024), (1, 512))
        """
        return (rows, self.context) if rows <= MOST_DECODES else (1, rows)


def every(kernels: Kernels, sizes: Sizes) -> Iterator[Call]:
    """Every operation with every number of rows. The memory of one operation is freed before the next."""
    yield from of_layer(kernels, sizes)
    for stored in sizes.types:
        yield from of_experts(kernels, sizes, stored)


def names(model: ModelSizes) -> tuple[str, ...]:
    """Names of the operations of a model without its experts, in the order in which they are measured."""
    wide = ("dense MLP",) if model.dense_width else ()
    shared = ("shared experts",) if model.shared_width else ()
    linear = (_name(model.attention.recurrent),) if isinstance(model.attention, Mixed) else ()
    before = ("query, key, value", "attention", *linear, "output projection", *wide, "gate")
    return (*before, *shared, "output head")


def of_layer(kernels: Kernels, sizes: Sizes) -> Iterator[Call]:
    """Every operation but the experts."""
    model, hidden = sizes.model, sizes.model.hidden
    before, after = (round(one / hidden) for one in model.attention.projected(hidden))
    yield from _linear("query, key, value", kernels, sizes, (before, hidden))
    yield from _attention(kernels, sizes)
    if isinstance(model.attention, Mixed):
        yield from _recurrent(kernels, sizes, model.attention.recurrent)
    yield from _linear("output projection", kernels, sizes, (hidden, after))
    if model.dense_width:
        yield from _mlp("dense MLP", kernels, sizes, model.dense_width)
    yield from _gate(kernels, sizes)
    if model.shared_width:
        yield from _mlp("shared experts", kernels, sizes, model.shared_width)
    yield from _linear("output head", kernels, sizes, (model.vocab, hidden))


def _turns(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """A function that makes the next of these calls each time."""
    each = itertools.cycle(calls)
    return lambda: next(each)()


def _matrices(sizes: Sizes, stored: str, *shapes: tuple[int, int]) -> list[list[torch.Tensor]]:
    """So many sets of matrices of these shapes that no cache holds them."""
    dtype: torch.dtype = getattr(torch, stored)
    size = sum(math.prod(shape) for shape in shapes) * dtype.itemsize
    return [
        [sizes.random(shape, dtype) for shape in shapes] for _ in range(1 + math.ceil(sizes.beyond / size))
    ]


def _product(rows: int, numbers: float, stored: str) -> Work:
    return Work(2.0 * rows * numbers, numbers * NUMBER_BYTES[stored])


def _linear(name: str, kernels: Kernels, sizes: Sizes, shape: tuple[int, int]) -> Iterator[Call]:
    matrices = [one for (one,) in _matrices(sizes, sizes.dense, shape)]
    for rows in sizes.rows:
        states = sizes.random((rows, shape[1]))
        run = _turns([partial(kernels.linear, states, one) for one in matrices])
        yield Call(name, sizes.dense, rows, None, _product(rows, math.prod(shape), sizes.dense), run)


def _mlp(name: str, kernels: Kernels, sizes: Sizes, width: int) -> Iterator[Call]:
    hidden = sizes.model.hidden
    matrices = _matrices(sizes, sizes.dense, (width, hidden), (width, hidden), (hidden, width))
    for rows in sizes.rows:
        states = sizes.random((rows, hidden))
        run = _turns([partial(kernels.gated_mlp, states, *one) for one in matrices])
        yield Call(name, sizes.dense, rows, None, _product(rows, 3.0 * hidden * width, sizes.dense), run)


def _gate(kernels: Kernels, sizes: Sizes) -> Iterator[Call]:
    model = sizes.model
    shape = model.experts, model.hidden
    matrices = [one for (one,) in _matrices(sizes, "float32", shape)]
    gating = Gating(round(model.top_k))
    for rows in sizes.rows:
        states = sizes.random((rows, model.hidden))
        run = _turns([partial(kernels.gate, states, one, gating) for one in matrices])
        work = _product(rows, math.prod(shape), "float32")
        yield Call("gate", "float32", rows, None, work, run)


def of_experts(kernels: Kernels, sizes: Sizes, stored: str) -> Iterator[Call]:
    """The routed experts of a layer. Each row chooses its experts at random."""
    model, rng = sizes.model, np.random.default_rng(0)
    one = _expert_bytes(model, stored)
    top_k = round(model.top_k)
    weights = experts(model, stored, min(model.experts, max(top_k, int(MEMORY / one))), sizes.device)
    for rows in sizes.rows:
        states = sizes.random((rows, model.hidden))
        out = torch.empty(rows, top_k, model.hidden, device=sizes.device)
        count = 1 if rows > MOST_DECODES else 8
        ids = [
            torch.from_numpy(np.stack([rng.permutation(weights.num_experts)[:top_k] for _ in range(rows)]))
            for _ in range(count)
        ]
        read = statistics.mean(len(set(chosen.flatten().tolist())) for chosen in ids)
        work = Work(2.0 * rows * top_k * model.expert, read * one)
        there = [chosen.to(sizes.device) for chosen in ids]
        run = _turns([partial(kernels.experts, weights, states, chosen, out) for chosen in there])
        yield Call("experts", stored, rows, None, work, run)


def _expert_bytes(model: ModelSizes, stored: str) -> float:
    inner, outer = of_matrices(stored)
    rows = 2 * model.expert_width * row_bytes(inner, model.hidden)
    return float(rows + model.hidden * row_bytes(outer, model.expert_width))


def experts(model: ModelSizes, stored: str, count: int, device: str = "cpu") -> ExpertWeights:
    """So many experts of a model in one type. Their numbers are random, and the same in each of them."""
    inner, outer = of_matrices(stored)
    shapes = (
        (inner, (model.expert_width, model.hidden)),
        (inner, (model.expert_width, model.hidden)),
        (outer, (model.hidden, model.expert_width)),
    )
    parts = []
    for kind, shape in shapes:
        first = products.in_type(kind, shape).to(device)
        parts.append((first, *(first.clone() for _ in range(count - 1))))
    return ExpertWeights(*parts, packed_dtype=stored if is_packed(stored) else COMPRESSED)


def _steps(sizes: Sizes, rows: int) -> AttentionBatch:
    """A step of requests whose blocks are anywhere in the cache."""
    requests, context = sizes.requests(rows)
    each, width = rows // requests, -(-context // BLOCK)
    blocks = np.random.default_rng(0).permutation(requests * width).reshape(requests, width)
    first = context - each
    pages = np.arange(1, requests + 1)
    at = np.full(requests, first // CHUNK * CHUNK)
    batch = TokenBatch(
        token_ids=np.zeros(rows, np.int64),
        positions=np.tile(np.arange(first, context), requests),
        query_starts=np.arange(requests + 1) * each,
        context_lens=np.full(requests, context),
        block_tables=blocks,
        logit_rows=np.arange(1),
        states=np.stack([pages, at, pages, pages - 1], axis=1),
    )
    return AttentionBatch.build(batch, BLOCK, sizes.device)


def _attention(kernels: Kernels, sizes: Sizes) -> Iterator[Call]:
    """Attention over the cache: decode steps of requests, or one prompt."""
    found = sizes.model.attention
    kind = found.full if isinstance(found, Mixed) else found
    for rows in sizes.rows:
        requests, context = sizes.requests(rows)
        batch, tokens = _steps(sizes, rows), requests * context
        pairs = tokens if requests == rows else rows * (rows + 1) // 2
        size = tokens * kind.cached * sizes.model.cache_number(sizes.cache)
        run = _attending(kernels, sizes, kind, batch, rows)
        work = Work(float(pairs) * kind.pair_flops, 0.0, size)
        yield Call("attention", sizes.cache, rows, context, work, run)


def _attending(
    kernels: Kernels, sizes: Sizes, kind: object, batch: AttentionBatch, rows: int
) -> Callable[[], object]:
    blocks = batch.batch.block_tables.size

    def cached(heads: int, width: int) -> torch.Tensor:
        dtype: torch.dtype = getattr(torch, sizes.cache)
        shape = blocks, BLOCK, heads, stored_width(width, dtype)
        filled = torch.empty(shape, dtype=dtype, device=sizes.device)
        filled[:] = encode(sizes.random((BLOCK, heads, width)), dtype)
        return filled

    def query(heads: int, width: int) -> torch.Tensor:
        return sizes.random((rows, heads, width))

    match kind:
        case GroupedQuery():
            keys, values = (cached(kind.kv_heads, kind.width) for _ in range(2))
            asked = query(kind.heads, kind.width)
            return lambda: kernels.paged_attention(asked, keys, values, batch, kind.width**-0.5)
        case Latent():
            wide = kind.rank + kind.turned
            latents, asked = cached(1, wide), query(kind.heads, wide)
            return lambda: kernels.paged_attention(
                asked, latents, None, batch, wide**-0.5, value_width=kind.rank
            )
    raise TypeError(f"{type(kind).__name__} is not attention over a cache")


def _name(kind: Recurrent) -> str:
    """What a layer with states does between its projections."""
    return "linear attention" if isinstance(kind, DeltaRule) else "short convolution"


def _recurrent(kernels: Kernels, sizes: Sizes, kind: Recurrent) -> Iterator[Call]:
    """Layers with states, between their projections: the delta rule without its convolution, or a convolution
    alone."""
    for rows in sizes.rows:
        requests, context = sizes.requests(rows)
        batch = _steps(sizes, rows)
        positions = range(context - rows // requests, context)
        match kind:
            case DeltaRule():
                work, run = _delta(kernels, sizes, kind, rows, positions, batch)
            case ShortConvolution():
                work, run = _convolution(kernels, sizes, kind, rows, batch)
            case _:
                raise TypeError(f"{type(kind).__name__} has no operation")
        yield Call(_name(kind), "float32", rows, context, work, run)


def _delta(
    kernels: Kernels, sizes: Sizes, kind: DeltaRule, rows: int, positions: range, batch: AttentionBatch
) -> tuple[Work, Callable[[], object]]:
    """positions: of the rows of one request."""
    requests, _ = sizes.requests(rows)
    of = StateSizes(kind.key_heads, kind.value_heads, kind.key_width, kind.value_width, kind.taps)
    matrix = kind.value_heads * kind.key_width * kind.value_width
    mixed, gates = (sizes.random((rows, width)) for width in (of.channels, 2 * of.value_heads))
    decay, bias = (one.to(sizes.device) for one in (-torch.rand(of.value_heads), torch.rand(of.value_heads)))
    since = [position % CHUNK + 1 for position in positions]
    kept = of.key_heads * of.key_width + of.value_heads * of.value_width
    flops = 2 * (2 * rows * matrix + 2 * requests * sum(since) * kept)
    read = 4 * requests * (matrix + since[-1] * kept)
    run = partial(kernels.delta, mixed, gates, decay, bias, _states(sizes, of, requests), batch)
    return Work(float(flops), 0.0, float(read)), run


def _convolution(
    kernels: Kernels, sizes: Sizes, kind: ShortConvolution, rows: int, batch: AttentionBatch
) -> tuple[Work, Callable[[], object]]:
    requests, _ = sizes.requests(rows)
    of = StateSizes.of_convolution(kind.channels, kind.taps)
    given, weight = sizes.random((rows, kind.channels)), sizes.random((kind.taps, kind.channels)).t()
    flops, read = 2 * rows * kind.taps * kind.channels, 4 * requests * (kind.taps - 1) * kind.channels
    run = partial(kernels.convolve, given, weight, _states(sizes, of, requests), batch)
    return Work(float(flops), 0.0, float(read)), run


def _states(sizes: Sizes, of: StateSizes, requests: int) -> LayerStates:
    kept, heads = of.taps - 1, of.value_heads
    return LayerStates(
        of,
        pages=sizes.random((requests + 1, heads, of.key_width, of.value_width)),
        page_tails=sizes.random((requests + 1, kept, of.channels)),
        keys=sizes.random((requests, of.key_heads, CHUNK, of.key_width)),
        updates=sizes.random((requests, heads, CHUNK, of.value_width)),
        decays=-torch.rand(requests, heads, CHUNK).cumsum(-1).to(sizes.device),
        tails=sizes.random((requests, kept, of.channels)),
    )
