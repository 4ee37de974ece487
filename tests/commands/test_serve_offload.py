"""`moesaic serve --fast-memory`: the answers of the model in memory, under a limit of memory that is kept."""

from __future__ import annotations

import asyncio
import functools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from tests.commands.test_run_batch_offload import MACHINE, SIZES
from tests.support import model_configs, pairs, tiny_models
from tests.support.processes import all_children, children
from tests.test_serve import Server, idle, start

from moesaic import LLM, SamplingParams
from moesaic.commands import cli
from moesaic.kernels import table
from moesaic.testing import byte_tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not table.instruction_sets(), reason="no native kernels in this build"),
]

MIB = 1 << 20
FULL = partial(pytest.param, marks=pytest.mark.full)
LENGTHS = (1, 3, 16, 30, 45, 70, 9, 40)
MODELS = {
    "qwen3": ("qwen3_moe", model_configs.qwen3(**SIZES)),
    "states": ("qwen3_next", model_configs.qwen3_next(moe_intermediate_size=256, num_experts=16)),
}
CAPS = {"qwen3": "6MiB", "states": "4MiB"}
"""Memory that has no room for all experts."""
Saved = Callable[[str], Path]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    known: dict[str, Path] = {}

    def save(name: str) -> Path:
        if name not in known:
            folder = tmp_path_factory.mktemp(name) / "model"
            folder.mkdir()
            tiny_models.save(tiny_models.build(*MODELS[name]), folder, torch.bfloat16)
            byte_tokenizer(folder)
            (folder.parent / "this.toml").write_text(MACHINE)
            known[name] = folder
        return known[name]

    return save


@contextmanager
def serving(path: Path, *flags: str, cap: str = "6MiB", hot_experts: str = "off") -> Iterator[Server]:
    machine = str(path.parent / "this.toml")
    given = ("--fast-memory", cap, "--hardware", machine, "--hot-experts", hot_experts, *flags)
    server = start(*given, "--served-model-name", "demo", model=str(path))
    try:
        yield server
    finally:
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        assert server.process.stdout is not None
        server.process.stdout.close()


def prompts() -> list[list[int]]:
    drawn = [tiny_models.prompt(length, model_configs.VOCAB, seed=length) for length in LENGTHS]
    return [*drawn, drawn[5][:60] + drawn[1]]


def in_memory(path: Path, tokens: int) -> list[str]:
    llm = LLM(str(path), threads=1, max_model_len=128)
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    return [result.outputs[0].text for result in llm.generate(prompts(), params)]


def asked(server: Server, prompt: list[int], tokens: int, **more: Any) -> Any:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        extra = {"ignore_eos": True}
        body = {"model": "demo", "prompt": prompt, "max_tokens": tokens, "temperature": 0, **more}
        return client.completions.create(**body, extra_body=extra)


@pytest.mark.parametrize("model", pairs.some(MODELS, ["qwen3"]))  # states: see test_composition.py
def test_clients_that_come_and_go_get_the_answers_of_the_model_in_memory(model: str, saved: Saved) -> None:
    path, tokens = saved(model), 12
    with serving(path, "--max-num-seqs", "8", "--max-model-len", "128", cap=CAPS[model]) as server:
        with ThreadPoolExecutor(5) as pool:
            found = list(pool.map(lambda prompt: asked(server, prompt, tokens).choices[0].text, prompts()))
        assert found == in_memory(path, tokens)
        assert asked(server, prompts()[5], tokens).choices[0].text == found[5]
        metrics = server.metrics(until=lambda found: found[HITS] > 0 or model == "states")
    assert metrics[READ] > 0
    steps = [metrics[f'moesaic:offloaded_decode_steps_total{{,schedule="{one}"}}'] for one in SCHEDULES]
    assert sum(steps) > tokens and metrics["moesaic:micro_batch_size{}"] >= 1
    if steps[0]:
        assert metrics["moesaic:chosen_experts_total{}"] > metrics["moesaic:chosen_experts_in_memory_total{}"]
    assert (metrics[HITS] > 0) == (model != "states"), "without snapshots states share no prefix"


READ = 'moesaic:expert_bytes_total{level="slow",}'
USED = 'moesaic:kv_blocks{,state="used"}'
LISTED = "moesaic:listed_experts{}"
HITS = "moesaic:prefix_cache_hits_total{}"
SCHEDULES = ("on-demand", "paged")


