"""Rounding to nearest, and GPTQ: each is exact where it can be, and GPTQ's outputs are nearer."""

from __future__ import annotations

import pytest
import torch

from moesaic.jobs.quantizing.formats import Format
from moesaic.jobs.quantizing.rounding import Rounding

CASES = [Format(4, 32), Format(4, 128), Format(8, None), Format(8, 64)]


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("form", CASES)
@pytest.mark.parametrize("scales", ["F32", "BF16"])
def test_nearest_is_off_by_half_a_step_at_most(form: Format, scales: str) -> None:
    weight = drawn(9, 256)
    rounding = Rounding(form, scales)
    coded = rounding.nearest(weight)
    steps = torch.from_numpy(coded.scales).repeat_interleave(form.group or 256, 1)
    # half a step, a little more at the ends: the scale itself was rounded
    assert ((rounding.numbers(coded) - weight).abs() <= steps * (0.5 + 2.0 ** (form.bits - 9))).all()
    assert int(coded.codes.max()) == 2**form.bits - 1 or int(coded.codes.min()) == 0


@pytest.mark.parametrize("form", CASES)
def test_numbers_of_the_format_come_back(form: Format) -> None:
    codes = torch.randint(0, 2**form.bits, (6, 256), generator=torch.Generator().manual_seed(0))
    middle = 2 ** (form.bits - 1)
    codes[:, ::32] = 0  # the largest number, which decides about the scale
    exact = (codes - middle) * 2.0**-5 * (middle - 0.5) / middle
    rounding = Rounding(form, "F32")
    torch.testing.assert_close(rounding.numbers(rounding.nearest(exact)), exact, rtol=0.04, atol=0.04)
    zeros = rounding.nearest(torch.zeros(2, 256))
    assert not rounding.numbers(zeros).any()


@pytest.mark.parametrize("form", CASES)
def test_gptq_loses_less_of_the_outputs(form: Format) -> None:
    weight = drawn(24, 256)
    inputs = drawn(400, 40, seed=1) @ drawn(40, 256, seed=2) + 0.1 * drawn(400, 256, seed=3)
    rounding = Rounding(form, "BF16")
    solved = rounding.gptq(weight, inputs.T @ inputs)
    assert solved is not None

    def lost(numbers: torch.Tensor) -> float:
        return float(((numbers - weight) @ inputs.T).square().sum())

    assert lost(rounding.numbers(solved)) < 0.5 * lost(rounding.numbers(rounding.nearest(weight)))


def test_inputs_that_do_not_depend_on_one_another_leave_the_search_for_scales_alone() -> None:
    """Without correlations no error can be made up for: each number has its nearest code."""
    weight, rounding = drawn(8, 64), Rounding(Format(4, 32), "F32")
    solved = rounding.gptq(weight, torch.eye(64))
    assert solved is not None
    scales = torch.from_numpy(solved.scales).repeat_interleave(32, 1)
    nearest = ((weight / scales).round() + 8).clamp(0, 15)
    assert torch.equal(nearest.to(torch.uint8), torch.from_numpy(solved.codes))


def test_a_hessian_without_inverse_is_rounded_to_nearest() -> None:
    weight, rounding = drawn(4, 64), Rounding(Format(4, 32), "F32")
    assert rounding.gptq(weight, torch.zeros(64, 64)) is None
    found = rounding.nearest_or_gptq(weight, torch.zeros(64, 64))
    assert (found.codes == rounding.nearest(weight).codes).all()
