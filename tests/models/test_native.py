"""Whole models on the native kernels: the reference's logits, and the same bits however rows are batched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import model_configs, tiny_models
from tests.support.model_driver import Driver
from tests.support.native_kernels import LOGITS, native_sets

from moesaic.kernels import table
from moesaic.kernels.table import REFERENCE, Kernels
from moesaic.models import registry

LENGTH = 41
SETS = native_sets()
"""The fastest of this machine; the others are slow to try with everything."""
Published = Callable[..., tuple[Any, Path]]


@pytest.fixture(params=SETS)
def native(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    """The kernels of one instruction set."""
    kernels = table.pick("cpu", request.param)
    kernels.set_threads(1, False)
    yield kernels
    kernels.set_threads(1, False)
    table.pick("cpu")


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference over largest logit."""
    return float((found - wanted).abs().max() / wanted.abs().max())


def near(native: Kernels, dtype: torch.dtype, found: torch.Tensor, wanted: torch.Tensor, most: float) -> bool:
    """Whether logits over weights of `dtype` differ by less than `most` of the largest.

    Kernels that round rows may choose other experts for a token, so of theirs only half need be near.
    """
    if dtype is torch.bfloat16 and native.name in {f"native ({name})" for name in table.ROUNDING}:
        return float((found - wanted).abs().median() / wanted.abs().max()) < 0.02
    return error(found, wanted) < most


# In float32 they are those of transformers, says test_identity.
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.full), torch.bfloat16])
@pytest.mark.parametrize(("name", "native"), model_configs.with_kernels(SETS), indirect=["native"])
def test_logits_are_those_of_the_reference(
    native: Kernels, name: str, dtype: torch.dtype, published: Published
) -> None:
    path = published(name, dtype)[1]
    ours = registry.load(path, native)
    assert ours.embedding.dtype == dtype  # as it is stored; the reference widens it
    tokens = tiny_models.prompt(LENGTH, model_configs.VOCAB)
    wanted = Driver(registry.load(path, REFERENCE)).prefill(tokens)
    most = LOGITS.get(native.name.removeprefix("native (").removesuffix(")"), 1e-4)
    assert near(native, dtype, Driver(ours).prefill(tokens), wanted, most)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_narrow_cache_is_that_of_the_reference(
    native: Kernels, dtype: torch.dtype, kv_dtype: torch.dtype, published: Published
) -> None:
    tokens = tiny_models.prompt(LENGTH, model_configs.VOCAB)
    for name in ("mixtral-window", "qwen3", "deepseek-full"):
        path = published(name, dtype)[1]
        found, wanted = (
            Driver(registry.load(path, kernels), kv_dtype=kv_dtype).prefill(tokens, chunk=7)
            for kernels in (native, REFERENCE)
        )
        # A number on the edge between two narrow numbers may fall to either side.
        assert near(native, dtype, found, wanted, 0.02)


def alike(driver: Driver, tokens: list[int], wanted: torch.Tensor) -> None:
    """Every row's logits have the same bits in chunks, in company, and as the last row of a longer batch."""
    for index, chunk in enumerate((1, 3, 7, 16), start=1):
        assert torch.equal(driver.prefill(tokens, index, chunk), wanted), chunk
    others = [tiny_models.prompt(length, model_configs.VOCAB, seed=length) for length in (23, 1, 9)]
    driver.step({10: others[0], 11: others[1]})
    for start in range(0, LENGTH, 9):
        part = tokens[start : start + 9]
        step = {
            10: [start],
            12 + start: others[2],
            11: [start + 1, start + 2],
            13: part,
            50 + start: others[1],
        }
        before = 1 + len(others[2]) + 2
        found = driver.step(step)[before : before + len(part)]
        assert torch.equal(found, wanted[start : start + 9]), start


def with_a_type() -> list[Any]:
    """Each case on each kernels with a type of the weights in turn; the full tests have the other type."""
    every = model_configs.with_kernels(SETS)
    turns = [sum(divmod(index, len(SETS))) % 2 for index in range(len(every))]
    return [
        pytest.param(*case.values, dtype, marks=case.marks if turn == number else pytest.mark.full)
        for case, turn in zip(every, turns, strict=True)
        for number, dtype in enumerate((torch.float32, torch.bfloat16))
    ]


@pytest.mark.parametrize(("name", "native", "dtype"), with_a_type(), indirect=["native"])
def test_a_prompt_has_the_same_bits_whole_in_chunks_and_in_company(
    native: Kernels, name: str, dtype: torch.dtype, published: Published
) -> None:
    model = registry.load(published(name, dtype)[1], native)
    tokens = tiny_models.prompt(LENGTH, model_configs.VOCAB)
    driver = Driver(model, num_blocks=400, kv_dtype=dtype)
    alike(driver, tokens, driver.prefill(tokens))


@pytest.mark.parametrize("threads", [2, 3, 5])
@pytest.mark.parametrize("name", ["mixtral-window", "qwen3-bias-dense-layers", "deepseek-full"])
def test_the_number_of_threads_changes_no_bit(
    native: Kernels, name: str, threads: int, published: Published
) -> None:
    model = registry.load(published(name)[1], native)
    tokens = tiny_models.prompt(LENGTH, model_configs.VOCAB)
    wanted = Driver(model).prefill(tokens)
    native.set_threads(threads, False)
    alike(Driver(model, num_blocks=400), tokens, wanted)
