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
from moesaic.core.weight_types import QUANT_METHOD
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
MAX_ALIGNMENTS = {"I64": 8, "I32": 4, "F32": 4, "F16": 2, "BF16": 2}
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
    """Name of the matrix in the files, without ".weight"."""
    place: Place
    """Where its numbers are in the files, or its codes if the files have it in FP8."""
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
    """The tensors of one new file, by what becomes of them."""

    layer: int | None
    """None: the tensors outside the layers."""
    copied_tensors: dict[str, Place] = field(default_factory=dict)
    """Tensors that stay as they are."""
    converted_matrices: dict[str, Weight] = field(default_factory=dict)
    """Matrices in FP8 that become bf16."""
    experts: dict[int, Expert] = field(default_factory=dict)
    """Routed experts that are quantised."""
    other_matrices: list[Weight] = field(default_factory=list)
    """Other matrices that are quantised."""

    @property
    def weights(self) -> Iterator[Weight]:
        """All matrices that are quantised."""
        for expert in self.experts.values():
            yield from expert
        yield from self.other_matrices

    def tensors(self, form: Format) -> list[Tensor]:
        """The tensors in the order of the file, so that each begins at a multiple of the size of its
        numbers."""
        all_tensors = [Tensor(n, p.dtype, p.shape, p.size) for n, p in self.copied_tensors.items()]
        for name, weight in self.converted_matrices.items():
            all_tensors.append(
                Tensor(name, weight.kind, (weight.rows, weight.columns), 2 * weight.rows * weight.columns)
            )
        for weight in self.weights:
            all_tensors += form.tensors(weight.module, weight.rows, weight.columns, weight.kind)
        return sorted(all_tensors, key=lambda weight: (-_width(weight), weight.name))

    @property
    def bytes_before(self) -> int:
        """Bytes of these tensors in the old files."""
        weights = [*self.weights, *self.converted_matrices.values()]
        return sum(p.size for p in self.copied_tensors.values()) + sum(weight.size for weight in weights)

    def bytes_after(self, form: Format) -> int:
        return sum(tensor.size for tensor in self.tensors(form))


@dataclass(frozen=True)
class Plan:
    """All new files of a checkpoint."""

    shards: tuple[Shard, ...]

    @property
    def columns(self) -> set[int]:
        """Numbers of a row, of every quantised matrix."""
        return {weight.columns for shard in self.shards for weight in shard.weights}

    @property
    def modules_to_ignore(self) -> list[str]:
        """Modules whose matrix stays as it is, for `Format.config`. An LM head can be tied to the
        embedding."""
        names = {"lm_head"}
        for shard in self.shards:
            for name, place in shard.copied_tensors.items():
                if len(place.shape) == 2 and name.endswith(".weight") and "embed_tokens" not in name:
                    names.add(name.removesuffix(".weight"))
            names |= {
                weight.module
                for weight in shard.converted_matrices.values()
                if "embed_tokens" not in weight.module
            }
        return sorted(names)


