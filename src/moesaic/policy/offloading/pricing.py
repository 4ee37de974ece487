"""Prices a policy in time, by the very lists of tasks that would be run.

Question: How is a plan for a model larger than memory priced?
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from moesaic.cost.hardware import Hardware
from moesaic.cost.sizes import ModelSizes
from moesaic.policy.offloading.durations import Durations, Table
from moesaic.policy.offloading.footprint import Footprint
from moesaic.policy.offloading.pipeline import Schedule, decode, prefill
from moesaic.policy.offloading.policies import Policy, Workload, shape_of
from moesaic.policy.offloading.tasks import Kind, Lane, Shape, Task
from moesaic.policy.offloading.timeline import run

FEWER_LAYERS, MORE_LAYERS = 4, 6
"""Numbers of layers of two short task lists. Their difference in price is the price of two more layers."""
MOST_LISTED = 256
"""Number of micro-batches above which a pass is priced by its busiest resource.

The pipeline's start and end no longer matter then.
"""
SLOW_MEMORY = "slow memory"
"""A resource besides the lanes. Some lanes share it."""


@dataclass(frozen=True)
class Phase:
    """The price of one pass over all layers."""

    seconds: float
    busy: dict[str, float]
    """Busy seconds of each resource: of the lanes, and of the slow level's memory, which some lanes share."""

    @property
    def bottleneck(self) -> str:
        return max(self.busy, key=lambda name: self.busy[name])


@dataclass(frozen=True)
class Price:
    """The prediction for a policy: memory and time."""

    policy: Policy
    workload: Workload
    fast: dict[str, float]
    """Maximum bytes on the fast level, by content."""
    slow: dict[str, float]
    prefill: Phase
    step: Phase
    """The price of one decode step at the mean context."""

    @property
    def decode_seconds(self) -> float:
        """Seconds of all decode steps. Prefill produces the first token."""
        return (self.workload.generate - 1) * self.step.seconds

    @property
    def throughput(self) -> float:
        """Generated tokens/s over prefill and decode, the paper's metric."""
        return self.policy.batch * self.workload.generate / (self.prefill.seconds + self.decode_seconds)

    @property
    def prefill_throughput(self) -> float:
        """Prompt tokens/s in prefill."""
        return self.policy.batch * self.workload.prompt / self.prefill.seconds

    @property
    def decode_throughput(self) -> float:
        """Generated tokens/s in decode."""
        return self.policy.batch / self.step.seconds


class Pricing:
    """Prices policies for one model, machine and workload."""

    def __init__(self, model: ModelSizes, hardware: Hardware, workload: Workload) -> None:
        self.model, self.hardware, self.workload = model, hardware, workload
        self.footprint = Footprint(model, hardware, workload)
        self.durations = Durations(model, hardware, workload)

    def price(self, policy: Policy) -> Price:
        """The price of the task lists of prefill and of one decode step."""
        return Price(
            policy,
            self.workload,
            self.footprint.fast(policy),
            self.footprint.slow(policy),
            self.prefill(policy),
            self.step(policy),
        )

    def step(self, policy: Policy) -> Phase:
        """The price of one decode step, by its task list."""
        return self._step(policy, by_task_list=True)

    def prefill(self, policy: Policy, micro_batches: int | None = None) -> Phase:
        """The price of prefill over all prompts, by its task list.

        micro_batches: their number. None: the number that the footprint gives.
        """
        return self._prefill(policy, by_task_list=True, count=micro_batches)

    def bound(self, policy: Policy) -> float:
        """An upper bound of the throughput: each pass takes only as long as its busiest resource."""
        steps = (self.workload.generate - 1) * self._step(policy, by_task_list=False).seconds
        total = self._prefill(policy, by_task_list=False).seconds + steps
        return policy.batch * self.workload.generate / total

    def shape(self, policy: Policy, layers: int | None = None) -> Shape:
        """The shape of a decode step, with all layers with routed experts or with fewer."""
        return self._shape(policy, layers, policy.micro_batches)

    def prefill_shape(self, policy: Policy, layers: int | None = None, count: int | None = None) -> Shape:
        """The shape of prefill. A page is loaded with each of `count` micro-batches."""
        count = count or math.ceil(policy.batch / self.footprint.prefill_requests(policy))
        return self._shape(policy, layers, count, prompts=True)

    def _shape(self, policy: Policy, layers: int | None, count: int, prompts: bool = False) -> Shape:
        num_layers = self.model.moe_layers if layers is None else layers
        shape = shape_of(policy, self.model.experts, num_layers, count, prompts)
        return replace(shape, uses_pinned_memory=self.hardware.link.staging is not None)

    def _step(self, policy: Policy, by_task_list: bool) -> Phase:
        tables = [self.durations.decode(policy, dense) for dense in self._kinds]
        return self._phase(policy, policy.schedule, self.shape(policy), tables, by_task_list)

    def _prefill(self, policy: Policy, by_task_list: bool, count: int | None = None) -> Phase:
        shape = self.prefill_shape(policy, count=count)
        requests = policy.batch / shape.micro_batches
        tables = [self.durations.prefill(policy, requests, shape.pages, dense) for dense in self._kinds]
        order: Order = "prefill" if policy.fast_residual else "prefill, rows move"
        return self._phase(policy, order, shape, tables, by_task_list)

    @property
    def _kinds(self) -> tuple[bool, ...]:
        """The kinds of layers, as values of `dense`: with routed experts, and dense ones if there are any."""
        return (False, True) if self.model.layers > self.model.moe_layers else (False,)

    def _phase(
        self, policy: Policy, order: Order, shape: Shape, tables: Sequence[Table], by_task_list: bool
    ) -> Phase:
        """The price of a pass. tables: durations for each kind of layer.

        Dense layers are priced by their busiest resource.
        """
        busy = self._busy(policy, order, shape, tables[0], shape.layers)
        busy[Lane.FAST.value] += shape.micro_batches * tables[0][Kind.HEAD, Lane.FAST]
        seconds = max(busy.values())
        if by_task_list and shape.micro_batches <= MOST_LISTED:
            handover = self.hardware.link.handover
            seconds = max(_price_task_list(order, shape, tables[0], handover), seconds)
        for table in tables[1:]:
            plain = replace(policy, schedule="cgopipe")
            dense_busy = self._busy(plain, order, shape, table, self.model.layers - shape.layers, ROUTED)
            seconds += max(dense_busy.values())
            busy = {name: busy[name] + dense_busy[name] for name in busy}
        return Phase(seconds, busy)

    def _busy(
        self,
        policy: Policy,
        order: Order,
        shape: Shape,
        table: Table,
        layers: int,
        excluded_kinds: Sequence[Kind] = (),
    ) -> dict[str, float]:
        """Busy seconds of each resource in this number of layers."""
        lanes = dict.fromkeys(Lane, 0.0)
        for (kind, lane), count in _counts(order, replace(shape, layers=1)).items():
            if kind not in excluded_kinds:
                lanes[lane] += count * table[kind, lane]
        memory_seconds = self.durations.slow_memory(policy, lanes)
        busy_seconds = {lane.value: layers * busy for lane, busy in lanes.items()}
        return busy_seconds | {SLOW_MEMORY: layers * memory_seconds}


