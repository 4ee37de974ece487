"""Linear attention on the compiled module: as `native.ops`. The reference states the shapes."""

from __future__ import annotations

import torch

from moesaic.core.tokens import STATE_FIELDS
from moesaic.kernels.batch import AttentionBatch
from moesaic.kernels.native import _native, checks
from moesaic.kernels.native.memory import MEMORY
from moesaic.kernels.states import CHUNK, LayerStates, StateSizes

MOST_TAPS = 8
WIDTH_STEP, MOST_WIDTH = 8, 256


def convolve(
    rows: torch.Tensor,
    weight: torch.Tensor,
    states: LayerStates,
    batch: AttentionBatch,
    activate: bool = True,
) -> torch.Tensor:
    """Mixes each channel of rows [n, C] with the rows before it in its sequence. activate: then applies silu.

    weight: [C, taps] float32, dense in either axis; it is faster if the channels of a tap lie together.
    """
    n, channels = checks.axes(rows, 2)
    rows, taps = checks.rows_with_stride(rows, batch.batch.num_rows, states.sizes.channels), states.sizes.taps
    if not 2 <= taps <= MOST_TAPS:
        raise ValueError(f"taps: got {taps}; allowed: 2 to {MOST_TAPS}")
    # The kernel mixes neighbouring channels in one vector, which is one load if a tap's channels are
    # together.
    by_tap = weight.t().is_contiguous()
    checks.exact(weight.t() if by_tap else weight, *((taps, channels) if by_tap else (channels, taps)))
    pages, ring = states.page_tails, states.sizes.ring
    tails = [checks.exact(pages, len(pages), taps - 1, channels)]
    tails.append(checks.exact(states.tails, len(states.tails), ring, channels))
    output = MEMORY.empty(n, channels)
    _native.convolve(
        rows.data_ptr(), rows.stride(0), weight.data_ptr(), *((1, channels) if by_tap else (taps, 1)), *tails,
        output.data_ptr(), n, channels, taps, ring, activate, *_sequences(batch),
    )  # fmt: skip
    return output


def delta(
    mixed_rows: torch.Tensor,
    gates: torch.Tensor,
    decay: torch.Tensor,
    bias: torch.Tensor,
    states: LayerStates,
    batch: AttentionBatch,
) -> torch.Tensor:
    """Computes the gated delta rule of mixed_rows [n, C] and gates [n, 2 * Hv].

    It changes `states`. Returns [n, Hv, dv].
    """
    sizes, n = states.sizes, batch.batch.num_rows
    mixed_rows = checks.rows_with_stride(mixed_rows, n, sizes.channels)
    gates = checks.rows_with_stride(gates, n, 2 * sizes.value_heads)
    factors = [checks.exact(vector, sizes.value_heads) for vector in (decay, bias)]
    state_addresses = _state_addresses(states, sizes)
    output = MEMORY.empty(n, sizes.value_heads, sizes.value_width)
    _native.delta(
        mixed_rows.data_ptr(), gates.data_ptr(), mixed_rows.stride(0), gates.stride(0), *factors,
        *state_addresses, output.data_ptr(), n, sizes.key_heads, sizes.value_heads, sizes.key_width,
        sizes.value_width, *_sequences(batch),
    )  # fmt: skip
    return output


def _state_addresses(states: LayerStates, sizes: StateSizes) -> list[int]:
    """Addresses of pages, keys, updates and decays."""
    for name in ("key_width", "value_width"):
        width = getattr(sizes, name)
        if width % WIDTH_STEP or not 0 < width <= MOST_WIDTH:
            raise ValueError(f"{name}: got {width}; allowed: multiples of {WIDTH_STEP} up to {MOST_WIDTH}")
    if sizes.value_heads % sizes.key_heads:
        raise ValueError(f"value_heads: got {sizes.value_heads}; allowed: multiples of {sizes.key_heads}")
    seats, heads, width = len(states.keys), sizes.value_heads, sizes.value_width
    return [
        checks.exact(states.pages, len(states.pages), heads, sizes.key_width, width),
        checks.exact(states.keys, seats, sizes.key_heads, CHUNK, sizes.key_width),
        checks.exact(states.updates, seats, heads, CHUNK, width),
        checks.exact(states.decays, seats, heads, CHUNK),
    ]


def _sequences(batch: AttentionBatch) -> tuple[int, int, int, int]:
    """Addresses of query_starts, context_lens and states, and the number of sequences."""
    count, shape = batch.batch.num_sequences, batch.batch.states.shape
    if shape != (count, STATE_FIELDS):
        raise ValueError(f"states: got {shape}; allowed: {(count, STATE_FIELDS)}")
    return *batch.state_addresses, count


def gated_norm(rows: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, epsilon: float) -> torch.Tensor:
    """The norm of each head of rows [n, H, d], times silu(gate [n, H * d]). Returns [n, H * d]."""
    n, heads, width = checks.axes(rows, 3)
    rows, gate = checks.rows(rows), checks.rows_with_stride(gate, n, heads * width)
    factors, output = checks.exact(weight, width), MEMORY.empty(n, heads * width)
    _native.gated_norm(
        rows.data_ptr(), factors, gate.data_ptr(), output.data_ptr(), n, heads, width, gate.stride(0), epsilon
    )
    return output


def sigmoid_times(rows: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Multiplies rows [n, H, d] by sigmoid(gate [n, H, d]). Returns [n, H * d]."""
    n, heads, width = checks.axes(rows, 3)
    rows, gate = checks.rows(rows), checks.heads(gate)
    checks.shape(gate, n, heads, width)
    output = MEMORY.empty(n, heads * width)
    _native.sigmoid_times(
        rows.data_ptr(),
        gate.data_ptr(),
        output.data_ptr(),
        n,
        heads,
        width,
        gate.stride(0),
        gate.stride(1),
        True,
    )
    return output


def times(rows: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Multiplies rows [n, w] by factors [n, w]. Returns [n, w]."""
    n, width = checks.axes(rows, 2)
    rows, factors = checks.rows(rows), checks.rows_with_stride(factors, n, width)
    output = MEMORY.empty(n, width)
    _native.sigmoid_times(
        rows.data_ptr(), factors.data_ptr(), output.data_ptr(), n, 1, width, factors.stride(0), width, False
    )
    return output
