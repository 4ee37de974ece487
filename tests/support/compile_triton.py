"""Compiles for GPUs what Triton kernels are asked to launch, without a GPU. Run as a program, it prints each.

    python -m tests.support.compile_triton 80 90

Kernels that call NVSHMEM are linked with NVIDIA's library where the environment variable NVSHMEM_LIBRARY
names a folder that has it (`lib` of the package nvidia-nvshmem), and else with functions that do nothing.

Triton's compiler needs no GPU. Every launch of the calls below is compiled for each architecture, with the
types and constants that it has there.
"""

from __future__ import annotations

import atexit
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from moesaic.core.experts import Activation
from moesaic.core.weight_types import QUANTIZATIONS, row_bytes
from moesaic.gpu.exchange.exchange_launches import ADDRESSES, LEAST_SLOTS, Exchange
from moesaic.gpu.triton import (
    attention,
    cache,
    convolution,
    delta,
    dense,
    exchange,
    experts,
    gate,
    launching,
    nvshmem,
    nvshmem_exchange,
    rows,
)
from moesaic.kernels import table
from moesaic.kernels.batch import AttentionBatch
from moesaic.kernels.gating import Gating
from moesaic.kernels.matrix import QuantizedMatrix
from moesaic.kernels.states import StateSizes
from moesaic.kernels.weights import ExpertWeights
from tests.support import delta_steps, paged_steps

SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""KiB of shared memory that a block of threads can have, by compute capability."""
READS_WEIGHTS = ("experts._gate_and_up", "experts._down_projection", "dense._linear")
"""Kernels whose speed is that of reading weights."""
NARROW = re.compile(r"ld\.global\S*\.b(8|16)\b")
"""Loads of fewer than 4 bytes by a thread. They take as long as those of 16 bytes."""
LATENT = 576
"""Numbers of a cached row of DeepSeek's latent attention."""
ORDERED = {
    "exchange._post": (r"fence\.(acq_rel|release)\.sys.*st\.relaxed\.sys",),
    "exchange._wait": (r"ld\.relaxed\.sys.*fence\.(acq_rel|acquire)\.sys", r"ld\.volatile"),
    "nvshmem_exchange._send": (r"fence\.(acq_rel|release)\.sys.*st\.relaxed\.sys",),
    "nvshmem_exchange._wait": (r"fence\.(acq_rel|release)\.sys.*st\.relaxed\.sys", r"ld\.volatile"),
}
"""What a kernel must have so that other devices and the host see its writes in their order."""
NOTHING = """
target triple = "nvptx64-nvidia-cuda"
define i32 @nvshmemx_putmem_signal_nbi_block(i64, i64, i64, i64, i64, i32, i32) noinline { ret i32 0 }
define i32 @nvshmem_uint64_test(i64 %word, i32, i64) noinline {
  %at = inttoptr i64 %word to ptr
  %number = load volatile i32, ptr %at
  ret i32 %number
}
"""
"""Functions of NVIDIA's library, with the types by which kernels call them."""
done: set[tuple[int, str]] = set()
examined: set[str] = set()
"""Kernels that were compiled, as `module.name`."""


class Device:
    """Takes the place of Triton's driver: a GPU of some architecture, on which nothing runs."""

    architecture = 80

    def get_current_device(self) -> int:
        """Triton keeps what it has compiled by device, so each architecture is one."""
        return self.architecture

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.architecture, 32)


DEVICE = Device()


