"""Several processes that compute on the same cores, each with as many threads as there are cores.

    python benchmarks/sharing.py demo --processes 1 2

Every process decodes for some seconds; shown are the tokens/s of each and of all. A pool whose threads spin
loses a scheduler quantum whenever it waits for a thread that has no core, and the total collapses.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

from rich.console import Console
from rich.table import Table

from moesaic import LLM, SamplingParams

READY = "ready"


def child(model: str, kernels: str, threads: int, concurrency: int, seconds: float) -> None:
    """Loads, reports it, waits for a line, decodes, and prints tokens/s."""
    llm = LLM(model, kernels=kernels, threads=threads, enable_prefix_caching=False, max_model_len=512)
    prompts = [[1 + index, 2, 3, 4] for index in range(concurrency)]
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    llm.generate(prompts, params)
    print(READY, flush=True)
    sys.stdin.readline()
    tokens, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        tokens += sum(len(one.outputs[0].token_ids) for one in llm.generate(prompts, params))
    print(tokens / (time.perf_counter() - started), flush=True)


def together(processes: int, arguments: argparse.Namespace, kernels: str) -> list[float]:
    """Tokens/s of each of some processes that decode at the same time."""
    command = [sys.executable, __file__, arguments.model, "--child", kernels]
    command += ["--threads", str(arguments.threads), "--concurrency", str(arguments.concurrency)]
    command += ["--seconds", str(arguments.seconds)]
    children = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(processes)
    ]
    for one in children:
        assert one.stdout is not None and one.stdout.readline().strip() == READY
    for one in children:
        assert one.stdin is not None
        one.stdin.write("go\n")
        one.stdin.flush()
    return [float(one.communicate()[0]) for one in children]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", help="a Hugging Face directory, or demo")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--kernels", nargs="+", default=["auto", "reference"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.model, arguments.child, arguments.threads, arguments.concurrency, arguments.seconds)
        return
    shown = Table(title=f"{arguments.model}, {arguments.threads} threads a process")
    for column in ("kernels", "processes", "tokens/s of each", "of all"):
        shown.add_column(column)
    for kernels in arguments.kernels:
        for processes in arguments.processes:
            rates = together(processes, arguments, kernels)
            each = ", ".join(f"{rate:.0f}" for rate in rates)
            shown.add_row(kernels, str(processes), each, f"{sum(rates):.0f}")
    Console(width=80).print(shown)


if __name__ == "__main__":
    main()
