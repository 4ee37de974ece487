"""CUDA graphs and Triton's kernels on the device of `gpu_sanitizer`.

Within `graphs` torch.cuda has graphs. While one is recorded, no operation is done: its results hold what
fresh memory holds. A replay does all of them, in the same memory. It spoils what other graphs of its pool
made and no tensor looks at any more, where it may have that memory: where those were recorded later, or the
last tensor that looked at it was gone before the end of this recording.

What CUDA refuses while a graph is recorded is refused: to wait for the device, to read the host's memory or
to write it, and a result whose size depends on numbers. Each with an error that names the operation.
"""

from __future__ import annotations

import itertools
import math
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch._ops import OpOverload

from moesaic.gpu.triton import launching
from tests.support.gpu_sanitizer import (
    CPU,
    DEVICE,
    STREAM,
    TAKEN,
    WAITS,
    Dispatch,
    OnDevice,
    Operands,
    Operation,
    Running,
    mapped,
    numbers_of,
    spoil,
)

Pool = weakref.WeakSet["Graph"]


COUNT = itertools.count(1)


@dataclass
class Made:
    """Memory of a graph."""

    memory: torch.Tensor
    gone: float = math.inf
    """The recording in which the last tensor that looked at it was gone. Before one: half of one less."""


class Graph:
    """Takes the place of torch.cuda.CUDAGraph."""

    beside = False
    """Whether a replay goes on beside the thread that asked for it, as on a GPU. Else the thread does it."""

    def __init__(self) -> None:
        self.work: list[Callable[[], object]] = []
        self.made: list[Made] = []
        """What operations of the graph write first: its memory."""
        self.pool: Pool = weakref.WeakSet([self])
        self.number = 0
        """It counts the recordings, from 1."""

    def reset(self) -> None:
        """Give back its memory."""
        self.work, self.made = [], []

    def replay(self) -> None:
        if STREAM.capture is not None:
            raise RuntimeError("a graph cannot be replayed while another one is recorded")
        STREAM.drain()
        others = [(one, made) for one in self.pool if one is not self for made in one.made]
        free = [(one, made) for one, made in others if not TAKEN.looked_at(made.memory)]
        for one, made in free:
            if one.number > self.number or made.gone < self.number:
                spoil(made.memory)
        if Graph.beside:
            STREAM.running = Running(partial(self._replay, free))
        else:
            self._replay(free)

    def _replay(self, free: list[tuple[Graph, Made]]) -> None:
        for work in self.work:
            work()
        for _, made in free:
            if made.gone == self.number:
                spoil(made.memory)

    def launch(self, kernel: Any, grid: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        """A Triton kernel while the graph is recorded."""
        self.work.append(partial(_interpret, kernel, grid, arguments, constants))

    def take(self, func: OpOverload, given: dict[str, Any], operands: Operands, device: torch.device) -> Any:
        """An operation of torch while the graph is recorded."""
        name = func._schema.name.partition("::")[2]
        there = [one for _, one in operands if isinstance(one, OnDevice)]
        plain = {key: mapped(value, numbers_of) for key, value in given.items()}
        if device == CPU and not there:
            return func(**plain)
        if any(one.dim() for _, one in operands if not isinstance(one, OnDevice)) or device == CPU:
            raise RuntimeError(
                f"operation not permitted when stream is capturing: {name} uses the host's memory"
            )
        if given.get("device") is not None:
            plain["device"] = CPU
        returned = [one.alias_info for one in func._schema.returns]
        if any(one is not None and one.is_write for one in returned):
            self.work.append(partial(func, **plain))
            return given[func._schema.arguments[0].name]
        if any(one is not None for one in returned):
            view = func(**plain)
            storages = {one.numbers.untyped_storage().data_ptr() for one in there}
            if all(one.untyped_storage().data_ptr() in storages for one in _tensors(view)):
                return mapped(view, OnDevice)
        made = self._memory(func, name, plain)
        self.work.append(partial(_compute, func, plain, made))
        return mapped(made, OnDevice)

    def _memory(self, func: OpOverload, name: str, plain: dict[str, Any]) -> Any:
        """Memory for the results, whose sizes are known without the numbers."""
        shapes = {key: mapped(value, lambda one: one.to("meta")) for key, value in plain.items()}
        if plain.get("device") is not None:
            shapes["device"] = torch.device("meta")
        try:
            result = func(**shapes)
        except (RuntimeError, NotImplementedError) as error:
            says = f"operation not permitted when stream is capturing: {name}: {error}"
            raise RuntimeError(says) from None

        def memory(one: torch.Tensor) -> torch.Tensor:
            made = torch.empty_strided(one.shape, one.stride(), dtype=one.dtype)
            spoil(made)
            self.made.append(Made(made))
            return made

        return mapped(result, memory)


def _tensors(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    mapped(value, lambda one: found.append(one) or one)
    return found


def _compute(func: OpOverload, plain: dict[str, Any], made: Any) -> None:
    for mine, result in zip(_tensors(made), _tensors(func(**plain)), strict=True):
        mine.copy_(result)


@contextmanager
def record(graph: Graph, pool: Pool | None = None, capture_error_mode: str = "global") -> Iterator[None]:
    """Takes the place of torch.cuda.graph."""
    if STREAM.waiting:
        STREAM.drain()
    if pool is not None:
        graph.pool = pool
        pool.add(graph)
    graph.number = next(COUNT)
    _look(graph.pool, graph.number - 0.5)
    waited = len(WAITS.mine.of)
    STREAM.capture = partial(_refusing, graph, waited)
    CAPTURED.graph = graph
    try:
        yield
    finally:
        STREAM.capture = CAPTURED.graph = None
        _look(graph.pool, graph.number)


def _look(pool: Pool, now: float) -> None:
    """Note which memory of these graphs nobody looks at any more."""
    for graph in pool:
        for one in graph.made:
            if one.gone > now and not TAKEN.looked_at(one.memory):
                one.gone = now


class Captured(threading.local):
    """The graph that the calling thread records now, if it records one."""

    graph: Graph | None = None


CAPTURED = Captured()
INTERPRETER = threading.RLock()
"""Triton's interpreter runs one kernel at a time: it keeps the present program in variables of its module."""


def _refusing(
    graph: Graph,
    waited: int,
    func: OpOverload,
    given: dict[str, Any],
    operands: Operands,
    device: torch.device,
) -> Any:
    if len(WAITS.mine.of) > waited:
        raise RuntimeError(f"operation not permitted when stream is capturing: {WAITS.mine.of[-1]}")
    STREAM.capture, before = None, STREAM.capture
    try:
        return graph.take(func, given, operands, device)
    finally:
        STREAM.capture = before


def _run(kernel: Any, grid: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    plain = tuple(numbers_of(one) if isinstance(one, torch.Tensor) else one for one in arguments)
    if CAPTURED.graph is not None:
        CAPTURED.graph.launch(kernel, grid, plain, constants)
        return
    STREAM.drain()
    _interpret(kernel, grid, plain, constants)


def _interpret(kernel: Any, grid: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    """One thread at a time: Triton's interpreter changes modules while it runs a kernel."""
    with INTERPRETER:
        kernel[grid](*arguments, **constants)


@contextmanager
def graphs() -> Iterator[None]:
    """Within it and `sanitized`, torch.cuda has graphs, and Triton's kernels run on the device."""
    there: dict[str, Any] = {
        "CUDAGraph": Graph,
        "graph": record,
        "graph_pool_handle": lambda: weakref.WeakSet(),
        "device": lambda device: Dispatch(),  # type: ignore[no-untyped-call]
    }
    real = {"data_ptr": lambda one: one.numbers.data_ptr()}  # tables of pointers are read by the interpreter
    with (
        mock.patch.multiple(torch.cuda, **there),
        mock.patch.multiple(OnDevice, **real),
        mock.patch.object(launching, "run", _run),
    ):
        yield


__all__ = ["DEVICE", "Graph", "Operation", "graphs", "record"]
