"""NVSHMEM's functions for kernels, and the launch of kernels that call them.

The functions come from NVIDIA's library of device code, which Triton links into a kernel. Each such kernel is
made known to NVSHMEM once, before it runs, which is possible once this process is in a job.
"""

from __future__ import annotations

import contextlib
import importlib
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language import core

from moesaic.core.errors import ConfigError
from moesaic.gpu.nvshmem.symmetric_heap import bindings
from moesaic.gpu.triton import launching

LIBRARY = "libnvshmem_device"
CAPABILITIES = (100, 90, 89, 80, 70)
"""Compute capabilities for which NVIDIA builds that library. Later GPUs use it too."""
_SET = tl.constexpr(9)
"""NVSHMEM_SIGNAL_SET."""
_AT_LEAST = tl.constexpr(5)
"""NVSHMEM_CMP_GE."""
_known_kernels: set[str] = set()
"""Kernels that NVSHMEM knows, by their hashes."""


@core.extern
def _put_signal(target, source, size, signal, number, operation, pe, _semantic=None):
    types = *(core.dtype("int64"),) * 5, core.dtype("int32"), core.dtype("int32")
    function = {types: ("nvshmemx_putmem_signal_nbi_block", core.dtype("int32"))}
    arguments = [target, source, size, signal, number, operation, pe]
    return core.extern_elementwise("", "", arguments, function, is_pure=False, _semantic=_semantic)


@core.extern
def _test(words, comparison, numbers, _semantic=None):
    types = core.dtype("int64"), core.dtype("int32"), core.dtype("int64")
    function = {types: ("nvshmem_uint64_test", core.dtype("int32"))}
    return core.extern_elementwise(
        "", "", [words, comparison, numbers], function, is_pure=False, _semantic=_semantic
    )


@triton.jit
def put_signal(target, source, size, signal, number, pe):
    """Send `size` bytes to the process `pe`, then `number` into its word at `signal`. Does not wait.

    target, source, signal: int64 addresses of places in the own heap. All threads of the program call it.
    """
    operation = tl.full([], _SET, tl.int32)
    _put_signal(target, source, size.to(tl.int64), signal, number.to(tl.int64), operation, pe.to(tl.int32))


@triton.jit
def at_least(words, numbers):
    """Whether words of 8 bytes in the own heap are at least these numbers. What came before them is seen.

    words: block of int64 addresses. Returns a block of bool.
    """
    comparison = tl.full(words.shape, _AT_LEAST, tl.int32)
    return _test(words, comparison, numbers.to(tl.int64)) != 0


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch a kernel that calls functions of this module, as `launching.launch` does."""
    if not launching.IS_INTERPRETED:
        constants["extern_libs"] = {LIBRARY: _library()}
        _make_known(kernel, grid, arguments, constants)
    launching.launch(kernel, grid, *arguments, **constants)


@cache
def _library() -> str:
    """The path of NVIDIA's library for the current GPU. Raises ConfigError if there is none."""
    package, (major, minor) = importlib.import_module("nvshmem.core"), torch.cuda.get_device_capability()
    capability = 10 * major + minor
    for architecture in (capability, *(candidate for candidate in CAPABILITIES if candidate < capability)):
        with contextlib.suppress(package.NvshmemInvalid):
            return str(package.find_device_bitcode_library(arch=str(architecture)))
    raise ConfigError(
        f"--transport nvshmem: NVSHMEM has no library for kernels of compute capability {capability}"
    )


def _make_known(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: Any) -> None:
    """Compile the kernel, load it, and have NVSHMEM give it what its functions need."""
    device = next(argument.device for argument in arguments if isinstance(argument, torch.Tensor))
    with torch.cuda.device(device):
        kernel_binary = kernel.run(*arguments, grid=grid, warmup=True, **constants)
        if kernel_binary.hash not in _known_kernels:
            kernel_binary._init_handles()
            status = bindings().cumodule_init(kernel_binary.module)
            if status:
                raise ConfigError(f"--transport nvshmem: a kernel is refused with status code {status}")
            _known_kernels.add(kernel_binary.hash)
