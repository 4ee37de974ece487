"""The pool of KV blocks: who holds which block, and which blocks hold a known prefix.

A block is `block_size` consecutive positions of one sequence, in every layer. Each block is in
exactly one of three states:

    free      holds nothing of use
    cached    full, known by its prefix, held by nobody: evicted when blocks run out
    used      held by at least one request

A block is *known* once the step that filled it is done (`commit`). Its key is exact: the identity of
the known block before it, and its own tokens as bytes; identities are never used twice, so equal keys
mean equal prefixes and no hash needs to be trusted. What keeps this sound:

 * Known blocks are full and never written again. A request writes only at positions from
   `num_committed * block_size` on, and those blocks are held by it alone. So nothing is copied on write.
 * One key, one block. A request that computed what another one just committed gives its copy back and
   holds the known block instead. So a request's committed blocks form a path from the root, and whoever
   holds a block holds all blocks before it.
 * A request lets go of its last block first. With the point above, the oldest cached block never has a
   cached block behind it: evicting in order of age evicts leaves first.

The ideas of a pool with reference counts and of sharing full blocks by what precedes them come from
vLLM and nano-vllm; both key by a hash and keep duplicates.

Every operation is O(1) a block touched.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from moesaic.core.errors import ConfigError
from moesaic.core.metrics import BlockStats
from moesaic.core.tokens import IntArray
from moesaic.policy.scheduling.intvector import IntVector

ROOT = 0
"""Identity of what precedes a first block."""

Key = tuple[int, bytes]
"""(identity of the known block before, this block's tokens)"""


class _Table:
    """The blocks of one request, in order of position."""

    __slots__ = ("blocks", "num_committed")

    def __init__(self, known: list[int]) -> None:
        self.blocks = IntVector(known)
        self.num_committed = len(known)
        """Blocks 0 : num_committed are known; 0 <= num_committed <= len(blocks)."""


class KVBlocks:
    """Blocks for requests. It never fails half way: what does not fit changes nothing."""

    def __init__(self, num_blocks: int, block_size: int, prefix_reuse: bool = True) -> None:
        if num_blocks < 1:
            raise ConfigError.field("num_blocks", num_blocks, "at least 1")
        if block_size < 1:
            raise ConfigError.field("block_size", block_size, "at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_reuse = prefix_reuse
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Known blocks that nobody holds, the one let go longest ago first."""
        self._holders = [0] * num_blocks
        self._keys: list[Key | None] = [None] * num_blocks
        self._identities = [ROOT] * num_blocks
        self._known: dict[Key, int] = {}
        self._last_identity = ROOT
        self._tables: dict[int, _Table] = {}
        self._queries = 0
        self._hits = 0

    # ---- questions

    @property
    def available(self) -> int:
        """Blocks that can be handed out now: free or cached."""
        return len(self._free) + len(self._cached)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that this many tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def capacity(self, request_id: int) -> int:
        """Tokens that the blocks of this request hold."""
        return len(self._tables[request_id].blocks) * self.block_size

    def table(self, request_id: int) -> IntArray:
        """[b] its block ids in order. A view: good until the next call that changes the pool."""
        return self._tables[request_id].blocks.array

    def stats(self) -> BlockStats:
        """total == free + cached + used. A re-admitted request counts as looked up again."""
        free, cached = len(self._free), len(self._cached)
        used = self.num_blocks - free - cached
        return BlockStats(self.num_blocks, free, cached, used, self._queries, self._hits)

    # ---- changes

    def allocate(self, request_id: int, token_ids: IntArray, reusable: int, spare: int = 0) -> int | None:
        """Blocks for all of `token_ids`, leaving at least `spare` blocks available.

        Returns how many of the tokens are already in those blocks: a multiple of block_size, at most
        `reusable` and less than all of them, since the last token's row must be computed to go on.
        None when the blocks do not suffice. `reusable` 0 looks nothing up.
        """
        if request_id in self._tables:
            raise ValueError(f"request {request_id} has blocks already")
        if self.available <= spare:  # the last token's block is always a new one: spare the look-up
            return None
        known = self._find(token_ids, min(reusable, len(token_ids) - 1))
        revived = sum(not self._holders[block] for block in known)
        missing = self.blocks_for(len(token_ids)) - len(known)
        if missing + spare > self.available - revived:
            return None
        for block in known:
            self._hold(block)
        table = self._tables[request_id] = _Table(known)
        table.blocks.extend([self._take() for _ in range(missing)])
        if self.prefix_reuse and reusable:
            self._queries += len(token_ids)
            self._hits += len(known) * self.block_size
        return len(known) * self.block_size

    def extend(self, request_id: int, num_tokens: int) -> bool:
        """Blocks for `num_tokens` tokens in all; False, and nothing taken, when there are too few."""
        blocks = self._tables[request_id].blocks
        missing = self.blocks_for(num_tokens) - len(blocks)
        if missing <= 0:
            return True
        if missing > self.available:
            return False
        blocks.extend([self._take() for _ in range(missing)])
        return True

    def commit(self, request_id: int, token_ids: IntArray, num_computed: int) -> None:
        """The first `num_computed` tokens are in every layer's KV: their full blocks become known.

        A block that another request made known meanwhile is swapped for that one. So call this while
        no step that reads or writes this request's table is under way.
        """
        table = self._tables[request_id]
        first, last = table.num_committed, num_computed // self.block_size
        if first >= last or not self.prefix_reuse:
            return
        blocks = table.blocks.array
        parent = self._identities[blocks[first - 1]] if first else ROOT
        for index, content in enumerate(self._contents(token_ids, first, last), start=first):
            known = self._know(int(blocks[index]), (parent, content))
            blocks[index] = known
            parent = self._identities[known]
        table.num_committed = last

    def free(self, request_id: int) -> None:
        """The request holds no block any more. Its known blocks stay cached, others become free."""
        for block in reversed(self._tables.pop(request_id).blocks.array.tolist()):
            self._let_go(block)

    # ---- prefixes

    def _contents(self, token_ids: IntArray, first: int, last: int) -> list[bytes]:
        """The tokens of blocks first : last, as bytes."""
        size = self.block_size
        data = np.asarray(token_ids[first * size : last * size], dtype=np.int64).tobytes()
        width = 8 * size
        return [data[start : start + width] for start in range(0, len(data), width)]

    def _find(self, token_ids: IntArray, limit: int) -> list[int]:
        """The longest run of known blocks that starts `token_ids`, of at most `limit` tokens."""
        found: list[int] = []
        if not self.prefix_reuse or limit < self.block_size:
            return found
        parent = ROOT
        for content in self._contents(token_ids, 0, limit // self.block_size):
            block = self._known.get((parent, content))
            if block is None:
                break
            found.append(block)
            parent = self._identities[block]
        return found

    def _know(self, block: int, key: Key) -> int:
        """The one block of this key: `block` itself if it is the first, else `block` is given back."""
        known = self._known.setdefault(key, block)
        if known == block:
            self._last_identity += 1
            self._keys[block] = key
            self._identities[block] = self._last_identity
        else:
            self._hold(known)
            self._let_go(block)
        return known

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        assert key is not None, "only known blocks are cached"
        del self._known[key]
        self._keys[block] = None
        self._identities[block] = ROOT

    # ---- single blocks

    def _take(self) -> int:
        """A block for one holder to write: a free one, or else the one cached longest."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
        self._holders[block] = 1
        return block

    def _hold(self, block: int) -> None:
        if not self._holders[block]:
            del self._cached[block]
        self._holders[block] += 1

    def _let_go(self, block: int) -> None:
        self._holders[block] -= 1
        if self._holders[block]:
            return
        if self._keys[block] is None:
            self._free.append(block)
        else:
            self._cached[block] = None
