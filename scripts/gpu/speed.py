"""Tokens/s of prefill and decode, each alone: of moesaic, and of other engines on this machine."""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from scripts.gpu.plan import Found, Work, checkpoint, problem

from moesaic import LLM, SamplingParams

MEASURING = 20
"""Seconds after an engine is there in which a number of requests may begin."""
LONGEST = 1024
"""Maximum number of tokens of a request."""
PEER = Path(__file__).with_name("peer.py")
TRANSFORMERS = ("grouped_mm", "eager")
"""How transformers computes experts."""
Timed = Callable[[list[list[int]], int], float]
"""Seconds in which so many tokens of each prompt are generated."""


def cases(work: Work) -> Sequence[str]:
    """moesaic's ways, then transformers, then the engines that can be imported or whose path is given."""
    first = work.kernels[0]
    ours = [first, f"{first}, eager"] + (["reference, eager"] if work.device == "cuda" else [])
    return [*ours, *(f"transformers, {how}" for how in TRANSFORMERS), *peers(work)]


def peers(work: Work) -> dict[str, str]:
    """Other engines that this machine has, and the interpreter that can import each."""
    found = {name: sys.executable for name in ("vllm", "sglang") if importlib.util.find_spec(name)}
    for python in work.pythons:
        for name in ("vllm", "sglang"):
            code = f"import importlib.util, sys; sys.exit(not importlib.util.find_spec({name!r}))"
            if name not in found and subprocess.run([python, "-c", code]).returncode == 0:
                found[name] = python
    return found


def run(work: Work, case: str) -> Found:
    """One row for each number of requests."""
    folder = checkpoint(work)
    name, _, how = case.partition(", ")
    if name not in ("transformers", "vllm", "sglang"):
        return ours(work, folder, name, how == "eager")
    return theirs(work, folder, name, how)


def ours(work: Work, folder: Path, kernels: str, eager: bool) -> Found:
    """The speed of moesaic in this process."""
    llm = LLM(
        str(folder), device=work.device, kernels=kernels, enforce_eager=eager, max_model_len=LONGEST,
        enable_prefix_caching=False,
    )  # fmt: skip

    def seconds(prompts: list[list[int]], tokens: int) -> float:
        started = time.perf_counter()
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True))
        return time.perf_counter() - started

    info = llm.info
    about = {"device": info.device, "kernels": info.kernels, "dtype": info.dtype, "kv_dtype": info.kv_dtype}
    return rows(work, seconds) | about


def theirs(work: Work, folder: Path, name: str, how: str) -> Found:
    """The speed of another engine, in a process of its own interpreter."""
    command = [peers(work).get(name, sys.executable), str(PEER), name, str(folder), work.device, how]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        to, back = process.stdin, process.stdout

        def ask(order: Found) -> Found:
            print(json.dumps(order), file=to, flush=True)
            answer = back.readline()
            if not answer:
                raise RuntimeError(f"{name} ended with exit code {process.wait()}")
            return dict(json.loads(answer))

        about = ask({"prompts": [[1]], "tokens": 1})
        found = rows(work, lambda prompts, tokens: ask({"prompts": prompts, "tokens": tokens})["seconds"])
        to.close()
        return found | {"version": about["version"]}


def rows(work: Work, seconds: Timed) -> Found:
    """A row for each number of requests for which there is time."""
    latest = time.monotonic() + MEASURING
    found = [
        measured(seconds, requests, work, latest) for requests in work.requests if time.monotonic() < latest
    ]
    result: Found = {"ok": True, "checkpoint": work.checkpoint, "rows": found}
    slow = len(found) < len(work.requests)
    return result | problem(f"only {len(found)} of {len(work.requests)} rows in time") if slow else result


def measured(seconds: Timed, requests: int, work: Work, latest: float) -> Found:
    """One row: medians of work.rounds runs, or of fewer if time runs out."""
    generator = torch.Generator().manual_seed(requests)
    shape = (requests, work.prompt_tokens)
    prompts: list[list[int]] = torch.randint(0, 256, shape, generator=generator).tolist()
    seconds(prompts, work.new_tokens)  # what is allocated, compiled or recorded on first use
    pairs: list[tuple[float, float]] = []
    while not pairs or (len(pairs) < work.rounds and time.monotonic() < latest):
        pairs.append((seconds(prompts, 1), seconds(prompts, work.new_tokens)))
    first, whole = (statistics.median(times) for times in zip(*pairs, strict=True))
    return {
        "requests": requests,
        "rounds": len(pairs),
        "prompt_tokens": work.prompt_tokens,
        "new_tokens": work.new_tokens,
        "prefill_tokens_per_s": requests * work.prompt_tokens / first,
        "decode_tokens_per_s": requests * (work.new_tokens - 1) / max(whole - first, 1e-9),
    }
