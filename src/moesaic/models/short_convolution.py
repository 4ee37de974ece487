"""Gated short convolutions in place of attention (Liquid AI, LFM2).

Each row has three projections B, C and x of h numbers. A causal convolution of a few taps mixes each channel
of B * x with those of the rows just before, and C * the result is projected to the output. So the state of a
sequence is the last rows of B * x: the same numbers, whatever the chunks were.

Question: How are short convolutions computed?
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from moesaic.kernels.batch import AttentionBatch
from moesaic.kernels.matrix import Weight
from moesaic.kernels.states import LayerStates
from moesaic.kernels.table import Kernels
from moesaic.models.block import Projections
from moesaic.models.layers import Projection
from moesaic.models.loader import Loader


@dataclass(frozen=True)
class ShortConvolution:
    """The convolution of one layer. See `block.Recurrence`. A rank of a group has c of the h channels."""

    kernels: Kernels
    inputs: tuple[Weight, Weight, Weight]
    """[c, h] each: the projections to B, C and x."""
    taps: torch.Tensor
    """[c, taps] float32. The channels of one tap lie together."""
    out_proj: Projection

    def project(self, rows: torch.Tensor, positions: torch.Tensor) -> Projections:
        """rows [n, h] -> query: B * x [n, c], which the convolution mixes; key: C [n, c]."""
        input_gate, output_gate, value = self.kernels.linears(rows, self.inputs, [None, None, None])
        return Projections(query=self.kernels.times(input_gate, value), key=output_gate, value=None)

    def recur(self, rows: Projections, states: LayerStates, batch: AttentionBatch) -> torch.Tensor:
        """Rows of `project` -> [n, c]. Changes `states`."""
        mixed_rows = self.kernels.convolve(rows.query, self.taps, states, batch, activate=False)
        return self.kernels.times(mixed_rows, rows.key)

    def with_attention_kernels(self, kernels: Kernels) -> ShortConvolution:
        """The same convolution, whose `recur` runs on a CPU with these kernels. Its taps are on a CPU."""
        return replace(self, kernels=kernels)

    def output(self, attention_output: torch.Tensor) -> torch.Tensor:
        """[n, c] -> [n, h]."""
        return self.kernels.linear(attention_output, self.out_proj.weight, self.out_proj.bias)


def load(loader: Loader, name: str, hidden: int, taps: int) -> ShortConvolution:
    """Loads in_proj, conv and out_proj under `name`, for the channels of the shard."""
    shard_channels, input_name = loader.shard.heads(hidden), f"{name}.in_proj"
    parts = [
        slice(begin + shard_channels.start, begin + shard_channels.stop) for begin in (0, hidden, 2 * hidden)
    ]
    input_gate, output_gate, value = (loader.weight(input_name, 3 * hidden, hidden, part) for part in parts)
    channels = slice(shard_channels.start, shard_channels.stop)
    weight = loader.exact(f"{name}.conv.weight", hidden, 1, taps)[channels, 0]
    return ShortConvolution(
        kernels=loader.kernels,
        inputs=(input_gate, output_gate, value),
        taps=weight.t().contiguous().t(),
        out_proj=loader.output_projection(f"{name}.out_proj", hidden, hidden, channels),
    )
