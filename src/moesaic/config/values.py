"""The values that settings may have, and how they are read from text."""

from __future__ import annotations

import math
import re
from typing import Literal
from urllib.parse import urlsplit

from moesaic.core.errors import ConfigError

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
CacheDtype = Literal[Dtype, "int8"]
Schedule = Literal["barrier", "lockstep", "async", "auto"]
QueuePolicyName = Literal["defrag", "mtfs", "flfs"]
Combine = Literal["exact", "partial"]
RelayUse = Literal["auto", "always", "off"]
MoeCollectives = Literal["deepspeed", "all-reduce", "reduce-scatter", "shuffled"]
CollectivesBackend = Literal["host", "nccl", "gloo"]
Align = Literal["move", "variable"]
NumaBinding = Literal["auto", "off"]
Rebalance = Literal["load", "routing"]
DispatchName = Literal["affinity", "affinity-rounds", "least-loaded", "round-robin"]
KernelName = Literal[
    "auto",
    "avx512",
    "avx2",
    "portable",
    "avx512_bf16",
    "amx_bf16",
    "amx_bf16x2",
    "amx_bf16x3",
    "avx512_int8",
    "amx_int8",
    "avx2_vnni_int8",
    "avx2_int8",
    "reference",
    "triton",
]
CudagraphMode = Literal["piecewise", "full"]
MemoryDivision = Literal["follow", "fixed"]
OffloadSchedule = Literal["auto", "cgopipe", "in-place", "on-demand", "split", "s2", "s3", "s4", "serial"]
MetricsPrefix = Literal["moesaic:", "vllm:"]
LogLevel = Literal["debug", "info", "warning", "error"]
HostTransport = Literal["shm", "socket", "nixl", "cuda_ipc", "nvshmem"]
"""Transport between processes of one host: shm or socket. Between hosts both stand for encrypted TCP. nixl:
one-sided writes between hosts, and shm or a socket on one host. cuda_ipc: one host only; shm, and rows stay
on its GPUs. nvshmem: graphs of whole steps write between GPUs of all hosts, and all else goes as with shm, or
with a socket."""
ON_GPUS: tuple[HostTransport, ...] = ("cuda_ipc", "nvshmem")
"""Those whose rows stay on GPUs."""
KVRole = Literal["prefill", "decode"]
"""What an attention worker has to do with the KV of other workers."""
Transport = Literal["auto", HostTransport]
ExecutorBackend = Literal["local", "mp", "ray"]
"""Where processes start. mp is vLLM's name of local."""

SMALL_MODEL = 1 << 28
"""Bytes of weights below which a model is computed by one thread. Its products are so small that several
threads lose more time waiting for each other than they save."""

MOST_THREADS = 1024
"""Maximum value of --threads."""

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_UNITS |= {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_bytes(name: str, text: str | int) -> int:
    """The number of bytes that `text` says: '512MiB', '4GB', '2g' or a plain number.

    Raises ConfigError naming `name`.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(text))
    unit = _UNITS.get(match.group(2).upper()) if match else None
    number = float(match.group(1)) if match else 0.0
    if match is None or unit is None or not 0 < number * unit < 2**63:
        raise ConfigError.field(name, text, "a positive size such as 512MiB, 4GiB or 4GB")
    return int(number * unit)


def at_least(name: str, value: int, low: int) -> None:
    if not isinstance(value, int) or value < low:  # from Python anything may come
        raise ConfigError.field(name, value, f"an integer of at least {low}")


def check_threads(threads: int | None) -> None:
    """Raises ConfigError for a number of threads that is not allowed. None, all cores, is allowed."""
    if threads is not None and (not isinstance(threads, int) or not 1 <= threads <= MOST_THREADS):
        raise ConfigError.field("--threads", threads, f"an integer of at least 1 and at most {MOST_THREADS}")


def capacity(name: str, text: str) -> float:
    """The capacity weight that `text` says. Raises ConfigError naming `name`."""
    try:
        weight = float(text)
    except ValueError:
        weight = 0.0  # what is no number is refused like 0
    if not 0 < weight < math.inf:
        raise ConfigError.field(name, text, "positive numbers with commas between, such as 2,1")
    return weight


def require_one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError.field(name, value, ", ".join(choices))


def check_names(names: tuple[str, ...]) -> None:
    """Raises ConfigError for a name of the served model that is empty or given twice."""
    for name in names:
        if not name.strip() or names.count(name) > 1:
            raise ConfigError.field("--served-model-name", name, "names that are not empty, each once")


def check_key(name: str, key: str) -> None:
    """Raises ConfigError for a key that an HTTP header cannot carry. The error does not repeat the key."""
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"{name}: this key cannot be sent; allowed: ASCII characters, no spaces, not empty")


def check_url(flag: str, url: str) -> None:
    """Raise ConfigError unless `url` is one of HTTP with a host."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a wrong port or IPv6 address
        good = False
    if not good:
        raise ConfigError.field(flag, url, "a URL of HTTP, such as http://localhost:4318/v1/traces")
