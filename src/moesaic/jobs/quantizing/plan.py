"""Which tensors of a checkpoint are quantised, and what the new files have.

The first file has all tensors outside the layers, and each other file those of one layer. Experts of a fused
tensor are written one by one. Of a checkpoint in FP8, the matrices that are not quantised become bf16.

Question: How is a checkpoint quantised?
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from moesaic.core.errors import CheckpointError
from moesaic.core.experts import ROWS, ExpertLayout
from moesaic.core.stored import QUANT_METHOD
from moesaic.jobs.quantizing.formats import Format, Tensor
from moesaic.kernels.table import REFERENCE
from moesaic.models import fused_tensors, registry
from moesaic.models.checkpoint import Claims
from moesaic.models.files import read_config
from moesaic.models.headers import NUMBERS, Headers, Place
from moesaic.models.loader import Loader
from moesaic.models.quantization import parse as quantization
from moesaic.models.quantization.fp8 import Fp8
from moesaic.models.quantization.parse import read_skipped_patterns
from moesaic.models.quantization.scheme import Matrix
from moesaic.models.wrapped_names import plain_names

Modules = Literal["experts", "attention", "mlp"]
"""Routed experts, the projections of attention, and dense MLPs with shared experts."""
LAYER = re.compile(r"model\.layers\.(\d+)\..*")
FP8 = "F8_E4M3"
MOST = {"I64": 8, "I32": 4, "F32": 4, "F16": 2, "BF16": 2}
"""Types that the new files can begin with: the tensors with the widest numbers come first."""


@dataclass(frozen=True)
class Fp8Matrix:
    """A matrix in FP8, and the files that it is in."""

    headers: Headers
    matrix: Matrix

    @property
    def size(self) -> int:
        """Bytes of its codes and scales."""
        return sum(self.headers.locate_part(part)[0].size for part in self.matrix.parts)


@dataclass(frozen=True)
class Weight:
    """A matrix that is quantised."""

    module: str
    """Its name in the files, without ".weight"."""
    place: Place
    """Of its numbers, or of its codes if the files have it in FP8."""
    rows: int
    columns: int
    fp8: Fp8Matrix | None = None
    """How the files have it, if that is FP8."""

    @property
    def kind(self) -> str:
        """The type of its scales in the new files, and of the matrix if it is not quantised."""
        return self.place.dtype if self.fp8 is None else "BF16"

    @property
    def size(self) -> int:
        """Bytes in the old files."""
        return self.place.size if self.fp8 is None else self.fp8.size


Expert = tuple[Weight, Weight, Weight]
"""Gate, up and down of a routed expert."""


@dataclass
class Shard:
    """One of the new files."""

    layer: int | None
    """None: the tensors outside the layers."""
    copied: dict[str, Place] = field(default_factory=dict)
    """Tensors that stay as they are."""
    converted: dict[str, Weight] = field(default_factory=dict)
    """Matrices in FP8 that become bf16."""
    experts: dict[int, Expert] = field(default_factory=dict)
    """Routed experts that are quantised."""
    others: list[Weight] = field(default_factory=list)
    """Other matrices that are quantised."""

    @property
    def weights(self) -> Iterator[Weight]:
        """All matrices that are quantised."""
        for expert in self.experts.values():
            yield from expert
        yield from self.others

    def tensors(self, form: Format) -> list[Tensor]:
        """The tensors in the order of the file, so that each begins at a multiple of the size of its
        numbers."""
        found = [Tensor(n, p.dtype, p.shape, p.size) for n, p in self.copied.items()]
        for name, one in self.converted.items():
            found.append(Tensor(name, one.kind, (one.rows, one.columns), 2 * one.rows * one.columns))
        for one in self.weights:
            found += form.tensors(one.module, one.rows, one.columns, one.kind)
        return sorted(found, key=lambda one: (-_width(one), one.name))

    @property
    def bytes_before(self) -> int:
        """Bytes of these tensors in the old files."""
        weights = [*self.weights, *self.converted.values()]
        return sum(p.size for p in self.copied.values()) + sum(one.size for one in weights)

    def bytes_after(self, form: Format) -> int:
        return sum(one.size for one in self.tensors(form))


@dataclass(frozen=True)
class Plan:
    """All new files of a checkpoint."""

    shards: tuple[Shard, ...]

    @property
    def columns(self) -> set[int]:
        """Numbers of a row, of every quantised matrix."""
        return {one.columns for shard in self.shards for one in shard.weights}

    @property
    def ignored(self) -> list[str]:
        """Modules whose matrix stays as it is, for `Format.config`. An LM head can be tied to the
        embedding."""
        names = {"lm_head"}
        for shard in self.shards:
            for name, place in shard.copied.items():
                if len(place.shape) == 2 and name.endswith(".weight") and "embed_tokens" not in name:
                    names.add(name.removesuffix(".weight"))
            names |= {one.module for one in shard.converted.values() if "embed_tokens" not in one.module}
        return sorted(names)


def make(path: Path, modules: Collection[Modules]) -> Plan:
    """Find what is quantised in the checkpoint at `path`, from the headers of its files.

    Raises CheckpointError for a checkpoint without such matrices, for one that is compressed or quantised in
    another type than FP8, and for one whose experts are stored in columns.
    """
    _refuse_quantised(path)
    headers = Headers(path)
    every = headers.list_tensors()
    plain = {stored: name for name, stored in plain_names(every).items()}
    fp8 = _fp8(headers, every)
    experts = _experts(path, headers) if "experts" in modules else {}
    others = _others(path, modules)
    inside = {part.tensor for one in fp8.values() for part in one.matrix.parts[1:]}
    shards: dict[int | None, Shard] = {None: Shard(None)}
    for (number, expert), (found, tensors) in experts.items():
        shards.setdefault(number, Shard(number)).experts[expert] = found
        inside |= tensors
    skipped = read_skipped_patterns(path)
    for name, place in every.items():
        if name in inside or any(re.fullmatch(pattern, name) for pattern in skipped):
            continue
        match = LAYER.fullmatch(plain[name])
        layer = int(match[1]) if match else None
        shard = shards.setdefault(layer, Shard(layer))
        if plain[name] in others:
            shard.others.append(_weight(name, place, fp8.get(name)))
        elif name in fp8:
            shard.converted[name] = _weight(name, place, fp8[name])
        else:
            shard.copied[name] = place
    ordered = sorted(shards.values(), key=lambda shard: -1 if shard.layer is None else shard.layer)
    plan = Plan(tuple(shard for shard in ordered if shard.copied or any(shard.weights)))
    if not plan.columns:
        raise CheckpointError(f"{path}: this model has no {' or '.join(modules)} to quantise")
    return plan


def _refuse_quantised(path: Path) -> None:
    config = read_config(path)
    told = config.get("quantization_config")
    if isinstance(told, dict) and told.get("quant_method") == QUANT_METHOD:
        raise CheckpointError(f"{path}: the experts of this model are compressed; quantise the original")
    scheme = quantization.parse(config)
    if scheme is not None and not isinstance(scheme, Fp8):
        raise CheckpointError(
            f"{path}: this model is quantised; allowed: matrices in bf16, fp16 or float32, and those of "
            "quant_method fp8"
        )


def _fp8(headers: Headers, every: Mapping[str, Place]) -> dict[str, Fp8Matrix]:
    """The matrices in FP8 by the names of their codes."""
    found = {}
    for name, place in every.items():
        if place.dtype == FP8:
            matrix = headers.find_quantized(name, *place.shape)
            if matrix is None:
                raise CheckpointError(f"{place.file}: tensor {name}: got {FP8}; allowed: only in matrices")
            found[name] = Fp8Matrix(headers, matrix)
    return found


def _weight(name: str, place: Place, fp8: Fp8Matrix | None) -> Weight:
    rows, columns = place.shape
    place = _numbers(name, place) if fp8 is None else place
    return Weight(name.removesuffix(".weight"), place, rows, columns, fp8)


def _experts(path: Path, headers: Headers) -> dict[tuple[int, int], tuple[Expert, set[str]]]:
    """(layer, expert) -> its matrices, and the tensors of the files that these are in."""
    if not registry.read_spec(path).moe_layers:
        return {}
    layout = registry.expert_layout(path, REFERENCE)
    if layout.form != ROWS:
        raise CheckpointError(
            f"{path}: the experts of this model are stored in columns or have biases; allowed: rows without "
            "biases"
        )
    names = frozenset(headers.list_tensors())
    return {
        (layer, expert): _expert(headers, names, layout, layer, expert)
        for layer in layout.layers
        for expert in range(layout.num_experts)
    }


def _expert(
    headers: Headers, names: frozenset[str], layout: ExpertLayout, layer: int, expert: int
) -> tuple[Expert, set[str]]:
    weights, tensors = [], set()
    for name, *shape in layout.tensors(layer, expert):
        rows, columns = shape
        matrix = headers.find_quantized(name, rows, columns)
        if matrix is not None:
            weights.append(_weight(name, headers.place(matrix.parts[0]), Fp8Matrix(headers, matrix)))
            tensors |= {one.tensor for one in matrix.parts}
            continue
        part = fused_tensors.find_fused_part(name, names.__contains__)
        place = _numbers(name, headers.find(name, rows, columns))
        weights.append(Weight(name.removesuffix(".weight"), place, rows, columns))
        tensors.add(name if part is None else part.tensor)
    gate, up, down = weights
    return (gate, up, down), tensors


def _numbers(name: str, place: Place) -> Place:
    if place.dtype not in NUMBERS:
        raise CheckpointError(
            f"{place.file}: tensor {name}: got {place.dtype}; allowed: {', '.join(NUMBERS)}"
        )
    return place


def _others(path: Path, modules: Iterable[str]) -> set[str]:
    """Names of other matrices of these modules, as the text model's own files have them."""
    wanted = set(modules) & {"attention", "mlp"}
    if not wanted:
        return set()
    file, config = registry.model_file(path)
    asked = _Asked(path)
    file.blocks(config, Loader(asked, REFERENCE, "meta", torch.bfloat16, positions=0))
    return {name for name in asked.matrices if _module(name) in wanted}


def _module(name: str) -> str | None:
    """The module that a matrix of a layer belongs to. Projections of linear attention and of short
    convolutions are in none: families split and join them in ways of their own."""
    if "linear_attn" in name or ".conv." in name:
        return None
    return "attention" if "attn" in name else "mlp"


class _Asked(Claims):
    """A checkpoint of which nothing is read. It notes the matrices that a model multiplies with."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.matrices: set[str] = set()

    def tensor(self, name: str, *shape: int, **how: Any) -> torch.Tensor:
        """As `Claims.tensor`. Gates and norms are read as float32."""
        multiplied = how["dtype"] is torch.bfloat16 or self.find_quantized(name, *shape) is not None
        if len(shape) == 2 and multiplied and name in self.names:
            self.matrices.add(name)
        return super().tensor(name, *shape, **how)


def _width(tensor: Tensor) -> float:
    """Bytes of a number; infinite for an empty tensor."""
    return tensor.size / math.prod(tensor.shape) if tensor.size else math.inf
