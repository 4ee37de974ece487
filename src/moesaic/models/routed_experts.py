"""Loads the routed experts of a layer, in each form in which files have them.

Question: How are experts in columns (gpt-oss, DBRX) read as rows?
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from moesaic.core.errors import CheckpointError, ConfigError
from moesaic.core.experts import BIASED_ROWS, COLUMNS, DOWN_COLUMNS, HALF_COLUMNS, PARTS, ROWS
from moesaic.core.weight_types import COMPRESSED_DTYPE, is_integer, is_packed, is_quantized, split_dtype
from moesaic.kernels.weights import ExpertWeights
from moesaic.models.checkpoint import Checkpoint
from moesaic.models.loader import ExpertNames, Loader, quantised_experts


def claim_experts(checkpoint: Checkpoint, names: ExpertNames) -> None:
    """Checks that every expert exists with its shape, without reading any, and that a fused tensor has no
    others."""
    for name, *shape in names.list_tensors(0):
        fused_part = checkpoint.find_fused_part(name)
        if fused_part is not None:
            checkpoint.claim(fused_part.tensor, *fused_part.tensor_shape(names.num_experts, *shape))
    for expert in range(names.num_experts):
        for name, *shape in names.list_tensors(expert):
            checkpoint.claim(name, *shape)


def experts(loader: Loader, names: ExpertNames, expert_ids: Iterable[int] | None) -> ExpertWeights:
    """Loads the experts of one layer. `expert_ids` None means all.

    If experts are split over ranks, this loads the rank's part: rows of gate and up, columns of down.
    Raises CheckpointError for an id out of range, and for experts that cannot all have one type.
    """
    ids = set(range(names.num_experts) if expert_ids is None else expert_ids)
    if ids and not 0 <= min(ids) <= max(ids) < names.num_experts:
        raise CheckpointError(f"experts: got {sorted(ids)}; allowed: 0 to {names.num_experts - 1}")
    kind = loader.expert_type(names)
    if is_packed(kind) or (kind != "float32" and loader.device.startswith("cpu")):
        _refuse_other_types(loader.checkpoint, names, sorted(ids))
    packed_dtype = kind if is_packed(kind) else COMPRESSED_DTYPE
    loader = replace(
        loader,
        dtype=torch.uint8 if is_packed(kind) else getattr(torch, kind),
        packed_dtype=packed_dtype,
        scan=False,
    )
    load = FORMS[names.form]
    tensors = {expert: load(loader, names, expert) for expert in sorted(ids)}
    return ExpertWeights.from_resident(
        names.num_experts, tensors, PARTS[names.form], names.activation, packed_dtype
    )


def _refuse_other_types(checkpoint: Checkpoint, names: ExpertNames, expert_ids: Iterable[int]) -> None:
    """Raises CheckpointError unless these experts have the quantised types of the layer's first, or none."""
    inner, outer = split_dtype(quantised_experts(checkpoint, names) or "")
    for expert in expert_ids:
        *inners, last = (tensor for tensor in names.list_tensors(expert) if len(tensor) == 3)
        for matrix, allowed_type in [*((tensor, inner) for tensor in inners), (last, outer)]:
            quantized_matrix = checkpoint.find_quantized(*matrix)
            file_type = None if quantized_matrix is None else quantized_matrix.dtype
            if (file_type or "") != allowed_type:
                file_type = file_type or str(checkpoint.dtype(matrix[0])).removeprefix("torch.")
                allowed_type = allowed_type or "no quantised type"
                problem = f"got {file_type}; allowed: {allowed_type}, as the layer's first expert"
                raise CheckpointError(f"{checkpoint.path}: tensor {matrix[0]}: {problem}")


def _in_rows(loader: Loader, names: ExpertNames, expert: int) -> tuple[torch.Tensor, ...]:
    """Loads gate, up and down of one expert in ROWS."""
    parts: Sequence[tuple[slice, ...]] = ((), (), ())
    if loader.of_expert.size > 1:
        rank_part = loader.of_expert.part(names.width)
        parts = (rank_part,), (rank_part,), (slice(None), rank_part)
    inner, outer = split_dtype(loader.packed_dtype or "")
    types = zip(names.shapes(expert), parts, (inner, inner, outer), strict=True)
    return tuple(loader.matrix(*shape, *part, packed_dtype=dtype) for shape, part, dtype in types)


