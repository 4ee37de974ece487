"""Records the native operations of a step and runs them again in one call, like a CUDA graph on a GPU.

Between two operations, Python takes as long as several operations compute for one token. A recording has no
Python between them: inputs and results are in the same memory each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moesaic.kernels.native import _native
from moesaic.kernels.native.memory import MEMORY, Arena


class _OnlyViews(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes torch's own arithmetic an error, since it would be missing from a recording."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: to exclude torch.compile, torch would import it, which takes over a second and 70 MB."""
        return False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        results = list(_tensors((answer,)))
        input_storages = {tensor.untyped_storage().data_ptr() for tensor in _tensors(args)}
        views = results and all(tensor.untyped_storage().data_ptr() in input_storages for tensor in results)
        if (not views or function._schema.is_mutable) and name not in ("empty", "new_empty", "detach_"):
            raise RuntimeError(f"torch's {name} cannot be part of a recorded step")
        return answer


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


Result = TypeVar("Result")


class Recording(Generic[Result]):
    """A recorded step: its operations, and the memory that they read and write."""

    def __init__(
        self, step: Callable[[], Result], arena: Arena, expert_rows: torch.Tensor | None = None
    ) -> None:
        """Run `step` once; its result is then in `result`. expert_rows: dense rows of experts that `step`
        merges.

        Raises RuntimeError if it computes with torch.
        """
        self._tape = _native.Tape()
        MEMORY.arena, MEMORY.kept_tensors = arena, []
        _native.record(self._tape, _address(expert_rows))
        try:
            with _OnlyViews():  # type: ignore[no-untyped-call]
                self.result = step()
        finally:
            _native.stop()
            # The tape has only addresses. These references keep the memory there alive.
            self._kept_tensors = MEMORY.kept_tensors
            MEMORY.arena, MEMORY.kept_tensors = None, []

    def run(self, expert_rows: torch.Tensor | None = None) -> Result:
        """The result for the present content of the step's inputs. It is valid until the next run.
        expert_rows: rows of experts in place of those of the recording, of the same shape; they may be
        anywhere."""
        absent = self._tape.run(_address(expert_rows))
        # The tape checks expert ids as it runs, since a gate inside of it chose them.
        if absent != _native.ALL_HELD:
            raise KeyError("a routed expert is not held here")
        return self.result

    def free(self) -> None:
        """Frees its operations and their memory."""
        self._tape, self._kept_tensors = _native.Tape(), []


def _address(rows: torch.Tensor | None) -> int:
    return 0 if rows is None else rows.data_ptr()
