"""KV blocks of a model some of whose layers keep a state of fixed size for each sequence.

A running sequence has a *seat* and a page, besides its KV blocks (`kernels.states` says what they hold). Its
page has its state at the last multiple of STATE_CHUNK positions. A page that is kept at such a multiple is a
*snapshot* of the prefix up to there. A prefix that is found in the cache is shortened to its newest snapshot.

Snapshots are kept at these positions:

 * the last possible one of a prompt, where the same prompt goes on
 * the last one that is OPENING_TOKENS before its end, where the next request of a conversation branches off.
   A chat template ends a prompt with the opening of an answer, and may write it otherwise in the next prompt
 * the end of what the cache already had of a prompt, as far as there was no snapshot
 * every SNAPSHOT_TOKENS positions
 * where a request ends or is preempted

A snapshot costs no copy: its page is not written any more, and the sequence gets another one. Snapshots are
found by the identity of the KV block that ends at their position. The least recently used ones give way. No
sequence reads a page that is given to another one.

Question: Which requests get memory for states of linear attention?
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field

from moesaic.core.errors import ConfigError
from moesaic.core.metrics import StateStats
from moesaic.core.tokens import STATE_CHUNK, IntArray
from moesaic.policy.scheduling.kvblocks import KVBlocks

SNAPSHOT_TOKENS = 1024
"""Snapshots of long prompts and answers are at most this many tokens apart, rounded up to whole blocks."""
ZEROS = 0
"""The page of the state before the first token."""

OPENING_TOKENS = 16
"""Tokens at the end of a prompt that the next turn may write otherwise, such as `<think>` of an answer whose
reasoning is dropped."""


@dataclass
class _RequestStates:
    """The states of one running request."""

    seat: int
    read_page: int
    """Page with the state at position `at`: that of a snapshot, ZEROS, or the request's own."""
    position: int
    own_page: int
    """Page that is written when the request passes the next multiple of STATE_CHUNK."""
    marks: set[int] = field(default_factory=set)
    """Positions at which snapshots are wanted."""
    computing: bool = False
    """A step was planned and is not done. The own page may be at another position in some layers."""


