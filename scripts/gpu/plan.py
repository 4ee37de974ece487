"""What is tried on a GPU, in which order, and how long it may take."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TOTAL = 575
"""Seconds that all parts may take. Those that come late get what is left."""
LARGE = "qwen3-moe-0.96b"
"""The checkpoint of `benchmarks/make_checkpoint.py` whose speed is measured on a GPU."""
TESTS = ("tests/gpu/triton", "tests/gpu", "tests/gpu/test_llm_triton.py")
UNTESTED = tuple(
    f"tests/gpu/test_{name}.py" for name in ("make_gpu", "serve_cuda_ipc", "serve_gpu", "serve_nvshmem")
)
"""Tests of this command and of whole servers, for which there is no time."""
Found = dict[str, Any]


@dataclass(frozen=True)
class Work:
    """What is tried, and how many runs and requests it has. Travels to child processes as JSON."""

    device: str
    gpus: int = 1
    folder: str = ""
    """Where checkpoints and files of the run lie."""
    tests: Sequence[str] = TESTS
    checkpoint: str = "qwen3-moe-0.01b"
    prompt_tokens: int = 64
    new_tokens: int = 32
    requests: Sequence[int] = (1, 8, 32)
    rounds: int = 3
    only: str = ""
    """Only cases with this in "part: case"."""
    pythons: Sequence[str] = ()
    """Interpreters of virtual environments with vLLM or SGLang."""
    command: str = "moesaic"
    """The module whose command `serve` is run."""
    child: str = "scripts.gpu.child"
    """The module that a child process runs."""

    @property
    def kernels(self) -> tuple[str, ...]:
        """The kernels whose answers are compared. The first ones are measured."""
        return ("triton", "reference") if self.device == "cuda" else ("auto",)


@dataclass(frozen=True)
class Part:
    """Cases that are tried one after another, or several at once, each with a limit."""

    seconds: int
    """Seconds for all cases of the part together. Cases that have not begun by then are left out."""
    each: int
    """Seconds that one case may take."""
    cases: Callable[[Work], Sequence[str]]
    """The names of the part's cases."""
    run: Callable[[Work, str], Found]
    """Tries one case in a child process. The result has at least "ok"."""
    processes: Callable[[], int] = lambda: 1
    """Cases that run at once."""
    fresh: bool = True
    """Whether each case gets a process of its own. Else one process tries cases until one of them fails."""


def several() -> int:
    """Processes that share the GPU where nothing is timed."""
    return max(1, min((os.cpu_count() or 1) // 2, 6))


def problem(says: str) -> Found:
    """The result of a case that could not be tried to its end."""
    return {"ok": False, "error": says}


def checkpoint(work: Work) -> Path:
    """The random checkpoint whose speed is measured. The first case that needs it writes it."""
    path = Path(work.folder) / work.checkpoint
    if not path.exists():
        making = path.with_name(f"{path.name}.{os.getpid()}")
        make = [sys.executable, str(ROOT / "benchmarks" / "make_checkpoint.py"), work.checkpoint, str(making)]
        subprocess.run(make, check=True, stdout=sys.stderr)
        making.rename(path)
    return path
