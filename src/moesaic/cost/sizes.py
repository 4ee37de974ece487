"""The sizes of a model that cost time and memory, as pure numbers. Names and tensors are in models/."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

from moesaic.core.weight_types import COMPRESSED_DTYPE, NUMBER_BYTES, row_bytes, split_dtype
from moesaic.cost.routing import Routing

BYTES = {dtype: float(size) for dtype, size in NUMBER_BYTES.items()}
"""Bytes of one weight, by dtype."""
CACHE_BYTES = {**BYTES, "int8": 1.0, "int4": 0.5}
"""Bytes of one cached number, by dtype. Integers are multiples of their row's scale."""
SCALE_BYTES = 4.0


class Attention(Protocol):
    """The attention of one layer over a cache, counted in numbers (not bytes)."""

    @property
    def cache_width(self) -> int:
        """Numbers that one token has in the cache."""

    @property
    def rows(self) -> int:
        """Number of rows in a token's cache entry: keys and values of each head, or one latent."""

    @property
    def query(self) -> int:
        """Numbers of one row's query that attention reads."""

    @property
    def output(self) -> int:
        """Numbers of one row's result that attention writes."""

    @property
    def pair_flops(self) -> int:
        """Flops of one row with one cached token, for scores and the weighted sum."""

    def projection_sizes(self, hidden: int) -> tuple[int, int]:
        """Number of parameters before attention (query, key, value) and after it (output)."""


