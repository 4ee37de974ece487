"""Linear attention: the reference against transformers, and native kernels against the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.support.delta_steps import BLOCK, STATES, Inputs, Layer, empty_states
from tests.support.native_kernels import close, same_bits, stored
from torch.nn import functional

from moesaic.core.tokens import TokenBatch
from moesaic.kernels.batch import AttentionBatch
from moesaic.kernels.states import StateSizes
from moesaic.kernels.table import REFERENCE, Kernels

torch.set_num_threads(1)
SIZES = (
    StateSizes(2, 4, 16, 8, 4),
    StateSizes(1, 3, 24, 40, 2),
    StateSizes(3, 3, 8, 72, 3),
    StateSizes(2, 4, 128, 128, 4),
)
LONG_SIZES = (StateSizes(1, 1, 256, 256, 8), StateSizes(1, 2, 136, 248, 5), StateSizes(2, 16, 64, 32, 7))
ALL_SIZES = [*SIZES, *(pytest.param(sizes, marks=pytest.mark.slow) for sizes in LONG_SIZES)]


@pytest.fixture
def own(native: Kernels) -> Kernels:
    """Native kernels that have forms of their own of these operations."""
    for name in ("convolve", "delta", "gated_norm", "sigmoid_times", "times"):
        assert getattr(native, name) is not getattr(REFERENCE, name)
    return native


@pytest.mark.slow
def test_the_reference_agrees_with_transformers() -> None:
    """transformers computes row after row, with a state in every row."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

    torch.manual_seed(0)
    sizes, length = StateSizes(2, 4, 16, 8, 4), 201
    inputs = Inputs(sizes, [length])
    found = Layer(REFERENCE, inputs).run(0, [70, 1, 58, 72])
    padded = functional.pad(inputs.rows[0].t(), (sizes.taps - 1, 0))
    mixed = functional.silu(functional.conv1d(padded, inputs.weight[:, None], groups=sizes.channels)).t()
    query, key, value = mixed.split([32, 32, 32], dim=1)
    beta, alpha = inputs.gates[0].split(4, dim=1)
    wanted, _ = torch_recurrent_gated_delta_rule(
        query.reshape(1, length, 2, 16), key.reshape(1, length, 2, 16), value.reshape(1, length, 4, 8),
        g=(inputs.decay * functional.softplus(alpha + inputs.bias))[None], beta=beta.sigmoid()[None],
        initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    close(found, wanted[0])


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("sizes", ALL_SIZES, ids=str)
def test_steps_agree_with_the_reference(own: Kernels, sizes: StateSizes, in_place: bool) -> None:
    inputs = Inputs(sizes, [140, 70, 1])
    ours, theirs = Layer(own, inputs, in_place), Layer(REFERENCE, inputs, in_place)
    for step in ([(0, 3)], [(1, 61), (0, 1), (2, 1)], [(0, 60), (1, 1)], [(1, 2), (0, 75)], [(0, 1), (1, 6)]):
        for found, wanted in zip(ours.step(step), theirs.step(step), strict=True):
            close(found, wanted)
    for index in range(3):
        for found, wanted in zip(ours.state(index), theirs.state(index), strict=True):
            close(found, wanted)


def test_nothing_but_the_states_of_a_step_changes(own: Kernels) -> None:
    inputs = Inputs(SIZES[0], [130, 130, 130])
    layer = Layer(own, inputs)
    layer.step([(0, 70), (1, 10), (2, 64)])
    before = {name: getattr(layer.states, name).clone() for name in STATES}
    layer.step([(1, 60)])
    for name in STATES:
        found, kept = getattr(layer.states, name), torch.ones(len(before[name]), dtype=torch.bool)
        kept[3 if name.startswith("page") else 1] = False
        assert same_bits(found[kept], before[name][kept]), name
        assert not same_bits(found[~kept], before[name][~kept]), name


def test_a_sequence_with_nan_changes_no_other(own: Kernels) -> None:
    inputs = Inputs(SIZES[0], [100, 100])
    inputs.rows[0][3], inputs.gates[0][5] = float("nan"), float("nan")
    found = Layer(own, inputs).step([(0, 100), (1, 100)])[1]
    close(found, Layer(REFERENCE, inputs).run(1, [100]))


@pytest.mark.parametrize("number", [-1000.0, -90.0, -20.0, -1e-3, 0.0, 15.0, 19.0, 21.0, 90.0, 1000.0])
def test_gates_of_any_size(own: Kernels, number: float) -> None:
    inputs = Inputs(SIZES[0], [80])
    for column in (slice(0, 4), slice(4, 8)):
        inputs.gates[0].normal_()
        inputs.gates[0][:, column] += number
        found, wanted = (Layer(kernels, inputs).run(0, [80]) for kernels in (own, REFERENCE))
        assert bool(((found - wanted).abs() <= 1e-5 * wanted.abs().max() + 1e-30).all())


def test_the_decay_of_each_gate(own: Kernels) -> None:
    """Its logarithm is minus softplus, as exact in small numbers as in large ones."""
    gates = torch.cat([torch.linspace(-80, 40, 5000), torch.tensor([0.0, -0.0, 87.0, 88.5, 500.0])])
    sizes = StateSizes(1, len(gates), 8, 8, 2)
    states, batch = empty_states(sizes, 2, 1), _one_row()
    both = torch.cat([torch.zeros(len(gates)), gates])[None]
    mixed, ones = torch.randn(1, sizes.channels), torch.ones(len(gates))
    own.delta(mixed, both, -ones, torch.zeros(len(gates)), states, batch)
    wanted = -functional.softplus(gates.double())
    assert bool(((states.decays[0, :, 0] - wanted).abs() <= 4e-7 * wanted.abs()).all())


def _one_row() -> AttentionBatch:
    zero = np.zeros(1, np.int64)
    place = np.array([[0, 0, 1, 0]])
    return AttentionBatch.build(
        TokenBatch(zero, zero, np.array([0, 1]), np.array([1]), zero[None], zero, place), BLOCK
    )


def test_inputs_may_be_parts_of_wider_rows(own: Kernels) -> None:
    """And weights may lie by tap or by channel."""
    sizes = SIZES[0]
    inputs = Inputs(sizes, [70])
    batch = AttentionBatch.build(Layer(own, inputs).batch([(0, 70)]), BLOCK)
    wide, gates = stored(70, sizes.channels + 11), stored(70, 20)
    wide[:, 5:-6], gates[:, 9:17] = inputs.rows[0], inputs.gates[0]
    by_tap = inputs.weight.t().contiguous().t()
    results = []
    for rows, weight, of in (
        (inputs.rows[0], inputs.weight, inputs.gates[0]),
        (wide[:, 5:-6], by_tap, gates[:, 9:17]),
    ):
        states = empty_states(sizes, 2, 1)
        mixed = own.convolve(rows, weight, states, batch)
        joined = torch.cat([torch.zeros(70, 3), mixed], dim=1)[:, 3:]
        results.append(
            (mixed, own.delta(joined, of, inputs.decay, inputs.bias, states, batch), states.pages[1])
        )
    assert all(same_bits(found, wanted) for found, wanted in zip(*results, strict=True))


@pytest.mark.parametrize(("channels", "taps"), [(1, 2), (100, 3), (700, 8)])
def test_a_convolution_alone(own: Kernels, channels: int, taps: int) -> None:
    """Without silu, and without heads whose states would lie beside its tails."""
    sizes = StateSizes.of_convolution(channels, taps)
    assert (sizes.channels, sizes.page_numbers, sizes.seat_numbers) == (
        channels,
        *[(taps - 1) * channels] * 2,
    )
    rows, weight = stored(130, channels), stored(channels, taps)
    found, wanted = (_convolved(kernels, sizes, rows, weight) for kernels in (own, REFERENCE))
    before = torch.cat([torch.zeros(taps - 1, channels), rows]).double()
    sums = sum(before[tap : tap + 130] * weight[:, tap].double() for tap in range(taps))
    close(found[0], sums.float())
    close(found[0], wanted[0])
    assert all(same_bits(*both) for both in zip(found[1:], wanted[1:], strict=True))


def _convolved(
    kernels: Kernels, sizes: StateSizes, rows: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The result of 130 rows in two steps, and the tails of page and seat."""
    states, made = empty_states(sizes, 2, 1), []
    for start, stop in ((0, 70), (70, 130)):
        place = np.array([[0, 0, 1, 0]] if start == 0 else [[1, 64, 1, 0]])
        count, zero = np.array([0, stop - start]), np.zeros(1, np.int64)
        batch = TokenBatch(zero.repeat(stop - start), np.arange(start, stop), count, np.array([stop]),
                           zero[None], zero, place)  # fmt: skip
        one = AttentionBatch.build(batch, BLOCK)
        made.append(kernels.convolve(rows[start:stop], weight, states, one, activate=False))
    return torch.cat(made), states.page_tails[1], states.tails[0]


@pytest.mark.parametrize("width", [1, 8, 100, 256])
def test_times(own: Kernels, width: int) -> None:
    for n in (0, 1, 130):
        rows, wide = stored(n, width), stored(n, width + 5)
        for factors in (wide[:, 3:-2], wide[:, :width].contiguous()):
            assert same_bits(own.times(rows, factors), rows * factors)


@pytest.mark.parametrize("width", [1, 8, 24, 100, 128, 256])
def test_gated_norm(own: Kernels, width: int) -> None:
    weight = stored(width)
    for n, heads in ((0, 3), (1, 1), (3, 2), (130, 5)):
        rows, gates = stored(n, heads, width) * 3, stored(n, heads * width + 9) * 4
        for gate in (gates[:, 4:-5], gates[:, : heads * width].contiguous()):
            found = own.gated_norm(rows, weight, gate, 1e-6)
            close(found, REFERENCE.gated_norm(rows, weight, gate, 1e-6))
            for row in range(0, n, 40):
                single = own.gated_norm(rows[row : row + 1], weight, gate[row : row + 1], 1e-6)
                assert same_bits(single[0], found[row])


@pytest.mark.parametrize("width", [1, 8, 24, 100, 128, 256])
def test_sigmoid_times(own: Kernels, width: int) -> None:
    for n, heads in ((0, 3), (1, 1), (3, 2), (130, 5)):
        rows, gates = stored(n, heads, width) * 3, stored(n, heads + 1, 2 * width + 1) * 4
        for gate in (gates[:, 1:, width + 1 :], gates[:, :heads, ::2][..., :width]):
            found = own.sigmoid_times(rows, gate)
            close(found, REFERENCE.sigmoid_times(rows, gate))
            for row in range(0, n, 40):
                single = own.sigmoid_times(rows[row : row + 1], gate[row : row + 1])
                assert same_bits(single[0], found[row])
