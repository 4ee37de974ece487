"""Schedules of a decode step over a model larger than the fast memory, as lists of tasks.

A task stands on a lane. A lane does its tasks in the order of the list, one at a time, and a task begins when
those it needs have ended: what streams and threads do. The planner prices a list and the executor runs the
same one. MoE-Lightning, section 4.1, Algorithm 1 and Figure 6:

- cgopipe: attention on the slow processor, two micro-batches ahead of the experts; the next layer's weights
  come in as many pages as there are micro-batches, between the rows that the fast processor waits for.
- s2 (FastDecode): the same, but the next layer's weights come whole, before the layer's first rows.
- s3 (FlexGen with attention on the slow processor): micro-batch after micro-batch in lock-step, weights whole.
- s4 (FlexGen): lock-step, attention on the fast processor; the next micro-batch's cache comes meanwhile.
- serial: one task after the other. What overlap is worth is measured against it.

Two more compute where the data is, or fetch only what was chosen:

- in-place: attention and routed experts each on the processor of the level that holds their data; no weights
  move. The paper's advice below P1 (section 3.3).
- on-demand: all gates of a layer first, then the union of the experts that were chosen, then the experts.

Tasks of layer `layers` load the first layer of the next step; a step finds its own first layer loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Literal

Schedule = Literal["cgopipe", "s2", "s3", "s4", "serial", "in-place", "on-demand"]
SLOW_ATTENTION: tuple[Schedule, ...] = ("cgopipe", "s2", "s3", "serial")
"""Schedules whose attention runs on the slow processor."""


class Lane(Enum):
    """What works on its own."""

    FAST = "fast compute"
    SLOW = "slow compute"
    DOWN = "link down"
    UP = "link up"
    STAGING = "staging copy"


class Kind(Enum):
    """What a task does for one micro-batch of one layer; a page's number takes the micro-batch's place."""

    PRE = "pre-attention"
    """Norm, query, key, value."""
    SAVE_QKV = "save qkv"
    """Up: the rows' query, key and value, to the attention there."""
    ATTENTION = "attention"
    LOAD_ROWS = "load rows"
    """Down: the rows' attention, or the experts' answers, to the fast level."""
    POST = "post-attention"
    """Output projection, gate, shared and routed experts."""
    GATE = "gate"
    """Output projection, gate and shared experts: POST without the routed experts."""
    EXPERTS = "experts"
    """The routed experts alone."""
    SAVE_ROWS = "save rows"
    """Up: the rows that experts there compute."""
    STAGE_PAGE = "stage page"
    LOAD_PAGE = "load page"
    LOAD_CHOSEN = "load chosen experts"
    LOAD_CACHE = "load cache"
    SAVE_CACHE = "save cache"
    """Up: the rows' new keys and values, or a whole prompt's."""
    SYNC = "sync"
    """Lock-step: no later task begins before all earlier ones ended. It takes no time."""


LANES = {
    Kind.PRE: Lane.FAST,
    Kind.SAVE_QKV: Lane.UP,
    Kind.LOAD_ROWS: Lane.DOWN,
    Kind.POST: Lane.FAST,
    Kind.GATE: Lane.FAST,
    Kind.SAVE_ROWS: Lane.UP,
    Kind.STAGE_PAGE: Lane.STAGING,
    Kind.LOAD_PAGE: Lane.DOWN,
    Kind.LOAD_CHOSEN: Lane.DOWN,
    Kind.LOAD_CACHE: Lane.DOWN,
    Kind.SAVE_CACHE: Lane.UP,
    Kind.SYNC: Lane.FAST,
}
"""Of every kind that has one lane only; attention and experts run on either processor."""


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


