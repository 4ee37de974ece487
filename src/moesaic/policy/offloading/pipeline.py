"""The schedules of a pass over a model larger than the fast memory, as lists of tasks.

Each task belongs to a lane. A lane runs its tasks in the order of the list, one at a time. A task begins
when the tasks that it needs have ended, as with CUDA streams and threads. The planner prices a list, and
the executor runs the same list. These schedules are from MoE-Lightning (section 4.1, Algorithm 1 and Figure
6):

- cgopipe: the slow processor computes attention, two micro-batches ahead of the experts. The next layer's
  weights are loaded in pages, one with each micro-batch, between the rows that the fast processor waits
  for. If attention is on the fast processor, the cache of the next micro-batches is loaded between the
  pages.
- s2 (FastDecode): the same, but the next layer's weights are loaded whole, before the layer's first rows.
- s3 (FlexGen, attention on the slow processor): one micro-batch after another in lockstep, with whole
  weights.
- s4 (FlexGen, attention on the fast processor): lockstep. Meanwhile the next micro-batch's cache is loaded.
- serial: one task after another, as a baseline without overlap.

Three more schedules compute where the data is, or load only chosen experts:

- in-place: no weights move. The processor of the level that has an expert computes it. The paper advises
  this below P1 (section 3.3).
- on-demand: first all gates of a layer run. Then the union of the chosen experts is loaded and computed.
  During that time and the next layer's gates, experts that the next layer chose in recent steps are loaded.
- split: both together. Once all gates of a layer have run, the chosen experts that are not on the fast level
  are split by price: some are loaded, and meanwhile the slow processor computes the others.

Tasks of layer `layers` load the first layer of the next step. So a step finds its own first layer loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Literal, get_args

from moesaic.policy.offloading.tasks import Key, Kind, Lane, Shape, Task, TaskList, name

Schedule = Literal["cgopipe", "s2", "s3", "s4", "serial", "in-place", "on-demand", "split"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
FORCED: dict[Schedule, bool] = {"s2": True, "s3": True, "s4": False}
"""Schedules that fix the processor of attention: True for the slow one, False for the fast one."""
AHEAD = 2
"""Number of micro-batches that start attention before the experts of the current one run."""


def decode(schedule: Schedule, shape: Shape) -> list[Task]:
    """The tasks of one decode step: one row of each request.

    s2 and s3 always have attention on the slow processor and s4 on the fast one, whatever `shape` says.

    Example: cgopipe with 1 layer, 1 micro-batch and 1 page. The tasks are pre-attention, save qkv,
    attention, load rows, load page (of the next step), post-attention, head.
    """
    builders = {
        "cgopipe": _cgopipe,
        "s2": _s2,
        "s3": _s3,
        "s4": _s4,
        "serial": _serial,
        "in-place": _in_place,
        "on-demand": _on_demand,
        "split": _split,
    }
    whole = shape.pages if schedule == "cgopipe" else min(shape.pages, 1)
    slow = FORCED.get(schedule, shape.slow_attention)
    return builders[schedule](_Parts(replace(shape, pages=whole, slow_attention=slow)))


def prefill(shape: Shape, rows_move: bool = False) -> list[Task]:
    """The tasks of prefill: all prompts, one layer after another, on the fast processor (MoE-Lightning,
    section 4).

    shape: micro-batches and pages of prefill. With slow_attention or cache_moves, keys and values are
    copied to the slow level. rows_move: the residual is on the slow level, so each micro-batch's part is
    loaded and stored again.

    The fast level has room for two micro-batches of both. So a micro-batch waits until the last but one is
    stored.
    """
    parts = _Parts(shape)
    for layer, part in parts.iterate_parts():
        parts.page_with(layer + 1, part, stage=True)
        gone = parts.shift(layer, part, -AHEAD)
        needs = [name(Kind.PROMPT, layer - 1, part), *parts.weights(layer), name(Kind.SAVE_CACHE, *gone)]
        if shape.cut:
            needs.append(name(Kind.SAVE_CACHE, layer, part - 1))
        if rows_move and layer:
            back = [name(Kind.SAVE_ROWS, layer - 1, part), name(Kind.SAVE_ROWS, *gone)]
            needs.append(parts.list.add(Kind.LOAD_ANSWERS, layer, part, back))
        done = parts.list.add(Kind.PROMPT, layer, part, [*needs, name(Kind.SAVE_ROWS, *gone)])
        if shape.slow_attention or shape.cache_moves:
            parts.list.add(Kind.SAVE_CACHE, layer, part, [done])
        if rows_move:
            parts.list.add(Kind.SAVE_ROWS, layer, part, [done])
    for part in range(shape.micro_batches):
        parts.list.add(Kind.HEAD, shape.layers, part, [name(Kind.PROMPT, shape.layers - 1, part)])
    return parts.list.tasks


def first_layer(shape: Shape) -> list[Task]:
    """The tasks that load the first layer's weights, for a step that no other step precedes."""
    parts = _Parts(shape)
    for page in range(shape.pages_of(0)):
        parts.stage(0, page)
        parts.page(0, page)
    return parts.list.tasks


