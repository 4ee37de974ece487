"""Flops and bytes of each operation of a layer, for rows that are computed together.

Bytes are kept apart by what is moved, since each kind may live on another level: weights, cached keys and
values, activations. Where they live, and over which links they come, is a policy's choice.
"""

from __future__ import annotations

from dataclasses import dataclass

from moesaic.cost.sizes import ModelSizes


@dataclass(frozen=True)
class Work:
    """What one operation does, once."""

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
        """Flops for each byte: the operational intensity where all of it is on one level."""
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


def touched(experts: int, top_k: float, rows: float) -> float:
    """How many experts of a layer `rows` tokens are expected to choose among them, each equally likely.

    Example: 8 experts, 2 a token: 1 row -> 2, 2 rows -> 3.5, 36 rows -> 8.0.
    """
    return float(experts * (1.0 - (1.0 - top_k / experts) ** rows))


def distinct(model: ModelSizes, rows: float) -> float:
    """How many routed experts of a layer `rows` tokens are expected to choose among them.

    By the model's routing where it is known, else as in `touched`.
    """
    if model.routing is None:
        return touched(model.experts, model.top_k, rows)
    return model.experts * model.routing.share(rows)


def rows_each(model: ModelSizes, rows: float) -> float:
    """Of the experts that `rows` tokens choose: rows that each has in the mean."""
    return rows * model.top_k / max(distinct(model, rows), 1e-9)


def _product(model: ModelSizes, rows: float, before: float, after: float, parameters: float) -> Work:
    """Rows of `before` numbers times matrices into rows of `after` numbers."""
    moved = rows * (before + after) * model.row_number
    return Work(2 * rows * parameters, parameters * model.number, 0.0, moved)


def query_key_value(model: ModelSizes, rows: float) -> Work:
    """The projections before attention."""
    wide = model.attention.query + model.attention.cached
    parameters = model.attention.projected(model.hidden)[0]
    return _product(model, rows, model.hidden, wide, parameters)


def attention(model: ModelSizes, rows: float, context: float, number: float) -> Work:
    """Decode: each row reads its own `context` cached tokens of `number` bytes a number."""
    flops = rows * context * model.attention.pair_flops
    wide = rows * (model.attention.query + model.attention.output) * model.row_number
    return Work(flops, 0.0, model.cache(rows * context, number), wide)


def causal_attention(model: ModelSizes, requests: float, prompt: float, number: float) -> Work:
    """Prefill: each row of a prompt sees those before it; keys and values are read and written once."""
    rows = requests * prompt
    flops = rows * (prompt + 1) / 2 * model.attention.pair_flops
    wide = rows * (model.attention.query + model.attention.output) * model.row_number
    return Work(flops, 0.0, 2 * model.cache(rows, number), wide)


def output_projection(model: ModelSizes, rows: float) -> Work:
    parameters = model.attention.projected(model.hidden)[1]
    return _product(model, rows, model.attention.output, model.hidden, parameters)


def gate(model: ModelSizes, rows: float) -> Work:
    return _product(model, rows, model.hidden, model.experts, model.hidden * model.experts)


def routed(model: ModelSizes, rows: float, share: float = 1.0) -> Work:
    """The routed experts, or a `share` of them and of the rows' choices; only those touched are read.

    Each row passes top_k experts: 6 * top_k * hidden * width flops.
    """
    pairs = rows * model.top_k * share
    read = distinct(model, rows) * share
    wide = pairs * (2 * model.hidden + 2 * model.expert_width)
    return Work(2 * pairs * model.expert, read * model.expert_bytes, 0.0, wide * model.row_number)


def shared(model: ModelSizes, rows: float) -> Work:
    """What each token of a layer with experts passes beside them."""
    return _gated(model, rows, model.shared_width)


def dense(model: ModelSizes, rows: float) -> Work:
    """The feed-forward part of a layer without experts."""
    return _gated(model, rows, model.dense_width)


def _gated(model: ModelSizes, rows: float, width: int) -> Work:
    if not width:
        return Work()
    return _product(model, rows, model.hidden, model.hidden + 2 * width, 3 * model.hidden * width)


def feed_forward(model: ModelSizes, rows: float, share: float = 1.0) -> Work:
    """Gate, shared experts and a share of the routed ones."""
    return gate(model, rows) + shared(model, rows) + routed(model, rows, share)


def between(model: ModelSizes, rows: float, answers: float) -> Work:
    """What lies between the products of a layer: two norms, rotations, residuals, the sum of the answers.

    Rows are read and written, each with so many `answers` of experts; there are next to no flops. It counts
    where rows are more than caches hold: in prefill.
    """
    numbers = (8 + 2 * answers) * model.hidden + 2 * (model.attention.query + model.attention.cached)
    return Work(activations=rows * numbers * model.row_number)


def head(model: ModelSizes, rows: float) -> Work:
    """Logits of the rows that are sampled."""
    return _product(model, rows, model.hidden, model.vocab, model.hidden * model.vocab)
