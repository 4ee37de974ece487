"""Gated DeltaNet: linear attention whose state forgets by a gate and is corrected by the delta rule.

Yang, Kautz, Hatamizadeh, Gated delta networks, 2024. `kernels/states.py` has the recurrence.

Question: How are linear attention and its states computed?
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from moesaic.kernels.batch import AttentionBatch
from moesaic.kernels.matrix import Weight, concat_rows, select_rows
from moesaic.kernels.states import LayerStates, StateSizes
from moesaic.kernels.table import Kernels
from moesaic.models.block import Projections
from moesaic.models.layers import Projection
from moesaic.models.loader import Loader, columns_of

DECAY = "decay"
"""The name in GGUF files of what is -exp(A_log)."""


@dataclass(frozen=True)
class GatedDeltaNet:
    """The linear attention of one layer. See `block.Recurrence`."""

    kernels: Kernels
    mixed_proj: Weight
    """[C, h] projection to query, key and value of all heads, before the convolution."""
    output_gate: Weight
    """[Hv * dv, h]"""
    gates: Weight
    """[2 * Hv, h] projection to beta and alpha of each value head."""
    taps: torch.Tensor
    """[C, taps] float32, of the convolution. The channels of one tap lie together."""
    decay: torch.Tensor
    """[Hv] float32, negative: factor of alpha's logarithm."""
    bias: torch.Tensor
    """[Hv] float32, added to alpha's gate."""
    norm: torch.Tensor
    """[dv] float32"""
    out_proj: Projection
    epsilon: float

    def project(self, rows: torch.Tensor, positions: torch.Tensor) -> Projections:
        """rows [n, h] -> query: what the convolution mixes [n, C]; key: gates [n, 2 * Hv]; value: the gate of
        the output [n, Hv * dv]."""
        mixed_rows, gate, gates = self.kernels.linears(
            rows, [self.mixed_proj, self.output_gate, self.gates], [None, None, None]
        )
        return Projections(query=mixed_rows, key=gates, value=gate)

    def recur(self, rows: Projections, states: LayerStates, batch: AttentionBatch) -> torch.Tensor:
        """Rows of `project` -> [n, Hv * dv]. Changes `states`."""
        assert rows.value is not None
        mixed_rows = self.kernels.convolve(rows.query, self.taps, states, batch)
        read = self.kernels.delta(mixed_rows, rows.key, self.decay, self.bias, states, batch)
        return self.kernels.gated_norm(read, self.norm, rows.value, self.epsilon)

    def with_attention_kernels(self, kernels: Kernels) -> GatedDeltaNet:
        """The same attention, whose `recur` runs on a CPU with these kernels. Its vectors are on a CPU."""
        return replace(self, kernels=kernels)

    def output(self, attention_output: torch.Tensor) -> torch.Tensor:
        """[n, Hv * dv] -> [n, h]."""
        return self.kernels.linear(attention_output, self.out_proj.weight, self.out_proj.bias)


def load(loader: Loader, name: str, sizes: StateSizes, hidden: int, epsilon: float) -> GatedDeltaNet:
    """Loads the tensors under `name`, for the key heads of the shard and the value heads that belong to them.

    Of Qwen3-Next's files, in_proj_qkvz has the parts of one key head after those of another. Qwen3.5's have
    in_proj_qkv, in_proj_z, in_proj_b and in_proj_a. GGUF files have the decay, and others its logarithm.
    """
    joint = f"{name}.in_proj_qkv.weight" not in loader.checkpoint.names
    load_inputs = _by_head if joint else _by_part
    mixed_proj, gate, gates = load_inputs(loader, name, sizes, hidden)
    values = _value_heads(loader, sizes)
    columns = columns_of(values, sizes.value_width)
    taps = loader.exact(f"{name}.conv1d.weight", sizes.channels, 1, sizes.taps)[:, 0].t()
    head_rows = slice(values.start, values.stop)
    return GatedDeltaNet(
        kernels=loader.kernels,
        mixed_proj=mixed_proj,
        output_gate=gate,
        gates=gates,
        taps=torch.cat([taps[:, part] for part in _mixed_parts(loader, sizes)], 1).contiguous().t(),
        decay=_decay(loader, name, sizes.value_heads)[head_rows],
        bias=loader.exact(f"{name}.dt_bias", sizes.value_heads)[head_rows],
        norm=loader.exact(f"{name}.norm.weight", sizes.value_width),
        out_proj=loader.output_projection(
            f"{name}.out_proj", hidden, sizes.value_heads * sizes.value_width, columns
        ),
        epsilon=epsilon,
    )


