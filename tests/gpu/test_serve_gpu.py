"""`moesaic serve --fast-memory` on the sanitizer's device: processes, HTTP and Triton's kernels together."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest
from tests.support import gpu_cases, gpu_sanitizer, model_configs, pairs, tiny_models
from tests.support.gpu_process import NAME
from tests.support.triton_kernels import IS_INTERPRETED
from tests.test_serve import Server

from moesaic import LLM, SamplingParams

pytestmark = pytest.mark.skipif(not IS_INTERPRETED, reason="a GPU compiles what it runs")

LENGTHS = (1, 3, 5, 20)
TOKENS = 6
KEY = "sk-of-the-tests"
ROOT = Path(__file__).parents[2]
CHOSEN, PAGED = (
    f'moesaic:offloaded_decode_steps_total{{,schedule="{one}"}}' for one in ("on-demand", "paged")
)
READ = 'moesaic:expert_bytes_total{level="slow",}'


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixtral")
    gpu_cases.write("mixtral-window", folder)
    return folder


@contextmanager
def serving(path: Path, *flags: str, hardware: tuple[str, ...] = ("--hardware", "l4")) -> Iterator[Server]:
    command = [sys.executable, "-m", NAME, "serve", str(path), "--port", "0", "--threads", "1", "--json"]
    command += ["--device", "cuda", *hardware, "--served-model-name", "demo"]
    command += ["--max-model-len", "64", "--max-num-seqs", "4", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"the server ended with code {process.wait()} before it served"
    try:
        yield Server(process, json.loads(line))
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        process.stdout.close()


def prompts() -> list[list[int]]:
    return [tiny_models.prompt(length, model_configs.VOCAB, seed=length) for length in LENGTHS]


def in_memory(path: Path) -> list[list[int]]:
    model = LLM(str(path), threads=1, max_model_len=64, kernels="reference", device="cpu")
    params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    return [result.outputs[0].token_ids for result in model.generate(prompts(), params)]


def asked(server: Server, prompt: list[int]) -> list[int]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        extra = {"ignore_eos": True, "return_token_ids": True}
        answer = client.completions.create(
            model="demo", prompt=prompt, max_tokens=TOKENS, temperature=0, extra_body=extra
        )
        found: list[int] = answer.choices[0].model_extra["token_ids"]  # type: ignore[index]
        return found


@pytest.mark.parametrize(
    ("kernels", "schedule", "cap"),
    [
        pytest.param("reference", "split", "640KiB", marks=pytest.mark.slow),
        pytest.param("triton", "split", "640KiB", marks=pairs.REST),
        pytest.param("triton", "split", "512KiB", marks=pairs.REST),
        pytest.param("triton", "cgopipe", "512KiB", marks=pairs.REST),
        pytest.param("triton", "on-demand", "512KiB", marks=pairs.REST),
        pytest.param("reference", "in-place", "768KiB", marks=pairs.REST),
        pytest.param("reference", "auto", "512KiB", marks=pairs.REST),
    ],
)
def test_clients_get_the_tokens_of_the_model_in_memory(
    path: Path, kernels: str, schedule: str, cap: str
) -> None:
    """In 512 KiB no expert stays on the GPU, and attention is on the CPU."""
    flags = ("--kernels", kernels, "--offload-schedule", schedule, "--fast-memory", cap)
    with serving(path, *flags) as server:
        assert server.info["device"] == gpu_sanitizer.NAME
        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(lambda prompt: asked(server, prompt), prompts()))
        assert found == in_memory(path)
        metrics = server.metrics(until=lambda found: found[CHOSEN] + found[PAGED] >= TOKENS)
    assert metrics[READ] > 0
    if schedule != "auto":
        assert (metrics[CHOSEN] > 0) == (schedule in ("split", "on-demand")) != (metrics[PAGED] > 0)


@pytest.mark.full
def test_expert_servers_on_the_device_come_and_go(path: Path) -> None:
    """The only server gives half of its experts to a second one and gets them back, while requests run."""
    wanted = in_memory(path)
    flags = ("--kernels", "triton", "--expert-servers", "1", "--kv-cache-memory", "1MiB")
    flags = (*flags, "--admin-key", KEY)
    with serving(path, *flags, hardware=()) as server, ThreadPoolExecutor(3) as pool:
        for servers in (2, 1):
            running = [pool.submit(asked, server, prompt) for prompt in prompts()]
            experts = scaled(server, servers)
            assert [one.result() for one in running] == wanted
            assert [asked(server, prompt) for prompt in prompts()[:2]] == wanted[:2]
            assert len(experts) == servers and all(experts), experts


def scaled(server: Server, servers: int) -> list[int]:
    """Change the number of expert servers. Returns the experts that each has then."""
    body = json.dumps({"expert_servers": servers}).encode()
    request = urllib.request.Request(
        f"{server.url}/scale_elastic_ep",
        body,
        {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"},
    )
    with urllib.request.urlopen(request) as answer:
        status = json.loads(answer.read())
    found = [one for one in status["processes"] if one["role"] == "expert server"]
    assert {one["kernels"] for one in found} == {"triton"}
    return [one["experts"] for one in found]
