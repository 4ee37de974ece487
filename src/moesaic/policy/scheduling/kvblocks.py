"""The pool of KV blocks: which requests use a block, and which blocks hold a known prefix.

A block is `block_size` consecutive positions of one sequence, in every layer. Each block is in exactly one of
three states:

    free      its contents are not needed
    cached    full, found by its prefix, used by no request: evicted when blocks run out
    used      used by at least one request

A block becomes *known* once the step that filled it is done (`commit`). Its key has two parts: the identity
of the known block before it, and its own tokens as bytes. Identities are never used twice. So equal keys mean
equal prefixes, and correctness does not depend on a hash. This is sound for three reasons:

 * Known blocks are full and never written again. A request writes only at positions from
   `num_committed * block_size` on, into blocks that no other request uses. So nothing is copied on write.
 * There is one block for each key. When a request commits a block whose key is known already, it gives its
   copy back and uses the known block. So the committed blocks of a request form a path from the root. A
   request that uses a block also uses all blocks before it.
 * A request releases its last block first. Together with the point above, no cached block follows the oldest
   cached block. So evicting in order of age evicts leaves first.

Reference counts, and sharing full blocks by the tokens before them, are ideas of vLLM and nano-vllm. Both of
them use a hash as the key and keep duplicates.

Every operation takes O(1) per block that it touches.

Question: Which KV blocks does a request get, and which prefixes are reused (prefix caching)?
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from moesaic.core.errors import ConfigError
from moesaic.core.metrics import BlockStats, StateStats
from moesaic.core.tokens import IntArray
from moesaic.policy.scheduling.intvector import IntVector
from moesaic.policy.scheduling.stored_prefixes import PrefixChanges, PrefixPath, chain_digests

ROOT = 0
"""The identity that a first block has as the block before it."""

Key = tuple[int, bytes]
"""(identity of the known block before, this block's tokens as bytes, in the first block behind the salt)"""


def block_contents(token_ids: IntArray, size: int, first: int, last: int, salt: bytes) -> list[bytes]:
    """The tokens of blocks first : last, each block's as bytes. Those of block 0 follow the salt.

    token_ids: [n] with n >= last * size. size: tokens of a block.
    """
    data = np.asarray(token_ids[first * size : last * size], dtype=np.int64).tobytes()
    width = 8 * size
    contents = [data[start : start + width] for start in range(0, len(data), width)]
    return [salt + contents[0], *contents[1:]] if salt and contents and not first else contents


class _Table:
    """The blocks of one request, in order of position."""

    __slots__ = ("blocks", "num_committed", "salt")

    def __init__(self, known_blocks: list[int], salt: bytes) -> None:
        self.blocks = IntVector(known_blocks)
        self.salt = salt
        """Is a part of the first block's key."""
        self.num_committed = len(known_blocks)
        """Blocks 0 : num_committed are known. 0 <= num_committed <= len(blocks)."""


class KVBlocks:
    """Allocates blocks to requests. A call that cannot be satisfied changes nothing."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        prefix_reuse: bool = True,
        stored_root: bytes | None = None,
    ) -> None:
        """stored_root: the digest before first blocks, see `stored_prefixes`. None: nothing is stored."""
        if num_blocks < 1:
            raise ConfigError.field("num_blocks", num_blocks, "at least 1")
        if block_size < 1:
            raise ConfigError.field("block_size", block_size, "at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_reuse = prefix_reuse
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached_blocks: OrderedDict[int, None] = OrderedDict()
        """Known blocks that no request uses, least recently released first."""
        self._references = [0] * num_blocks
        """How many requests use each block."""
        self._keys: list[Key | None] = [None] * num_blocks
        self._identities = [ROOT] * num_blocks
        self._block_by_key: dict[Key, int] = {}
        self._last_identity = ROOT
        self._tables: dict[int, _Table] = {}
        self._queries = 0
        self._hits = 0
        self._stored_root = stored_root
        self._changes = PrefixChanges()

    # ---- queries

    @property
    def available(self) -> int:
        """Blocks that can be allocated now: free or cached."""
        return len(self._free) + len(self._cached_blocks)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens need. The last one may be partly filled."""
        return -(-num_tokens // self.block_size)

    def capacity(self, request_id: int) -> int:
        """Tokens that fit into the blocks of this request."""
        return len(self._tables[request_id].blocks) * self.block_size

    def table(self, request_id: int) -> IntArray:
        """[b] the request's block ids in order.

        It is a view, valid until the next call that changes the pool.
        """
        return self._tables[request_id].blocks.array

    def stats(self) -> BlockStats:
        """Counts of blocks and of prefix cache queries.

        total == free + cached + used. A request that is admitted again counts as another query.
        """
        num_free, num_cached = len(self._free), len(self._cached_blocks)
        num_used = self.num_blocks - num_free - num_cached
        return BlockStats(self.num_blocks, num_free, num_cached, num_used, self._queries, self._hits)

    # ---- what sequences have beside their blocks: see `StateBlocks`

    def cut(self, request_id: int, start: int, stop: int) -> int:
        """The position up to which a chunk that begins at `start` may go, at most `stop`."""
        return stop

    def states(self, request_id: int) -> tuple[int, ...]:
        """The line of `TokenBatch.states` of a request whose rows are computed next; () without states."""
        return ()

    def rewind(self, request_id: int, num_computed: int) -> int:
        """How many of the computed tokens count after a step of this request has failed."""
        return num_computed

    def restore(self, request_id: int, num_tokens: int) -> None:
        """Record that the states after so many tokens of an admitted request come from another worker."""

    def state_stats(self) -> StateStats:
        """Counts of seats and pages of states."""
        return StateStats()

    def _snapshot_pages(self, known_blocks: list[int]) -> dict[int, int]:
        """Index of a block -> the page with the state at its end, where one is kept."""
        return {}

    def _usable(self, known_blocks: list[int]) -> list[int]:
        """The blocks found for a prompt from which its request can go on."""
        return known_blocks

    # ---- changes

    def allocate(
        self, request_id: int, token_ids: IntArray, reusable: int, spare: int = 0, salt: bytes = b""
    ) -> int | None:
        """Allocate blocks for all of `token_ids`, leaving at least `spare` blocks available.

        Only requests of the same salt share a prefix.

        Returns how many of the tokens are already in those blocks, or None when there are too few blocks. The
        number is a multiple of block_size and at most `reusable`. It is less than the number of tokens,
        because the last token's row must be computed to sample the next one. With `reusable` 0 no prefix is
        looked up.
        """
        if request_id in self._tables:
            raise ValueError(f"request {request_id} has blocks already")
        if self.available <= spare:  # the last token always needs a new block: skip the lookup
            return None
        known_blocks = self._usable(self._find(token_ids, min(reusable, len(token_ids) - 1), salt))
        num_revived = sum(not self._references[block] for block in known_blocks)
        missing = self.blocks_for(len(token_ids)) - len(known_blocks)
        if missing + spare > self.available - num_revived:
            return None
        for block in known_blocks:
            self._hold(block)
        table = self._tables[request_id] = _Table(known_blocks, salt)
        table.blocks.extend([self._take() for _ in range(missing)])
        if self.prefix_reuse and reusable:
            self._queries += len(token_ids)
            self._hits += len(known_blocks) * self.block_size
        return len(known_blocks) * self.block_size

    def extend(self, request_id: int, num_tokens: int) -> bool:
        """Allocate blocks so that `num_tokens` tokens fit in all.

        Returns False, and changes nothing, if it cannot.
        """
        blocks = self._tables[request_id].blocks
        missing = self.blocks_for(num_tokens) - len(blocks)
        if missing <= 0:
            return True
        if missing > self.available:
            return False
        blocks.extend([self._take() for _ in range(missing)])
        return True

    def reserve(self, request_id: int, num_tokens: int, num_draft_tokens: int, spare: int) -> int:
        """How many of the drafted tokens behind `num_tokens` tokens may be computed. They have blocks then.

        At least `spare` blocks stay available. `trim` frees the blocks that are not needed after all.
        """
        room = self.capacity(request_id) + max(0, self.available - spare) * self.block_size - num_tokens
        fit = max(0, min(num_draft_tokens, room))
        return fit if self.extend(request_id, num_tokens + fit) else 0

    def trim(self, request_id: int, num_tokens: int) -> None:
        """Free the blocks behind those of `num_tokens` tokens. They were reserved for drafted ones."""
        for block in self._tables[request_id].blocks.shorten(self.blocks_for(num_tokens))[::-1].tolist():
            self._release(block)

    def commit(self, request_id: int, token_ids: IntArray, num_computed: int) -> None:
        """Make the full blocks of the first `num_computed` tokens known. Their KV must be written in every
        layer.

        If another request made an equal block known meanwhile, the request uses that block from now on. So
        call this only while no running step reads or writes this request's blocks.
        """
        table = self._tables[request_id]
        first, last = table.num_committed, num_computed // self.block_size
        if first >= last or not self.prefix_reuse:
            return
        blocks = table.blocks.array
        parent = self._identities[blocks[first - 1]] if first else ROOT
        for index, content in enumerate(
            block_contents(token_ids, self.block_size, first, last, table.salt), start=first
        ):
            known_block = self._register(int(blocks[index]), (parent, content))
            blocks[index] = known_block
            parent = self._identities[known_block]
        table.num_committed = last

    def free(self, request_id: int, valid: bool = True) -> None:
        """Release all blocks of the request. Its known blocks stay cached, the others become free.

        valid: False where what it computed cannot be used. Then no later request finds its blocks, once the
        last request that shares them has ended.
        """
        # The last block goes first, so that eviction by age takes leaves before the blocks that they follow.
        table = self._tables.pop(request_id)
        blocks: list[int] = table.blocks.array.tolist()
        if self._stored_root is not None and valid and table.num_committed:
            self._changes.paths.append(self._path(self._stored_root, blocks[: table.num_committed]))
        for block in reversed(blocks):
            if not valid and self._references[block] == 1 and self._keys[block] is not None:
                self._unregister(block)
            self._release(block)

    @property
    def end_of_used(self) -> int:
        """Number of the highest block that a request uses, plus one. 0: none is used."""
        return (
            max((int(table.blocks.array.max(initial=-1)) for table in self._tables.values()), default=-1) + 1
        )

    def resize(self, num_blocks: int) -> None:
        """Go on with blocks 0 : num_blocks. From now on the lowest free numbers are taken first.

        Known blocks that leave are forgotten, and those that follow them. Raises ValueError, and changes
        nothing, where a request uses one of them.
        """
        if num_blocks < max(1, self.end_of_used):
            raise ValueError(f"a cache of {num_blocks} blocks, of which {self.end_of_used} are in use")
        lost_identities: set[int] = set()
        for block in reversed(list(self._cached_blocks)):  # blocks come after those that follow them
            key = self._keys[block]
            assert key is not None, "only known blocks are cached"
            if block >= num_blocks or key[0] in lost_identities:
                lost_identities.add(self._identities[block])
                del self._cached_blocks[block]
                self._unregister(block)
                self._free.append(block)
        new_blocks = range(self.num_blocks, num_blocks)
        self._free = sorted([*(b for b in self._free if b < num_blocks), *new_blocks], reverse=True)
        num_new = len(new_blocks)
        self._references = self._references[:num_blocks] + [0] * num_new
        self._keys = self._keys[:num_blocks] + [None] * num_new
        self._identities = self._identities[:num_blocks] + [ROOT] * num_new
        self.num_blocks = num_blocks

    def take_changes(self) -> PrefixChanges:
        """What happened to known blocks since the last call. Nothing if no prefix is stored."""
        changes, self._changes = self._changes, PrefixChanges()
        return changes

    # ---- prefixes

    def _path(self, root: bytes, known_blocks: list[int]) -> PrefixPath:
        """The names of the first known blocks of a request."""
        keys = [self._keys[block] for block in known_blocks]
        digests = chain_digests(root, [key[1] for key in keys if key is not None])
        return PrefixPath(known_blocks, digests, self._snapshot_pages(known_blocks))

    def _find(self, token_ids: IntArray, limit: int, salt: bytes) -> list[int]:
        """The longest run of known blocks that begins `token_ids`, with at most `limit` tokens."""
        known_blocks: list[int] = []
        if not self.prefix_reuse or limit < self.block_size:
            return known_blocks
        parent = ROOT
        for content in block_contents(token_ids, self.block_size, 0, limit // self.block_size, salt):
            block = self._block_by_key.get((parent, content))
            if block is None:
                break
            known_blocks.append(block)
            parent = self._identities[block]
        return known_blocks

    def _register(self, block: int, key: Key) -> int:
        """Register `block` under `key` and return the one block of this key.

        That is `block` if it is the first. Otherwise `block` is released and the known block is returned.
        """
        known_block = self._block_by_key.setdefault(key, block)
        if known_block == block:
            self._last_identity += 1
            self._keys[block] = key
            self._identities[block] = self._last_identity
        else:
            self._hold(known_block)
            self._release(block)
        return known_block

    def _unregister(self, block: int) -> None:
        key = self._keys[block]
        assert key is not None, "only known blocks are cached"
        del self._block_by_key[key]
        self._keys[block] = None
        self._identities[block] = ROOT
        if self._stored_root is not None:
            self._changes.evicted_blocks.append(block)

    # ---- single blocks

    def _take(self) -> int:
        """Take a block for one request to write: a free one, or else the least recently used cached one."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached_blocks.popitem(last=False)
            self._unregister(block)
        self._references[block] = 1
        return block

    def _hold(self, block: int) -> None:
        if not self._references[block]:
            del self._cached_blocks[block]
        self._references[block] += 1

    def _release(self, block: int) -> None:
        self._references[block] -= 1
        if self._references[block]:
            return
        if self._keys[block] is None:
            self._free.append(block)
        else:
            self._cached_blocks[block] = None
