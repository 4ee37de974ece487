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

from moesaic.core.tokens import TokenBatch
from moesaic.core.weight_types import COMPRESSED_DTYPE, NUMBER_BYTES, is_packed, row_bytes, split_dtype
from moesaic.cost.hybrid import DeltaRule, HybridAttention, Recurrent, ShortConvolution
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
    stored_type: str
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
    """Types of the experts, of `core.weight_types.NATIVE_DTYPES`."""
    dense: str
    """Type of all other matrices: "bfloat16" or "float32"."""
    cache: str
    """Type of the cache: "float32", "bfloat16" or "int8"."""
    rows: tuple[int, ...]
    """Rows of a step."""
    context: int
    """Cached tokens of each request of a decode step."""
    min_weight_bytes: int
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


def list_calls(kernels: Kernels, sizes: Sizes) -> Iterator[Call]:
    """Every operation with every number of rows. The memory of one operation is freed before the next."""
    yield from list_layer_calls(kernels, sizes)
    for stored_type in sizes.types:
        yield from list_expert_calls(kernels, sizes, stored_type)


def operation_names(model: ModelSizes) -> tuple[str, ...]:
    """Names of the operations of a model without its experts, in the order in which they are measured."""
    wide = ("dense MLP",) if model.dense_width else ()
    shared_names = ("shared experts",) if model.shared_width else ()
    linear = (
        (_recurrent_name(model.attention.recurrent),) if isinstance(model.attention, HybridAttention) else ()
    )
    layer_names = ("query, key, value", "attention", *linear, "output projection", *wide, "gate")
    return (*layer_names, *shared_names, "output head")


def list_layer_calls(kernels: Kernels, sizes: Sizes) -> Iterator[Call]:
    """Every operation but the experts."""
    model, hidden = sizes.model, sizes.model.hidden
    query_width, value_width = (round(size / hidden) for size in model.attention.projection_sizes(hidden))
    yield from _linear("query, key, value", kernels, sizes, (query_width, hidden))
    yield from _attention(kernels, sizes)
    if isinstance(model.attention, HybridAttention):
        yield from _recurrent(kernels, sizes, model.attention.recurrent)
    yield from _linear("output projection", kernels, sizes, (hidden, value_width))
    if model.dense_width:
        yield from _mlp("dense MLP", kernels, sizes, model.dense_width)
    yield from _gate(kernels, sizes)
    if model.shared_width:
        yield from _mlp("shared experts", kernels, sizes, model.shared_width)
    yield from _linear("output head", kernels, sizes, (model.vocab, hidden))