def _in_columns(loader: Loader, names: ExpertNames, expert: int) -> tuple[torch.Tensor, ...]:
    """Loads gate, up and down of one expert in COLUMNS, as rows, and their biases."""
    gate_up, down_proj = names.list_tensors(expert)[:2]
    gates, ups = _turns(loader, names)
    return (
        loader.transpose_matrix(gate_up, slice(None), gates),
        loader.transpose_matrix(gate_up, slice(None), ups),
        loader.transpose_matrix(down_proj, loader.of_expert.part(names.width)),
        *_biases(loader, names, expert),
    )


def _in_half_columns(loader: Loader, names: ExpertNames, expert: int) -> tuple[torch.Tensor, ...]:
    """Loads gate, up and down of one expert in HALF_COLUMNS, as rows."""
    gate_up, down_proj = names.list_tensors(expert)
    rank_part = loader.of_expert.part(names.width)
    ups = slice(names.width + rank_part.start, names.width + rank_part.stop)
    return (
        loader.transpose_matrix(gate_up, slice(None), rank_part),
        loader.transpose_matrix(gate_up, slice(None), ups),
        loader.transpose_matrix(down_proj, rank_part),
    )


def _with_down_in_columns(loader: Loader, names: ExpertNames, expert: int) -> tuple[torch.Tensor, ...]:
    """Loads gate, up and down of one expert in DOWN_COLUMNS."""
    gate_proj, up_proj, down_proj = names.list_tensors(expert)
    rank_part = loader.of_expert.part(names.width)
    return (
        loader.expert_matrix(gate_proj, rank_part),
        loader.expert_matrix(up_proj, rank_part),
        loader.transpose_matrix(down_proj, rank_part),
    )


def _in_biased_rows(loader: Loader, names: ExpertNames, expert: int) -> tuple[torch.Tensor, ...]:
    """Loads gate, up and down of one expert in BIASED_ROWS, and their biases."""
    return *_in_rows(loader, names, expert), *_biases(loader, names, expert)


def _turns(loader: Loader, names: ExpertNames) -> tuple[slice, slice]:
    """The places of the rank's gates and ups, which take turns."""
    rank_part = loader.of_expert.part(names.width)
    gates, ups = (slice(2 * rank_part.start + odd, 2 * rank_part.stop, 2) for odd in (0, 1))
    return gates, ups


def _biases(loader: Loader, names: ExpertNames, expert: int) -> tuple[torch.Tensor, ...]:
    """Loads the biases of gate, up and down.

    The down bias is that of the first of the ranks that share the expert, and zeros on the others, so that it
    counts once.
    """
    inner, last = map(loader.expert_vector, names.biases(expert))
    gates, ups = _turns(loader, names)
    down_bias = last if loader.of_expert.rank == 0 else torch.zeros_like(last)
    return inner[gates].contiguous(), inner[ups].contiguous(), down_bias


FORMS = {
    ROWS: _in_rows,
    BIASED_ROWS: _in_biased_rows,
    COLUMNS: _in_columns,
    HALF_COLUMNS: _in_half_columns,
    DOWN_COLUMNS: _with_down_in_columns,
}


def refuse_integer_kernels(path: Path, loader: Loader, names: Mapping[int, ExpertNames]) -> None:
    """Raises ConfigError for kernels of `table.INTEGER` where no layer has experts in integers."""
    if not loader.kernels.is_integer:
        return
    types = {loader.expert_type(layer_names) for layer_names in names.values()}
    if not any(map(is_integer, types)):
        kinds = f"routed experts in {', '.join(sorted(types))}" if types else "no routed experts"
        name = loader.kernels.name.removeprefix("native (").removesuffix(")")
        allowed_kernels = f"kernels that round nothing to int8, as {path} has {kinds}"
        raise ConfigError.field("--kernels", name, allowed_kernels)


def other_types(loader: Loader, names: Mapping[int, ExpertNames], kind: str) -> dict[int, str]:
    """Layer -> the type of its experts, of quantised ones that are not of type `kind`, or near such ones."""
    types = {layer: loader.expert_type(layer_names) for layer, layer_names in names.items()}
    quantized_types = [
        layer_type for layer_type in {kind, *types.values()} if is_quantized(split_dtype(layer_type)[0])
    ]
    return (
        {layer: layer_type for layer, layer_type in types.items() if layer_type != kind}
        if quantized_types
        else {}
    )
