"""Where the time of a decode step goes: in which kernels, and how much of it outside of them.

    python benchmarks/step.py demo
    python benchmarks/step.py /tmp/qwen --concurrency 1 8
    python benchmarks/step.py /tmp/qwen-gguf/qwen-q4_0.gguf --kernels avx512_int8

Two passes a concurrency: as it is served, with recorded steps, which gives the share outside of the kernels;
and operation by operation, which tells the kernels apart.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from typing import Any

from rich.console import Console
from rich.table import Table

from moesaic import LLM, SamplingParams
from moesaic.kernels.native import _native, ops, recording


class Timed:
    """The compiled module with a stopwatch around each function."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        for name in ("ALL_HELD", "record", "stop", "use", "set_threads"):
            setattr(self, name, getattr(_native, name))
        for name in dir(ops._native):
            if name.islower() and not name.startswith("_") and not hasattr(self, name):
                setattr(self, name, self._timed(name, getattr(_native, name)))

    def _timed(self, name: str, function: Any) -> Any:
        def run(*arguments: Any) -> Any:
            started = time.perf_counter()
            answer = function(*arguments)
            self.seconds[name] += time.perf_counter() - started
            return answer

        return run


def decode(llm: LLM, concurrency: int, steps: int) -> float:
    """Seconds of `steps` decode steps (and a prefill of four tokens a request)."""
    prompts = [[1 + index, 2, 3, 4] for index in range(concurrency)]
    params = SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True)
    started = time.perf_counter()
    llm.generate(prompts, params)
    return time.perf_counter() - started


def measure(model: str, kernels: str, threads: int, concurrency: int, steps: int) -> list[tuple[str, float]]:
    """(what, milliseconds a step) rows."""
    timed = Timed()
    replay = recording.Recording.run
    ops._native = timed  # type: ignore[assignment]
    recording.Recording.run = timed._timed("recorded step", replay)  # type: ignore[method-assign]
    try:
        totals = {}
        for eager in (False, True):
            llm = LLM(
                model,
                kernels=kernels,
                threads=threads,
                enable_prefix_caching=False,
                enforce_eager=eager,
                max_model_len=512,
            )
            decode(llm, concurrency, steps)
            timed.seconds.clear()
            total = decode(llm, concurrency, steps)
            totals[eager] = (total, Counter(timed.seconds))
            del llm
    finally:
        ops._native = _native
        recording.Recording.run = replay  # type: ignore[method-assign]
    total, spent = totals[False]
    inside = sum(spent.values())
    rows = [("a step", total), ("in kernels", inside), ("outside", total - inside)]
    rows += [(f"  {name}", taken) for name, taken in totals[True][1].most_common()]
    return [(name, 1e3 * taken / steps) for name, taken in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", help="a Hugging Face directory, or demo")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kernels", default="auto", help="as for moesaic serve")
    arguments = parser.parse_args()
    for concurrency in arguments.concurrency:
        rows = measure(arguments.model, arguments.kernels, arguments.threads, concurrency, arguments.steps)
        shown = Table(title=f"{arguments.model}, concurrency {concurrency}, {arguments.threads} threads")
        shown.add_column("part")
        shown.add_column("ms a step", justify="right")
        shown.add_column("share", justify="right")
        for name, taken in rows:
            shown.add_row(name, f"{taken:.3f}", f"{100 * taken / rows[0][1]:.1f} %")
        Console(width=80).print(shown)


if __name__ == "__main__":
    main()