class _Parts:
    """The building blocks of schedules."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.list = TaskList()
        self.layers, self.count = shape.layers, shape.micro_batches
        self.ahead = min(AHEAD, self.count)
        self._weights: dict[int, list[Key]] = {}

    def iterate_parts(self) -> Iterator[tuple[int, int]]:
        for layer in range(self.layers):
            for part in range(self.count):
                yield layer, part

    def shift(self, layer: int, part: int, offset: int) -> tuple[int, int]:
        """The (layer, micro-batch) that comes `offset` micro-batches later, possibly in the next layer."""
        layers_ahead, part = divmod(part + offset, self.count)
        return layer + layers_ahead, part

    # ---- weights

    def pages_of(self, part: int) -> range:
        """The pages that are loaded together with a micro-batch."""
        pages, count = self.shape.pages, self.count
        return range(part * pages // count, (part + 1) * pages // count)

    def stage(self, layer: int, page: int) -> None:
        """W_CtoPin: copy a page into pinned memory.

        Pinned memory has room for one layer. So the page waits until the same page of the last layer is on
        the fast level.
        """
        if self.shape.uses_pinned_memory and layer <= self.layers and self.shape.pages_of(layer):
            self.list.add(Kind.STAGE_PAGE, layer, page, [name(Kind.LOAD_PAGE, layer - 1, page)])

    def page(self, layer: int, page: int) -> None:
        """W_PinToG: load a page to the fast level.

        There is room for two layers. So the page waits until the last layer but one is computed.
        """
        if not self.shape.pages_of(layer):
            return
        last = self.count - 1
        free = [name(kind, layer - 2, last) for kind in (Kind.POST_WITH_EXPERTS, Kind.PROMPT)]
        self.list.add(Kind.LOAD_PAGE, layer, page, [name(Kind.STAGE_PAGE, layer, page), *free])

    def page_with(self, layer: int, part: int, stage: bool) -> None:
        for page in self.pages_of(part):
            if stage:
                self.stage(layer, page)
            self.page(layer, page)

    def load_layer(self, layer: int) -> None:
        """Load a layer's weights as one page."""
        for page in range(self.shape.pages):
            self.stage(layer, page)
            self.page(layer, page)

    def weights(self, layer: int) -> list[Key]:
        """The keys of a layer's pages. Each micro-batch asks for the same ones."""
        if layer not in self._weights:
            pages = range(self.shape.pages_of(layer))
            self._weights[layer] = [name(Kind.LOAD_PAGE, layer, page) for page in pages]
        return self._weights[layer]

    # ---- a micro-batch

    def attend(self, layer: int, part: int) -> None:
        """Add the tasks from the rows to attention's result on its level.

        Beyond the last layer, add nothing.
        """
        if layer >= self.layers:
            return
        ended = (Kind.POST_WITH_EXPERTS, Kind.EXPERTS, Kind.LOAD_ANSWERS)
        pre = self.list.add(Kind.PRE, layer, part, [name(kind, layer - 1, part) for kind in ended])
        if self.shape.slow_attention:
            saved = self.list.add(Kind.SAVE_QKV, layer, part, [pre])
            self.list.add(Kind.ATTENTION, layer, part, [saved], Lane.SLOW)
            return
        done = self.list.add(Kind.ATTENTION, layer, part, [pre, name(Kind.LOAD_CACHE, layer, part)])
        if self.shape.cache_moves:
            self.list.add(Kind.SAVE_CACHE, layer, part, [done])

    def cache(self, layer: int, part: int) -> None:
        """Add the task that loads the cache of a micro-batch.

        There is room for the caches of two micro-batches. So it waits until attention of the last but one
        has ended.
        """
        if self.shape.slow_attention or not self.shape.cache_moves or layer >= self.layers:
            return
        fewer, before = divmod(part - AHEAD, self.count)
        self.list.add(Kind.LOAD_CACHE, layer, part, [name(Kind.ATTENTION, layer + fewer, before)])

    def rows(self, layer: int, part: int) -> list[Key]:
        """Add the task that loads the rows after attention to the fast level.

        Returns the tasks to wait for.
        """
        if not self.shape.slow_attention:
            return [name(Kind.ATTENTION, layer, part)]
        slow = name(Kind.ATTENTION, layer, part, Lane.SLOW)
        return [self.list.add(Kind.LOAD_ROWS, layer, part, [slow])]

    def post(self, layer: int, part: int, rows: Iterable[Key]) -> None:
        done = self.list.add(Kind.POST_WITH_EXPERTS, layer, part, [*rows, *self.weights(layer)])
        self.head(layer, part, [done])

    def head(self, layer: int, part: int, needs: Iterable[Key]) -> None:
        if layer == self.layers - 1:
            self.list.add(Kind.HEAD, layer + 1, part, needs)


# ---- schedules


