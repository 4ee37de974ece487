"""The native operations on single rows against the reference: norms, rotations, gates, merges, copies."""

from __future__ import annotations

import itertools

import pytest
import torch
from tests.support.native_kernels import CACHED, ROWS, STORED, WIDTHS, close, same_bits, stored

from moesaic.kernels.cache import LEAST_PEAK, stored_width
from moesaic.kernels.gating import Gating
from moesaic.kernels.reference.cache import decode, encode
from moesaic.kernels.table import REFERENCE, Kernels

torch.set_num_threads(1)
EPSILON = 1e-6


@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm(native: Kernels, width: int) -> None:
    inputs, weight = stored(max(ROWS), width + 10) * 3, stored(width)
    for count in ROWS:
        for rows in (inputs[:count, 3 : width + 3], inputs[:count, :width].contiguous()):
            close(native.rms_norm(rows, weight, EPSILON), REFERENCE.rms_norm(rows, weight, EPSILON))


def test_rms_norm_of_any_layout(native: Kernels) -> None:
    wide, weight = stored(6, 5, 80), stored(33)
    layouts = (wide[..., :33], wide[:, 1, 2:35], wide[:, :, 1:67:2], wide[0, 0, :33], wide[::2, ::2, 40:73])
    for rows in (*layouts, stored(33, 7).t(), wide[:0, :, :33], wide[:1, :1, :33].expand(3, 4, -1)):
        close(native.rms_norm(rows, weight, EPSILON), REFERENCE.rms_norm(rows, weight, EPSILON))


def test_rms_norm_of_zeros_and_of_large_numbers(native: Kernels) -> None:
    rows = torch.cat([torch.zeros(1, 24), torch.full((1, 24), 1e18), torch.full((1, 24), 1e-18)])
    close(native.rms_norm(rows, torch.ones(24), EPSILON), REFERENCE.rms_norm(rows, torch.ones(24), EPSILON))