@dataclass(frozen=True)
class GroupedQuery:
    """Multi-head and grouped-query attention."""

    heads: int
    kv_heads: int
    width: int
    """Width of a head."""
    normed_heads: tuple[int, int] | None = None
    """Query and key-value heads that are normalized together. A rank projects all of them, also those that
    it does not have. None: each head stands alone."""

    @property
    def cache_width(self) -> int:
        return self.rows * self.width

    @property
    def rows(self) -> int:
        return 2 * self.kv_heads

    @property
    def query(self) -> int:
        return self.heads * self.width

    @property
    def output(self) -> int:
        return self.heads * self.width

    @property
    def pair_flops(self) -> int:
        return 4 * self.heads * self.width

    def projection_sizes(self, hidden: int) -> tuple[int, int]:
        queries, keys = self.normed_heads or (self.heads, self.kv_heads)
        return hidden * (queries + keys + self.kv_heads) * self.width, hidden * self.output


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention in its absorbed form: a token caches one latent and one rotated key.

    The source is DeepSeek-AI, DeepSeek-V2, section 2.1. In the absorbed form key and value are the same
    latent. A pair costs heads * (2 * (rank + turned) + 2 * rank) flops. The matrices that expand the latent
    are applied to rows instead.
    """

    heads: int
    rank: int
    rope_width: int
    """Width of the part of a key that has rotary position embedding."""
    nope_width: int
    """Width of the part of a head's key without rotary position embedding."""
    value: int
    """Width of a head's value."""
    query_rank: int | None = None
    """Inner width of the query's projection. None: it is a single matrix."""

    @property
    def cache_width(self) -> int:
        return self.rank + self.rope_width

    @property
    def rows(self) -> int:
        return 1

    @property
    def query(self) -> int:
        return self.heads * (self.rank + self.rope_width)

    @property
    def output(self) -> int:
        return self.heads * self.rank

    @property
    def pair_flops(self) -> int:
        return self.heads * (2 * self.cache_width + 2 * self.rank)

    def projection_sizes(self, hidden: int) -> tuple[int, int]:
        wide = self.heads * (self.nope_width + self.rope_width)
        query = hidden * wide if self.query_rank is None else self.query_rank * (hidden + wide)
        unfold_key = self.heads * self.nope_width * self.rank
        unfold_value = self.heads * self.value * self.rank
        output_parameters = unfold_value + self.heads * self.value * hidden
        return query + hidden * self.cache_width + unfold_key, output_parameters


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of what a forward pass reads and computes. Widths are in numbers, `number` is in bytes."""

    name: str
    layers: int
    hidden: int
    vocab: int
    attention: Attention
    moe_layers: int
    """Number of layers with routed experts. The others are dense."""
    experts: int
    """Number of routed experts of each such layer."""
    top_k: float
    """Number of routed experts that a token chooses. For a rank's part it need not be a whole number."""
    expert_width: int
    shared_width: int = 0
    """Inner width of the shared experts, in layers that have routed experts."""
    dense_width: int = 0
    """Inner width of a dense layer."""
    ties_embeddings: bool = False
    """True if the head's weights are those of the embedding."""
    number: float = 2.0
    """Bytes of one stored weight: 2 for bf16 and fp16."""
    has_compressed_experts: bool = False
    """True: routed experts are stored in 12 bits a number, with a head for each block of their rows."""
    quantized_dtype: str | None = None
    """Type of routed experts where others are quantised: as `core.weight_types.join_dtypes`. None: the
    type of all other weights."""
    mean_expert: float | None = None
    """Bytes of the matrices of a routed expert, as a mean of layers whose experts differ in type. Then
    `quantized_dtype` is that of the layer where they are largest. None: all layers have that type."""
    expert_biases: int = 0
    """Numbers of the biases of a routed expert, which are float32."""
    conversion: str | None = None
    """What happens to a routed expert that is loaded to the fast level: it is converted to a quantised type,
    by the type's name; a quantised one is made "float32"; a compressed one is "decompressed"; or its
    "columns" become rows. None: nothing."""
    read: float | None = None
    """Bytes of the files that are read to load one such expert. None: as many as it has in memory."""
    staging: float = 0.0
    """Bytes of memory that loading one such expert takes: for what is read, and for its conversion."""
    activation_number: float | None = None
    """Bytes of one number of a row. None: the same as a weight. A CPU computes in float32: 4."""
    page: float = 0.0
    """Bytes of a snapshot of the states of linear attention, over all layers."""
    seat: float = 0.0
    """Bytes that a running sequence has beside, over all layers, for these states."""
    ranks: int = 1
    """Number of ranks, if these are the sizes of one rank's part. See cost.ranks."""
    routing: Routing | None = field(default=None, repr=False)
    """How popular experts are. None: each is equally likely."""

    @property
    def row_number(self) -> float:
        """Bytes of one number of a row."""
        return self.number if self.activation_number is None else self.activation_number

    @property
    def expert(self) -> int:
        """Parameters of one routed expert: gate, up and down."""
        return 3 * self.hidden * self.expert_width

    @property
    def expert_bytes(self) -> float:
        """Bytes of one routed expert in memory, as a mean of the layers."""
        if self.mean_expert is not None:
            return self.mean_expert + 4 * self.expert_biases
        return self.largest_expert_bytes

    @property
    def largest_expert_bytes(self) -> float:
        """Bytes of one routed expert in memory, in the layer where experts are largest."""
        packed_dtype, biases = (
            COMPRESSED_DTYPE if self.has_compressed_experts else self.quantized_dtype,
            4 * self.expert_biases,
        )
        if packed_dtype is None:
            return self.expert * self.number + biases
        types = split_dtype(packed_dtype)
        inner, outer = row_bytes(types[0], self.hidden), row_bytes(types[1], self.expert_width)
        return float(2 * self.expert_width * inner + self.hidden * outer + biases)

    @property
    def read_bytes(self) -> float:
        """Bytes that are read to load one routed expert."""
        return self.expert_bytes if self.read is None else self.read

    @property
    def routed_bytes(self) -> float:
        """Bytes of all routed experts of one layer."""
        return self.experts * self.expert_bytes

    @property
    def other_parameters(self) -> int:
        """Parameters of all but routed experts: attention, gates, dense and shared parts, embeddings."""
        attention = self.layers * sum(self.attention.projection_sizes(self.hidden))
        shared_parameters = self.moe_layers * 3 * self.hidden * self.shared_width
        dense = (self.layers - self.moe_layers) * 3 * self.hidden * self.dense_width
        return attention + self.gates + shared_parameters + dense + self.embeddings

    @property
    def gates(self) -> int:
        """Parameters of the gates."""
        return self.moe_layers * self.hidden * self.experts

    @property
    def embeddings(self) -> int:
        """Parameters of the embedding and the head."""
        return (1 if self.ties_embeddings else 2) * self.vocab * self.hidden

    @property
    def other_bytes(self) -> float:
        """Bytes of everything but routed experts."""
        return self.other_parameters * self.number

    @property
    def weights(self) -> float:
        """Bytes of the whole model."""
        return self.other_bytes + self.moe_layers * self.routed_bytes

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole model without norms and biases. Mixtral 8x7B: 46.7 billion."""
        return self.other_parameters + self.moe_layers * self.experts * self.expert

    @property
    def active(self) -> int:
        """Number of parameters that one token passes. Mixtral 8x7B: 12.9 billion."""
        idle = self.moe_layers * (self.experts - self.top_k) * self.expert
        return round(self.parameters - idle)

    def cache(self, tokens: float, number: float) -> float:
        """Bytes of `tokens` tokens in one layer's cache. number: bytes of one cached number."""
        return tokens * self.attention.cache_width * number

    def cache_number(self, dtype: str) -> float:
        """Bytes of one cached number. For an integer this includes its part of its row's scale."""
        scales = SCALE_BYTES * self.attention.rows if dtype.startswith("int") else 0.0
        return CACHE_BYTES[dtype] + scales / self.attention.cache_width

    def with_number(self, number: float) -> ModelSizes:
        """The same sizes with weights of `number` bytes.

        Experts in another type than bf16 are not compressed.
        """
        return replace(
            self,
            number=number,
            has_compressed_experts=self.has_compressed_experts and number == BYTES["bfloat16"],
        )


