"""The operations that a model needs, and the table that picks their implementation.

Question: Which implementation does an operation have, and how is a kernel added?
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from moesaic.core import gpu_parts
from moesaic.core.errors import ConfigError
from moesaic.core.tokens import FloatRows, IntArray
from moesaic.core.weight_types import convert_blocks, is_integer
from moesaic.kernels.batch import AttentionBatch
from moesaic.kernels.gating import Gating
from moesaic.kernels.matrix import Weight
from moesaic.kernels.reference import attention, delta, dense, experts, gate
from moesaic.kernels.states import LayerStates
from moesaic.kernels.weights import ExpertWeights

try:
    from moesaic.kernels.native import _native, checks, memory, ops, plain, recording
    from moesaic.kernels.native import delta as native_delta
except ImportError:  # installed without a compiler
    _native = None  # type: ignore[assignment]


def permute_rows(rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Returns [n, h] rows[order], as a reduce-scatter sends them. rows: [n, h]; order: [n] int64."""
    return rows.index_select(0, order)


def restore_rows(rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """The inverse of `permute_rows`, after an all-gather: row i goes to index order[i]."""
    return torch.empty_like(rows).index_copy_(0, order, rows)


def sum_ranks(addends: torch.Tensor, ranks: int, copies: int = 1) -> torch.Tensor:
    """Returns [copies * m, ...]: the sum of the ranks' addends, in the order of the ranks, so many times.

    addends: [ranks * m, ...] rank after rank. A copy goes to each rank in the exchange that follows. One rank
    has nothing to add: its rows are copied.
    """
    total = functools.reduce(torch.add, addends.chunk(ranks) if ranks > 1 else [addends])
    return torch.cat([total] * copies) if copies > 1 else total


class Linear(Protocol):
    def __call__(
        self, rows: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None
    ) -> torch.Tensor: ...


class Rope(Protocol):
    def __call__(
        self,
        rows: torch.Tensor,
        cosine: torch.Tensor,
        sine: torch.Tensor,
        positions: torch.Tensor,
        is_interleaved: bool = False,
        norm: torch.Tensor | None = None,
        epsilon: float = 0.0,
    ) -> torch.Tensor: ...


class Gate(Protocol):
    def __call__(
        self,
        rows: torch.Tensor,
        weight: torch.Tensor,
        gating: Gating,
        bias: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class PagedAttention(Protocol):
    def __call__(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor | None,
        batch: AttentionBatch,
        scale: float,
        sliding_window: int | None = None,
        value_width: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor: ...


class Convolve(Protocol):
    def __call__(
        self,
        rows: torch.Tensor,
        weight: torch.Tensor,
        states: LayerStates,
        batch: AttentionBatch,
        activate: bool = True,
    ) -> torch.Tensor: ...


class Delta(Protocol):
    def __call__(
        self,
        mixed_rows: torch.Tensor,
        gates: torch.Tensor,
        decay: torch.Tensor,
        bias: torch.Tensor,
        states: LayerStates,
        batch: AttentionBatch,
    ) -> torch.Tensor: ...


class Experts(Protocol):
    def __call__(
        self,
        weights: ExpertWeights,
        hidden: torch.Tensor,
        expert_ids: torch.Tensor,
        output: torch.Tensor | None = None,
    ) -> torch.Tensor: ...


class Put(Protocol):
    def __call__(self, output: FloatRows, lines: IntArray, rows: FloatRows, places: IntArray, /) -> None: ...


Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)


class Recording(Protocol[Result_co]):
    """A step that was run once and can be run again on the present content of its inputs."""

    @property
    def result(self) -> Result_co: ...
    def run(self, expert_rows: torch.Tensor | None = None) -> Result_co: ...
    def free(self) -> None:
        """Frees what it holds. It is not run again."""
        ...


class OperationRecorder(Protocol):
    def __call__(
        self, step: Callable[[], Result], expert_rows: torch.Tensor | None = None
    ) -> Recording[Result]:
        """Runs a step and records it. expert_rows: experts' rows that it merges; each `run` gets new ones.

        On a GPU a recording reads `expert_rows` where it was, and new rows are copied there.
        """
        ...


MOST_RECORDED_ROWS = 256
"""Steps of more rows are not recorded: their launches take less time than what they compute."""
Pair = tuple[torch.Tensor, torch.Tensor]
Biases = Sequence[torch.Tensor | None]


@dataclass(frozen=True)
class Kernels:
    """An implementation of every operation. The reference of each operation states its shapes."""

    name: str
    """Name for people."""
    unconverted_dtypes: frozenset[torch.dtype]
    """Dtypes in which a CPU's weights stay as the checkpoint has them. Others are widened when they are
    loaded."""
    weight_dtypes: frozenset[torch.dtype]
    """Dtypes that weights may be stored in."""
    cache_dtypes: frozenset[torch.dtype]
    """Dtypes that KV caches may be stored in."""
    embed: Callable[[Weight, torch.Tensor], torch.Tensor]
    linear: Linear
    linears: Callable[[torch.Tensor, Sequence[Weight], Biases], tuple[torch.Tensor, ...]]
    head_linear: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    add_norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], Pair]
    rope: Rope
    join: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    store: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
    paged_attention: PagedAttention
    gated_mlp: Callable[[torch.Tensor, Weight, Weight, Weight], torch.Tensor]
    gate: Gate
    experts: Experts
    merge: Callable[
        [torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None], torch.Tensor
    ]
    sigmoid_gate: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    clip: Callable[[torch.Tensor, float], torch.Tensor]
    mask_tokens: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
    convolve: Convolve
    delta: Delta
    gated_norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
    sigmoid_times: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    times: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    put: Put
    set_threads: Callable[[int, bool], None]
    """Sets the number of compute threads, and whether each is pinned to a core."""
    recorder: Callable[[], OperationRecorder] | None = None
    """Makes a recorder of steps that use these operations only; None: steps cannot be recorded."""
    peak: Callable[[int, bool], int] | None = None
    """Computes so many rounds of multiply-adds in registers on each thread, and returns their number. True:
    those of float32. False: those that the instruction set has for some types of weights."""
    one_core: Callable[[int], AbstractContextManager[None]] | None = None
    """A context in which the calling thread computes alone on this core, while other threads compute; None:
    not possible."""
    can_use_quantized: bool = False
    """True if experts may be of a type of `core.weight_types.QUANTIZATIONS`, and other matrices a
    QuantizedMatrix."""
    can_use_blocks: bool = False
    """True if these may also be of a type of `core.weight_types.BLOCK_TYPES`, as GGUF files have them."""
    can_use_compressed: bool = False
    """True if experts may be compressed (`core.weight_types.COMPRESSED_DTYPE`)."""
    is_integer: bool = False
    """True if these kernels are chosen for weights in integers, whose rows they round."""
    can_skip_absent: bool = False
    """True if `experts` leaves rows of `out` as they are where an expert is not held. Otherwise it raises."""
    permute_rows: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = permute_rows
    restore_rows: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = restore_rows
    sum_ranks: Callable[[torch.Tensor, int, int], torch.Tensor] = sum_ranks
    reuse_memory: Callable[[], AbstractContextManager[None]] = nullcontext
    """A context in which the calling thread's results may reuse the memory of freed results."""

    def choose_quantized_type(self, dtype: str) -> str:
        """The type in memory of weights that have a quantised type in files. "float32": they are not read."""
        if not self.can_use_quantized:
            return "float32"
        return dtype if self.can_use_blocks else convert_blocks(dtype)