class _List:
    """A list that grows; tasks are needed by what they do, and what is not in the list was done before."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self._places: dict[Key, int] = {}
        self._barrier: int | None = None

    def add(
        self, kind: Kind, layer: int, part: int, needs: Iterable[Key] = (), lane: Lane | None = None
    ) -> Key:
        """lane: where the kind has several."""
        lane = lane or LANES[kind]
        found = [self._places[key] for key in needs if key in self._places]
        if self._barrier is not None:
            found.append(self._barrier)
        key = (kind, lane, layer, part)
        self._places[key] = len(self.tasks)
        self.tasks.append(Task(kind, lane, layer, part, tuple(sorted(set(found)))))
        return key

    def sync(self, layer: int, part: int) -> None:
        """What comes next waits for every task so far."""
        since = 0 if self._barrier is None else self._barrier
        place = len(self.tasks)
        self.tasks.append(Task(Kind.SYNC, Lane.FAST, layer, part, tuple(range(since, place))))
        self._barrier = place


def key(kind: Kind, layer: int, part: int, lane: Lane | None = None) -> Key:
    return kind, lane or LANES[kind], layer, part


def _attention(layer: int, part: int, lane: Lane = Lane.SLOW) -> Key:
    return Kind.ATTENTION, lane, layer, part


def decode(
    schedule: Schedule, layers: int, micro_batches: int, pages: int | None = None, staged: bool = False
) -> list[Task]:
    """One decode step.

    pages: of a layer's streamed weights; None: as many as micro-batches. 0: no weights are streamed. Schedules
    without pages move them as one. staged: pages are copied into pinned memory before they come down.

    Example, cgopipe, 1 layer, 1 micro-batch: pre, save qkv, attention; load rows, load page, post.
    """
    pages = micro_batches if pages is None else pages
    build = _Builder(layers, micro_batches, pages, staged)
    return {
        "cgopipe": build.cgopipe,
        "s2": build.s2,
        "s3": build.s3,
        "s4": build.s4,
        "serial": build.serial,
        "in-place": build.in_place,
        "on-demand": build.on_demand,
    }[schedule]()


class _Builder:
    def __init__(self, layers: int, micro_batches: int, pages: int, staged: bool) -> None:
        self._layers, self._count, self._pages, self._staged = layers, micro_batches, pages, staged
        self._list = _List()
        self._ahead = min(2, micro_batches)

    # ---- the parts of a micro-batch

    def _to_attention(self, layer: int, part: int) -> None:
        """PreAttn, OffloadQKV and CPUAttn; nothing beyond the last layer."""
        if layer >= self._layers:
            return
        done = key(Kind.POST, layer - 1, part)
        pre = self._list.add(Kind.PRE, layer, part, [done])
        saved = self._list.add(Kind.SAVE_QKV, layer, part, [pre])
        self._list.add(Kind.ATTENTION, layer, part, [saved], Lane.SLOW)

    def _rows(self, layer: int, part: int) -> None:
        self._list.add(Kind.LOAD_ROWS, layer, part, [_attention(layer, part)])

    def _post(self, layer: int, part: int) -> None:
        loaded = [key(Kind.LOAD_PAGE, layer, page) for page in range(max(self._pages, 1))]
        rows = [key(Kind.LOAD_ROWS, layer, part), (Kind.ATTENTION, Lane.FAST, layer, part)]
        self._list.add(Kind.POST, layer, part, [*rows, *loaded])

    def _stage(self, layer: int, page: int) -> None:
        """W_CtoPin: the page's place in pinned memory is free when the last layer's page was loaded from it."""
        if self._staged and page < self._pages:
            self._list.add(Kind.STAGE_PAGE, layer, page, [key(Kind.LOAD_PAGE, layer - 1, page)])

    def _page(self, layer: int, page: int) -> None:
        """W_PinToG: two layers have room, so the last but one must have been computed."""
        if page < self._pages:
            free = key(Kind.POST, layer - 2, self._count - 1)
            self._list.add(Kind.LOAD_PAGE, layer, page, [key(Kind.STAGE_PAGE, layer, page), free])

    # ---- schedules

    def cgopipe(self) -> list[Task]:
        """Algorithm 1. With more pages than micro-batches, or fewer, each one brings its share of them."""
        for part in range(self._ahead):
            self._to_attention(0, part)
        for page in self._pages_of(range(self._ahead)):
            self._stage(1, page)
        for layer in range(self._layers):
            for part in range(self._count):
                self._rows(layer, part)
                for page in self._pages_of([part]):
                    self._page(layer + 1, page)
                self._post(layer, part)
                more, next_part = divmod(part + self._ahead, self._count)
                self._to_attention(layer + more, next_part)
                if layer + more < self._layers:
                    for page in self._pages_of([next_part]):
                        self._stage(layer + more + 1, page)
        return self._list.tasks

    def _pages_of(self, parts: Iterable[int]) -> Iterator[int]:
        for part in parts:
            yield from range(part * self._pages // self._count, (part + 1) * self._pages // self._count)

    def _whole(self, layer: int) -> None:
        """A layer's weights as one page."""
        self._stage(layer, 0)
        self._page(layer, 0)

    def s2(self) -> list[Task]:
        self._pages = min(self._pages, 1)
        for part in range(self._ahead):
            self._to_attention(0, part)
        for layer in range(self._layers):
            self._whole(layer + 1)
            for part in range(self._count):
                self._rows(layer, part)
                self._post(layer, part)
                more, next_part = divmod(part + self._ahead, self._count)
                self._to_attention(layer + more, next_part)
        return self._list.tasks

    def s3(self) -> list[Task]:
        self._pages = min(self._pages, 1)
        for layer in range(self._layers):
            for part in range(self._count):
                if not part:
                    self._whole(layer + 1)
                self._to_attention(layer, part)
                self._rows(layer, part)
                self._post(layer, part)
                self._list.sync(layer, part)
        return self._list.tasks

    def s4(self) -> list[Task]:
        self._pages = min(self._pages, 1)
        self._list.add(Kind.LOAD_CACHE, 0, 0)
        for layer in range(self._layers):
            for part in range(self._count):
                if not part:
                    self._whole(layer + 1)
                more, next_part = divmod(part + 1, self._count)
                if layer + more < self._layers:
                    self._list.add(Kind.LOAD_CACHE, layer + more, next_part)
                self._on_fast(layer, part)
                self._post(layer, part)
                self._list.sync(layer, part)
        return self._list.tasks

    def _on_fast(self, layer: int, part: int) -> None:
        """Attention beside the experts; the new keys and values go back."""
        pre = self._list.add(Kind.PRE, layer, part, [key(Kind.POST, layer - 1, part)])
        cached = key(Kind.LOAD_CACHE, layer, part)
        done = self._list.add(Kind.ATTENTION, layer, part, [pre, cached], Lane.FAST)
        self._list.add(Kind.SAVE_CACHE, layer, part, [done])

    def serial(self) -> list[Task]:
        self._pages = min(self._pages, 1)
        for layer in range(self._layers):
            for part in range(self._count):
                self._to_attention(layer, part)
                self._rows(layer, part)
                self._post(layer, part)
            self._whole(layer + 1)
        tasks = self._list.tasks
        return [
            Task(task.kind, task.lane, task.layer, task.micro_batch, (place - 1,) if place else ())
            for place, task in enumerate(tasks)
        ]