Order = Schedule | Literal["prefill", "prefill, rows move"]
ROUTED = (Kind.LOAD_PAGE, Kind.STAGE_PAGE, Kind.LOAD_CHOSEN, Kind.LOAD_LIKELY, Kind.EXPERTS, Kind.SPLIT)
"""Kinds of tasks that a dense layer does not have."""


def tasks_of(order: Order, shape: Shape) -> list[Task]:
    """The task list of a decode step or of prefill."""
    if order == "prefill" or order == "prefill, rows move":
        return prefill(shape, rows_move=order != "prefill")
    return decode(order, shape)


def _price_task_list(order: Order, shape: Shape, table: Table, handover: float) -> float:
    """Seconds of the task list over all layers.

    It is exact for few layers; further ones cost what the last two do.
    """
    if shape.layers <= MORE_LAYERS:
        return _makespan(order, shape, table, handover)
    shorter_seconds, longer_seconds = (
        _makespan(order, replace(shape, layers=layers), table, handover)
        for layers in (FEWER_LAYERS, MORE_LAYERS)
    )
    return longer_seconds + (shape.layers - MORE_LAYERS) * (longer_seconds - shorter_seconds) / (
        MORE_LAYERS - FEWER_LAYERS
    )


def _makespan(order: Order, shape: Shape, table: Table, handover: float) -> float:
    tasks = _cached_tasks(order, shape)
    return run(tasks, [table[task.kind, task.lane] for task in tasks], handover).makespan


@lru_cache(maxsize=16)
def _cached_tasks(order: Order, shape: Shape) -> Sequence[Task]:
    return tasks_of(order, shape)


@lru_cache(maxsize=4096)
def _counts(order: Order, shape: Shape) -> dict[tuple[Kind, Lane], int]:
    """Number of tasks of one layer by kind and lane.

    It grows linearly with the micro-batches, so lists of two and three micro-batches determine it.
    """
    paged = shape.pages > 0, order == "cgopipe" or order.startswith("prefill")
    two, three = (
        _small(order, replace(shape, layers=1, micro_batches=2, pages=0), count, *paged) for count in (2, 3)
    )
    return {key: two[key] + (shape.micro_batches - 2) * (three[key] - two[key]) for key in three}


@lru_cache(maxsize=1024)
def _small(
    order: Order, shape: Shape, count: int, streams: bool, by_micro_batch: bool
) -> Counter[tuple[Kind, Lane]]:
    """Count the tasks that one more layer adds, with `count` micro-batches."""
    pages = (count if by_micro_batch else 1) if streams else 0
    shape = replace(shape, micro_batches=count, pages=pages)
    longer, shorter = (
        Counter((task.kind, task.lane) for task in tasks_of(order, replace(shape, layers=layers)))
        for layers in (4, 3)
    )
    longer.subtract(shorter)
    return longer