def torch_code() -> str:
    """The instruction set of torch's own operations on a CPU, such as AVX512, AVX2 or DEFAULT (portable).

    Log-probabilities and sampling use them beside the kernels, so it decides their last bits. torch reads
    /proc/cpuinfo to choose; where that is missing it takes DEFAULT. ATEN_CPU_CAPABILITY overrides it.
    """
    return torch.backends.cpu.get_cpu_capability()


def _torch_threads(threads: int, pin: bool) -> None:
    if pin:
        raise ConfigError.field(
            "--pin-threads", pin, "the native kernels (the reference runs torch's threads)"
        )
    torch.set_num_threads(threads)


REFERENCE = Kernels(
    name="reference (torch)",
    unconverted_dtypes=frozenset({torch.float32}),
    weight_dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
    cache_dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16, torch.int8}),
    embed=dense.embed,
    linear=dense.linear,
    linears=dense.linears,
    head_linear=dense.head_linear,
    rms_norm=dense.rms_norm,
    add_norm=dense.add_norm,
    rope=dense.rope,
    join=dense.join,
    store=dense.store,
    paged_attention=attention.paged_attention,
    gated_mlp=dense.gated_mlp,
    gate=gate.gate,
    experts=experts.experts,
    merge=gate.merge,
    sigmoid_gate=dense.sigmoid_gate,
    clip=dense.clip,
    mask_tokens=dense.mask_tokens,
    convolve=delta.convolve,
    delta=delta.delta,
    gated_norm=delta.gated_norm,
    sigmoid_times=delta.sigmoid_times,
    times=delta.times,
    put=experts.put,
    set_threads=_torch_threads,
)


