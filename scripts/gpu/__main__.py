"""Measures moesaic on a GPU: one command, one JSON file, less than ten minutes.

    make gpu                                        writes build/gpu.json
    python -m scripts.gpu --table build/gpu.json    prints it as Markdown
    python -m scripts.gpu --only "speed: "          one part, or the cases with that in their names
    python -m scripts.gpu --device cpu              the same on the CPU, to try this command

The parts, in this order:

- identity: greedy tokens of every family and every format of weights beside those of transformers;
- kernels: each operation's share of a copy's bandwidth, or of the speed of torch's large bf16 product,
  by rows and format;
- speed: prefill and decode with CUDA graphs and without, beside transformers, and beside vLLM and SGLang
  where they can be imported here or by an interpreter that --pythons names;
- tests: `pytest tests/gpu`, and those of the Triton kernels;
- larger than GPU memory: `serve --fast-memory` by schedules, beside the same model in memory;
- processes: a worker and an expert server, on the CPU and on the GPU;
- several GPUs: ranks that exchange rows by NCCL or through RAM, workers and servers.

Every case has a process of its own, or one that is replaced when a case fails. A case that crashes or hangs
costs no other one: the file says how it ended, with its last lines. The file is written after each case.
Exit code: 0 when every case is as it should be, 1 when one is not, 2 without a GPU. This command has run on a
CPU and on the stand-in for a GPU that the tests have. No real GPU has run it yet.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from scripts.gpu.children import run_part
from scripts.gpu.parts import PARTS
from scripts.gpu.plan import LARGE, ROOT, TOTAL, Found, Part, Work
from scripts.gpu.table import as_markdown

OUTPUT = ROOT / "build" / "gpu.json"
GPU = """
import json, torch
one = torch.cuda.get_device_properties(0)
found = {"name": one.name, "count": torch.cuda.device_count(), "bytes": one.total_memory}
print(json.dumps(found | {"capability": [one.major, one.minor], "cuda": torch.version.cuda}))
"""
"""Prints what torch says of the first GPU."""


class Report:
    """The file with the results. It is written anew after each case."""

    def __init__(self, path: Path, work: Work, about: Found) -> None:
        self._path, self._begun = path, time.monotonic()
        self._found: Found = {"ok": None, **about, "work": asdict(work), "seconds": 0.0, "parts": {}}
        path.parent.mkdir(parents=True, exist_ok=True)

    def begin(self, part: str) -> None:
        """What comes next belongs to this part."""
        self._part = self._found["parts"].setdefault(part, {"ok": True, "cases": {}})
        self._write()

    def tell(self, case: str, found: Found) -> None:
        """Keep the result of a case."""
        self._part["cases"][case] = found
        self._part["ok"] = self._part["ok"] and found["ok"]
        self._write()

    def end(self) -> bool:
        """Whether all parts are as they should be."""
        self._found["ok"] = all(part["ok"] for part in self._found["parts"].values())
        self._write()
        return bool(self._found["ok"])

    def _write(self) -> None:
        self._found["seconds"] = round(time.monotonic() - self._begun, 1)
        writing = self._path.with_suffix(".writing")
        writing.write_text(json.dumps(self._found, indent=1) + "\n")
        writing.replace(self._path)


def run(work: Work, parts: Mapping[str, Part], report: Report) -> bool:
    """Run the parts within TOTAL seconds and say how it goes. Returns whether all is as it should be."""
    deadline = time.monotonic() + TOTAL
    for name, part in parts.items():
        cases = [one for one in part.cases(work) if work.only in f"{name}: {one}"]
        if not cases:
            continue
        left = deadline - time.monotonic()
        most = min(part.seconds, left)
        say(f"{name}: {len(cases)} cases, at most {most:.0f} s of {left:.0f} s that are left")
        report.begin(name)
        done = 0

        def tell(case: str, found: Found, name: str = name, total: int = len(cases)) -> None:
            nonlocal done
            done += 1
            report.tell(case, found)
            how = "ok" if found["ok"] else f"NOT OK: {found.get('error', 'other answers')}"
            say(f"{name} {done}/{total}: {case}: {how}, {found['seconds']} s")

        run_part(name, part, cases, work, most, tell)
    return report.end()


def say(line: str) -> None:
    print(f"gpu: {line}", file=sys.stderr, flush=True)


def about(device: str) -> Found:
    """What `moesaic doctor` reports about the machine and the versions, and the GPU."""
    found = printed([sys.executable, "-m", "moesaic", "doctor", "--json"])
    return found | {"gpu": printed([sys.executable, "-c", GPU])} if device == "cuda" else found


def printed(command: Sequence[str]) -> Found:
    """The JSON that a command prints, or what went wrong. This process itself never touches the GPU."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=20)
        return dict(json.loads(done.stdout))
    except (subprocess.SubprocessError, ValueError) as error:
        return {"error": f"{type(error).__name__}: {error}"}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    default = Work("cuda")
    parser = argparse.ArgumentParser(
        prog="python -m scripts.gpu", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--device", choices=("cuda", "cpu"), default=default.device)
    parser.add_argument("--output-file", type=Path, default=OUTPUT)
    parser.add_argument("--table", type=Path, metavar="FILE", help="print this file as Markdown, run nothing")
    parser.add_argument("--only", default="", help="cases with this in 'part: case'")
    parser.add_argument("--tests", nargs="+", default=default.tests, help="what pytest is given")
    says = f"of benchmarks/make_checkpoint.py (default: {LARGE} with cuda, {default.checkpoint} with cpu)"
    parser.add_argument("--checkpoint", help=says)
    parser.add_argument("--prompt-tokens", type=int, default=default.prompt_tokens, help="of each prompt")
    parser.add_argument("--new-tokens", type=int, default=default.new_tokens, help="of each answer")
    requests = "at once, a row each"
    parser.add_argument("--requests", type=int, nargs="+", default=default.requests, help=requests)
    parser.add_argument("--rounds", type=int, default=default.rounds, help="of each speed")
    pythons = "interpreters of environments with vLLM or SGLang, as /tmp/vllm/bin/python"
    parser.add_argument("--pythons", nargs="+", default=(), help=pythons)
    parser.add_argument("--child", default=default.child, help=argparse.SUPPRESS)
    parser.add_argument("--command", default=default.command, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def work_of(asked: argparse.Namespace) -> Work:
    """What is tried, without its folder."""
    usual = LARGE if asked.device == "cuda" else Work.checkpoint
    gpus = torch.cuda.device_count() if asked.device == "cuda" else 0
    return Work(
        asked.device, gpus, tests=tuple(asked.tests), checkpoint=asked.checkpoint or usual,
        prompt_tokens=asked.prompt_tokens, new_tokens=asked.new_tokens, requests=tuple(asked.requests),
        rounds=asked.rounds, only=asked.only, pythons=tuple(asked.pythons), child=asked.child,
        command=asked.command,
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None, parts: Mapping[str, Part] = PARTS) -> int:
    """Run the command line. Returns the exit code."""
    asked = parse(arguments)
    if asked.table:
        print(as_markdown(json.loads(asked.table.read_text())))
        return 0
    if asked.device == "cuda" and not torch.cuda.is_available():
        says = f"--device: got 'cuda'; allowed: cpu (torch {torch.__version__} sees no GPU)"
        says += "; scripts/cuda_torch brings one with CUDA where nvidia-smi finds a GPU"
        print(f"gpu: {says}", file=sys.stderr)
        return 2
    work = work_of(asked)
    with tempfile.TemporaryDirectory(prefix="moesaic-gpu-", ignore_cleanup_errors=True) as folder:
        report = Report(asked.output_file, work, about(work.device))
        try:
            ok = run(replace(work, folder=folder), parts, report)
        except KeyboardInterrupt:
            say("interrupted")
            ok = False
    print(asked.output_file)
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
