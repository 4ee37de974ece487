"""Writes the new files of a quantised checkpoint one after the other, and goes on where it stopped."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from moesaic.core.errors import CheckpointError
from moesaic.jobs.quantizing.calibrating import LayerRounder, Nearest, Rounded, Rounder
from moesaic.jobs.quantizing.directory import Directory, ShardFile
from moesaic.jobs.quantizing.formats import Coded, Format, as_bytes
from moesaic.jobs.quantizing.plan import Expert, Plan, Shard, Weight
from moesaic.jobs.quantizing.rounding import Rounding
from moesaic.models.headers import Place

KINDS: dict[str, Any] = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
Given = TypeVar("Given")
Made = TypeVar("Made")


def names(plan: Plan) -> list[str]:
    """The names of the new files, in the order of the plan."""
    count = len(plan.shards)
    return [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


class Writer:
    """Writes files of a plan into a directory."""

    def __init__(
        self, form: Format, directory: Directory, rounder: Rounder, threads: int, show: Callable[[int], None]
    ) -> None:
        """threads: how many read and round. show: called with bytes of the old files that are done."""
        self._form, self._directory, self._rounder = form, directory, rounder
        self._threads, self._show = threads, show
        self._done = 0

    def write(self, name: str, shard: Shard, layers: int) -> None:
        """Write a file. layers: layers of the model; what comes after them has no experts of the model."""
        routed = shard.layer is not None and shard.layer < layers
        with (
            self._directory.writing(name, shard.tensors(self._form)) as file,
            self._rounder.layer(shard.layer or 0) if routed else nullcontext(Nearest()) as rounder,
        ):
            for tensor, place in shard.copied.items():
                for size in file.copy(tensor, place.file, place.offset):
                    self._count(size)
            for (tensor, weight), data in self._in_order(shard.converted.items(), _in_bf16):
                file.put(tensor, data)
                self._count(weight.size)
            self._experts(shard, file, rounder)
            for weight, coded in self._in_order(shard.others, self._nearest):
                self._put(file, weight, coded)

    def _experts(self, shard: Shard, file: ShardFile, rounder: LayerRounder) -> None:
        def rounded(item: tuple[int, Expert]) -> Rounded:
            gate, up, down = (partial(read, one) for one in item[1])
            return rounder.expert(item[0], (gate, up, down), self._rounding(item[1][0]))

        for (expert, weights), made in self._in_order(sorted(shard.experts.items()), rounded):
            rounder.add(expert, made)
            for weight, coded in zip(weights, made.matrices, strict=True):
                self._put(file, weight, coded)

    def _nearest(self, weight: Weight) -> Coded:
        return self._rounding(weight).nearest(read(weight))

    def _rounding(self, weight: Weight) -> Rounding:
        return Rounding(self._form, weight.kind)

    def _put(self, file: ShardFile, weight: Weight, coded: Coded) -> None:
        scales = weight.kind
        tensors = self._form.tensors(weight.module, weight.rows, weight.columns, scales)
        for tensor, data in zip(tensors, self._form.stored(coded, scales), strict=True):
            file.put(tensor.name, data)
        self._count(weight.size)

    def _count(self, size: int) -> None:
        self._done += size
        self._show(self._done)

    def _in_order(
        self, items: Iterable[Given], make: Callable[[Given], Made]
    ) -> Iterator[tuple[Given, Made]]:
        """Yields each item and what is made of it, in order. Threads make the next ones meanwhile."""
        waiting: deque[tuple[Given, Future[Made]]] = deque()
        pool = ThreadPoolExecutor(self._threads)
        try:
            for item in items:
                waiting.append((item, pool.submit(_in_mode, make, item)))
                if len(waiting) > self._threads:
                    first, future = waiting.popleft()
                    yield first, future.result()
            for first, future in waiting:
                yield first, future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _in_mode(make: Callable[[Given], Made], item: Given) -> Made:
    """torch's inference mode belongs to a thread."""
    with torch.inference_mode():
        return make(item)


def read(weight: Weight) -> torch.Tensor:
    """The numbers of a matrix [rows, columns], float32. Raises CheckpointError for NaN and infinite ones."""
    place = weight.place
    if weight.fp8 is not None:
        return torch.from_numpy(weight.fp8.matrix.floats(weight.fp8.headers.reader(_stored)))
    count = weight.rows * weight.columns
    stored = np.fromfile(place.file, dtype=KINDS[place.dtype], count=count, offset=place.offset)
    if len(stored) < count:
        raise CheckpointError(f"{place.file}: tensor {weight.module}.weight: the file ends within it")
    if place.dtype == "BF16":
        stored = np.left_shift(stored, 16, dtype=np.uint32).view(np.float32)
    floats = stored.astype(np.float32, copy=False)
    numbers = torch.from_numpy(floats).view(weight.rows, weight.columns)
    finite = numbers.isfinite()
    if not finite.all():
        got = float(numbers[~finite][0])
        raise CheckpointError(
            f"{place.file}: tensor {weight.module}.weight: got {got}; allowed: finite numbers"
        )
    return numbers


def _in_bf16(item: tuple[str, Weight]) -> bytes:
    """The numbers of a matrix, rounded to bf16."""
    return as_bytes(read(item[1]).numpy(), "BF16")


def _stored(place: Place) -> npt.NDArray[np.uint8]:
    """The bytes of a place."""
    found = np.fromfile(place.file, dtype=np.uint8, count=place.size, offset=place.offset)
    if len(found) < place.size:
        raise CheckpointError(f"{place.file}: the file ends within a tensor")
    return found
