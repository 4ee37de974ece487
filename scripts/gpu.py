"""Tries moesaic on a GPU: one command, one JSON file, less than ten minutes.

    make gpu                            writes build/gpu.json
    python scripts/gpu.py --device cpu  the same on the CPU, to try this script

These parts run one after the other, each in a process of its own and with a limit of time:

- tests: `pytest tests/device`, and those of the Triton kernels;
- identity: greedy answers in float32 on the device beside those of the CPU, token by token;
- speed: tokens/s of the torch path with a random checkpoint, prefill and decode apart;
- triton_identity and triton_speed: the same of the kernels in Triton, whose decode steps are CUDA graphs.
  A CPU leaves them out.

Exit code: 0 when every part is as it should be, 1 when one is not, 2 without a GPU. This script has run on a
CPU and on the stand-in for a GPU that the tests have. No real GPU has run it yet.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import torch

from moesaic import LLM, RequestOutput, SamplingParams

ROOT = Path(__file__).parent.parent
LIMITS = {"tests": 300, "identity": 45, "speed": 90, "triton_identity": 65, "triton_speed": 95}
"""Seconds that each part may take; together less than ten minutes."""
REPORTING = 60
"""Seconds that pytest may take besides its tests: to start, and to end the tests that run at its limit."""
LARGE = "qwen3-moe-0.96b"
"""The checkpoint whose speed is measured on a GPU."""
MOST_PROCESSES = 4
"""Maximum number of processes that run tests at once, each with its share of the GPU's memory."""
INTERRUPTED = 2
"""Exit code of pytest when it was interrupted."""
PROMPTS = (
    "def add(a, b):",
    "Tom has 3 apples and buys 4 more. How many apples does he have now?",
    "The",
    "class Queue:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "1 + 1 =",
    "This manual page describes how to copy files. " * 4,
)
Found = dict[str, Any]


@dataclass(frozen=True)
class Work:
    """What is tried, and how many runs and requests it has."""

    device: str
    tests: tuple[str, ...] = ("tests/device", "tests/kernels/triton", "tests/test_llm_triton.py")
    checkpoint: str = "qwen3-moe-0.01b"
    prompt_tokens: int = 64
    new_tokens: int = 32
    requests: tuple[int, ...] = (1, 8, 32)
    rounds: int = 3
    kernels: str = "reference"
    limits: dict[str, int] = field(default_factory=lambda: dict(LIMITS))


def run_tests(work: Work) -> Found:
    """The counts of pytest's results, and the tests that failed. Ends a little before the limit, to report
    them."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        seconds = max(work.limits["tests"] - REPORTING, 1)
        processes = min(os.cpu_count() or 1, MOST_PROCESSES)
        options = ["-q", "-p", "no:cacheprovider", f"--junitxml={report}", f"--session-timeout={seconds}"]
        command = [sys.executable, "-m", "pytest", *options, "-n", str(processes), "--dist", "worksteal"]
        done = subprocess.run([*command, *work.tests], cwd=ROOT, stdout=sys.stderr)
        if not report.exists():
            return problem(f"pytest ended with exit code {done.returncode} and wrote no report")
        [suite] = ET.parse(report).getroot().iter("testsuite")
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    wrong = [case for case in suite.iter("testcase") if {"failure", "error"} & {child.tag for child in case}]
    names = [f"{case.get('classname')}.{case.get('name')}" for case in wrong]
    found: Found = {"ok": done.returncode == 0, **counts, "failed": names}
    early = done.returncode == INTERRUPTED
    return found | problem(f"pytest did not reach the last test within {seconds} s") if early else found


def identity(work: Work) -> Found:
    """How many greedy tokens are those of the CPU, up to each answer's first difference."""
    params = SamplingParams(temperature=0.0, max_tokens=work.new_tokens, ignore_eos=True, logprobs=0)
    wanted = LLM("demo", device="cpu", dtype="float32", kernels="reference").generate(PROMPTS, params)
    llm = LLM("demo", device=work.device, dtype="float32", kernels=work.kernels)
    found = llm.generate(PROMPTS, params)
    pairs = [(one.outputs[0], other.outputs[0]) for one, other in zip(found, wanted, strict=True)]
    equal = [common_tokens(*pair) for pair in pairs]
    total = sum(len(other.token_ids) for _, other in pairs)
    differences = [largest_difference(*pair, count) for pair, count in zip(pairs, equal, strict=True)]
    return {
        "ok": sum(equal) == total,
        "device": llm.info.device,
        "kernels": llm.info.kernels,
        "model": "demo",
        "dtype": llm.info.dtype,
        "requests": len(pairs),
        "tokens": total,
        "equal_tokens": sum(equal),
        "largest_logprob_difference": max(differences),
    }


def common_tokens(one: RequestOutput, other: RequestOutput) -> int:
    same = [a == b for a, b in zip(one.token_ids, other.token_ids, strict=True)]
    return [*same, False].index(False)


def largest_difference(one: RequestOutput, other: RequestOutput, count: int) -> float:
    """The largest difference between the log-probabilities of the first `count` tokens."""
    pairs = zip((one.logprobs or [])[:count], (other.logprobs or [])[:count], strict=True)
    return max((abs(a.logprob - b.logprob) for a, b in pairs), default=0.0)