def compiled(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Takes the place of `launch`.

    Triton specialises a kernel as for a launch: for numbers that are 1, for multiples of 16, and for aligned
    tensors. Wide loads and their shared memory depend on that.
    """
    for DEVICE.architecture in map(int, sys.argv[1:]):
        made = kernel.run(*arguments, grid=grid, warmup=True, **constants)
        if (DEVICE.architecture, made.hash) in done:
            continue
        done.add((DEVICE.architecture, made.hash))
        short_name = f"{kernel.__module__.rpartition('.')[2]}.{kernel.__name__}"
        examined.add(short_name)
        shared, name = made.metadata.shared, f"{short_name} {constants}"
        sys.stdout.write(f"sm_{DEVICE.architecture} {shared} bytes: {name}\n")
        assert shared <= SHARED[DEVICE.architecture] << 10, f"{name}: more shared memory than there is"
        narrow = short_name in READS_WEIGHTS and NARROW.search(made.asm["ptx"])
        for instruction in ORDERED.get(short_name, ()):
            found = re.search(instruction, made.asm["ptx"], re.DOTALL)
            assert found, f"sm_{DEVICE.architecture}: {name} lacks {instruction}"
        assert not narrow, f"{name} reads weights with {narrow and narrow[0]}"


def linked(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Takes the place of `nvshmem.launch`."""
    every = sys.argv[1:]
    for architecture in every:
        sys.argv[1:] = [architecture]
        library = {nvshmem.LIBRARY: str(_library(architecture))}
        compiled(kernel, grid, *arguments, **constants, extern_libs=library)
    sys.argv[1:] = every


def _library(architecture: str) -> Path:
    """NVIDIA's library of device code for an architecture, or one whose functions do nothing."""
    if (folder := os.environ.get("NVSHMEM_LIBRARY")) is not None:
        names = [f"libnvshmem_device_sm_{one}.bc" for one in (architecture, architecture[:-1] + "0", "100")]
        return next(path for path in (Path(folder, name) for name in names) if path.exists())
    made = Path(tempfile.gettempdir(), f"moesaic-nvshmem-{os.getpid()}.ll")
    made.write_text(NOTHING)
    atexit.register(made.unlink, missing_ok=True)
    return made


def weights(dtype: torch.dtype, biased: bool) -> ExpertWeights:
    shapes = ((64, 128), (64, 128), (128, 64), *(((64,), (64,), (128,)) if biased else ()))
    parts = [(torch.zeros(shape, dtype=dtype if len(shape) > 1 else torch.float32),) * 4 for shape in shapes]
    return ExpertWeights(*parts, activation=Activation(1.7, 1.0, 7.0) if biased else Activation())


def quantised(kind: str) -> ExpertWeights:
    shapes = ((64, 128), (64, 128), (128, 64))
    parts = [(torch.zeros(lines, row_bytes(kind, size), dtype=torch.uint8),) * 4 for lines, size in shapes]
    return ExpertWeights(*parts, packed_dtype=kind)


def attend(step: tuple[list[int], list[int]], dtype: torch.dtype, window: int | None, width: int) -> None:
    """Heads as wide as those of DeepSeek's latent attention, of Qwen3-Next, and of most others."""
    batch = AttentionBatch.build(paged_steps.tokens(*step, 16, num_blocks=150), 16)
    latent = width == LATENT
    keys = paged_steps.cache(16, 1 if latent else 2, width, dtype, 150)
    query, sinks = torch.zeros(batch.batch.num_rows, 8, width), torch.zeros(8) if window else None
    values = None if latent else keys
    attention.paged_attention(query, keys, values, batch, 0.1, window, 512 if latent else width, sinks)


def recur(counts: list[int], recorded: bool) -> None:
    """Heads as Qwen3-Next has them, and wide ones. recorded: with arrays as recordings of steps have them."""
    for sizes in (StateSizes(2, 4, 128, 128, 4), StateSizes(1, 1, 256, 256, 8, max_draft_tokens=3)):
        layer = delta_steps.Layer(table.REFERENCE, delta_steps.Inputs(sizes, counts))
        batch = AttentionBatch.build(layer.batch(list(enumerate(counts))), delta_steps.BLOCK)
        if recorded:
            batch.__dict__["state_sequences"] = batch.state_sequences._replace(
                tiles=batch.state_sequences.tiles.long()
            )
        one, heads = torch.zeros(sum(counts), sizes.channels), sizes.value_heads
        taps = torch.zeros(sizes.taps, sizes.channels).t()
        convolution.convolve(one, taps, layer.states, batch, activate=heads > 1)
        gates = torch.zeros(sum(counts), 2 * heads)
        delta.delta(one, gates, gates[0, :heads], gates[0, :heads], layer.states, batch)


def ask() -> None:
    """The launches of a layer between a worker and its servers."""
    step, word = torch.zeros(2, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    table, ids = torch.zeros(2, 64, dtype=torch.int32), torch.zeros(3, 8, dtype=torch.int64)
    headers, asked = (torch.zeros(2, size, dtype=torch.int32) for size in (7, LEAST_SLOTS))
    addresses, hidden = torch.zeros(ADDRESSES, LEAST_SLOTS, dtype=torch.int64), torch.zeros(3, 2880)
    lines = torch.zeros(LEAST_SLOTS, 257, dtype=torch.int32)
    ours = Exchange(addresses, table, headers, 2, 3, hidden, lines, step, word, asked, word)
    for launches in (exchange, nvshmem_exchange):
        sources = launches.dispatch(ours, 1, hidden, ids)
        launches.post(ours, 1)
        launches.wait(ours, 1, 1 << 24)
    exchange.collect(sources, 8, 2880)


def main() -> None:
    for module in (attention, cache, convolution, delta, dense, exchange, experts, gate, rows):
        module.launch = compiled  # type: ignore[attr-defined]
    nvshmem_exchange.launch, nvshmem.launch = compiled, linked  # type: ignore[attr-defined]
    assert not launching.IS_INTERPRETED
    driver.set_active(DEVICE)
    one, ids = torch.zeros(3, 128), torch.zeros(3, 2, dtype=torch.int64)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        experts.experts(weights(dtype, biased=dtype is torch.bfloat16), one, ids)
    for kind in QUANTIZATIONS:
        experts.experts(quantised(kind), one, ids)
        matrix = QuantizedMatrix(torch.zeros(64, row_bytes(kind, 128), dtype=torch.uint8), 128, kind)
        dense.linear(one, matrix)
        dense.embed(matrix, ids[0])
    experts.experts(weights(torch.bfloat16, biased=True), one, ids, torch.zeros(3, 2, 128))
    experts.experts(weights(torch.bfloat16, biased=False), one[:1], ids[:1, :1])
    dense.gated_mlp(one, torch.zeros(64, 128), torch.zeros(64, 128), torch.zeros(128, 64))
    rows.rms_norm(one, one[0], 1e-6)
    rows.add_norm(one, one, one[0], 1e-6)
    for interleaved, norm in ((False, one[0, :64]), (True, None)):
        rows.rope(one.view(3, 2, 64), torch.zeros(9, 16), torch.zeros(9, 16), ids[:, 0], interleaved, norm)
    rows.gated_norm(one.view(3, 2, 64), one[0, :64], one, 1e-6)
    rows.sigmoid_times(one.view(3, 2, 64), one.view(3, 2, 64))
    rows.merge(one, one, torch.zeros(3, 2, 128), torch.zeros(3, 2))
    rules = Gating(2, True, 1.0, 4, 2, "sigmoid", "two best"), Gating(8, normalise=True), Gating(1)
    for rule in rules:
        gate.gate(one, torch.zeros(64, 128), rule, torch.zeros(64))
    for counts, recorded in (([1, 1], False), ([3, 70], False), ([3, 2], True)):
        recur(counts, recorded)
    ask()
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        cache.store(paged_steps.cache(16, 2, 64, dtype, 4), one.view(3, 2, 64), ids[:, 0])
        for width in (128, 256, LATENT):
            attend(([1, 1], [40, 1500]), dtype, None, width)
            attend(([1, 30], [40, 200]), dtype, 50, width)
    missing = {*READS_WEIGHTS, *ORDERED} - examined
    assert not missing, f"kernels that nobody compiled: {sorted(missing)}"


if __name__ == "__main__":
    main()
