"""Grouped-query attention as a family's files describe it: its dimensions, and how a layer's is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from moesaic.models.block import Attention
from moesaic.models.loader import Heads, Loader, grouped_query_attention
from moesaic.models.rope import RopeTable
from moesaic.models.spec import KVLayout


@dataclass(frozen=True)
class GroupedQuery:
    """The sizes of grouped-query attention, as `shared_experts.AttentionSizes` asks for them."""

    sizes: Heads
    rotated_width: int
    """Numbers of a head that are rotated."""

    @property
    def heads(self) -> int:
        return self.sizes.query

    @property
    def kv(self) -> KVLayout:
        return KVLayout(self.sizes.key, self.sizes.width, self.sizes.width)

    def load(self, loader: Loader, name: str, rope: RopeTable, window: int | None) -> Attention:
        return grouped_query_attention(loader, name, self.sizes, rope, window)
