"""Counts flops and bytes of each operation of a layer, for rows that are computed together.

Bytes are counted by kind (weights, cached keys and values, activations), since each kind may be on another
level. A policy decides on which level they are and over which links they move.
"""

from __future__ import annotations

from dataclasses import dataclass

from moesaic.cost.sizes import ModelSizes


@dataclass(frozen=True)
class Work:
    """The work of one or more operations."""

    flops: float = 0.0
    weights: float = 0.0
    """Bytes of weights read."""
    cache: float = 0.0
    """Bytes of cached keys and values read or written."""
    activations: float = 0.0
    """Bytes of rows read and written."""

    @property
    def bytes(self) -> float:
        return self.weights + self.cache + self.activations

    @property
    def intensity(self) -> float:
        """Flops for each byte: the operational intensity if all data is on one level."""
        return self.flops / self.bytes if self.bytes else 0.0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.flops + other.flops,
            self.weights + other.weights,
            self.cache + other.cache,
            self.activations + other.activations,
        )

    def __mul__(self, times: float) -> Work:
        return Work(times * self.flops, times * self.weights, times * self.cache, times * self.activations)


def uniform_distinct(experts: int, top_k: float, rows: float) -> float:
    """Expected number of experts of a layer that `rows` tokens choose together, if all are equally likely.

    Example: of 8 experts each token chooses 2. 1 row -> 2, 2 rows -> 3.5, 36 rows -> 8.0.
    """
    return float(experts * (1.0 - (1.0 - top_k / experts) ** rows))


def distinct(model: ModelSizes, rows: float) -> float:
    """Expected number of routed experts of a layer that `rows` tokens choose together.

    It uses the model's routing if it is known, else all experts are taken as equally likely.
    """
    if model.routing is None:
        return uniform_distinct(model.experts, model.top_k, rows)
    return model.experts * model.routing.share(rows)


def rows_each(model: ModelSizes, rows: float) -> float:
    """Mean number of rows of each expert that `rows` tokens choose."""
    return rows * model.top_k / max(distinct(model, rows), 1e-9)


def _product(
    model: ModelSizes, rows: float, input_width: float, output_width: float, parameters: float
) -> Work:
    """A product of `rows` rows of `input_width` numbers with weights of `parameters` numbers, giving rows of
    `output_width` numbers."""
    moved_bytes = rows * (input_width + output_width) * model.row_number
    return Work(2 * rows * parameters, parameters * model.number, 0.0, moved_bytes)


def query_key_value(model: ModelSizes, rows: float) -> Work:
    """The projections before attention: query, key and value."""
    wide = model.attention.query + model.attention.cache_width
    parameters = model.attention.projection_sizes(model.hidden)[0]
    return _product(model, rows, model.hidden, wide, parameters)


def attention(model: ModelSizes, rows: float, context: float, number: float) -> Work:
    """Attention in decode: each row reads its own `context` cached tokens.

    It also reads and writes its states, if there are layers of linear attention: here their mean over all
    layers. number: bytes of one cached number.
    """
    flops = rows * context * model.attention.pair_flops
    wide = rows * (model.attention.query + model.attention.output) * model.row_number
    states = 2 * rows * model.page / model.layers
    return Work(flops, 0.0, model.cache(rows * context, number) + states, wide)


def causal_attention(model: ModelSizes, requests: float, prompt: float, number: float) -> Work:
    """Attention in prefill: each row of a prompt attends to itself and those before it.

    Keys and values are read and written once. number: bytes of one cached number.
    """
    rows = requests * prompt
    flops = rows * (prompt + 1) / 2 * model.attention.pair_flops
    wide = rows * (model.attention.query + model.attention.output) * model.row_number
    return Work(flops, 0.0, 2 * model.cache(rows, number), wide)


def output_projection(model: ModelSizes, rows: float) -> Work:
    """The output projection after attention."""
    parameters = model.attention.projection_sizes(model.hidden)[1]
    return _product(model, rows, model.attention.output, model.hidden, parameters)


def gate(model: ModelSizes, rows: float) -> Work:
    """The gate (router), which scores every routed expert."""
    return _product(model, rows, model.hidden, model.experts, model.hidden * model.experts)


def routed_experts(model: ModelSizes, rows: float, share: float = 1.0) -> Work:
    """The routed experts, or a `share` of them and of the choices. Only chosen experts are read.

    Each row passes top_k experts, which takes 6 * top_k * hidden * width flops.
    """
    pairs = rows * model.top_k * share
    read = distinct(model, rows) * share
    wide = pairs * (2 * model.hidden + 2 * model.expert_width)
    return Work(2 * pairs * model.expert, read * model.expert_bytes, 0.0, wide * model.row_number)


def one_expert(model: ModelSizes, rows: float) -> Work:
    """A routed expert with so many rows."""
    wide = rows * (2 * model.hidden + 2 * model.expert_width)
    return Work(2 * rows * model.expert, model.expert_bytes, 0.0, wide * model.row_number)


def shared_experts(model: ModelSizes, rows: float) -> Work:
    """The shared experts. Each token of a layer with routed experts passes them."""
    return _gated_product(model, rows, model.shared_width)


def dense(model: ModelSizes, rows: float) -> Work:
    """The feed-forward part of a layer without routed experts."""
    return _gated_product(model, rows, model.dense_width)


def _gated_product(model: ModelSizes, rows: float, width: int) -> Work:
    if not width:
        return Work()
    return _product(model, rows, model.hidden, model.hidden + 2 * width, 3 * model.hidden * width)


def feed_forward(model: ModelSizes, rows: float, share: float = 1.0) -> Work:
    """The gate, the shared experts and a share of the routed experts."""
    return gate(model, rows) + shared_experts(model, rows) + routed_experts(model, rows, share)


def between_products(model: ModelSizes, rows: float, answers: float) -> Work:
    """The work between the products of a layer: two norms, rotations, residuals, and the sum of the
    experts' answers.

    Rows are read and written, each with `answers` answers of experts. There are hardly any flops. This
    matters in prefill, when the rows are larger than the processor's caches.
    """
    numbers = (8 + 2 * answers) * model.hidden + 2 * (model.attention.query + model.attention.cache_width)
    return Work(activations=rows * numbers * model.row_number)


def head(model: ModelSizes, rows: float) -> Work:
    """The logits of the sampled rows."""
    return _product(model, rows, model.hidden, model.vocab, model.hidden * model.vocab)
