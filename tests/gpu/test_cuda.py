"""The same on a real GPU. Nothing here runs where torch sees none; `test_engine.py` does in its stead."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gpu import test_group, test_offload
from tests.support import gpu_cases, model_configs, tiny_models
from tests.support.fake_batch_server import line

from moesaic import LLM, RequestOutput, SamplingParams
from moesaic.testing import byte_tokenizer

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    pytest.mark.slow,
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module", autouse=True)
def whole_float32() -> Iterator[None]:
    """Without TensorFloat-32, which rounds the operands of products to 10 bits."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", gpu_cases.ALLOWED)
def test_what_the_sanitizer_allows(name: str, mode: Any) -> None:
    with mode():
        gpu_cases.ALLOWED[name]("cuda")


@pytest.mark.parametrize("name", gpu_cases.REFUSED)
def test_what_the_sanitizer_refuses(name: str) -> None:
    with torch.inference_mode(), pytest.raises(RuntimeError):
        gpu_cases.REFUSED[name]("cuda")


@pytest.mark.parametrize("fact", gpu_cases.FACTS)
def test_what_the_sanitizer_takes_for_a_fact(fact: gpu_cases.Operation) -> None:
    with torch.inference_mode():
        fact("cuda")


def test_numpy_and_products_of_integers_are_refused() -> None:
    ids = torch.ones(2, 2, dtype=torch.int64, device="cuda")
    with pytest.raises(RuntimeError, match="not implemented for"):
        ids @ ids
    with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
        ids.numpy()


@pytest.mark.parametrize("model", gpu_cases.MODELS)
def test_64_greedy_tokens_are_those_of_transformers(tmp_path: Path, model: str) -> None:
    theirs = gpu_cases.write(model, tmp_path)
    llm = LLM(str(tmp_path), device="cuda")
    assert llm.info.device == torch.cuda.get_device_name() and llm.info.kv_dtype == "float32"
    found = [one.outputs[0] for one in llm.generate(gpu_cases.prompts(), GREEDY)]
    for prompt, output in zip(gpu_cases.prompts(), found, strict=True):
        assert output.token_ids == tiny_models.reference_greedy(theirs, prompt, 64)
        wanted = torch.log_softmax(tiny_models.reference_logits(theirs, prompt + output.token_ids), dim=-1)
        taken = wanted[len(prompt) - 1 : -1].gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
        logprobs = torch.tensor([entry.logprob for entry in output.logprobs or []])
        assert ((logprobs - taken).abs() / taken.abs().clamp(min=1.0)).max() < 1e-4


@pytest.mark.parametrize("setting", gpu_cases.SETTINGS)
@pytest.mark.parametrize("model", gpu_cases.MODELS)
def test_every_way_to_sample_gives_the_tokens_of_the_cpu(tmp_path: Path, model: str, setting: str) -> None:
    gpu_cases.write(model, tmp_path)
    settings = gpu_cases.SETTINGS[setting]
    if setting == "blocks run out":
        settings = settings | {"kv_cache_memory": gpu_cases.one_request(tmp_path)}
    on_cpu = LLM(str(tmp_path), device="cpu", kernels="reference", threads=1, **settings)
    llm = LLM(str(tmp_path), device="cuda", **settings)
    assert gpu_cases.tokens(gpu_cases.answers(llm)) == gpu_cases.tokens(gpu_cases.answers(on_cpu))
    assert (llm.stats().preemptions > 0) == (setting == "blocks run out")


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("model", ["qwen3-next", "lfm2", "deepseek-full", "gpt-oss"])
def test_triton_kernels_give_the_tokens_of_the_cpu(tmp_path: Path, model: str, enforce_eager: bool) -> None:
    """Seven requests of 12 to 24 tokens: buckets of rows, with padded rows and without."""
    byte_tokenizer(tiny_models.save(tiny_models.build(*model_configs.CASES[model]), tmp_path))
    params = [
        SamplingParams(temperature=0.0, max_tokens=12 + 2 * number, ignore_eos=True) for number in range(7)
    ]
    settings: dict[str, Any] = {"enforce_eager": enforce_eager, "kernels": "triton", "device": "cuda"}
    found, wanted = (
        [one.outputs[0].token_ids for one in LLM(str(tmp_path), **each).generate(gpu_cases.prompts(), params)]
        for each in (settings, {"device": "cpu", "kernels": "reference", "threads": 1})
    )
    assert found == wanted


@pytest.mark.parametrize("policy", test_offload.POLICIES)
@pytest.mark.parametrize("model", gpu_cases.MODELS)
def test_a_model_larger_than_the_gpu_has_the_tokens_of_the_one_in_memory(
    tmp_path: Path, model: str, policy: str
) -> None:
    gpu_cases.write(model, tmp_path)
    _, found = test_offload.answers(tmp_path, device="cuda", offload=test_offload.POLICIES[policy])
    _, wanted = test_offload.answers(tmp_path, device="cpu", kernels="reference")
    assert [one.token_ids for one in found] == [one.token_ids for one in wanted]