def _take_turns(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """A function that makes the next of these calls each time."""
    next_call = itertools.cycle(calls)
    return lambda: next(next_call)()


def _matrices(sizes: Sizes, stored_type: str, *shapes: tuple[int, int]) -> list[list[torch.Tensor]]:
    """So many sets of matrices of these shapes that no cache holds them."""
    dtype: torch.dtype = getattr(torch, stored_type)
    size = sum(math.prod(shape) for shape in shapes) * dtype.itemsize
    return [
        [sizes.random(shape, dtype) for shape in shapes]
        for _ in range(1 + math.ceil(sizes.min_weight_bytes / size))
    ]


def _product(rows: int, numbers: float, stored_type: str) -> Work:
    return Work(2.0 * rows * numbers, numbers * NUMBER_BYTES[stored_type])


def _linear(name: str, kernels: Kernels, sizes: Sizes, shape: tuple[int, int]) -> Iterator[Call]:
    matrices = [matrix for (matrix,) in _matrices(sizes, sizes.dense, shape)]
    for rows in sizes.rows:
        states = sizes.random((rows, shape[1]))
        run = _take_turns([partial(kernels.linear, states, matrix) for matrix in matrices])
        yield Call(name, sizes.dense, rows, None, _product(rows, math.prod(shape), sizes.dense), run)


def _mlp(name: str, kernels: Kernels, sizes: Sizes, width: int) -> Iterator[Call]:
    hidden = sizes.model.hidden
    matrices = _matrices(sizes, sizes.dense, (width, hidden), (width, hidden), (hidden, width))
    for rows in sizes.rows:
        states = sizes.random((rows, hidden))
        run = _take_turns([partial(kernels.gated_mlp, states, *weights) for weights in matrices])
        yield Call(name, sizes.dense, rows, None, _product(rows, 3.0 * hidden * width, sizes.dense), run)


def _gate(kernels: Kernels, sizes: Sizes) -> Iterator[Call]:
    model = sizes.model
    shape = model.experts, model.hidden
    matrices = [matrix for (matrix,) in _matrices(sizes, "float32", shape)]
    gating = Gating(round(model.top_k))
    for rows in sizes.rows:
        states = sizes.random((rows, model.hidden))
        run = _take_turns([partial(kernels.gate, states, matrix, gating) for matrix in matrices])
        work = _product(rows, math.prod(shape), "float32")
        yield Call("gate", "float32", rows, None, work, run)


def list_expert_calls(kernels: Kernels, sizes: Sizes, stored_type: str) -> Iterator[Call]:
    """The routed experts of a layer. Each row chooses its experts at random."""
    model, rng = sizes.model, np.random.default_rng(0)
    expert_bytes = _expert_bytes(model, stored_type)
    top_k = round(model.top_k)
    weights = build_experts(
        model, stored_type, min(model.experts, max(top_k, int(MEMORY / expert_bytes))), sizes.device
    )
    for rows in sizes.rows:
        states = sizes.random((rows, model.hidden))
        out = torch.empty(rows, top_k, model.hidden, device=sizes.device)
        # A few rows choose few experts, so several draws are needed for a mean number of experts.
        count = 1 if rows > MOST_DECODES else 8
        topk_sets = [
            torch.from_numpy(np.stack([rng.permutation(weights.num_experts)[:top_k] for _ in range(rows)]))
            for _ in range(count)
        ]
        read = statistics.mean(len(set(topk_ids.flatten().tolist())) for topk_ids in topk_sets)
        work = Work(2.0 * rows * top_k * model.expert, read * expert_bytes)
        device_ids = [topk_ids.to(sizes.device) for topk_ids in topk_sets]
        run = _take_turns(
            [partial(kernels.experts, weights, states, topk_ids, out) for topk_ids in device_ids]
        )
        yield Call("experts", stored_type, rows, None, work, run)


def _expert_bytes(model: ModelSizes, stored_type: str) -> float:
    inner, outer = split_dtype(stored_type)
    rows = 2 * model.expert_width * row_bytes(inner, model.hidden)
    return float(rows + model.hidden * row_bytes(outer, model.expert_width))


def build_experts(model: ModelSizes, stored_type: str, count: int, device: str = "cpu") -> ExpertWeights:
    """So many experts of a model in one type. Their numbers are random, and the same in each of them."""
    inner, outer = split_dtype(stored_type)
    shapes = (
        (inner, (model.expert_width, model.hidden)),
        (inner, (model.expert_width, model.hidden)),
        (outer, (model.hidden, model.expert_width)),
    )
    parts = []
    for kind, shape in shapes:
        # Each expert has memory of its own, so that a cache cannot serve several of them.
        first = products.random_in_type(kind, shape).to(device)
        parts.append((first, *(first.clone() for _ in range(count - 1))))
    return ExpertWeights(*parts, packed_dtype=stored_type if is_packed(stored_type) else COMPRESSED_DTYPE)


def _steps(sizes: Sizes, rows: int) -> AttentionBatch:
    """A step of requests whose blocks are anywhere in the cache."""
    requests, context = sizes.requests(rows)
    tokens_per_request, width = rows // requests, -(-context // BLOCK)
    blocks = np.random.default_rng(0).permutation(requests * width).reshape(requests, width)
    first = context - tokens_per_request
    pages = np.arange(1, requests + 1)
    state_positions = np.full(requests, first // CHUNK * CHUNK)
    batch = TokenBatch(
        token_ids=np.zeros(rows, np.int64),
        positions=np.tile(np.arange(first, context), requests),
        query_starts=np.arange(requests + 1) * tokens_per_request,
        context_lens=np.full(requests, context),
        block_tables=blocks,
        logit_rows=np.arange(1),
        states=np.stack([pages, state_positions, pages, pages - 1], axis=1),
    )
    return AttentionBatch.build(batch, BLOCK, sizes.device)


def _attention(kernels: Kernels, sizes: Sizes) -> Iterator[Call]:
    """Attention over the cache: decode steps of requests, or one prompt."""
    attention = sizes.model.attention
    kind = attention.full if isinstance(attention, HybridAttention) else attention
    for rows in sizes.rows:
        requests, context = sizes.requests(rows)
        batch, tokens = _steps(sizes, rows), requests * context
        pairs = tokens if requests == rows else rows * (rows + 1) // 2
        size = tokens * kind.cache_width * sizes.model.cache_number(sizes.cache)
        run = _attention_call(kernels, sizes, kind, batch, rows)
        work = Work(float(pairs) * kind.pair_flops, 0.0, size)
        yield Call("attention", sizes.cache, rows, context, work, run)


def _attention_call(
    kernels: Kernels, sizes: Sizes, kind: object, batch: AttentionBatch, rows: int
) -> Callable[[], object]:
    blocks = batch.batch.block_tables.size

    def fill_cache(heads: int, width: int) -> torch.Tensor:
        dtype: torch.dtype = getattr(torch, sizes.cache)
        shape = blocks, BLOCK, heads, stored_width(width, dtype)
        cache = torch.empty(shape, dtype=dtype, device=sizes.device)
        cache[:] = encode(sizes.random((BLOCK, heads, width)), dtype)
        return cache

    def query(heads: int, width: int) -> torch.Tensor:
        return sizes.random((rows, heads, width))

    match kind:
        case GroupedQuery():
            keys, values = (fill_cache(kind.kv_heads, kind.width) for _ in range(2))
            queries = query(kind.heads, kind.width)
            return lambda: kernels.paged_attention(queries, keys, values, batch, kind.width**-0.5)
        case Latent():
            wide = kind.rank + kind.rope_width
            latents, queries = fill_cache(1, wide), query(kind.heads, wide)
            return lambda: kernels.paged_attention(
                queries, latents, None, batch, wide**-0.5, value_width=kind.rank
            )
    raise TypeError(f"{type(kind).__name__} is not attention over a cache")


def _recurrent_name(kind: Recurrent) -> str:
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
        yield Call(_recurrent_name(kind), "float32", rows, context, work, run)


def _delta(
    kernels: Kernels, sizes: Sizes, kind: DeltaRule, rows: int, positions: range, batch: AttentionBatch
) -> tuple[Work, Callable[[], object]]:
    """positions: of the rows of one request."""
    requests, _ = sizes.requests(rows)
    state_sizes = StateSizes(kind.key_heads, kind.value_heads, kind.key_width, kind.value_width, kind.taps)
    matrix = kind.value_heads * kind.key_width * kind.value_width
    channels, gates = (
        sizes.random((rows, width)) for width in (state_sizes.channels, 2 * state_sizes.value_heads)
    )
    decay, bias = (
        numbers.to(sizes.device)
        for numbers in (-torch.rand(state_sizes.value_heads), torch.rand(state_sizes.value_heads))
    )
    chunk_lengths = [position % CHUNK + 1 for position in positions]
    kept_numbers = (
        state_sizes.key_heads * state_sizes.key_width + state_sizes.value_heads * state_sizes.value_width
    )
    flops = 2 * (2 * rows * matrix + 2 * requests * sum(chunk_lengths) * kept_numbers)
    read = 4 * requests * (matrix + chunk_lengths[-1] * kept_numbers)
    run = partial(
        kernels.delta, channels, gates, decay, bias, _build_states(sizes, state_sizes, requests), batch
    )
    return Work(float(flops), 0.0, float(read)), run


def _convolution(
    kernels: Kernels, sizes: Sizes, kind: ShortConvolution, rows: int, batch: AttentionBatch
) -> tuple[Work, Callable[[], object]]:
    requests, _ = sizes.requests(rows)
    state_sizes = StateSizes.of_convolution(kind.channels, kind.taps)
    inputs, weight = sizes.random((rows, kind.channels)), sizes.random((kind.taps, kind.channels)).t()
    flops, read = 2 * rows * kind.taps * kind.channels, 4 * requests * (kind.taps - 1) * kind.channels
    run = partial(kernels.convolve, inputs, weight, _build_states(sizes, state_sizes, requests), batch)
    return Work(float(flops), 0.0, float(read)), run


def _build_states(sizes: Sizes, state_sizes: StateSizes, requests: int) -> LayerStates:
    tail_length, heads = state_sizes.taps - 1, state_sizes.value_heads
    return LayerStates(
        state_sizes,
        pages=sizes.random((requests + 1, heads, state_sizes.key_width, state_sizes.value_width)),
        page_tails=sizes.random((requests + 1, tail_length, state_sizes.channels)),
        keys=sizes.random((requests, state_sizes.key_heads, CHUNK, state_sizes.key_width)),
        updates=sizes.random((requests, heads, CHUNK, state_sizes.value_width)),
        decays=-torch.rand(requests, heads, CHUNK).cumsum(-1).to(sizes.device),
        tails=sizes.random((requests, tail_length, state_sizes.channels)),
    )