def _cgopipe(parts: _Parts) -> list[Task]:
    """Algorithm 1 of MoE-Lightning."""
    first = [parts.shift(0, 0, by) for by in range(parts.ahead)]
    for layer, part in first:
        parts.cache(layer, part)
    for layer, part in first:
        if parts.shape.slow_attention:
            parts.attend(layer, part)
        for page in parts.pages_of(part):
            parts.stage(layer + 1, page)
    for layer, part in parts.iterate_parts():
        if not parts.shape.slow_attention:
            parts.attend(layer, part)
        rows = parts.rows(layer, part)
        parts.page_with(layer + 1, part, stage=False)
        parts.post(layer, part, rows)
        later, other = parts.shift(layer, part, parts.ahead)
        parts.cache(later, other)
        if parts.shape.slow_attention:
            parts.attend(later, other)
        for page in parts.pages_of(other):
            parts.stage(later + 1, page)
    return parts.list.tasks


def _s2(parts: _Parts) -> list[Task]:
    for by in range(parts.ahead):
        parts.attend(*parts.shift(0, 0, by))
    for layer, part in parts.iterate_parts():
        if not part:
            parts.load_layer(layer + 1)
        parts.post(layer, part, parts.rows(layer, part))
        parts.attend(*parts.shift(layer, part, parts.ahead))
    return parts.list.tasks


def _s3(parts: _Parts) -> list[Task]:
    for layer, part in parts.iterate_parts():
        if not part:
            parts.load_layer(layer + 1)
        parts.attend(layer, part)
        parts.post(layer, part, parts.rows(layer, part))
        parts.list.sync(layer, part)
    return parts.list.tasks


def _s4(parts: _Parts) -> list[Task]:
    parts.cache(0, 0)
    for layer, part in parts.iterate_parts():
        if not part:
            parts.load_layer(layer + 1)
        parts.cache(*parts.shift(layer, part, 1))
        parts.attend(layer, part)
        parts.post(layer, part, parts.rows(layer, part))
        parts.list.sync(layer, part)
    return parts.list.tasks


def _serial(parts: _Parts) -> list[Task]:
    for layer in range(parts.layers):
        for part in range(parts.count):
            parts.cache(layer, part)
            parts.attend(layer, part)
            parts.post(layer, part, parts.rows(layer, part))
        parts.load_layer(layer + 1)
    tasks = parts.list.tasks
    return [replace(task, needs=(place - 1,) if place else ()) for place, task in enumerate(tasks)]


def _in_place(parts: _Parts) -> list[Task]:
    for by in range(parts.ahead):
        parts.cache(*parts.shift(0, 0, by))
        parts.attend(*parts.shift(0, 0, by))
    for layer, part in parts.iterate_parts():
        gate = parts.list.add(Kind.POST_WITHOUT_EXPERTS, layer, part, parts.rows(layer, part))
        ended = []
        if parts.shape.slow_experts:
            saved = parts.list.add(Kind.SAVE_ROWS, layer, part, [gate])
            slow = parts.list.add(Kind.EXPERTS, layer, part, [saved], Lane.SLOW)
            ended.append(parts.list.add(Kind.LOAD_ANSWERS, layer, part, [slow]))
        if parts.shape.fast_experts:
            ended.append(parts.list.add(Kind.EXPERTS, layer, part, [gate]))
        parts.head(layer, part, ended)
        later = parts.shift(layer, part, parts.ahead)
        parts.cache(*later)
        parts.attend(*later)
    return parts.list.tasks


def _gates(parts: _Parts, layer: int) -> list[Key]:
    """A layer up to the gates of all parts, before any of its experts."""
    for part in range(parts.count):
        parts.cache(layer, part)
        parts.attend(layer, part)
    return [
        parts.list.add(Kind.POST_WITHOUT_EXPERTS, layer, part, parts.rows(layer, part))
        for part in range(parts.count)
    ]


def _on_demand(parts: _Parts) -> list[Task]:
    for layer in range(parts.layers):
        gates = _gates(parts, layer)
        chosen = parts.list.add(Kind.LOAD_CHOSEN, layer, 0, gates)
        if parts.shape.guesses and (layer + 1) % parts.layers not in parts.shape.dense:
            # It need not wait for a slot: gates come after the layer's experts.
            parts.list.add(Kind.LOAD_LIKELY, layer + 1, 0)
        for part in range(parts.count):
            done = parts.list.add(Kind.EXPERTS, layer, part, [gates[part], chosen])
            parts.head(layer, part, [done])
    return parts.list.tasks


def _split(parts: _Parts) -> list[Task]:
    for layer in range(parts.layers):
        gates = _gates(parts, layer)
        split = parts.list.add(Kind.SPLIT, layer, 0, gates)
        chosen = parts.list.add(Kind.LOAD_CHOSEN, layer, 0, [split])
        for part in range(parts.count):
            ended = []
            if parts.shape.slow_experts:
                saved = parts.list.add(Kind.SAVE_ROWS, layer, part, [split])
                slow = parts.list.add(Kind.EXPERTS, layer, part, [saved], Lane.SLOW)
                ended.append(parts.list.add(Kind.LOAD_ANSWERS, layer, part, [slow]))
            ended.append(parts.list.add(Kind.EXPERTS, layer, part, [split, chosen]))
            parts.head(layer, part, ended)
    return parts.list.tasks