def make(path: Path, modules: Collection[Modules]) -> Plan:
    """Find what is quantised in the checkpoint at `path`, from the headers of its files.

    Raises CheckpointError for a checkpoint without such matrices, for one that is compressed or quantised in
    another type than FP8, and for one whose experts are stored in columns.
    """
    _refuse_quantised(path)
    headers = Headers(path)
    places = headers.list_tensors()
    plain = {stored_name: name for name, stored_name in plain_names(places).items()}
    fp8 = _fp8(headers, places)
    experts = _experts(path, headers) if "experts" in modules else {}
    other_names = _list_other_matrices(path, modules)
    expert_tensors = {part.tensor for fp8_matrix in fp8.values() for part in fp8_matrix.matrix.parts[1:]}
    shards: dict[int | None, Shard] = {None: Shard(None)}
    for (number, expert), (expert_matrices, tensors) in experts.items():
        shards.setdefault(number, Shard(number)).experts[expert] = expert_matrices
        expert_tensors |= tensors
    skipped_patterns = read_skipped_patterns(path)
    for name, place in places.items():
        # Experts are written one by one, also those of a fused tensor, so it is not copied.
        if name in expert_tensors or any(re.fullmatch(pattern, name) for pattern in skipped_patterns):
            continue
        match = LAYER.fullmatch(plain[name])
        layer = int(match[1]) if match else None
        shard = shards.setdefault(layer, Shard(layer))
        if plain[name] in other_names:
            shard.other_matrices.append(_weight(name, place, fp8.get(name)))
        elif name in fp8:
            shard.converted_matrices[name] = _weight(name, place, fp8[name])
        else:
            shard.copied_tensors[name] = place
    sorted_shards = sorted(shards.values(), key=lambda shard: -1 if shard.layer is None else shard.layer)
    plan = Plan(tuple(shard for shard in sorted_shards if shard.copied_tensors or any(shard.weights)))
    if not plan.columns:
        raise CheckpointError(f"{path}: this model has no {' or '.join(modules)} to quantise")
    return plan


def _refuse_quantised(path: Path) -> None:
    config = read_config(path)
    quantization_config = config.get("quantization_config")
    if isinstance(quantization_config, dict) and quantization_config.get("quant_method") == QUANT_METHOD:
        raise CheckpointError(f"{path}: the experts of this model are compressed; quantise the original")
    scheme = quantization.parse(config)
    if scheme is not None and not isinstance(scheme, Fp8):
        raise CheckpointError(
            f"{path}: this model is quantised; allowed: matrices in bf16, fp16 or float32, and those of "
            "quant_method fp8"
        )


def _fp8(headers: Headers, places: Mapping[str, Place]) -> dict[str, Fp8Matrix]:
    """The matrices in FP8 by the names of their codes."""
    matrices = {}
    for name, place in places.items():
        if place.dtype == FP8:
            matrix = headers.find_quantized(name, *place.shape)
            if matrix is None:
                raise CheckpointError(f"{place.file}: tensor {name}: got {FP8}; allowed: only in matrices")
            matrices[name] = Fp8Matrix(headers, matrix)
    return matrices


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
            tensors |= {matrix_part.tensor for matrix_part in matrix.parts}
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


def _list_other_matrices(path: Path, modules: Iterable[str]) -> set[str]:
    """Names of other matrices of these modules, as the text model's own files have them."""
    wanted_modules = set(modules) & {"attention", "mlp"}
    if not wanted_modules:
        return set()
    file, config = registry.model_file(path)
    recorder = _MatrixRecorder(path)
    file.blocks(config, Loader(recorder, REFERENCE, "meta", torch.bfloat16, positions=0))
    return {name for name in recorder.matrices if _module(name) in wanted_modules}


def _module(name: str) -> str | None:
    """The module that a matrix of a layer belongs to. Projections of linear attention and of short
    convolutions are in none: families split and join them in ways of their own."""
    if "linear_attn" in name or ".conv." in name:
        return None
    return "attention" if "attn" in name else "mlp"


class _MatrixRecorder(Claims):
    """A checkpoint of which nothing is read. It notes the matrices that a model multiplies with."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.matrices: set[str] = set()

    def tensor(self, name: str, *shape: int, **options: Any) -> torch.Tensor:
        """Note a matrix that is multiplied with, and claim it. Gates and norms are read as float32."""
        is_multiplied = options["dtype"] is torch.bfloat16 or self.find_quantized(name, *shape) is not None
        if len(shape) == 2 and is_multiplied and name in self.names:
            self.matrices.add(name)
        return super().tensor(name, *shape, **options)


def _width(tensor: Tensor) -> float:
    """Bytes of a number; infinite for an empty tensor."""
    return tensor.size / math.prod(tensor.shape) if tensor.size else math.inf
