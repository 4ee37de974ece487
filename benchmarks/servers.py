"""Servers side by side under the same arrivals: how long people wait, and how evenly tokens come.

    python benchmarks/make_checkpoint.py qwen3-moe-0.96b /tmp/qwen
    benchmarks/setup_peer.sh vllm /tmp/vllm
    benchmarks/setup_peer.sh llama-server /tmp/llama-server
    python benchmarks/servers.py /tmp/qwen --kernels auto avx512_bf16 --vllm /tmp/vllm \\
        --llama-server /tmp/llama-server/llama-server --gguf /tmp/qwen-bf16.gguf --rates 0.8 1.2 1.6

Each server runs alone, gets each rate of each seed, and ends. Prompts have lengths from a lognormal
distribution, or all --prompt-len if --prompt-sigma is 0. Arrivals are Poisson's, or those of a --trace.
All servers get the same ones, from `moesaic bench serve`, whose share of the CPUs is shown.
`good` is the share of requests whose first token came within --first-ms and whose tokens took at most
--token-ms each on average. Tokens of made checkpoints are words, so each arrives in an event of its own.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from engines import venv_python
from one_server import MOESAIC
from rich.console import Console
from rich.table import Table

START_SECONDS = 600.0
NAME = "model"
"""The model's name in the API of every server."""
SHORTEST, LONGEST = 64, 2000
"""Tokens of a prompt that is drawn."""


@dataclass(frozen=True)
class Contender:
    """A server, and the command that starts it."""

    name: str
    command: list[str]


@dataclass(frozen=True)
class Load:
    """What a server did under one load. Times are in milliseconds."""

    server: str
    rate: float
    seed: int
    good: float
    first: dict[str, float]
    """Percentile -> time to the first token."""
    gap: dict[str, float]
    """Percentile -> time between two tokens."""
    requests_per_s: float
    failed: int
    client_share: float
    """CPU time of the client over that of all cores."""


def list_contenders(arguments: argparse.Namespace) -> list[Contender]:
    port, threads, length = str(arguments.port), str(arguments.threads), str(arguments.max_model_len)
    contenders = []
    for kernels in arguments.kernels:
        for flags in arguments.serve:
            command = [*MOESAIC, "serve", str(arguments.model), "--port", port, "--served-model-name", NAME]
            command += ["--kernels", kernels, "--threads", threads, "--max-model-len", length]
            command += ["--no-enable-prefix-caching", *shlex.split(flags)]
            contenders.append(Contender(" ".join(filter(None, (f"moesaic {kernels}", flags))), command))
    for flags in arguments.vllm_serve if arguments.vllm else ():
        # The program `vllm` asks for a package of that name, and the CPU build has another one.
        command = [venv_python(arguments.vllm), "-m", "vllm.entrypoints.openai.api_server"]
        command += [
            "--model",
            str(arguments.model),
            "--port",
            port,
            "--served-model-name",
            NAME,
            "--max-model-len",
            length,
        ]
        command += ["--no-enable-prefix-caching", *shlex.split(flags)]
        contenders.append(Contender(" ".join(filter(None, ("vLLM", flags))), command))
    for slots in arguments.slots if arguments.llama_server else ():
        command = [str(arguments.llama_server), "-m", str(arguments.gguf), "--port", port, "--alias", NAME]
        command += ["-t", threads, "-np", str(slots), "-c", str(slots * arguments.max_model_len)]
        command += ["--no-cache-prompt"]
        contenders.append(Contender(f"llama-server, {slots} slots", command))
    return contenders


def write_trace(path: Path, arguments: argparse.Namespace, rate: float, seed: int) -> None:
    """Arrivals and lengths, as `moesaic bench serve --trace` reads them."""
    rng, now = random.Random(f"{rate}/{seed}"), 0.0
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["arrival_s", "input_tokens", "output_tokens"])
        for _ in range(arguments.requests):
            now += rng.expovariate(rate)
            tokens = arguments.prompt_len * rng.lognormvariate(0.0, arguments.prompt_sigma)
            length = round(min(max(tokens, SHORTEST), LONGEST)) if arguments.prompt_sigma else round(tokens)
            writer.writerow([f"{now:.3f}", length, arguments.gen_len])