@pytest.mark.parametrize("width", WIDTHS)
def test_add_norm(native: Kernels, width: int) -> None:
    inputs, others, weight = stored(max(ROWS), width + 10), stored(max(ROWS), width), stored(width)
    for count in ROWS:
        for rows in (inputs[:count, 3 : width + 3], inputs[:count, :width].contiguous()):
            total, normed = native.add_norm(rows, others[:count], weight, EPSILON)
            assert torch.equal(total, rows + others[:count])
            close(normed, REFERENCE.rms_norm(total, weight, EPSILON))


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [2, 6, 34, 64, 1024])
def test_rope(native: Kernels, width: int, interleaved: bool, normed: bool) -> None:
    angles, heads = torch.randn(300, width // 2), 3
    cosine, sine, norm = angles.cos(), angles.sin(), stored(width) if normed else None
    inputs, positions = stored(max(ROWS), heads + 2, width + 7), torch.randint(300, (max(ROWS),))
    for count in ROWS:
        dense = inputs[:count, :heads, :width].contiguous()
        for rows in (dense, inputs[:count, 1 : heads + 1, 7:], inputs[:count, :1, 3 : width + 3]):
            arguments = (rows, cosine, sine, positions[:count], interleaved, norm, EPSILON)
            close(native.rope(*arguments), REFERENCE.rope(*arguments))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_of_heads_whose_numbers_lie_apart(native: Kernels, interleaved: bool) -> None:
    rows, angles = stored(5, 3, 68)[..., ::2], torch.randn(9, 17)
    arguments = (rows, angles.cos(), angles.sin(), torch.tensor([8, 0, 0, 3, 1]), interleaved)
    close(native.rope(*arguments), REFERENCE.rope(*arguments))


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("width", "rotated"), [(8, 2), (20, 10), (64, 34)])
def test_rope_of_a_part_of_each_head(
    native: Kernels, width: int, rotated: int, interleaved: bool, normed: bool
) -> None:
    """The first numbers are those of a head that has no others. The rest is normalised and not rotated."""
    angles, rows, positions = torch.randn(300, rotated // 2), stored(23, 3, width), torch.randint(300, (23,))
    norm = stored(width) if normed else None
    whole = REFERENCE.rms_norm(rows, norm, EPSILON) if norm is not None else rows
    wanted = REFERENCE.rope(whole[..., :rotated], angles.cos(), angles.sin(), positions, interleaved)
    for kernels in (native, REFERENCE):
        found = kernels.rope(rows, angles.cos(), angles.sin(), positions, interleaved, norm, EPSILON)
        close(found[..., :rotated], wanted)
        close(found[..., rotated:], whole[..., rotated:])


GATES = [(1, 1), (5, 2), (16, 16), (64, 6), (160, 8), (160, 160)]
"""Numbers of experts and of chosen experts."""


def chosen(rows: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The probability of each chosen expert, by torch."""
    return REFERENCE.linear(rows, weight).softmax(-1).gather(1, ids)


@pytest.mark.parametrize("width", [1, 24, 100, 1030])
@pytest.mark.parametrize(("experts", "top_k"), GATES)
def test_gate(native: Kernels, experts: int, top_k: int, width: int) -> None:
    weight, inputs = stored(experts, width, spread=width**-0.5), stored(max(ROWS), width)
    for count in ROWS:
        rows = inputs[:count]
        ids, likely = native.gate(rows, weight, Gating(top_k, False))
        assert (ids.dtype, ids.shape) == (torch.int64, (count, top_k))
        assert all(len(set(line)) == top_k for line in ids.tolist())
        close(likely, REFERENCE.gate(rows, weight, Gating(top_k, False))[1])
        close(likely, chosen(rows, weight, ids))
        same, scaled = native.gate(rows, weight, Gating(top_k, True, 2.5))
        assert torch.equal(same, ids)
        close(scaled, 2.5 * likely / likely.sum(-1, keepdim=True))


@pytest.mark.parametrize(
    ("experts", "groups", "kept"), [(12, 4, 2), (160, 8, 3), (20, 5, 4), (6, 6, 2), (9, 1, 1)]
)
def test_gate_limited_to_groups(native: Kernels, experts: int, groups: int, kept: int) -> None:
    weight, rows = stored(experts, 33, spread=0.2), stored(130, 33)
    top_k = experts // groups * kept
    ids, likely = native.gate(rows, weight, Gating(top_k, False, 16.0, groups, kept))
    wanted_ids, wanted = REFERENCE.gate(rows, weight, Gating(top_k, False, 16.0, groups, kept))
    assert torch.equal(ids.sort().values, wanted_ids.sort().values)
    close(likely, wanted)
    close(likely, 16.0 * chosen(rows, weight, ids))


def test_of_equally_likely_experts_the_first_are_chosen(native: Kernels) -> None:
    weight = torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0, 0.0])[:, None].expand(-1, 24).contiguous()
    rows = torch.ones(3, 24)
    for kernels in (native, REFERENCE):
        assert kernels.gate(rows, weight, Gating(6, False))[0].tolist() == [[1, 3, 4, 0, 2, 5]] * 3
        assert kernels.gate(torch.zeros(3, 24), weight, Gating(4, True))[0].tolist() == [[0, 1, 2, 3]] * 3
        # The best of group 0 is as likely as that of groups 1 and 2; those that are left out are equal zeros.
        assert kernels.gate(rows, weight, Gating(4, False, 1.0, 3, 2))[0].tolist() == [[1, 3, 0, 2]] * 3


@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (4, 2), (8, 3)])
@pytest.mark.parametrize("experts", [8, 64, 160])
def test_ties_are_those_of_the_reference(native: Kernels, experts: int, groups: int, kept: int) -> None:
    """Experts are copies of a few, and copies are equally likely. They come in any order. The best of the
    groups tie too."""
    kinds = torch.randint(3, (experts,))
    weight, rows = stored(3, 33)[kinds], torch.cat([stored(20, 33), torch.zeros(1, 33)])
    top_k = experts // groups * kept
    ids, likely = native.gate(rows, weight, Gating(top_k, False, 1.0, groups, kept))
    wanted_ids, wanted = REFERENCE.gate(rows, weight, Gating(top_k, False, 1.0, groups, kept))
    assert torch.equal(ids, wanted_ids) and wanted_ids.is_contiguous()
    close(likely, wanted)


def test_gate_of_sure_rows(native: Kernels) -> None:
    weight, rows = torch.eye(8), 1e4 * torch.eye(8)[:5]
    ids, likely = native.gate(rows, weight, Gating(3, False))
    assert ids[:, 0].tolist() == [0, 1, 2, 3, 4] and torch.equal(likely[:, 0], torch.ones(5))
    assert likely[:, 1:].max() < 1e-30


@pytest.mark.parametrize("strange", [float("nan"), float("inf")])
def test_a_gate_of_strange_numbers_is_not_a_number(native: Kernels, strange: float) -> None:
    rows, weight = stored(3, 8), stored(6, 8)
    rows[1, 2] = strange
    ids, likely = native.gate(rows, weight, Gating(3, True))
    assert likely.isnan().any(1).tolist() == [False, True, False]
    assert (ids >= 0).all() and (ids < 6).all()


@pytest.mark.parametrize("width", WIDTHS)
def test_merge(native: Kernels, width: int) -> None:
    for count, top_k in itertools.product(ROWS, (1, 2, 8)):
        residual, dense = stored(count, width), stored(count, width)
        rows, weights = stored(count, top_k, width), stored(count, top_k)
        close(native.merge(residual, None, rows, weights), REFERENCE.merge(residual, None, rows, weights))
        close(native.merge(residual, dense, rows, weights), REFERENCE.merge(residual, dense, rows, weights))
        assert torch.equal(native.merge(residual, dense, None, None), residual + dense)
        assert torch.equal(native.merge(residual, None, None, None), residual)


def test_merge_of_rows_that_do_not_lie_together(native: Kernels) -> None:
    wide, rows, weights = stored(4, 80), stored(4, 3, 80), stored(4, 9)
    arguments = (wide[:, 1:34], wide[:, 40:73], rows[..., 5:38], weights[:, 2:5])
    close(native.merge(*arguments), REFERENCE.merge(*arguments))


def every_kind_of_number() -> torch.Tensor:
    """float32 numbers with random bits, ties between two bf16 numbers, infinities and subnormals."""
    drawn = torch.randint(-(2**31), 2**31, (200_000,)).to(torch.int32)
    ties = torch.arange(-(2**15), 2**15).to(torch.int32) * 2**16 + 2**15
    return torch.cat([drawn, ties, ties - 1, ties + 1, torch.tensor([0, -(2**31)], dtype=torch.int32)]).view(
        torch.float32
    )


def test_store_rounds_to_bf16_as_torch_does(native: Kernels) -> None:
    numbers = every_kind_of_number()
    numbers = numbers[: len(numbers) // 8 * 8]
    cache = torch.zeros(len(numbers) // 8, 1, 1, 8, dtype=torch.bfloat16)
    native.store(cache, numbers.view(-1, 1, 8), torch.arange(len(cache)))
    found, wanted = cache.flatten(), numbers.to(torch.bfloat16)
    assert torch.equal(found.isnan(), wanted.isnan()) and found.isnan().any() and found.isinf().any()
    known = ~wanted.isnan()
    assert torch.equal(found[known].view(torch.int16), wanted[known].view(torch.int16))


ROWS_IN_INT8: dict[str, list[float]] = {
    "zeros": [0.0, -0.0, 0.0],
    "one number": [0.0, 3.0, -0.0],
    "the ends of the scale": [127.0, -127.0, 1.0],
    "halves go to the even": [127.0, 0.5, 1.5, -2.5, 126.5, -126.5],
    "huge": [3.4e38, -3.4e38, 1e38, 1.0],
    "the smallest that are kept": [LEAST_PEAK, -LEAST_PEAK / 2, 0.0],
    "too small": [LEAST_PEAK * 0.999, 1e-40, -1e-38],
    "huge beside tiny": [1e30, 1e-30, -5e27],
    "a NaN": [1.0, float("nan"), 2.0],
    "an infinity": [1.0, float("inf"), 2.0],
    "both infinities": [-float("inf"), float("inf"), 0.0],
}


@pytest.mark.parametrize("what", ROWS_IN_INT8)
def test_store_in_int8_of_strange_rows(native: Kernels, what: str) -> None:
    row = torch.tensor(ROWS_IN_INT8[what])
    cache = torch.full((1, 3, 1, len(row) + 4), 77, dtype=torch.int8)
    native.store(cache, row.view(1, 1, -1), torch.tensor([1]))
    assert torch.equal(cache[0, 1, 0], encode(row, torch.int8))
    assert (cache[0, 0] == 77).all() and (cache[0, 2] == 77).all()
    found, peak = decode(cache[0, 1, 0]), row.abs().max()
    if not row.isfinite().all():
        assert found.isnan().all()
    elif peak < LEAST_PEAK:
        assert torch.equal(found, torch.zeros_like(row))
    else:
        assert ((found.double() - row.double()).abs() <= peak.double() / 254 * 1.00001).all()


def test_store_rounds_to_int8_as_torch_does(native: Kernels) -> None:
    numbers = every_kind_of_number()
    rows = numbers[: len(numbers) // 8 * 8].view(-1, 1, 8)
    cache = torch.zeros(len(rows), 1, 1, 12, dtype=torch.int8)
    native.store(cache, rows, torch.arange(len(rows)))
    assert torch.equal(cache[:, 0], encode(rows, torch.int8))
    assert (cache[..., :8].min(), cache[..., :8].max()) == (-127, 127)


@pytest.mark.parametrize("dtype", CACHED)
@pytest.mark.parametrize(("heads", "width"), [(1, 1), (2, 7), (3, 33), (1, 576), (8, 128)])
def test_store(native: Kernels, heads: int, width: int, dtype: torch.dtype) -> None:
    for count in ROWS:
        found = torch.zeros(10, 16, heads, stored_width(width, dtype), dtype=dtype)
        wanted, slots = found.clone(), torch.randperm(160)[:count]
        rows = stored(count, heads + 1, width + 3)[:, 1:, 2 : width + 2]
        native.store(found, rows, slots)
        REFERENCE.store(wanted, rows, slots)
        assert same_bits(found, wanted)


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("width", WIDTHS)
def test_embed(native: Kernels, width: int, dtype: torch.dtype) -> None:
    table = stored(50, width, dtype=dtype)
    for count in ROWS:
        ids = torch.randint(50, (count,))
        assert torch.equal(native.embed(table, ids), REFERENCE.embed(table, ids))


def test_bf16_is_widened_exactly(native: Kernels) -> None:
    table = torch.arange(2**16).to(torch.int16).view(torch.bfloat16)[:, None]
    found = native.embed(table, torch.arange(2**16))[:, 0]
    assert torch.equal(found.view(torch.int32), torch.arange(2**16).to(torch.int32) << 16)


@pytest.mark.parametrize(("left", "right"), [(1, 1), (7, 33), (512, 64), (8, 4)])
def test_join(native: Kernels, left: int, right: int) -> None:
    for count, heads in itertools.product(ROWS, (1, 3)):
        wide = stored(count, heads + 1, left + right + 9)
        dense = (wide[:, :heads, :left].contiguous(), wide[:, :heads, -right:].contiguous())
        strided = (wide[:, 1:, 2 : left + 2], wide[:, :heads, -right:])
        shared = (dense[0], wide[:, :1, :right].expand(-1, heads, -1))
        for pair in (dense, strided, shared):
            assert torch.equal(native.join(*pair), torch.cat(pair, dim=-1))


@pytest.mark.parametrize("width", WIDTHS)
def test_sigmoid_gate(native: Kernels, width: int) -> None:
    for hidden in (1, 33, 100):
        rows, weight = stored(max(ROWS), hidden), stored(1, hidden, spread=hidden**-0.5)
        values = stored(max(ROWS), width + 3)
        for count in ROWS:
            for some in (values[:count, 3:], values[:count, :width].contiguous()):
                arguments = rows[:count], weight, some
                close(native.sigmoid_gate(*arguments), REFERENCE.sigmoid_gate(*arguments))


def test_sigmoid_gate_of_large_numbers(native: Kernels) -> None:
    rows = torch.tensor([[-1e30], [-200.0], [-20.0], [0.0], [20.0], [200.0], [1e30]])
    for kernels in (native, REFERENCE):
        found = kernels.sigmoid_gate(rows, torch.ones(1, 1), torch.full((7, 5), 3.0))
        wanted = torch.tensor([0.0, 0.0, 6.1834606e-9, 1.5, 3.0, 3.0, 3.0])[:, None].expand(7, 5)
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-30)
        nan = torch.full((1, 1), torch.nan)
        assert kernels.sigmoid_gate(nan, torch.ones(1, 1), torch.ones(1, 5)).isnan().all()
        assert kernels.sigmoid_gate(torch.ones(1, 1), torch.ones(1, 1), nan).isnan().all()


@pytest.mark.parametrize("width", WIDTHS)
def test_clip(native: Kernels, width: int) -> None:
    wide = stored(max(ROWS), width + 3)
    for count in ROWS:
        for rows in (wide[:count, 3:], wide[:count, :width].contiguous()):
            found = native.clip(rows, 0.75)
            assert same_bits(found, REFERENCE.clip(rows, 0.75).contiguous())
            assert bool((found.abs() <= 0.75).all())
    [row] = native.clip(torch.tensor([[-torch.inf, torch.inf, torch.nan, -0.5]]), 0.75)
    assert row[:2].tolist() == [-0.75, 0.75]
    assert row[2].isnan() and row[3] == -0.5


@pytest.mark.parametrize("width", [1, 31, 32, 33, 100, 4096])
def test_mask_tokens(native: Kernels, width: int) -> None:
    words = (width + 31) // 32
    bits = torch.randint(-(2**31), 2**31, (4, words), dtype=torch.int32)
    bits[1], bits[2] = 0, -1
    logits, lines = stored(6, width), torch.tensor([5, 0, 3, 2])
    found, wanted = logits.clone(), logits.clone()
    native.mask_tokens(found, lines, bits)
    REFERENCE.mask_tokens(wanted, lines, bits)
    assert same_bits(found, wanted)
    for line, mask in zip(lines.tolist(), bits.numpy(), strict=True):
        for token in range(width):
            allowed = int(mask[token // 32]) >> (token % 32) & 1
            assert found[line, token] == (logits[line, token] if allowed else -torch.inf)
    assert same_bits(found[[1, 4]], logits[[1, 4]])
    native.mask_tokens(found, lines[:0], bits[:0])
    with pytest.raises(ValueError, match="lines"):
        native.mask_tokens(found, lines + 1, bits)
