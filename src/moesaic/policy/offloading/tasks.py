"""Tasks on lanes: what a schedule is made of, what the planner prices and the executor runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Lane(Enum):
    """What works on its own."""

    __hash__ = object.__hash__  # of the member itself: Enum's hashes the name, in Python, at each look-up

    FAST = "fast compute"
    SLOW = "slow compute"
    DOWN = "link down"
    UP = "link up"
    STAGING = "staging copy"


class Kind(Enum):
    """What a task does for one micro-batch of one layer; a page's number takes the micro-batch's place."""

    __hash__ = object.__hash__

    PRE = "pre-attention"
    """Norm, query, key, value."""
    SAVE_QKV = "save qkv"
    """To the attention there."""
    ATTENTION = "attention"
    LOAD_ROWS = "load rows"
    """What that attention answered."""
    POST = "post-attention"
    """Output projection, gate, shared and routed experts."""
    GATE = "gate"
    """POST without the routed experts."""
    EXPERTS = "experts"
    """The routed experts alone: on each processor those that its level holds."""
    SAVE_ROWS = "save rows"
    """Rows for experts there; in prefill, the residual."""
    LOAD_ANSWERS = "load answers"
    """What those experts answered; in prefill, the residual."""
    STAGE_PAGE = "stage page"
    LOAD_PAGE = "load page"
    LOAD_CHOSEN = "load chosen experts"
    LOAD_LIKELY = "load likely experts"
    """Before the layer's gates have spoken."""
    LOAD_CACHE = "load cache"
    SAVE_CACHE = "save cache"
    """The rows' new keys and values."""
    PROMPT = "prompt"
    """A layer over whole prompts."""
    HEAD = "head"
    """Logits and the next token."""
    SYNC = "sync"
    """Lock-step: no later task begins before all earlier ones ended. It takes no time."""


LANES = {
    **dict.fromkeys((Kind.SAVE_QKV, Kind.SAVE_ROWS, Kind.SAVE_CACHE), Lane.UP),
    **dict.fromkeys((Kind.LOAD_ROWS, Kind.LOAD_ANSWERS, Kind.LOAD_PAGE), Lane.DOWN),
    **dict.fromkeys((Kind.LOAD_CHOSEN, Kind.LOAD_LIKELY, Kind.LOAD_CACHE), Lane.DOWN),
    Kind.STAGE_PAGE: Lane.STAGING,
}
"""Of kinds that are not computed by the fast processor; attention and experts may run on the slow one."""


@dataclass(frozen=True)
class Shape:
    """How much there is to schedule. What is false or 0 makes no tasks."""

    layers: int
    micro_batches: int
    pages: int
    """Of a layer's streamed weights; schedules without pages move them as one. 0: all weights stay fast."""
    staged: bool = False
    """Pages are copied into pinned memory before they come down."""
    slow_attention: bool = True
    cache_moves: bool = False
    """The fast processor's attention reads a cache on the slow level."""
    slow_experts: bool = False
    """in-place: some routed experts are on the slow level."""
    fast_experts: bool = True
    """in-place: some are on the fast one."""
    cut: bool = False
    """In prefill a micro-batch may go on with the last one's prompt, whose cache it attends to."""
    guesses: bool = False
    """on-demand: some experts come before their gates have spoken."""
    dense: frozenset[int] = frozenset()
    """Layers without routed experts: nothing of theirs is streamed."""

    def pages_of(self, layer: int) -> int:
        """Pages of a layer, perhaps of the next step."""
        return 0 if layer % self.layers in self.dense else self.pages


@dataclass(frozen=True, slots=True)
class Task:
    kind: Kind
    lane: Lane
    layer: int
    micro_batch: int
    """Or page."""
    needs: tuple[int, ...]
    """Places of earlier tasks in the list."""


Key = tuple[Kind, Lane, int, int]


class TaskList:
    """A list that grows. Tasks are needed by what they do; what is not in the list was done before it."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self._places: dict[Key, int] = {}
        self._barrier: int | None = None

    def add(
        self, kind: Kind, layer: int, part: int, needs: Iterable[Key] = (), lane: Lane | None = None
    ) -> Key:
        """lane: where it is not the kind's own."""
        found = {self._places[key] for key in needs if key in self._places}
        if self._barrier is not None:
            found.add(self._barrier)
        key = name(kind, layer, part, lane)
        self._places[key] = len(self.tasks)
        self.tasks.append(Task(kind, key[1], layer, part, tuple(sorted(found))))
        return key

    def sync(self, layer: int, part: int) -> None:
        """What comes next waits for every task so far."""
        since, place = self._barrier or 0, len(self.tasks)
        self.tasks.append(Task(Kind.SYNC, Lane.FAST, layer, part, tuple(range(since, place))))
        self._barrier = place


def name(kind: Kind, layer: int, part: int, lane: Lane | None = None) -> Key:
    return kind, lane or LANES.get(kind, Lane.FAST), layer, part
