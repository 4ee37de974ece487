"""Recorded steps on a GPU: CUDA graphs.

A graph holds the launches of a step with their arguments. So tensors that it reads and writes are in the same
memory at every run, and the host may neither wait for the device nor read from it while one is recorded. What
a launch compiles or allocates for itself at its first time has to be there before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

Result = TypeVar("Result")


class GraphRecording(Generic[Result]):
    """Holds one recorded step, or a part of one."""

    def __init__(
        self, step: Callable[[], Result], pool: Any, expert_rows: torch.Tensor | None = None
    ) -> None:
        """Record `step` and run it; its result is then in `result`.

        pool: memory of graphs of which one runs at a time. expert_rows: rows of experts on the device that
        `step` reads.
        """
        self._graph = torch.cuda.CUDAGraph()
        self._expert_rows = expert_rows
        try:
            with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
                self.result = step()
            self._graph.replay()
        except BaseException:
            self.free()
            raise

    def run(self, expert_rows: torch.Tensor | None = None) -> Result:
        """The result for the present content of the step's inputs, valid until the next run in the pool.

        expert_rows: rows of experts for the first rows of the step; they may be in pinned memory.
        """
        if expert_rows is not None:
            assert self._expert_rows is not None
            self._expert_rows[: len(expert_rows)].copy_(expert_rows, non_blocking=True)
        self._graph.replay()
        return self.result

    def free(self) -> None:
        """Destroys the graph, even where the error of a step still refers to it."""
        self._graph.reset()


class GraphRecorder:
    """Makes recordings that share their memory; see `kernels.table.OperationRecorder`."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(
        self, step: Callable[[], Result], expert_rows: torch.Tensor | None = None
    ) -> GraphRecording[Result]:
        return GraphRecording(step, self._pool, expert_rows)
