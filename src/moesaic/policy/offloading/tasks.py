"""Tasks on lanes: the parts of a schedule. The planner prices them and the executor runs them.

Question: Which lane runs a task, and which thread copies weights or caches?
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Lane(Enum):
    """A unit that works independently of the others, such as a processor or one direction of a link."""

    # Hash the member itself. Enum would hash its name, in Python, at each look-up.
    __hash__ = object.__hash__

    FAST = "fast compute"
    SLOW = "slow compute"
    LINK_DOWN = "link down"
    """Copies from the slow level to the fast one."""
    LINK_UP = "link up"
    """Copies from the fast level to the slow one."""
    STAGING = "staging copy"
    """Copies on the slow level, into pinned memory."""


class Kind(Enum):
    """What a task does for one micro-batch of one layer.

    Tasks on pages have the page's number in place of the micro-batch's.
    """

    __hash__ = object.__hash__

    PRE = "pre-attention"
    """Norm, and the projections to query, key and value."""
    SAVE_QKV = "save qkv"
    """Copy query, key and value to the slow level, where attention runs."""
    ATTENTION = "attention"
    LOAD_ROWS = "load rows"
    """Load the results of attention from the slow level."""
    POST_WITH_EXPERTS = "post-attention"
    """Output projection, gate, shared and routed experts."""
    POST_WITHOUT_EXPERTS = "gate"
    """Output projection, gate and shared experts. The routed experts are tasks of their own."""
    EXPERTS = "experts"
    """The routed experts alone. Each processor computes those on its level."""
    SAVE_ROWS = "save rows"
    """Copy rows to the experts on the slow level. In prefill: store the residual there."""
    LOAD_ANSWERS = "load answers"
    """Load the answers of the experts on the slow level. In prefill: load the residual."""
    STAGE_PAGE = "stage page"
    LOAD_PAGE = "load page"
    SPLIT = "split experts"
    """Decide which processor computes which of the chosen experts."""
    LOAD_CHOSEN = "load chosen experts"
    LOAD_LIKELY = "load likely experts"
    """Load experts before the layer's gate has chosen."""
    LOAD_CACHE = "load cache"
    SAVE_CACHE = "save cache"
    """Copy the rows' new keys and values."""
    PROMPT = "prompt"
    """A layer over whole prompts."""
    HEAD = "head"
    """Logits and the next token."""
    SYNC = "sync"
    """Lockstep: no later task begins before all earlier ones have ended. It takes no time."""


LANES = {
    **dict.fromkeys((Kind.SAVE_QKV, Kind.SAVE_ROWS, Kind.SAVE_CACHE), Lane.LINK_UP),
    **dict.fromkeys((Kind.LOAD_ROWS, Kind.LOAD_ANSWERS, Kind.LOAD_PAGE), Lane.LINK_DOWN),
    **dict.fromkeys((Kind.LOAD_CHOSEN, Kind.LOAD_LIKELY, Kind.LOAD_CACHE), Lane.LINK_DOWN),
    Kind.STAGE_PAGE: Lane.STAGING,
}
"""Lanes of the kinds of tasks that the fast processor does not run. Attention and experts may also run on
SLOW."""


@dataclass(frozen=True)
class Shape:
    """The input of a schedule. Fields that are false or 0 make no tasks."""

    layers: int
    micro_batches: int
    pages: int
    """Number of pages of a layer's streamed weights. 0: all weights stay on the fast level.

    Schedules without pages move the weights as one page.
    """
    uses_pinned_memory: bool = False
    """True: pages are copied into pinned memory before they are loaded."""
    slow_attention: bool = True
    cache_moves: bool = False
    """True: the fast processor's attention reads a cache on the slow level."""
    slow_experts: bool = False
    """True: with in-place and split, some routed experts are on the slow level."""
    fast_experts: bool = True
    """True: with in-place and split, some routed experts are on the fast level."""
    cut: bool = False
    """True: in prefill, a micro-batch may continue the prompt of the one before, and attends to its cache."""
    guesses: bool = False
    """True: with on-demand, some experts are loaded before the gate has chosen."""
    dense: frozenset[int] = frozenset()
    """Layers without routed experts. Their weights are not streamed."""

    def pages_of(self, layer: int) -> int:
        """Number of pages of a layer, which may be one of the next step."""
        return 0 if layer % self.layers in self.dense else self.pages


@dataclass(frozen=True, slots=True)
class Task:
    """A task of a schedule."""

    kind: Kind
    lane: Lane
    layer: int
    micro_batch: int
    """Number of the micro-batch, or of the page."""
    needs: tuple[int, ...]
    """Indices of the tasks in the list that must end first."""


Key = tuple[Kind, Lane, int, int]


class TaskList:
    """A list of tasks that grows. A task is identified by what it does.

    If a task needs one that is not in the list, that one counts as done before.
    """

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self._indices: dict[Key, int] = {}
        self._barrier: int | None = None

    def add(
        self, kind: Kind, layer: int, part: int, needs: Iterable[Key] = (), lane: Lane | None = None
    ) -> Key:
        """Add a task and return its key. lane: the task's lane if it is not its kind's own."""
        indices = {self._indices[key] for key in needs if key in self._indices}
        if self._barrier is not None:
            indices.add(self._barrier)
        key = name(kind, layer, part, lane)
        self._indices[key] = len(self.tasks)
        self.tasks.append(Task(kind, key[1], layer, part, tuple(sorted(indices))))
        return key

    def sync(self, layer: int, part: int) -> None:
        """Make all later tasks wait for every task so far."""
        first, index = self._barrier or 0, len(self.tasks)
        self.tasks.append(Task(Kind.SYNC, Lane.FAST, layer, part, tuple(range(first, index))))
        self._barrier = index


def name(kind: Kind, layer: int, part: int, lane: Lane | None = None) -> Key:
    """The key of a task. lane: its lane if it is not its kind's own."""
    return kind, lane or LANES.get(kind, Lane.FAST), layer, part