def _decay(loader: Loader, name: str, heads: int) -> torch.Tensor:
    """[Hv], negative."""
    if f"{name}.{DECAY}" in loader.checkpoint.names:
        return loader.exact(f"{name}.{DECAY}", heads)
    return -torch.exp(loader.exact(f"{name}.A_log", heads))


def _value_heads(loader: Loader, sizes: StateSizes) -> range:
    """The value heads of the shard."""
    keys, heads_per_key = loader.shard.heads(sizes.key_heads), sizes.value_heads // sizes.key_heads
    return range(keys.start * heads_per_key, keys.stop * heads_per_key)


def _mixed_parts(loader: Loader, sizes: StateSizes) -> list[slice]:
    """The shard's channels of query, key and value among all channels."""
    keys = columns_of(loader.shard.heads(sizes.key_heads), sizes.key_width)
    values = columns_of(_value_heads(loader, sizes), sizes.value_width)
    width = sizes.key_heads * sizes.key_width
    starts = ((0, keys), (width, keys), (2 * width, values))
    return [slice(start + part.start, start + part.stop) for start, part in starts]


def _by_part(loader: Loader, name: str, sizes: StateSizes, hidden: int) -> tuple[Weight, Weight, Weight]:
    values, width = _value_heads(loader, sizes), sizes.value_heads * sizes.value_width
    if loader.shard.size == 1:
        mixed_proj = loader.weight(f"{name}.in_proj_qkv", sizes.channels, hidden)
    else:
        parts = _mixed_parts(loader, sizes)
        mixed_proj = concat_rows(
            [loader.weight(f"{name}.in_proj_qkv", sizes.channels, hidden, p) for p in parts]
        )
    head_rows = slice(values.start, values.stop)
    gates = [loader.weight(f"{name}.in_proj_{gate}", sizes.value_heads, hidden, head_rows) for gate in "ba"]
    gate = loader.weight(f"{name}.in_proj_z", width, hidden, columns_of(values, sizes.value_width))
    return mixed_proj, gate, concat_rows(gates)


def _by_head(loader: Loader, name: str, sizes: StateSizes, hidden: int) -> tuple[Weight, Weight, Weight]:
    keys, heads_per_key = loader.shard.heads(sizes.key_heads), sizes.value_heads // sizes.key_heads
    widths = [sizes.key_width] * 2 + [heads_per_key * sizes.value_width] * 2
    parts = _load_by_heads(loader, f"{name}.in_proj_qkvz", sizes.key_heads, keys, widths, hidden)
    gates = _load_by_heads(
        loader, f"{name}.in_proj_ba", sizes.key_heads, keys, [heads_per_key, heads_per_key], hidden
    )
    return concat_rows(parts[:3]), parts[3], concat_rows(gates)


def _load_by_heads(
    loader: Loader, name: str, heads: int, shard_heads: range, widths: list[int], hidden: int
) -> list[Weight]:
    """The rows of several projections, which follow each other head by head in one matrix."""
    total = sum(widths)
    matrix = loader.weight(name, heads * total, hidden, columns_of(shard_heads, total))
    rows = torch.arange(len(shard_heads) * total).view(len(shard_heads), total)
    return [select_rows(matrix, part.flatten()) for part in rows.split_with_sizes(widths, dim=1)]