@pytest.mark.parametrize(
    "policy", [None, "the cache stays", "the cache moves, s4", "the CPU attends", "the CPU attends, padded"]
)
@pytest.mark.parametrize("form", test_group.FORMS)
def test_ranks_have_the_tokens_of_one_process(tmp_path: Path, form: str, policy: str | None) -> None:
    """Real processes, on a GPU each, or on one together. policy: of ranks that page their shards."""
    kind, options = test_group.MODELS["qwen3"]
    byte_tokenizer(tiny_models.save(tiny_models.build(kind, options), tmp_path))
    offload = None if policy is None else test_offload.POLICIES[policy]
    settings: dict[str, Any] = {
        "tensor_parallel_size": 2,
        "moe_collectives": form,
        "kv_cache_memory": "64MiB",
    }
    _, found = test_offload.answers(tmp_path, device="cuda", offload=offload, **settings)
    test_group.same(found, test_group.alone(tmp_path))


@pytest.mark.parametrize("schedule", ["auto", "s2", "s4"])
def test_a_batch_is_answered_by_a_model_larger_than_what_it_may_take(tmp_path: Path, schedule: str) -> None:
    asked, answered = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [line(f"r{n}", model="demo", prompt=f"{n} + {n} =", max_tokens=8) for n in range(9)]
    asked.write_text("\n".join(lines))
    command = [sys.executable, "-m", "moesaic", "run-batch", "-i", str(asked), "-o", str(answered)]
    options = ["--model", "demo", "--device", "cuda", "--fast-memory", "8MiB", "--offload-schedule", schedule]
    done = subprocess.run([*command, *options, "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["completed"] == 9 and len(answered.read_text().splitlines()) == 9


@pytest.mark.parametrize("cache", ["auto", "float32", "float16", "int8"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("model", gpu_cases.MODELS)
def test_narrow_weights_and_caches_give_nearly_the_same(
    tmp_path: Path, model: str, dtype: str, cache: str
) -> None:
    """The first token's probabilities: of one model in two arithmetics, each rounding as it does."""
    gpu_cases.write(model, tmp_path)
    llm = LLM(str(tmp_path), device="cuda", dtype=dtype, kv_cache_dtype=cache)
    assert (llm.info.dtype, llm.info.kv_dtype) == (dtype, dtype if cache == "auto" else cache)
    wide = LLM(str(tmp_path), device="cpu", kernels="reference", threads=1)
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)

    def logprobs(found: list[RequestOutput]) -> torch.Tensor:
        return torch.tensor([entry.logprob for one in found for entry in one.prompt_logprobs or [] if entry])

    narrow, exact = (
        logprobs([one.outputs[0] for one in each.generate(gpu_cases.prompts(), params)])
        for each in (llm, wide)
    )
    assert narrow.isfinite().all() and (narrow - exact).abs().median() < 0.3


@contextlib.contextmanager
def serving(*flags: str) -> Iterator[dict[str, Any]]:
    """`moesaic serve demo` on the GPU as a process, and what it says of itself."""
    command = [sys.executable, "-m", "moesaic", "serve", "demo", "--dtype", "float32"]
    process = subprocess.Popen([*command, "--port", "0", "--json", *flags], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, f"the server ended with code {process.wait()} before it served"
        yield json.loads(line)
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()


@pytest.mark.parametrize(
    "flags",
    [
        ("--device", "cuda"),
        ("--device", "cuda", "--kernels", "triton"),
        ("--device", "auto", "--kernels", "triton", "--expert-servers", "1", "--inflight-batches", "2"),
        ("--device", "cuda", "--expert-servers", "2", "--kv-cache-memory", "64MiB"),
        (
            "--device",
            "cuda",
            "--attention-workers",
            "2",
            "--expert-servers",
            "1",
            "--kv-cache-memory",
            "64MiB",
            "--schedule",
            "async",
        ),
    ],
    ids=[
        "one process",
        "triton",
        "experts on the CPU",
        "expert servers",
        "workers and a server, asynchronous",
    ],
)
def test_a_server_answers_as_the_library_on_a_cpu(flags: tuple[str, ...]) -> None:
    question = {"model": "demo", "prompt": "def add(a, b):", "max_tokens": 24, "temperature": 0}
    with serving(*flags) as info:
        assert info["device"] == torch.cuda.get_device_name()
        body = json.dumps(question).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{info['url']}/v1/completions", body, headers)
        with urllib.request.urlopen(request) as answer:
            text = json.load(answer)["choices"][0]["text"]
    llm = LLM("demo", device="cpu", dtype="float32", kernels="reference")
    assert text == llm.generate("def add(a, b):", SamplingParams(max_tokens=24, temperature=0))[0].text


def test_the_gpu_is_measured() -> None:
    command = [sys.executable, "-m", "moesaic", "hardware", "measure", "--device", "cuda", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    assert torch.cuda.get_device_name() in done.stdout