def speed(work: Work) -> Found:
    """Tokens/s of prefill and decode, for each number of requests. No row begins after half of the limit."""
    latest = time.monotonic() + work.limits["speed"] / 2
    with tempfile.TemporaryDirectory() as folder:
        make = [sys.executable, str(ROOT / "benchmarks" / "make_checkpoint.py"), work.checkpoint, folder]
        subprocess.run(make, check=True, stdout=sys.stderr)
        settings: Found = {"kernels": work.kernels, "enable_prefix_caching": False, "max_model_len": 1024}
        llm = LLM(folder, device=work.device, **settings)
        rows = [
            measured(llm, requests, work, latest) for requests in work.requests if time.monotonic() < latest
        ]
    info = llm.info
    device = {"device": info.device, "kernels": info.kernels, "dtype": info.dtype, "kv_dtype": info.kv_dtype}
    found: Found = {"ok": True, "checkpoint": work.checkpoint, **device, "rows": rows}
    slow = len(rows) < len(work.requests)
    return found | problem(f"only {len(rows)} of {len(work.requests)} rows in time") if slow else found


def measured(llm: LLM, requests: int, work: Work, latest: float) -> Found:
    """One row of `speed`: medians of work.rounds runs, or of fewer if time runs out."""
    generator = torch.Generator().manual_seed(requests)
    shape = (requests, work.prompt_tokens)
    prompts: list[list[int]] = torch.randint(0, 256, shape, generator=generator).tolist()

    def seconds(tokens: int) -> float:
        started = time.perf_counter()
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True))
        return time.perf_counter() - started

    seconds(2)  # what is allocated or compiled on first use
    pairs: list[tuple[float, float]] = []
    while not pairs or (len(pairs) < work.rounds and time.monotonic() < latest):
        pairs.append((seconds(1), seconds(work.new_tokens)))
    first, whole = (statistics.median(times) for times in zip(*pairs, strict=True))
    return {
        "requests": requests,
        "rounds": len(pairs),
        "prompt_tokens": work.prompt_tokens,
        "new_tokens": work.new_tokens,
        "prefill_tokens_per_s": requests * work.prompt_tokens / first,
        "decode_tokens_per_s": requests * (work.new_tokens - 1) / (whole - first),
    }


PARTS: dict[str, Callable[[Work], Found]] = {
    "tests": run_tests,
    "identity": identity,
    "speed": speed,
    "triton_identity": lambda work: identity(of_triton(work)),
    "triton_speed": lambda work: speed(of_triton(work)),
}


def of_triton(work: Work) -> Work:
    limits = work.limits | {"speed": work.limits["triton_speed"]}
    return replace(work, kernels="triton", limits=limits)


def parts_of(device: str) -> list[str]:
    """The parts that this device can run."""
    return [part for part in PARTS if device == "cuda" or not part.startswith("triton")]


def in_process(part: str, work: Work) -> Found:
    """The result of a part that ran in a process of its own, and the seconds that it took."""
    started = time.monotonic()
    command = [sys.executable, __file__, "--part", part, "--work", json.dumps(asdict(work))]
    print(f"gpu: {part}, at most {work.limits[part]} s", file=sys.stderr)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0) as process:
        try:
            printed, _ = process.communicate(timeout=work.limits[part])
            found = json.loads(printed) if printed else problem(f"exit code {process.wait()}")
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the processes that it started
            found = problem(f"did not end within {work.limits[part]} s")
    return found | {"seconds": round(time.monotonic() - started, 1)}


def problem(says: str) -> Found:
    return {"ok": False, "error": says}


def attempt(part: str, work: Work) -> Found:
    try:
        return PARTS[part](work)
    except Exception as error:
        traceback.print_exc()
        return problem(f"{type(error).__name__}: {error}")


def about(device: str) -> Found:
    """The device, and what `moesaic doctor` reports about the machine and the versions."""
    doctor = [sys.executable, "-m", "moesaic", "doctor", "--json"]
    found = json.loads(subprocess.run(doctor, stdout=subprocess.PIPE, check=True).stdout)
    name = torch.cuda.get_device_name() if device == "cuda" else found["machine"]["cpu"]
    return {"device": name, "cuda": torch.version.cuda, **found}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    default = Work("cuda")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default=default.device)
    parser.add_argument("--output-file", type=Path, default=ROOT / "build" / "gpu.json")
    parser.add_argument("--tests", nargs="+", default=default.tests, help="what pytest is given")
    says = f"of benchmarks/make_checkpoint.py (default: {LARGE} with cuda, {default.checkpoint} with cpu)"
    parser.add_argument("--checkpoint", help=says)
    parser.add_argument("--new-tokens", type=int, default=default.new_tokens, help="of each answer")
    parser.add_argument(
        "--requests", type=int, nargs="+", default=default.requests, help="at once, a row each"
    )
    parser.add_argument("--rounds", type=int, default=default.rounds, help="of each speed")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=json.loads, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    asked = parse(arguments)
    if asked.part:
        print(json.dumps(attempt(asked.part, Work(**asked.work))))
        return 0
    if asked.device == "cuda" and not torch.cuda.is_available():
        says = f"--device: got 'cuda'; allowed: cpu (torch {torch.__version__} sees no GPU)"
        print(f"gpu: {says}", file=sys.stderr)
        return 2
    usual = LARGE if asked.device == "cuda" else Work.checkpoint
    work = Work(
        asked.device, tuple(asked.tests), asked.checkpoint or usual, new_tokens=asked.new_tokens,
        requests=tuple(asked.requests), rounds=asked.rounds,
    )  # fmt: skip
    parts = {part: in_process(part, work) for part in parts_of(work.device)}
    ok = all(found["ok"] for found in parts.values())
    report = {"ok": ok, **about(work.device), "work": asdict(work), **parts}
    asked.output_file.parent.mkdir(parents=True, exist_ok=True)
    asked.output_file.write_text(json.dumps(report, indent=2) + "\n")
    for part, found in parts.items():
        print(f"gpu: {part}: {'ok' if found['ok'] else 'not ok'} in {found['seconds']} s", file=sys.stderr)
    print(asked.output_file)
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