async def _streamed(server: Server, prompt: list[int], leave_after: int | None) -> str | None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        stream = await client.completions.create(
            model="demo", prompt=prompt, max_tokens=16, temperature=0, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        text, chunks = "", 0
        async for chunk in stream:
            text, chunks = text + chunk.choices[0].text, chunks + 1
            if chunks == leave_after:
                await stream.close()
                return None
        return text


def test_streams_are_whole_while_others_are_aborted(saved: Saved) -> None:
    path = saved("qwen3")
    leaving = [None, 2, None, 1, None, None, 5, None, None]

    async def run(server: Server) -> list[str | None]:
        jobs = [_streamed(server, *pair) for pair in zip(prompts(), leaving, strict=True)]
        return await asyncio.gather(*jobs)

    with serving(path, "--micro-batch-size", "2", "--micro-batches", "2", "--max-model-len", "96") as server:
        found = asyncio.run(run(server))
        metrics = server.metrics(until=lambda found: idle(found) and not found[USED])
    wanted = in_memory(path, 16)
    assert [one for one in found if one is not None] == [
        text for text, leave in zip(wanted, leaving, strict=True) if leave is None
    ]
    assert metrics[USED] == 0


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        FULL(["--attention-workers", "2"], "--attention-workers: got 2; allowed: 1 with --fast-memory"),
        FULL(["--devices", "0"], "--devices: got .0.; allowed: nothing with --fast-memory"),
        (
            ["--distributed-executor-backend", "ray"],
            "--distributed-executor-backend: got .ray.; allowed: local with --fast-memory",
        ),
        (["--pad"], "--pad: got 'true'; allowed: false in serve"),
        FULL(["--kv-cache-memory", "1MiB"], "--kv-cache-memory: got .1MiB.; allowed: nothing with"),
        FULL(["--inflight-batches", "2"], "--inflight-batches: got 2; allowed: 1 with --fast-memory"),
        FULL(["--record-routing", "r.npz"], "--record-routing: got 'r.npz'; allowed: nothing with"),
        (["--speculative-config", '{"method": "mtp", "num_speculative_tokens": 1}'],
         "--speculative-config: method: got 'mtp'; allowed: ngram with --fast-memory"),
    ],
)  # fmt: skip
def test_what_does_not_go_with_it_is_one_line(
    saved: Saved, flags: list[str], told: str, capfd: pytest.CaptureFixture[str]
) -> None:
    path = saved("qwen3")
    machine = str(path.parent / "this.toml")
    given = ["--fast-memory", "6MiB", "--hardware", machine, "--threads", "1", "--port", "0"]
    assert cli.main(["serve", str(path), *given, *flags]) == 2
    last = capfd.readouterr().err.strip().splitlines()[-1]
    assert re.match(f"moesaic: {told}", last), last


def test_a_memory_that_is_too_small_is_refused_with_the_smallest(
    saved: Saved, capfd: pytest.CaptureFixture[str]
) -> None:
    path = saved("qwen3")
    machine = str(path.parent / "this.toml")
    assert cli.main(["serve", str(path), "--fast-memory", "1MiB", "--hardware", machine]) == 2
    assert re.search(r"--fast-memory: got '1MiB'; allowed: at least \d+MiB", capfd.readouterr().err)


# ---- the list of hot experts


def test_the_experts_of_a_killed_server_stay_first_after_the_next_start(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cache = saved("qwen3"), tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    flags = ("--max-num-seqs", "2", "--max-model-len", "128", "--offload-schedule", "on-demand")
    machine = str(path.parent / "this.toml")
    given = ("--fast-memory", "6MiB", "--hardware", machine, *flags, "--served-model-name", "demo")
    server = start(*given, model=str(path))
    assert server.metrics()[LISTED] == 0
    with ThreadPoolExecutor(2) as pool:
        while not list(cache.glob("moesaic/hot-experts/*.json")):
            texts = list(pool.map(lambda prompt: asked(server, prompt, 12).choices[0].text, prompts()))
    [worker] = children(server.process.pid, "moesaic.runtime")
    for pid in (server.process.pid, worker):
        os.kill(pid, signal.SIGKILL)
    server.process.wait(60)
    assert server.process.stdout is not None
    server.process.stdout.close()
    [file] = cache.glob("moesaic/hot-experts/*.json")
    with serving(path, *flags, hot_experts="auto") as server:
        assert server.metrics(until=lambda found: found[LISTED] > 0)[LISTED] % SIZES["num_hidden_layers"] == 0
        again = [asked(server, prompt, 12).choices[0].text for prompt in prompts()]
    assert again == texts == in_memory(path, 12)
    file.write_text(file.read_text()[:-9])
    with serving(path, *flags, hot_experts=str(file)) as server:
        assert server.metrics()[LISTED] == 0
        assert asked(server, prompts()[0], 12).choices[0].text == texts[0]


# ---- memory

LARGE = {"hidden_size": 256, "moe_intermediate_size": 512, "num_experts": 32, "num_hidden_layers": 8}
"""192 MiB of experts in bf16, 24 MiB a layer."""
CAP = 80
BESIDE = 25
"""MiB that a worker may take beside the cap and what its libraries take."""
LIBRARIES = (
    "import moesaic.runtime.__main__, moesaic.runtime.offloaded_worker, moesaic.runtime.build; "
    "import moesaic.experts.streamed_backend; print(open('/proc/self/status').read())"
)


def peak_in(status: str) -> float:
    """MiB of the field VmHWM."""
    [line] = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) / 1024


