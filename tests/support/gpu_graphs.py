"""CUDA graphs and Triton's kernels on the device of `gpu_sanitizer`.

Within `graphs` torch.cuda has graphs. While one is recorded, no operation is done: its results hold what
fresh memory holds. A replay does all of them, in the same memory. It first spoils what other graphs of its
pool made and no tensor looks at any more, since it may have that memory.

What CUDA refuses while a graph is recorded is refused: to wait for the device, to read the host's memory or
to write it, and a result whose size depends on numbers. Each with an error that names the operation.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch._ops import OpOverload

from moesaic.kernels.triton import launching
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


class Graph:
    """Takes the place of torch.cuda.CUDAGraph."""

    beside = False
    """Whether a replay goes on beside the thread that asked for it, as on a GPU. Else the thread does it."""

    def __init__(self) -> None:
        self.work: list[Callable[[], object]] = []
        self.made: list[torch.Tensor] = []
        """What operations of the graph write first: its memory."""
        self.pool: Pool = weakref.WeakSet()

    def replay(self) -> None:
        if STREAM.capture is not None:
            raise RuntimeError("a graph cannot be replayed while another one is recorded")
        STREAM.drain()
        for one in self.pool:
            for tensor in one.made if one is not self else ():
                if not TAKEN.looked_at(tensor):
                    spoil(tensor)
        if Graph.beside:
            STREAM.running = Running(self._replay)
        else:
            self._replay()

    def _replay(self) -> None:
        for work in self.work:
            work()

    def launch(self, kernel: Any, grid: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        """A Triton kernel while the graph is recorded."""
        self.work.append(partial(kernel[grid], *arguments, **constants))

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
            self.made.append(made)
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
    waited = len(WAITS.of)
    STREAM.capture = partial(_refusing, graph, waited)
    GRAPHS.append(graph)
    try:
        yield
    finally:
        STREAM.capture = None
        GRAPHS.pop()


GRAPHS: list[Graph] = []
"""The graph that is recorded now, if one is."""


def _refusing(
    graph: Graph,
    waited: int,
    func: OpOverload,
    given: dict[str, Any],
    operands: Operands,
    device: torch.device,
) -> Any:
    if len(WAITS.of) > waited:
        raise RuntimeError(f"operation not permitted when stream is capturing: {WAITS.of[-1]}")
    STREAM.capture, before = None, STREAM.capture
    try:
        return graph.take(func, given, operands, device)
    finally:
        STREAM.capture = before


def _run(kernel: Any, grid: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    plain = tuple(numbers_of(one) if isinstance(one, torch.Tensor) else one for one in arguments)
    if GRAPHS:
        GRAPHS[-1].launch(kernel, grid, plain, constants)
        return
    STREAM.drain()
    kernel[grid](*plain, **constants)


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