@contextmanager
def run_server(contender: Contender, port: int, log: Path) -> Iterator[str]:
    """The URL of a server, once it answers. It ends with the context."""
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "4", "HF_HUB_OFFLINE": "1"}
    # The programs beside a Python are part of it: vLLM compiles with its own.
    environment["PATH"] = f"{Path(contender.command[0]).parent}:{environment['PATH']}"
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_SECONDS
    with log.open("w") as file:
        process = subprocess.Popen(
            contender.command, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            while not _answers(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"{contender.name} does not answer:\n{log.read_text()[-2000:]}")
                time.sleep(0.5)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except OSError:
        return False


def send_load(
    server: str, url: str, trace: Path, arguments: argparse.Namespace, rate: float, seed: int
) -> Load:
    vocabulary = str(json.loads((arguments.model / "config.json").read_text())["vocab_size"])
    command = [*MOESAIC, "bench", "serve", "--base-url", url, "--json", "--seed", str(seed)]
    command += ["--trace", str(trace), "--num-prompts", str(arguments.requests), "--vocab-size", vocabulary]
    command += ["--goodput", f"ttft:{arguments.first_ms:g}", f"tpot:{arguments.token_ms:g}", "--ignore-eos"]
    command += ["--temperature", "0", "--num-warmups", "2"]
    if arguments.trace:
        command += ["--trace-scale", str(rate), "--trace-length-scale", str(arguments.trace_length_scale)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Load(
        server,
        rate,
        seed,
        report["request_goodput"] * report["duration"] / arguments.requests,
        {p: report[f"p{p}_ttft_ms"] for p in ("50", "90", "99")},
        {p: report[f"p{p}_itl_ms"] for p in ("50", "90", "99")},
        report["request_throughput"],
        arguments.requests - report["completed"],
        cpu_seconds / report["duration"] / (os.cpu_count() or 1),
    )


def measure(arguments: argparse.Namespace, console: Console) -> list[Load]:
    loads: list[Load] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for contender in list_contenders(arguments):
            with run_server(contender, arguments.port, folder / "log") as url:
                for rate in arguments.rates:
                    for seed in arguments.seeds:
                        trace = arguments.trace or folder / "trace.csv"
                        if not arguments.trace:
                            write_trace(trace, arguments, rate, seed)
                        loads.append(send_load(contender.name, url, trace, arguments, rate, seed))
                        console.print(f"{asdict(loads[-1])}", markup=False, highlight=False)
    return loads


def show(loads: list[Load], console: Console) -> None:
    """A row for each server and rate: medians over the seeds, and the range of the good ones."""
    table = Table(title="milliseconds; medians over the seeds")
    for column in ("server", "rate", "good %", "first: p50", "p90", "p99"):
        table.add_column(column, justify="left" if column == "server" else "right")
    for column in ("tokens: p50", "p90", "p99", "requests/s", "failed", "client %"):
        table.add_column(column, justify="right")
    for server, rate in dict.fromkeys((load.server, load.rate) for load in loads):
        rows = [load for load in loads if (load.server, load.rate) == (server, rate)]
        good = [100 * row.good for row in rows]
        spread = f"{statistics.median(good):.0f}"
        spread += f" ({min(good):.0f} to {max(good):.0f})" if len(rows) > 1 else ""
        times = [
            f"{statistics.median(getattr(row, field)[p] for row in rows):,.0f}"
            for field in ("first", "gap")
            for p in ("50", "90", "99")
        ]
        table.add_row(
            *(server, f"{rate:g}", spread, *times),
            f"{statistics.median(row.requests_per_s for row in rows):.3f}",
            str(sum(row.failed for row in rows)),
            f"{100 * max(row.client_share for row in rows):.1f}",
        )
    console.print(table)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a Hugging Face directory")
    parser.add_argument("--kernels", nargs="*", default=["auto"], help="of moesaic")
    flags = "moesaic serve's further flags, a string for each variant"
    parser.add_argument("--serve", nargs="+", default=[""], metavar="FLAGS", help=flags)
    parser.add_argument("--vllm", type=Path, metavar="VENV", help="from setup_peer.sh vllm")
    parser.add_argument("--vllm-serve", nargs="+", default=[""], metavar="FLAGS", help="of vllm serve")
    parser.add_argument("--llama-server", type=Path, metavar="FILE", help="from setup_peer.sh llama-server")
    parser.add_argument("--gguf", type=Path, help="the model for llama-server")
    parser.add_argument("--slots", type=int, nargs="+", default=[8], help="of llama-server")
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0], help="requests a second")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--requests", type=int, default=100, help="of each rate and seed")
    parser.add_argument("--prompt-len", type=int, default=200, help="median tokens of a prompt")
    parser.add_argument("--prompt-sigma", type=float, default=0.8, help="of the lognormal distribution")
    parser.add_argument("--gen-len", type=int, default=64)
    trace = "CSV of bench serve; --rates are then how many times as fast it is"
    parser.add_argument("--trace", type=Path, help=trace)
    parser.add_argument("--trace-length-scale", type=float, default=1.0)
    parser.add_argument("--first-ms", type=float, default=2000.0)
    parser.add_argument("--token-ms", type=float, default=100.0)
    parser.add_argument("--max-model-len", type=int, default=2304)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--port", type=int, default=8941)
    parser.add_argument("--json", type=Path, help="write all numbers here")
    arguments = parser.parse_args()
    if arguments.llama_server and not arguments.gguf:
        parser.error("--llama-server: give --gguf too")
    return arguments


def main() -> None:
    arguments = parse()
    loads = measure(arguments, Console(stderr=True, width=300))
    show(loads, Console(width=140))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(load) for load in loads], indent=2))


if __name__ == "__main__":
    sys.exit(main())