def peak(pid: int) -> float:
    """The most MiB that a process had resident."""
    return peak_in(Path(f"/proc/{pid}/status").read_text())


@functools.cache
def libraries() -> float:
    """MiB of a process that has imported what a worker or a server imports."""
    said = subprocess.run([sys.executable, "-c", LIBRARIES], capture_output=True, text=True, check=True)
    return peak_in(said.stdout)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large") / "model"
    folder.mkdir()
    tiny_models.save(tiny_models.build("qwen3_moe", model_configs.qwen3(**LARGE)), folder, torch.bfloat16)
    byte_tokenizer(folder)
    (folder.parent / "this.toml").write_text(MACHINE)
    return folder


def test_the_worker_keeps_its_limit(large: Path) -> None:
    own = libraries()
    with serving(large, "--max-num-seqs", "8", "--max-model-len", "128", cap=f"{CAP}MiB") as server:
        [worker] = children(server.process.pid, "moesaic.runtime")
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda prompt: asked(server, prompt, 12).choices[0].text, prompts()))
        most = peak(worker)
        assert peak(server.process.pid) < 0.7 * own, "the process of the API has no torch"
        assert most < own + CAP + BESIDE, f"{most:.0f} MiB, libraries {own:.0f} MiB"
        metrics = server.metrics(until=lambda found: found[READ] > 100 * MIB)
        assert metrics[READ] > 100 * MIB
    assert found == in_memory(large, 12)


# ---- expert servers


@pytest.mark.parametrize(
    "flags", [["--hardware", "l4"], ["--offload-schedule", "cgopipe"], ["--pad"], ["--devices", "0"]], ids=str
)
def test_servers_have_no_plan(saved: Saved, flags: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    given = ["--fast-memory", "6MiB", "--expert-servers", "2", "--port", "0"]
    assert cli.main(["serve", str(saved("qwen3")), *given, *flags]) == 2
    last = capfd.readouterr().err.strip().splitlines()[-1]
    assert re.match(f"moesaic: {flags[0]}: got .*; allowed: nothing with .*--expert-servers", last), last


def test_a_memory_without_room_for_two_experts_is_refused(
    saved: Saved, quick_workers: None, capfd: pytest.CaptureFixture[str]
) -> None:
    given = ["--fast-memory", "100KiB", "--expert-servers", "2", "--port", "0", "--threads", "1"]
    assert cli.main(["serve", str(saved("qwen3")), *given]) == 2
    assert "--fast-memory: got '102400 bytes'; allowed: at least 1MiB" in capfd.readouterr().err


def test_servers_keep_their_limit_beside_two_workers_that_draft(large: Path) -> None:
    """And what one process refuses goes together here."""
    own, cap = libraries(), 24
    drafts = '{"method": "ngram", "num_speculative_tokens": 2}'
    flags = ("--expert-servers", "2", "--attention-workers", "2", "--speculative-config", drafts)
    given = ("--fast-memory", f"{cap}MiB", "--max-model-len", "128", "--kv-cache-memory", "8MiB", *flags)
    server = start(*given, "--served-model-name", "demo", model=str(large))
    try:
        with ThreadPoolExecutor(5) as pool:
            found = list(pool.map(lambda prompt: asked(server, prompt, 12).choices[0].text, prompts()))
        peaks = [peak(pid) for pid in all_children(server.process.pid, "moesaic.experts")]
        metrics = server.metrics()
    finally:
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        assert server.process.stdout is not None
        server.process.stdout.close()
    assert found == in_memory(large, 12)
    assert len(peaks) == 2 and max(peaks) < own + cap + BESIDE, f"libraries {own:.0f} MiB, {peaks}"
    for number in (0, 1):
        name = f'server="expert server {number}"'
        read = metrics[f'moesaic:expert_server_bytes_total{{level="slow",,{name}}}']
        assert read > 2 * cap * MIB, metrics
