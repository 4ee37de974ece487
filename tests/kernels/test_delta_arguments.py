"""The native operations of linear attention refuse what does not fit and read nothing behind their inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.support.delta_steps import BLOCK, STATES, Inputs, Layer, empty_states
from tests.support.guarded import Guarded
from tests.support.native_kernels import same_bits, stored

from moesaic.core.tokens import TokenBatch
from moesaic.kernels.batch import AttentionBatch
from moesaic.kernels.states import LayerStates, StateSizes
from moesaic.kernels.table import REFERENCE, Kernels

torch.set_num_threads(1)
SIZES = StateSizes(2, 4, 16, 8, 4)
N, CHANNELS = 3, SIZES.channels
Call = Callable[[Kernels], object]


def f(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


def step(states: np.ndarray | None = None) -> AttentionBatch:
    """A step with three rows of one sequence."""
    zero, place = np.zeros(1, np.int64), np.array([[0, 0, 1, 0]])
    batch = TokenBatch(
        np.zeros(N, np.int64), np.arange(N), np.array([0, N]), np.array([N]), zero[None], zero, place
    )
    return AttentionBatch.build(batch if states is None else replace(batch, states=states), BLOCK)


def held(sizes: StateSizes = SIZES, **other: torch.Tensor) -> LayerStates:
    return replace(empty_states(sizes, 2, 1), **other)


def mix(
    k: Kernels,
    rows: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    states: LayerStates | None = None,
    batch: AttentionBatch | None = None,
) -> None:
    rows, weight = f(N, CHANNELS) if rows is None else rows, f(CHANNELS, 4) if weight is None else weight
    k.convolve(rows, weight, held() if states is None else states, step() if batch is None else batch)


def rule(
    k: Kernels, states: LayerStates | None = None, batch: AttentionBatch | None = None, **other: torch.Tensor
) -> None:
    states = held() if states is None else states
    sizes = states.sizes
    heads = sizes.value_heads
    given = {
        "mixed_rows": f(N, sizes.channels),
        "gates": f(N, 2 * heads),
        "decay": f(heads),
        "bias": f(heads),
    }
    k.delta(**(given | other), states=states, batch=step() if batch is None else batch)


CALLS: dict[str, Call] = {
    "convolve: rows of another width": lambda k: mix(k, rows=f(N, CHANNELS - 1)),
    "convolve: rows of another step": lambda k: mix(k, rows=f(N + 1, CHANNELS)),
    "convolve: rows in bf16": lambda k: mix(k, rows=f(N, CHANNELS).bfloat16()),
    "convolve: rows with three axes": lambda k: mix(k, rows=f(N, 2, CHANNELS // 2)),
    "convolve: a weight with other taps": lambda k: mix(k, weight=f(CHANNELS, 3)),
    "convolve: a weight of other channels": lambda k: mix(k, weight=f(CHANNELS + 1, 4)),
    "convolve: a weight with gaps": lambda k: mix(k, weight=f(CHANNELS, 8)[:, ::2]),
    "convolve: a weight in bf16": lambda k: mix(k, weight=f(CHANNELS, 4).bfloat16()),
    "convolve: tails of other taps": lambda k: mix(k, states=held(tails=f(1, 4, CHANNELS))),
    "convolve: tails in float64": lambda k: mix(k, states=held(tails=f(1, 3, CHANNELS).double())),
    "convolve: tails of pages with gaps": lambda k: mix(
        k, states=held(page_tails=f(2, 3, 2 * CHANNELS)[:, :, ::2])
    ),
    "convolve: no states in the step": lambda k: mix(k, batch=step(np.zeros((0, 4), np.int64))),
    "delta: mixed rows of another width": lambda k: rule(k, mixed_rows=f(N, CHANNELS + 1)),
    "delta: mixed rows of another step": lambda k: rule(k, mixed_rows=f(N - 1, CHANNELS)),
    "delta: mixed rows in float64": lambda k: rule(k, mixed_rows=f(N, CHANNELS).double()),
    "delta: gates of other heads": lambda k: rule(k, gates=f(N, 4)),
    "delta: gates of another step": lambda k: rule(k, gates=f(N + 1, 8)),
    "delta: gates in bf16": lambda k: rule(k, gates=f(N, 8).bfloat16()),
    "delta: a decay of other heads": lambda k: rule(k, decay=f(2)),
    "delta: a bias with gaps": lambda k: rule(k, bias=f(8)[::2]),
    "delta: pages of another width": lambda k: rule(k, held(pages=f(2, 4, 16, 16))),
    "delta: pages in bf16": lambda k: rule(k, held(pages=f(2, 4, 16, 8).bfloat16())),
    "delta: keys of fewer rows": lambda k: rule(k, held(keys=f(1, 2, 63, 16))),
    "delta: updates of fewer seats": lambda k: rule(k, held(updates=f(0, 4, 64, 8))),
    "delta: decays with gaps": lambda k: rule(k, held(decays=f(1, 4, 128)[:, :, ::2])),
    "delta: states of two sequences": lambda k: rule(k, batch=step(np.zeros((2, 4), np.int64))),
    "gated_norm: a weight of another width": lambda k: k.gated_norm(f(3, 2, 8), f(7), f(3, 16), 1e-6),
    "gated_norm: a gate of another width": lambda k: k.gated_norm(f(3, 2, 8), f(8), f(3, 8), 1e-6),
    "gated_norm: fewer gates": lambda k: k.gated_norm(f(3, 2, 8), f(8), f(2, 16), 1e-6),
    "gated_norm: a gate in bf16": lambda k: k.gated_norm(f(3, 2, 8), f(8), f(3, 16).bfloat16(), 1e-6),
    "gated_norm: rows without heads": lambda k: k.gated_norm(f(3, 16), f(16), f(3, 16), 1e-6),
    "sigmoid_times: a gate of other heads": lambda k: k.sigmoid_times(f(3, 2, 8), f(3, 1, 8)),
    "sigmoid_times: a gate without heads": lambda k: k.sigmoid_times(f(3, 2, 8), f(3, 16)),
    "sigmoid_times: a gate in float64": lambda k: k.sigmoid_times(f(3, 2, 8), f(3, 2, 8).double()),
    "times: factors of another width": lambda k: k.times(f(3, 8), f(3, 7)),
    "times: factors of other rows": lambda k: k.times(f(3, 8), f(4, 8)),
    "times: factors in float64": lambda k: k.times(f(3, 8), f(3, 8).double()),
    "times: rows in bf16": lambda k: k.times(f(3, 8).bfloat16(), f(3, 8)),
    "sigmoid_times: rows in bf16": lambda k: k.sigmoid_times(f(3, 2, 8).bfloat16(), f(3, 2, 8)),
}


@pytest.mark.parametrize("call", CALLS)
def test_what_does_not_fit_is_refused(native: Kernels, call: str) -> None:
    with pytest.raises((TypeError, ValueError), match="does not fit|allowed"):
        CALLS[call](native)


@pytest.mark.parametrize(
    ("sizes", "line"),
    [
        ((2, 4, 12, 8, 4), r"key_width: got 12; allowed: multiples of 8 up to 256"),
        ((2, 4, 8, 264, 4), r"value_width: got 264; allowed: multiples of 8 up to 256"),
        ((2, 3, 8, 8, 4), r"value_heads: got 3; allowed: multiples of 2"),
    ],
)
def test_other_sizes_are_named(native: Kernels, sizes: tuple[int, int, int, int, int], line: str) -> None:
    with pytest.raises(ValueError, match=f"^{line}$"):
        rule(native, held(StateSizes(*sizes)))


@pytest.mark.parametrize("taps", [1, 9])
def test_other_taps_are_named(native: Kernels, taps: int) -> None:
    with pytest.raises(ValueError, match=rf"^taps: got {taps}; allowed: 2 to 8$"):
        mix(native, weight=f(CHANNELS, taps), states=held(replace(SIZES, taps=taps)))


def test_a_step_without_rows(native: Kernels) -> None:
    none = np.zeros(0, np.int64)
    batch = AttentionBatch.build(
        TokenBatch(none, none, np.zeros(1, np.int64), none, np.zeros((0, 1), np.int64), none), BLOCK
    )
    assert native.delta is not REFERENCE.delta
    states = held()
    assert native.convolve(f(0, CHANNELS), f(CHANNELS, 4), states, batch).shape == (0, CHANNELS)
    assert native.delta(f(0, CHANNELS), f(0, 8), f(4), f(4), states, batch).shape == (0, 4, 8)


@pytest.mark.parametrize(
    "sizes", [StateSizes(1, 2, 8, 8, 2), StateSizes(2, 2, 24, 40, 4), StateSizes(1, 1, 136, 16, 8)], ids=str
)
def test_nothing_is_read_behind_the_inputs(native: Kernels, sizes: StateSizes) -> None:
    assert native.delta is not REFERENCE.delta
    guarded, inputs = Guarded(), Inputs(sizes, [80])
    layers = [Layer(native, inputs), Layer(native, inputs)]
    copies = {name: guarded(getattr(layers[1].states, name)) for name in STATES}
    layers[1].states = replace(layers[1].states, **copies)
    wanted = layers[0].run(0, [10, 54, 16])
    for name in ("weight", "decay", "bias"):
        setattr(inputs, name, guarded(getattr(inputs, name)))
    for count in (10, 54, 16):
        piece, done = [(0, count)], layers[1].done[0]
        batch = AttentionBatch.build(layers[1].batch(piece), BLOCK)
        rows, gates = (guarded(layers[1].taken(of, piece)) for of in (inputs.rows, inputs.gates))
        assert same_bits(layers[1].compute(rows, gates, batch), wanted[done : done + count])
        layers[1].advance(piece)


@pytest.mark.parametrize("width", [1, 8, 24, 33, 128])
def test_gates_read_nothing_behind_their_inputs(native: Kernels, width: int) -> None:
    assert native.gated_norm is not REFERENCE.gated_norm
    guarded, rows, weight, gate = Guarded(), stored(3, 2, width), stored(width), stored(3, 2 * width + 5)
    ends = guarded(gate)[:, 5:]
    wanted = native.gated_norm(rows, weight, gate[:, 5:], 1e-6)
    assert same_bits(native.gated_norm(guarded(rows), guarded(weight), ends, 1e-6), wanted)
    heads = ends.unflatten(1, (2, width))
    assert same_bits(native.sigmoid_times(guarded(rows), heads), native.sigmoid_times(rows, heads.clone()))
