"""NaN in the weights ends the requests that meet it, and changes no bit of the others."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from moesaic import LLM, SamplingParams
from moesaic.commands import cli
from moesaic.core.errors import CheckpointError
from moesaic.core.request import FinishReason
from moesaic.llm import Completion
from moesaic.models.checkpoint import Checkpoint
from moesaic.testing import byte_tokenizer
from moesaic.trace.parts import collecting, part_path
from tests.support import model_configs, tiny_models
from tests.support.cluster_driver import cluster
from tests.support.trace_reader import joined, rows
from tests.test_llm_offload import CORES, DISK

NEW = 4
LAST = "model.layers.2.block_sparse_moe.experts.1.w2.weight"
FIRST = "model.layers.0.block_sparse_moe.experts.1.w2.weight"
PROMPTS = [[3 + n, 40 + 2 * n, 7 * n % 90 + 3][: 1 + n % 3] for n in range(16)]
PARAMS = [
    SamplingParams(max_tokens=NEW, temperature=0.9 * (n % 2), seed=n, logprobs=2, ignore_eos=True)
    for n in range(16)
]


@dataclass(frozen=True)
class Folders:
    whole: Path
    damaged: Path
    """The same with NaN in one expert of the last layer."""


def spoil(path: Path, to: Path, name: str, value: float = float("nan")) -> Path:
    """A copy of a checkpoint whose tensor `name` ends with `value`."""
    to.mkdir()
    for file in path.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    tensors = load_file(path / "model.safetensors")
    tensors[name].view(-1)[-1] = value
    save_file(tensors, to / "model.safetensors")
    return to


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    top = tmp_path_factory.mktemp("models")
    model = tiny_models.build("mixtral", model_configs.mixtral(num_experts_per_tok=1))
    whole = tiny_models.save(model, top / "whole")
    byte_tokenizer(whole)
    return Folders(whole, spoil(whole, top / "damaged", LAST))


def answers(path: Path, **settings: Any) -> list[Completion]:
    return LLM(str(path), kv_cache_memory="2MiB", threads=1, **settings).generate(PROMPTS, PARAMS)


@dataclass(frozen=True)
class Known:
    whole: list[Completion]
    damaged: list[Completion]


@pytest.fixture(scope="module")
def known(folders: Folders) -> Known:
    return Known(answers(folders.whole), answers(folders.damaged))


def ended(found: list[Completion]) -> list[FinishReason | None]:
    return [one.outputs[0].finish_reason for one in found]


def test_others_keep_every_bit(known: Known) -> None:
    reasons = ended(known.damaged)
    assert set(reasons) == {FinishReason.ERROR, FinishReason.LENGTH}
    assert set(ended(known.whole)) == {FinishReason.LENGTH}
    for whole, damaged in zip(known.whole, known.damaged, strict=True):
        [want], [found] = whole.outputs, damaged.outputs
        length = len(found.token_ids)
        assert found.token_ids == want.token_ids[:length]
        assert (found.logprobs or []) == (want.logprobs or [])[:length]
        assert (length == NEW) == (found.finish_reason is FinishReason.LENGTH)


def test_the_log_says_where_it_began(
    folders: Folders, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    answers(folders.damaged)
    messages = {record.getMessage().split(" ended: ")[1] for record in caplog.records}
    place = "after the attention of layer 2: in its experts, or in the LM head"
    assert messages == {f"the model's logits are not finite, which began {place}"}
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    caplog.clear()
    answers(spoil(folders.whole, tmp_path / "first", FIRST))
    messages = {record.getMessage().split(", which ")[1] for record in caplog.records}
    assert messages == {"began between the experts of layer 0 and the keys and values of layer 1"}


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_no_block_of_a_failed_request_is_used_again(
    kernels: str, kv_cache_dtype: str, folders: Folders, tmp_path: Path
) -> None:
    """NaN in the first layer stays in the KV blocks. Later requests get these blocks."""
    damaged = spoil(folders.whole, tmp_path / "first", FIRST)
    settings = {
        "kv_cache_memory": "1MiB", "kernels": kernels, "kv_cache_dtype": kv_cache_dtype, "max_model_len": 64,
        "max_num_seqs": 4, "block_size": 8,
    }  # fmt: skip
    long = [[3 + (n + i) % 90 for i in range(20 + n)] for n in range(8)]
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    whole, broken = LLM(str(folders.whole), **settings), LLM(str(damaged), **settings)
    want = whole.generate(PROMPTS, params)
    passing: list[list[int]] = []
    for _ in range(3):
        assert set(ended(broken.generate(long, params))) == {FinishReason.ERROR}
        assert broken.stats().blocks.prefix_hits == 0
        found = broken.generate(PROMPTS, params)
        passing.append([n for n, reason in enumerate(ended(found)) if reason is FinishReason.LENGTH])
        for number in passing[-1]:
            assert found[number].outputs[0].token_ids == want[number].outputs[0].token_ids
    assert passing[0] and passing[0] == passing[1] == passing[2]


def test_prompt_logprobs_that_are_not_finite_end_the_request(folders: Folders) -> None:
    params = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=1, ignore_eos=True)
    prompts = [[3 + (n + i) % 90 for i in range(12)] for n in range(3)] + [[5]]
    found = LLM(str(folders.damaged), kv_cache_memory="1MiB").generate(prompts, params)
    assert ended(found)[:3] == [FinishReason.ERROR] * 3
    assert all(one.outputs[0].token_ids == [] for one in found[:3])
    whole = LLM(str(folders.whole), kv_cache_memory="1MiB").generate(prompts, params)
    assert ended(whole) == [FinishReason.LENGTH] * 4


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["pages", "cores"])
def test_offloaded(schedule: str, folders: Folders, known: Known) -> None:
    offload = {"pages": DISK, "cores": CORES}[schedule]
    found = answers(folders.damaged, offload=offload, max_num_seqs=16)
    assert [one.outputs for one in found] == [one.outputs for one in known.damaged]


@pytest.mark.slow
def test_on_ranks(folders: Folders, known: Known) -> None:
    found = answers(folders.damaged, tensor_parallel_size=3)
    assert ended(found) == ended(known.damaged)
    for one, other in zip(found, known.damaged, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        {"attention_workers": 2, "expert_servers": 0},
        {"attention_workers": 1, "expert_servers": 2},
        {"attention_workers": 2, "expert_servers": 2, "combine": "partial"},
        {"attention_workers": 1, "expert_servers": 2, "schedule": "async"},
        {"attention_workers": 2, "expert_servers": 1, "schedule": "barrier"},
    ],
    ids=str,
)
@pytest.mark.usefixtures("quick_workers")
def test_in_a_cluster(shape: dict[str, Any], folders: Folders, known: Known) -> None:
    with cluster(str(folders.damaged), kv_cache_memory="2MiB", **shape) as served:
        served.submit(PROMPTS, PARAMS)
        found = served.finish()
    assert [tokens for tokens, _ in found] == [one.outputs[0].token_ids for one in known.damaged]
    if shape.get("combine") != "partial":
        wanted = [[entry.logprob for entry in one.outputs[0].logprobs or []] for one in known.damaged]
        assert [logprobs for _, logprobs in found] == wanted


@pytest.mark.slow
def test_a_trace_says_where_it_began(folders: Folders, tmp_path: Path) -> None:
    trace = str(tmp_path / "trace.json")
    with collecting(trace):
        answers(folders.damaged, trace=part_path(trace, "attention worker 0"))
    spans = [one for row in rows(joined(Path(trace))) for one in row.named("not finite")]
    assert {str(one.args["place"])[:36] for one in spans} == {"which began after the attention of la"[:36]}


@pytest.mark.slow
@pytest.mark.usefixtures("quick_workers")
def test_run_batch_fails_these_lines_only(folders: Folders, known: Known, tmp_path: Path) -> None:
    body = {"model": "m", "temperature": 0, "ignore_eos": True, "max_tokens": NEW}
    lines = [
        {"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": {**body, "prompt": prompt}}
        for n, prompt in enumerate(PROMPTS)
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ["--threads", "1", "--kv-cache-memory", "2MiB", "--served-model-name", "m"]
    files = ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    assert cli.main(["run-batch", *files, "--model", str(folders.damaged), *flags]) == 1
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(found) == len(PROMPTS)
    statuses = {one["custom_id"]: one["response"]["status_code"] for one in found}
    assert set(statuses.values()) == {200, 500}
    assert {one["error"]["code"] for one in found if one["error"]} == {"non_finite_logits"}
    greedy = {str(n): reason for n, reason in enumerate(ended(known.damaged)) if n % 2 == 0}
    assert {n: statuses[n] == 200 for n in greedy} == {
        n: reason is FinishReason.LENGTH for n, reason in greedy.items()
    }


@pytest.mark.slow
def test_a_server_with_expert_servers_answers_500_and_goes_on(folders: Folders) -> None:
    flags = ["--port", "0", "--json", "--threads", "1", "--kv-cache-memory", "2MiB", "--expert-servers", "2"]
    command = [sys.executable, "-m", "moesaic", "serve", str(folders.damaged), *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            url = json.loads(process.stdout.readline())["url"]
            body = {"temperature": 0, "ignore_eos": True, "max_tokens": NEW}
            with httpx.Client(base_url=url, timeout=100) as client:
                model = client.get("/v1/models").json()["data"][0]["id"]
                found = [
                    client.post("/v1/completions", json={**body, "model": model, "prompt": prompt})
                    for prompt in PROMPTS
                ]
                metrics, health = client.get("/metrics").text, client.get("/health")
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
    broken = [response.json()["error"] for response in found if response.status_code == 500]
    assert {response.status_code for response in found} == {200, 500} and health.status_code == 200
    assert {error["code"] for error in broken} == {"non_finite_logits"}
    counted = next(
        line for line in metrics.splitlines() if line.startswith("moesaic:corrupted_requests_total")
    )
    assert float(counted.split()[-1]) == len(broken)


# ---- while loading

NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.norm.weight",
        NORM,
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.2.block_sparse_moe.gate.weight",
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_that_are_not_finite_are_refused(
    name: str, value: float, dtype: torch.dtype, folders: Folders, tmp_path: Path
) -> None:
    tensors = {
        key: tensor.to(dtype) for key, tensor in load_file(folders.whole / "model.safetensors").items()
    }
    tensors[name].view(-1)[5] = value
    save_file(tensors, tmp_path / "model.safetensors")
    for file in ("config.json", "tokenizer.json"):
        (tmp_path / file).write_bytes((folders.whole / file).read_bytes())
    with pytest.raises(CheckpointError) as caught:
        LLM(str(tmp_path), kv_cache_memory="1MiB")
    words = f"{tmp_path}: tensor {name}: got {value} at [{'0, ' if tensors[name].ndim > 1 else ''}5] as "
    assert str(caught.value).startswith(words) and "\n" not in str(caught.value)


@pytest.mark.slow
def test_numbers_that_only_the_wanted_type_makes_infinite(tmp_path: Path) -> None:
    save_file({"x": torch.tensor([1.0, 1e6])}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.tensor("x", 2, dtype=torch.float32).tolist() == [1.0, 1e6]
    with pytest.raises(CheckpointError, match=r"tensor x: got inf at \[1\] as float16"):
        checkpoint.tensor("x", 2, dtype=torch.float16)