def _mixtral(name: str, layers: int, hidden: int, heads: int, width: int, vocab: int) -> ModelSizes:
    attention = GroupedQuery(heads, 8, 128)
    return ModelSizes(name, layers, hidden, vocab, attention, layers, 8, 2, width)


PUBLISHED_MODELS = {
    model.name: model
    for model in (
        _mixtral("mixtral-8x7b", 32, 4096, 32, 14336, 32000),
        _mixtral("mixtral-8x22b", 56, 6144, 48, 16384, 32768),
        ModelSizes("dbrx", 40, 6144, 100352, GroupedQuery(48, 8, 128), 40, 16, 4, 10752),
        ModelSizes(
            *("deepseek-v2", 60, 5120, 102400, Latent(128, 512, 64, 128, 128, 1536), 59, 160, 6, 1536),
            shared_width=2 * 1536,
            dense_width=12288,
        ),
        ModelSizes(
            *("deepseek-v2-lite", 27, 2048, 102400, Latent(16, 512, 64, 128, 128), 26, 64, 6, 1408),
            shared_width=2 * 1408,
            dense_width=10944,
        ),
        ModelSizes(
            *("deepseek-v3", 61, 7168, 129280, Latent(128, 512, 64, 128, 128, 1536), 58, 256, 8, 2048),
            shared_width=2048,
            dense_width=18432,
        ),
        ModelSizes("qwen3-30b-a3b", 48, 2048, 151936, GroupedQuery(32, 4, 128), 48, 128, 8, 768),
        ModelSizes("olmoe-1b-7b", 16, 2048, 50304, GroupedQuery(16, 16, 128, (16, 16)), 16, 64, 8, 1024),
        ModelSizes(
            *("qwen1.5-moe-a2.7b", 24, 2048, 151936, GroupedQuery(16, 16, 128), 24, 60, 4, 1408),
            shared_width=5632,
        ),
        ModelSizes(
            *("qwen2-57b-a14b", 28, 3584, 151936, GroupedQuery(28, 4, 128), 28, 64, 8, 2560),
            shared_width=20480,
        ),
    )
}
"""Published models by their names for `moesaic plan`."""
