"""Thread pools for lanes: two lanes of a schedule can compute at once, each with its own threads and memory.

Without such a pool, the operations of all threads run one at a time on the process's shared pool. The bits
are the same either way.
"""

from __future__ import annotations

from collections.abc import Sequence

from moesaic.core.errors import ConfigError
from moesaic.kernels.native import _native


def own_pool(threads: int, cpus: Sequence[int] = ()) -> None:
    """Give the calling thread a pool of `threads`, including itself, until `shared_pool()` or its end.

    cpus: CPUs that they are pinned to, this thread first; empty: not pinned. A recording computes on the
    pool of the thread that runs it. Raises ConfigError for no threads and for a CPU that this thread may
    not use. Raises RuntimeError if the system has no more threads; this thread is then on the shared pool.
    """
    if threads < 1:
        raise ConfigError.field("threads", threads, "1 or more")
    allowed = _native.cpus()
    for cpu in cpus:
        if cpu not in allowed:
            raise ConfigError.field("cpus", cpu, ", ".join(map(str, allowed)))
    _native.own_pool(threads, list(cpus))


def shared_pool() -> None:
    """Return the calling thread to the process's pool, and to the CPUs that it had before it was pinned."""
    _native.shared_pool()
