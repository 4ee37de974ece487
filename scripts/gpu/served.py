"""`moesaic serve` in several forms: larger than GPU memory, with expert servers, and on several GPUs.

Each form answers the same requests twice. The first time compiles, records and fills caches. The second time
is measured. How many answers are those of the first form is told, and nothing more: bits of GPUs depend on
the batch.
"""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import torch
from scripts.gpu.plan import LARGE, ROOT, Found, Work, checkpoint

from moesaic.commands import hardware
from moesaic.planning.hardware import file

MACHINE, FILE = "the machine's memories and link", "machine.toml"
IN_MEMORY = "in memory, one process"
KV = {"--kv-cache-memory": "256MiB"}
CUDA_IPC, FULL = {"--transport": "cuda_ipc"}, {"--cudagraph-mode": "full"}
SCHEDULES = ("split", "on-demand", "in-place", "cgopipe")
ON_A_CPU = ("on-demand", "cgopipe")
"""Schedules that need no GPU."""
SHARE, SMALL_SHARE = 0.5, 2.0
"""GPU memory by the bytes of LARGE, or of a small checkpoint, whose cache is larger than its weights."""
LONGEST = 256
"""Maximum number of tokens of a request."""
STARTING, ANSWER = 40, 60
"""Seconds in which a server has to be ready, and a request has to be answered."""
Flags = dict[str, str]


def forms(work: Work) -> dict[str, Flags]:
    """Flags of each form of one part after the other."""
    return {IN_MEMORY: KV, **larger_forms(work), **process_forms(work), **gpu_forms(work)}


def larger_forms(work: Work) -> dict[str, Flags]:
    """Forms in which a part of the model fits."""
    schedules = SCHEDULES if work.device == "cuda" else ON_A_CPU
    return {f"a part in GPU memory, {one}": {"--offload-schedule": one} for one in schedules}


def process_forms(work: Work) -> dict[str, Flags]:
    """One worker and one server. Servers take a GPU only where it is asked for."""
    server = {"--expert-servers": "1", **KV}
    on_cpu = {"--device": "auto" if work.device == "cuda" else "cpu", **server}
    found = {"experts on a CPU server": on_cpu}
    if work.device == "cuda":
        found["experts on a CPU server, two batches"] = {**on_cpu, "--inflight-batches": "2"}
        found["experts on a GPU server"] = server
        found["experts on a GPU server, rows by CUDA IPC"] = {**server, **CUDA_IPC}
    return found


def gpu_forms(work: Work) -> dict[str, Flags]:
    """Several GPUs; none where there is one."""
    if work.gpus < 2:
        return {}
    ranks, whole = {"--tensor-parallel-size": "2", **KV}, {"--expert-servers": "1", **FULL, **KV}
    found = {
        "2 ranks, NCCL": {**ranks, "--collectives-backend": "nccl"},
        "2 ranks, through RAM": ranks,
        "a worker and a server, each step one graph": {**CUDA_IPC, **whole},
        "2 workers and 2 servers": {"--attention-workers": "2", "--expert-servers": "2", **KV},
    }
    if find_spec("nvshmem") is not None:
        found["a worker and a server, each step one graph, by NVSHMEM"] = {"--transport": "nvshmem", **whole}
    return found


def measure(work: Work) -> Found:
    """Measure what plans need, once for all schedules. A server without the file measures it anew."""
    found = hardware.now(str(checkpoint(work)), "cuda" if work.device == "cuda" else "cpu")
    file.save(found, Path(work.folder) / FILE)
    return {"ok": True, "hardware": found.to_tables()}


def machine(work: Work) -> str | None:
    """The file that `measure` wrote, if it did."""
    path = Path(work.folder) / FILE
    return str(path) if path.exists() else None


def kernels_of(work: Work) -> str:
    """The kernels that are measured. Tests take quicker ones."""
    return work.kernels[0]


def larger(work: Work) -> Sequence[str]:
    """Cases of a model that is larger than GPU memory, after what their plans need and one in memory."""
    return [MACHINE, IN_MEMORY, *larger_forms(work)]


def processes(work: Work) -> Sequence[str]:
    """Cases with an expert server."""
    return list(process_forms(work))


def several_gpus(work: Work) -> Sequence[str]:
    """Cases with several GPUs."""
    return list(gpu_forms(work))


def run(work: Work, case: str) -> Found:
    """Start a server in one of the forms, ask it twice, and measure the second time."""
    if case == MACHINE:
        return measure(work)
    folder, requests = checkpoint(work), max(work.requests)
    flags = {"--device": work.device, "--kernels": kernels_of(work), **forms(work)[case]}
    if case in larger_forms(work):
        share = SHARE if work.checkpoint == LARGE else SMALL_SHARE
        size = sum(one.stat().st_size for one in folder.glob("*.safetensors"))
        flags |= {"--fast-memory": str(int(share * size)), "--max-num-seqs": str(requests)}
        known = machine(work)
        flags |= {} if known is None else {"--hardware": known}
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, 256, (requests, work.prompt_tokens), generator=generator).tolist()
    with server(work, folder, flags) as port:
        asked(port, prompts, work.new_tokens)
        started = time.perf_counter()
        texts = asked(port, prompts, work.new_tokens)
        seconds = time.perf_counter() - started
    first = Path(work.folder) / "texts.json"
    if case == IN_MEMORY or not first.exists():
        first.write_text(json.dumps(texts))
    equal = sum(one == other for one, other in zip(texts, json.loads(first.read_text()), strict=True))
    return {
        "ok": True, "flags": flags, "requests": requests, "new_tokens": work.new_tokens,
        "output_tokens_per_s": requests * work.new_tokens / seconds, "equal_answers": equal,
    }  # fmt: skip


@contextmanager
def server(work: Work, folder: Path, flags: Flags) -> Iterator[int]:
    """The port of a server that is ready, and that ends afterwards. Raises RuntimeError if it is not."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", work.command, "serve", str(folder), "--port", str(port)]
    command += ["--max-model-len", str(LONGEST), *chain.from_iterable(flags.items())]
    print(*command, file=sys.stderr, flush=True)
    process = subprocess.Popen(command, cwd=ROOT, stdout=sys.stderr)
    try:
        deadline = time.monotonic() + STARTING
        while not ready(port):
            if process.poll() is not None:
                raise RuntimeError(f"the server ended with exit code {process.returncode}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"the server was not ready within {STARTING} s")
            time.sleep(0.1)
        yield port
    finally:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()


def ready(port: int) -> bool:
    """Whether the server answers, with its model loaded."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def asked(port: int, prompts: Sequence[Sequence[int]], tokens: int) -> list[str]:
    """The greedy answers to all prompts, which are sent at once."""

    def one(prompt: Sequence[int]) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER)
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        try:
            connection.request(
                "POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"}
            )
            answer = json.loads(connection.getresponse().read())
        finally:
            connection.close()
        if "choices" not in answer:
            raise RuntimeError(f"the server answered {answer}")
        return str(answer["choices"][0]["text"])

    with ThreadPoolExecutor(len(prompts)) as threads:
        return list(threads.map(one, prompts))