ROUNDING = frozenset({"avx512_bf16", "amx_bf16"})
"""Instruction sets that round rows to bf16 for bf16 weights. They are only used by name."""
SPLITTING = frozenset({"amx_bf16x2", "amx_bf16x3"})
"""Instruction sets that make two or three bf16 numbers of each number of a row for bf16 weights. Three hold
a float32, two nearly. They are only used by name."""
TILED = frozenset({"amx_bf16"}) | SPLITTING
"""Instruction sets that multiply in AMX tiles, loaded from bf16 rows."""
INTEGER = {"avx512_int8": "avx512", "amx_int8": "avx512", "avx2_vnni_int8": "avx2", "avx2_int8": "avx2"}
"""Instruction sets that round rows to int8 for weights in integers (`core.weight_types.is_integer`), and
the sets that they are for all else. They are only used by name."""
BY_NAME = frozenset({*ROUNDING, *SPLITTING, *INTEGER})
"""Instruction sets that `auto` never takes."""


def instruction_sets() -> tuple[str, ...]:
    """The instruction sets of the native kernels that this CPU can run; empty if they were not built.

    The fastest in float32 comes first. The last are portable, which every CPU runs, and then those of
    BY_NAME.
    """
    return () if _native is None else tuple(_native.instruction_sets())


def list_rounding_sets(stored_types: Sequence[str]) -> tuple[str, ...]:
    """The instruction sets of this CPU that round rows for weights of these types: usually the faster ones.

    stored_types: names of `core.weight_types`. Sets that round to int8 do so for weights in integers only,
    and those that round to bf16 for weights in bf16.
    """
    has_integers = any(is_integer(name) for name in stored_types)
    wanted_sets = set(INTEGER) if has_integers else set()
    wanted_sets |= ROUNDING if "bfloat16" in stored_types and not has_integers else set()
    return tuple(name for name in instruction_sets() if name in wanted_sets)


def pick(device: str, name: str = "auto") -> Kernels:
    """The kernels for "cpu", "cuda" or "cuda:N".

    name: "reference", "triton" on a GPU, the name of an instruction set, or "auto": on a CPU the fastest in
    float32, on a GPU the reference. Raises ConfigError for another device, and for kernels that this machine
    cannot run.
    """
    kind = device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise ConfigError.field("device", device, "cpu, cuda, cuda:N")
    if name == "triton":
        return _triton(kind)
    native = instruction_sets() if kind == "cpu" else ()
    if name == "reference" or (name == "auto" and not native):
        return REFERENCE
    if name != "auto" and name not in native:
        raise ConfigError.field("--kernels", name, ", ".join(("auto", *native, "reference")))
    return _natively(native[0] if name == "auto" else name)


def _triton(kind: str) -> Kernels:
    """Raises ConfigError without Triton, and on a CPU outside of Triton's interpreter."""
    try:
        kernels = gpu_parts.triton_kernels(kind, REFERENCE)
    except ImportError as error:
        raise ConfigError(f"--kernels triton: {error}; pip install triton") from None
    if kernels is None:
        allowed_kernels = "auto, reference and the instruction sets on a CPU; triton on a GPU"
        raise ConfigError.field("--kernels", "triton", allowed_kernels)
    return kernels


def _natively(name: str) -> Kernels:
    """The native kernels of one instruction set. The whole process uses one at a time."""
    assert _native is not None
    try:
        _native.use(name)
    except ValueError as error:
        raise ConfigError(f"--kernels: {error}") from None
    return Kernels(
        name=f"native ({name})",
        unconverted_dtypes=checks.STORED,
        weight_dtypes=checks.STORED,
        cache_dtypes=checks.CACHED,
        embed=ops.embed,
        linear=ops.linear,
        linears=ops.linears,
        head_linear=ops.head_linear,
        rms_norm=ops.rms_norm,
        add_norm=ops.add_norm,
        rope=ops.rope,
        join=ops.join,
        store=ops.store,
        paged_attention=ops.paged_attention,
        gated_mlp=ops.gated_mlp,
        gate=ops.gate,
        experts=ops.experts,
        merge=ops.merge,
        sigmoid_gate=ops.sigmoid_gate,
        clip=ops.clip,
        mask_tokens=ops.mask_tokens,
        convolve=native_delta.convolve,
        delta=native_delta.delta,
        gated_norm=native_delta.gated_norm,
        sigmoid_times=native_delta.sigmoid_times,
        times=native_delta.times,
        put=plain.put,
        set_threads=_native_threads,
        recorder=_recorder,
        peak=_native.peak,
        one_core=_one_core,
        can_use_quantized=name not in TILED,
        can_use_blocks=name not in TILED,
        can_use_compressed=name not in TILED,
        is_integer=name in INTEGER,
        reuse_memory=memory.reuse_memory,
    )


def _native_threads(threads: int, pin: bool) -> None:
    torch.set_num_threads(1)  # the operations left to torch are too small for several threads
    plain.set_threads(threads, pin)


@contextmanager
def _one_core(cpu: int) -> Generator[None]:
    plain.own_pool(1, [cpu])
    try:
        yield
    finally:
        plain.shared_pool()


def _recorder() -> OperationRecorder:
    arena = memory.Arena()
    return lambda step, expert_rows=None: recording.Recording(step, arena, expert_rows)
