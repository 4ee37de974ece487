"""Tasks on lanes: the parts of a schedule, which the planner prices and the executor runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Lane(Enum):
    """A unit that works independently of the others."""

    __hash__ = (
        object.__hash__
    )  # the hash of the member itself; Enum hashes the name, in Python, at each look-up

    FAST = "fast compute"
    SLOW = "slow compute"
    DOWN = "link down"
    UP = "link up"
    STAGING = "staging copy"


class Kind(Enum):
    """What a task does for one micro-batch of one layer. Tasks on pages have the page's number as
    micro-batch."""

    __hash__ = object.__hash__

    PRE = "pre-attention"
    """Norm, and the projections of query, key and value."""
    SAVE_QKV = "save qkv"
    """Copy query, key and value to the slow processor's attention."""
    ATTENTION = "attention"
    LOAD_ROWS = "load rows"
    """Load the results of that attention."""
    POST = "post-attention"
    """Output projection, gate, shared and routed experts."""
    GATE = "gate"
    """POST without the routed experts."""
    EXPERTS = "experts"
    """The routed experts alone: each processor computes those that its level holds."""
    SAVE_ROWS = "save rows"
    """Copy rows to experts on the slow level; in prefill, the residual."""
    LOAD_ANSWERS = "load answers"
    """Load the answers of those experts; in prefill, the residual."""
    STAGE_PAGE = "stage page"
    LOAD_PAGE = "load page"
    LOAD_CHOSEN = "load chosen experts"
    LOAD_LIKELY = "load likely experts"
    """Load experts before the layer's gate has chosen."""
    LOAD_CACHE = "load cache"
    SAVE_CACHE = "save cache"
    """Copy the rows' new keys and values."""
    PROMPT = "prompt"
    """One layer over whole prompts."""
    HEAD = "head"
    """Logits and the next token."""
    SYNC = "sync"
    """Lock-step: no later task begins before all earlier ones have ended. It takes no time."""


LANES = {
    **dict.fromkeys((Kind.SAVE_QKV, Kind.SAVE_ROWS, Kind.SAVE_CACHE), Lane.UP),
    **dict.fromkeys((Kind.LOAD_ROWS, Kind.LOAD_ANSWERS, Kind.LOAD_PAGE), Lane.DOWN),
    **dict.fromkeys((Kind.LOAD_CHOSEN, Kind.LOAD_LIKELY, Kind.LOAD_CACHE), Lane.DOWN),
    Kind.STAGE_PAGE: Lane.STAGING,
}
"""Lanes of the kinds that the fast processor does not run. Attention and experts may run on the slow one."""


@dataclass(frozen=True)
class Shape:
    """What there is to schedule. Fields that are false or 0 make no tasks."""

    layers: int
    micro_batches: int
    pages: int
    """Pages of a layer's streamed weights. Schedules without pages move them as one. 0: all weights stay on
    the fast level."""
    staged: bool = False
    """True: pages are copied into pinned memory before they are loaded."""
    slow_attention: bool = True
    cache_moves: bool = False
    """True: the fast processor's attention reads a cache on the slow level."""
    slow_experts: bool = False
    """in-place: some routed experts are on the slow level."""
    fast_experts: bool = True
    """in-place: some routed experts are on the fast level."""
    cut: bool = False
    """True: in prefill a micro-batch may continue the last one's prompt, whose cache it attends to."""
    guesses: bool = False
    """on-demand: some experts are loaded before their gate has chosen."""
    dense: frozenset[int] = frozenset()
    """Layers without routed experts. Nothing of theirs is streamed."""

    def pages_of(self, layer: int) -> int:
        """Pages of a layer, possibly of the next step."""
        return 0 if layer % self.layers in self.dense else self.pages


@dataclass(frozen=True, slots=True)
class Task:
    kind: Kind
    lane: Lane
    layer: int
    micro_batch: int
    """Number of the micro-batch, or of the page."""
    needs: tuple[int, ...]
    """Places of earlier tasks in the list."""


Key = tuple[Kind, Lane, int, int]


class TaskList:
    """A growing list of tasks. Tasks are identified by what they do. A needed task that is not in the list
    was done before."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self._places: dict[Key, int] = {}
        self._barrier: int | None = None

    def add(
        self, kind: Kind, layer: int, part: int, needs: Iterable[Key] = (), lane: Lane | None = None
    ) -> Key:
        """Add a task. lane: if it is not the kind's own."""
        found = {self._places[key] for key in needs if key in self._places}
        if self._barrier is not None:
            found.add(self._barrier)
        key = name(kind, layer, part, lane)
        self._places[key] = len(self.tasks)
        self.tasks.append(Task(kind, key[1], layer, part, tuple(sorted(found))))
        return key

    def sync(self, layer: int, part: int) -> None:
        """Make all later tasks wait for every task so far."""
        since, place = self._barrier or 0, len(self.tasks)
        self.tasks.append(Task(Kind.SYNC, Lane.FAST, layer, part, tuple(range(since, place))))
        self._barrier = place


def name(kind: Kind, layer: int, part: int, lane: Lane | None = None) -> Key:
    return kind, lane or LANES.get(kind, Lane.FAST), layer, part
