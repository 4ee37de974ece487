"""Says in words how a process of this host ended, and why, where the system knows more than the signal.

The kernel kills a process with SIGKILL when memory is used up, and with SIGBUS when it reads a mapped file
behind the file's end. Neither process can say so itself.

Question: What is said of a process that was killed because memory was used up, or because a file was cut?
"""

from __future__ import annotations

import logging
import signal
import subprocess
from pathlib import Path

from moesaic.core.errors import CheckpointError
from moesaic.models.headers import Headers
from moesaic.runtime.limits import count_oom_kills
from moesaic.runtime.machine import describe_total_memory, total_memory

LOG = logging.getLogger(__name__)
KILLED_SECONDS = 2.0
"""Seconds that a killed process has to end."""
ADVICE = (
    "allowed: less in --kv-cache-memory, --max-num-seqs or --max-num-batched-tokens, or --fast-memory, "
    "which leaves experts on the disk"
)


class OomKills:
    """The kernel's count of processes that it killed for want of memory. Each explains one end."""

    def __init__(self) -> None:
        self._num_explained = count_oom_kills()

    def take(self) -> bool:
        """Whether there is one that explains no other end."""
        is_unexplained = count_oom_kills() > self._num_explained
        self._num_explained += is_unexplained
        return is_unexplained


OOM_KILLS = OomKills()
"""The count of this process's control group, which begins when this module is imported."""


def describe_exit(code: int, model: Path | None = None, oom_kills: OomKills = OOM_KILLS) -> str:
    """How a process ended, as a predicate. Called once for each process.

    code: as `subprocess.Popen.returncode`. model: the checkpoint that it had mapped; None: that is not known.
    """
    if code >= 0:
        return f"exited with code {code}"
    text = f"killed by signal {-code}"
    if code == -signal.SIGKILL and oom_kills.take():
        bound = f"{total_memory() / 2**30:.1f} GiB ({describe_total_memory()})"
        return f"{text}, because memory was used up: {bound}; {ADVICE}"
    if code == -signal.SIGBUS and model is not None:
        return f"{text} (SIGBUS), because a file that it had mapped was cut: {_find_cut_file(model)}"
    return text


def _find_cut_file(model: Path) -> str:
    """Which file of a checkpoint is shorter than its header says."""
    try:
        Headers(model).list_tensors()
    except (CheckpointError, OSError) as error:
        return str(error)
    return "none of its files is short now, so it was put back, or the disk fails"


def wait_for_killed(process: subprocess.Popen[bytes], name: str) -> None:
    """Waits for the end of a process that got SIGKILL, but not for one that the kernel cannot end: it waits
    for a disk or a network file system that does not answer."""
    try:
        process.wait(KILLED_SECONDS)
    except subprocess.TimeoutExpired:
        LOG.warning(
            "%s %s cannot be killed: it waits for a disk or a network file system; it ends once that answers",
            name,
            process.pid,
        )