class StateBlocks(KVBlocks):
    """Allocates blocks, seats and pages. A request gets all of them or waits."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        prefix_reuse: bool,
        seats: int,
        snapshots: int,
        stored_root: bytes | None = None,
    ) -> None:
        """seats: most sequences that run at once. snapshots: most pages that are kept of prefixes."""
        super().__init__(num_blocks, block_size, prefix_reuse, stored_root)
        if seats < 1:
            raise ConfigError.field("seats", seats, "at least 1")
        self._stride = math.lcm(STATE_CHUNK, block_size)
        self._snapshot_interval = -(-SNAPSHOT_TOKENS // self._stride) * self._stride
        self._seats = list(range(seats - 1, -1, -1))
        self._num_seats, self._max_snapshots = seats, snapshots if prefix_reuse else 0
        self._pages = list(range(seats + self._max_snapshots, ZEROS, -1))
        """Pages without contents. There is one for each seat without a request."""
        self._snapshots: OrderedDict[int, int] = OrderedDict()
        """Identity of a block -> page with the state at its end, least recently used first."""
        self._readers: dict[int, int] = {}
        """Page of a snapshot -> running requests that read it."""
        self._request_states: dict[int, _RequestStates] = {}
        self._num_found = 0
        """Tokens of the prompt allocated last that were in the cache, with or without a snapshot."""

    # ---- queries

    def states(self, request_id: int) -> tuple[int, ...]:
        held = self._request_states[request_id]
        held.computing = True
        return held.read_page, held.position, held.own_page, held.seat

    def cut(self, request_id: int, start: int, stop: int) -> int:
        marks = self._request_states[request_id].marks
        periodic = (
            (start // self._snapshot_interval + 1) * self._snapshot_interval if self._max_snapshots else stop
        )
        return min([stop, periodic, *(mark for mark in marks if mark > start)])

    def state_stats(self) -> StateStats:
        """Counts of seats and pages. pages == free + snapshots + those of the requests that run."""
        return StateStats(
            seats=self._num_seats,
            seats_used=len(self._request_states),
            pages=self._num_seats + self._max_snapshots,
            pages_free=len(self._pages),
            snapshots=len(self._snapshots),
        )

    # ---- changes

    def allocate(
        self, request_id: int, token_ids: IntArray, reusable: int, spare: int = 0, salt: bytes = b""
    ) -> int | None:
        if not self._seats:
            return None
        num_cached = super().allocate(request_id, token_ids, reusable, spare, salt)
        if num_cached is None:
            return None
        states = _RequestStates(self._seats.pop(), ZEROS, num_cached, self._pages.pop())
        if num_cached:
            states.read_page = self._snapshots[self._identity(request_id, num_cached)]
            self._readers[states.read_page] += 1
        if self._max_snapshots:
            last = len(token_ids) - 1
            ends = self._num_found, last, max(0, last - OPENING_TOKENS)
            states.marks = {end // self._stride * self._stride for end in ends}
        self._request_states[request_id] = states
        return num_cached

    def reserve(self, request_id: int, num_tokens: int, num_draft_tokens: int, spare: int) -> int:
        """Reserve up to the next multiple of STATE_CHUNK: no page may have rows that turn out not to
        count."""
        return super().reserve(
            request_id, num_tokens, min(num_draft_tokens, -(num_tokens + 1) % STATE_CHUNK), spare
        )

    def commit(self, request_id: int, token_ids: IntArray, num_computed: int) -> None:
        super().commit(request_id, token_ids, num_computed)
        states = self._request_states[request_id]
        states.computing = False
        new_position = num_computed // STATE_CHUNK * STATE_CHUNK
        if new_position > states.position:
            self._leave(states)
            states.read_page, states.position = states.own_page, new_position
        is_snapshot_position = (
            states.position in states.marks or states.position % self._snapshot_interval == 0
        )
        if (
            is_snapshot_position
            and states.position
            and states.read_page == states.own_page
            and self._keep(request_id, states)
        ):
            states.own_page = self._pages.pop()
            self._readers[states.read_page] = 1
        states.marks = {mark for mark in states.marks if mark > num_computed}

    def rewind(self, request_id: int, num_computed: int) -> int:
        """The state at a snapshot is whole. One of the request's own page may not be."""
        states = self._request_states[request_id]
        if states.read_page == states.own_page:
            states.read_page, states.position = ZEROS, 0
        states.computing = False
        return states.position

    def restore(self, request_id: int, num_tokens: int) -> None:
        """Record that the request's page has the state at the last multiple of STATE_CHUNK, and its seat the
        rest."""
        states = self._request_states[request_id]
        self._leave(states)
        states.position = num_tokens // STATE_CHUNK * STATE_CHUNK
        states.read_page = states.own_page if states.position else ZEROS

    def free(self, request_id: int, valid: bool = True) -> None:
        states = self._request_states.pop(request_id)
        is_valid_state = (
            valid and not states.computing and states.read_page == states.own_page and states.position > 0
        )
        became_snapshot = is_valid_state and self._keep(request_id, states)
        if not became_snapshot:
            self._pages.append(states.own_page)
        self._leave(states)
        self._seats.append(states.seat)
        super().free(request_id, valid)

    # ---- snapshots

    def _snapshot_pages(self, known_blocks: list[int]) -> dict[int, int]:
        pages = (self._snapshots.get(self._identities[block]) for block in known_blocks)
        return {index: page for index, page in enumerate(pages) if page is not None}

    def _usable(self, known_blocks: list[int]) -> list[int]:
        """The blocks up to the newest snapshot."""
        self._num_found = len(known_blocks) * self.block_size
        step = self._stride // self.block_size
        for count in range(len(known_blocks) // step * step, 0, -step):
            identity = self._identities[known_blocks[count - 1]]
            if identity in self._snapshots:
                self._snapshots.move_to_end(identity)
                return known_blocks[:count]
        return []

    def _identity(self, request_id: int, position: int) -> int:
        """Identity of the request's block that ends at `position`."""
        return self._identities[int(self.table(request_id)[position // self.block_size - 1])]

    def _keep(self, request_id: int, states: _RequestStates) -> bool:
        """Make the request's own page a snapshot, if it is the first one of its prefix and there is room."""
        # A snapshot is found by the KV block that ends at its position, so it must lie on a block's end.
        if states.position % self._stride:
            return False
        identity = self._identity(request_id, states.position)
        if identity in self._snapshots:
            self._snapshots.move_to_end(identity)
            return False
        if len(self._snapshots) >= self._max_snapshots and not self._evict():
            return False
        self._snapshots[identity] = states.own_page
        self._readers[states.own_page] = 0
        return True

    def _evict(self) -> bool:
        """Free the page of the least recently used snapshot that no request reads."""
        for identity, page in self._snapshots.items():
            if not self._readers[page]:
                del self._snapshots[identity], self._readers[page]
                self._pages.append(page)
                if self._stored_root is not None:
                    self._changes.evicted_pages.append(page)
                return True
        return False

    def _leave(self, states: _RequestStates) -> None:
        """The request does not read the page of a snapshot any more."""
        if states.read_page not in (states.own_page, ZEROS):
            self._readers[states.read_page] -= 1
