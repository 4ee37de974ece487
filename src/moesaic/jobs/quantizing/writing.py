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
from moesaic.jobs.quantizing.calibrating import LayerRounder, NearestRounder, RoundedExpert, Rounder
from moesaic.jobs.quantizing.directory import Directory, ShardFile
from moesaic.jobs.quantizing.formats import Format, QuantizedMatrix, as_bytes
from moesaic.jobs.quantizing.plan import Expert, Plan, Shard, Weight
from moesaic.jobs.quantizing.rounding import Rounding
from moesaic.models.headers import Place

KINDS: dict[str, Any] = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
Input = TypeVar("Input")
Result = TypeVar("Result")


def file_names(plan: Plan) -> list[str]:
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
        self._bytes_done = 0

    def write(self, name: str, shard: Shard, layers: int) -> None:
        """Write a file. layers: layers of the model; what comes after them has no experts of the model."""
        has_experts = shard.layer is not None and shard.layer < layers
        with (
            self._directory.writing(name, shard.tensors(self._form)) as file,
            self._rounder.layer(shard.layer or 0)
            if has_experts
            else nullcontext(NearestRounder()) as rounder,
        ):
            for tensor, place in shard.copied_tensors.items():
                for size in file.copy(tensor, place.file, place.offset):
                    self._count(size)
            for (tensor, weight), data in self._in_order(shard.converted_matrices.items(), _in_bf16):
                file.put(tensor, data)
                self._count(weight.size)
            self._experts(shard, file, rounder)
            for weight, matrix in self._in_order(shard.other_matrices, self._nearest):
                self._put(file, weight, matrix)

    def _experts(self, shard: Shard, file: ShardFile, rounder: LayerRounder) -> None:
        def round_expert(item: tuple[int, Expert]) -> RoundedExpert:
            gate, up, down = (partial(read_weight, matrix_weight) for matrix_weight in item[1])
            return rounder.expert(item[0], (gate, up, down), self._rounding(item[1][0]))

        for (expert, weights), rounded_expert in self._in_order(sorted(shard.experts.items()), round_expert):
            rounder.add(expert, rounded_expert)
            for weight, matrix in zip(weights, rounded_expert.matrices, strict=True):
                self._put(file, weight, matrix)

    def _nearest(self, weight: Weight) -> QuantizedMatrix:
        return self._rounding(weight).nearest(read_weight(weight))

    def _rounding(self, weight: Weight) -> Rounding:
        return Rounding(self._form, weight.kind)

    def _put(self, file: ShardFile, weight: Weight, matrix: QuantizedMatrix) -> None:
        scales = weight.kind
        tensors = self._form.tensors(weight.module, weight.rows, weight.columns, scales)
        for tensor, data in zip(tensors, self._form.encode(matrix, scales), strict=True):
            file.put(tensor.name, data)
        self._count(weight.size)

    def _count(self, size: int) -> None:
        self._bytes_done += size
        self._show(self._bytes_done)

    def _in_order(
        self, items: Iterable[Input], make: Callable[[Input], Result]
    ) -> Iterator[tuple[Input, Result]]:
        """Yields each item and what is made of it, in order. Threads make the next ones meanwhile."""
        waiting: deque[tuple[Input, Future[Result]]] = deque()
        pool = ThreadPoolExecutor(self._threads)
        try:
            for item in items:
                waiting.append((item, pool.submit(_in_mode, make, item)))
                # More results in advance would only take memory.
                if len(waiting) > self._threads:
                    first, future = waiting.popleft()
                    yield first, future.result()
            for first, future in waiting:
                yield first, future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _in_mode(make: Callable[[Input], Result], item: Input) -> Result:
    """torch's inference mode belongs to a thread."""
    with torch.inference_mode():
        return make(item)


def read_weight(weight: Weight) -> torch.Tensor:
    """The numbers of a matrix [rows, columns], float32. Raises CheckpointError for NaN and infinite ones."""
    place = weight.place
    if weight.fp8 is not None:
        return torch.from_numpy(weight.fp8.matrix.floats(weight.fp8.headers.reader(_read_bytes)))
    count = weight.rows * weight.columns
    raw_numbers = np.fromfile(place.file, dtype=KINDS[place.dtype], count=count, offset=place.offset)
    if len(raw_numbers) < count:
        raise CheckpointError(f"{place.file}: tensor {weight.module}.weight: the file ends within it")
    # NumPy has no bf16. Its bits are the upper half of a float32's.
    if place.dtype == "BF16":
        raw_numbers = np.left_shift(raw_numbers, 16, dtype=np.uint32).view(np.float32)
    floats = raw_numbers.astype(np.float32, copy=False)
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
    return as_bytes(read_weight(item[1]).numpy(), "BF16")


def _read_bytes(place: Place) -> npt.NDArray[np.uint8]:
    """The bytes of a place."""
    data = np.fromfile(place.file, dtype=np.uint8, count=place.size, offset=place.offset)
    if len(data) < place.size:
        raise CheckpointError(f"{place.file}: the file ends within a tensor")
    return data
