"""Finds out what this machine has, without any privileges."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from moesaic.cluster import numa
from moesaic.config import hub_cache
from moesaic.core.errors import ConfigError
from moesaic.kernels import table
from moesaic.runtime.limits import Limit, cpu_quota, memory_limit
from moesaic.runtime.machine import NVIDIA, allowed_cpus, available_memory, cores

_CPUINFO = Path("/proc/cpuinfo")

INSTRUCTION_SETS = {
    "avx2": ("avx2",),
    "fma": ("fma",),
    "avx_vnni": ("avx_vnni",),
    "avx512": ("avx512f", "avx512bw", "avx512vl", "avx512dq"),
    "avx512_vnni": ("avx512_vnni",),
    "avx512_bf16": ("avx512_bf16",),
    "amx_bf16": ("amx_tile", "amx_bf16"),
    "amx_int8": ("amx_tile", "amx_int8"),
    "neon": ("asimd",),
    "bf16": ("bf16",),
    "sve": ("sve",),
}
"""Displayed name -> flags in /proc/cpuinfo. All of them must be present."""


@dataclass(frozen=True)
class Gpu:
    """A GPU that torch sees."""

    name: str
    memory: int
    """Size of the GPU's memory in bytes."""
    free: int
    """Free memory in bytes."""
    capability: str
    """CUDA compute capability, such as "9.0"."""


@dataclass(frozen=True)
class Machine:
    """Hardware, limits and libraries of this machine. Sizes are in bytes."""

    system: str
    python: str
    cpu: str
    cores: int
    """Number of cores that this process may run on."""
    cores_online: int
    numa_nodes: int
    """Number of NUMA nodes that have these cores."""
    cpu_quota: Limit | None
    """CPU time that a container may use, in cores. None without a limit."""
    threads: int
    """Number of cores that processes compute on: those of this process, within the limit."""
    instruction_sets: list[str]
    memory_total: int
    memory_available: int
    """Memory that can be used without swapping and within the container's limit."""
    memory_limit: Limit | None
    """The limit of memory in bytes. None without a limit."""
    gpus: list[Gpu]
    nvidia_driver: bool
    """True if an NVIDIA driver is loaded, even if torch sees no GPU."""
    torch: str
    torch_build: str
    """"CPU", or the version of CUDA or ROCm that torch was built for."""
    torch_cpu_capability: str
    hub_cache: str | None
    """Directory of downloaded models. None for a user without a home directory, if no variable names one."""
    hub_cache_free: int
    """Free space on the disk of that directory, in bytes."""


def examine() -> Machine:
    """Examine this machine."""
    cpuinfo = _CPUINFO.read_text() if _CPUINFO.is_file() else ""
    try:
        cache = hub_cache()
    except ConfigError:
        cache = None
    return Machine(
        system=platform.platform(),
        python=platform.python_version(),
        cpu=cpu_name(cpuinfo),
        cores=len(allowed_cpus()),
        cores_online=os.cpu_count() or 1,
        numa_nodes=max(1, len(numa.list_nodes(allowed_cpus()))),
        cpu_quota=cpu_quota(),
        threads=cores(),
        instruction_sets=instruction_sets(cpuinfo),
        memory_total=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        memory_available=available_memory(),
        memory_limit=memory_limit(),
        gpus=_gpus(),
        nvidia_driver=NVIDIA.exists(),
        torch=str(torch.__version__),
        torch_build=_torch_build(),
        torch_cpu_capability=table.torch_code(),
        hub_cache=None if cache is None else str(cache),
        hub_cache_free=0 if cache is None else shutil.disk_usage(nearest_existing(cache)).free,
    )


def cpu_name(cpuinfo: str) -> str:
    """The CPU's name in the text of /proc/cpuinfo, which ARM kernels do not give; else platform's."""
    return next(iter(_fields(cpuinfo, ("model name", "Model"))), platform.processor() or platform.machine())


def instruction_sets(cpuinfo: str) -> list[str]:
    """The names in INSTRUCTION_SETS that the first core supports."""
    flags = set(next(iter(_fields(cpuinfo, ("flags", "Features"))), "").split())
    return [name for name, cpu_flags in INSTRUCTION_SETS.items() if flags.issuperset(cpu_flags)]


def nearest_existing(path: Path) -> Path:
    """`path`, or the closest parent folder that exists."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


def _fields(text: str, names: Sequence[str]) -> list[str]:
    """The values of the lines "name : value" whose name is in `names`, in the order of the lines."""
    pairs = (line.split(":", 1) for line in text.splitlines() if ":" in line)
    return [value.strip() for name, value in pairs if name.strip() in names]


def _gpus() -> list[Gpu]:
    if not torch.cuda.is_available():
        return []
    return [_gpu(index) for index in range(torch.cuda.device_count())]


def _gpu(index: int) -> Gpu:
    free, total = torch.cuda.mem_get_info(index)
    major, minor = torch.cuda.get_device_capability(index)
    return Gpu(torch.cuda.get_device_name(index), total, free, f"{major}.{minor}")


def _torch_build() -> str:
    if torch.version.cuda is not None:
        return f"CUDA {torch.version.cuda}"
    return "CPU" if torch.version.hip is None else f"ROCm {torch.version.hip}"
