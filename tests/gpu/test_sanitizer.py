"""The sanitizer refuses what CUDA refuses, by torch's own model of a GPU, and computes like a CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.support.gpu_cases import ALLOWED, FACTS, REFUSED, Operation
from tests.support.gpu_sanitizer import NAME, OnDevice, guarded, sanitized
from torch._subclasses.fake_tensor import FakeTensorMode

UNKNOWN_TO_FAKES = {
    "numpy by the way of the CPU": "fakes have no numbers",
    "lists": "fakes have no numbers",
    "a CPU mask": "its ones cannot be counted",
    "its indices into the CPU": "fakes let them pass; torch's indexing says that they must be on the CPU too",
}


def refused(run: Operation) -> bool:
    try:
        run("cuda")
    except RuntimeError:
        return True
    return False


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ALLOWED)
def test_what_cuda_allows(name: str, mode: Callable[[], torch.no_grad]) -> None:
    with sanitized(), mode():
        ALLOWED[name]("cuda")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", REFUSED)
def test_what_cuda_refuses(name: str, mode: Callable[[], torch.no_grad]) -> None:
    with sanitized(), mode(), pytest.raises(RuntimeError, match="two devices, cuda:0 and cpu"):
        REFUSED[name]("cuda")


@pytest.mark.parametrize("name", [name for name in (*ALLOWED, *REFUSED) if name not in UNKNOWN_TO_FAKES])
def test_torchs_own_model_of_a_gpu_agrees(name: str) -> None:
    """FakeTensor follows devices and sizes and has no numbers."""
    run, wanted = (ALLOWED[name], False) if name in ALLOWED else (REFUSED[name], True)
    with guarded(), FakeTensorMode(), torch.no_grad():
        assert refused(run) == wanted


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("fact", FACTS)
def test_facts_of_a_gpu(fact: Operation, mode: Callable[[], torch.no_grad]) -> None:
    with sanitized(), mode():
        fact("cuda")


def test_numpy_and_products_of_integers_are_refused() -> None:
    with sanitized():
        ids = torch.ones(2, 2, dtype=torch.int64, device="cuda")
        with pytest.raises(RuntimeError, match="not implemented for"):
            ids @ ids
        with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
            ids.numpy()


def test_fresh_memory_holds_nothing_that_can_be_used() -> None:
    with sanitized():
        assert torch.empty(2, device="cuda").isnan().all()
        ones = torch.ones(2, device="cuda")
        assert ones.new_empty(1).isnan().all() and torch.empty_like(ones).isnan().all()
        with pytest.raises(IndexError):
            ones[torch.empty(1, dtype=torch.int64, device="cuda")]
    assert not ones.new_zeros(1).any() and isinstance(ones, OnDevice), "it stays what it was afterwards"


def test_torch_has_a_device_within_it_only() -> None:
    before = torch.cuda.is_available()
    with sanitized(free=1000):
        assert torch.cuda.is_available() and torch.cuda.get_device_name() == NAME
        assert torch.cuda.mem_get_info()[0] == 1000
        made = torch.tensor([1.5], device="cuda")
        assert made.device == torch.device("cuda:0") and torch.ones(1).device.type == "cpu"
    assert torch.cuda.is_available() == before and type(torch.ones(1)) is torch.Tensor
