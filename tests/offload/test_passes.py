"""Passes that break off, over a real checkpoint. Later passes have the floats of the model in memory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support import model_configs, tiny_models
from tests.support.failing_methods import raises_at

from moesaic import LLM, SamplingParams
from moesaic.core.errors import CheckpointError
from moesaic.core.offload import Offload
from moesaic.kernels import table
from moesaic.offload.operations import Operations
from moesaic.offload.reading import DirectFile
from moesaic.offload.weights import StreamedExperts
from moesaic.testing import byte_tokenizer

pytestmark = pytest.mark.skipif(not table.instruction_sets(), reason="no native kernels in this build")

DISK = Offload(1 << 30, "cgopipe", micro_batch=2, micro_batches=2, prefill_rows=19)
WAYS = {
    "pages": DISK,
    "on demand": replace(DISK, schedule="on-demand", static_experts=1),
    "likely ones before": replace(DISK, schedule="on-demand", static_experts=1, likely_experts=3),
    "two cores": replace(DISK, link=4e9, slow_attention=True, slow_cache=1.0),
    "in place": replace(DISK, schedule="in-place", link=4e9, slow_attention=True, static_experts=1),
}
PROMPTS = [tiny_models.prompt(length, model_configs.VOCAB, seed=length) for length in (1, 40, 17, 5, 33)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, logprobs=2, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of three layers. The number is odd, so that a pass's first layer is loaded into both slots."""
    made = tiny_models.save(
        tiny_models.build("qwen3_moe", model_configs.qwen3()), tmp_path_factory.mktemp("passes")
    )
    byte_tokenizer(made)
    return made


def llm(path: Path, offload: Offload | None, **settings: Any) -> LLM:
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 64, **settings}
    return LLM(str(path), threads=1, offload=offload, max_model_len=64, **settings)


def floats(made: LLM, params: SamplingParams = PARAMS) -> list[Any]:
    outputs = [result.outputs[0] for result in made.generate(PROMPTS, params)]
    return [
        (one.token_ids, [(p.token_id, p.logprob) for p in one.logprobs or () if p is not None])
        for one in outputs
    ]


@pytest.fixture(scope="module")
def wanted(path: Path) -> list[Any]:
    return floats(llm(path, None))


@pytest.mark.parametrize(
    "way", [pytest.param(one, marks=() if one == "pages" else pytest.mark.slow) for one in WAYS]
)
def test_a_pass_that_breaks_off_anywhere_is_a_pass_that_was_never_run(
    path: Path, wanted: list[Any], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    made = llm(path, WAYS[way], enable_prefix_caching=False)
    assert floats(made) == wanted
    for call in (1, 5, 12, 17, 22, 40, 75, 120):
        with monkeypatch.context() as patched:
            raises_at(patched, Operations, "__call__", call, KeyboardInterrupt())
            with pytest.raises(KeyboardInterrupt):
                floats(made)
        assert floats(made) == wanted, call
        stats = made.stats()
        assert (stats.running, stats.waiting, stats.blocks.num_used) == (0, 0, 0)


def test_passes_that_waited_for_their_first_layer_are_counted(path: Path) -> None:
    """With pages, only the first pass waits. On demand, a decode step loads nothing for the prompts
    after it."""
    for way, prompts_wait in (("pages", False), ("on demand", True)):
        made = llm(path, WAYS[way], enable_prefix_caching=False)
        for _ in range(2):
            floats(made)
        passes = made.stats().experts.passes
        prompts, steps = ([one for one in passes if one.prefill is prefill] for prefill in (True, False))
        count = sum(one.passes for one in prompts)
        assert count > 2 and sum(one.cold for one in steps) == 0
        assert sum(one.cold for one in prompts) == 1 if not prompts_wait else count >= 2
        for one in passes:
            assert one.busy["down"] <= one.seconds


def test_a_disk_that_fails_in_the_middle_is_told_and_can_come_back(
    path: Path, wanted: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = llm(path, DISK)
    with monkeypatch.context() as patched:
        raises_at(patched, DirectFile, "read", 9, OSError(5, "Input/output error"))
        with pytest.raises(CheckpointError, match="cannot be read .*Input/output error"):
            floats(made)
    assert floats(made) == wanted


def test_a_file_that_is_cut_in_the_middle_is_told(path: Path, tmp_path: Path) -> None:
    model = tiny_models.build("qwen3_moe", model_configs.qwen3())
    tiny_models.save(model, tmp_path)
    byte_tokenizer(tmp_path)
    made = llm(tmp_path, DISK)
    os.truncate(tmp_path / "model.safetensors", 8192)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: .* it has 8192 bytes instead of"):
        floats(made)


@pytest.mark.parametrize("way", WAYS)
def test_requests_that_do_not_fit_together_are_put_back(path: Path, wanted: list[Any], way: str) -> None:
    """The cache has four blocks, and one request has the maximum length. The others are preempted and go on
    later."""
    token = 3 * 2 * 2 * 16 * 4
    assert floats(llm(path, WAYS[way], kv_cache_memory=str(64 * token))) == wanted


@pytest.mark.parametrize("rows", [1, 3])
def test_logits_of_a_few_rows_at_a_time_are_the_same(path: Path, rows: int) -> None:
    params = replace(PARAMS, temperature=0.9, top_p=0.9, seed=3, prompt_logprobs=2)
    assert floats(llm(path, replace(DISK, logit_rows=rows)), params) == floats(llm(path, DISK), params)


def test_a_stream_that_is_closed_leaves_the_others_alone(path: Path, wanted: list[Any]) -> None:
    made = llm(path, DISK)
    first = made.stream(PROMPTS[1], PARAMS)
    next(first)
    first.close()  # type: ignore[attr-defined]
    assert floats(made) == wanted


def test_passes_are_counted(path: Path) -> None:
    made = llm(path, DISK)
    floats(made)
    passes = made.stats().experts.passes
    assert {one.prefill for one in passes} == {True, False}
    assert sum(one.rows for one in passes) == sum(map(len, PROMPTS)) + len(PROMPTS) * 5
    layer = 12 * 3 * 48 * 20 * 4
    for one in passes:
        assert one.loaded_bytes >= one.passes * 3 * layer and one.seconds > 0
        assert one.busy["down"] > 0 and one.busy["fast"] > 0


PROGRAM = """
import re, sys
from moesaic import LLM, SamplingParams
from moesaic.core.offload import Offload

def told(name):
    return int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) // 1024

path, prefill, padded = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) or None
LLM(path, threads=1, max_model_len=64).generate([[1, 2, 3]], SamplingParams(max_tokens=2))  # libraries
open("/proc/self/clear_refs", "w").write("5")
before = told("VmRSS")
offload = Offload(1 << 30, "cgopipe", micro_batch=8, micro_batches=2, prefill_rows=prefill, logit_rows=8,
                  padded_prompt_len=padded)
seats = dict(max_num_seqs=16, max_num_batched_tokens=2048, kv_cache_memory="4MiB", max_model_len=512)
llm = LLM(path, threads=1, offload=offload, **seats)
params = SamplingParams(max_tokens=4, temperature=1.0, seed=1, ignore_eos=True)
llm.generate([[index + 1] * (100 + 20 * index) for index in range(16)], params)
print(told("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="Linux tells the peak")
@pytest.mark.parametrize("padded", [0, pytest.param(400, marks=pytest.mark.full)])
def test_memory_stays_what_the_policy_holds(tmp_path: Path, padded: int) -> None:
    """The model has 24 + 96 MiB. The policy keeps two layers of eight, a cache, rows and their workspace."""
    options = model_configs.qwen3(
        hidden_size=256, moe_intermediate_size=512, num_experts=8, num_hidden_layers=8,
        vocab_size=12288, max_position_embeddings=512,
    )  # fmt: skip
    tiny_models.save(tiny_models.build("qwen3_moe", options), tmp_path)
    byte_tokenizer(tmp_path)
    paths = os.pathsep.join(dict.fromkeys(one for one in sys.path if one))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), "512", str(padded)],
        env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = re.search(r"\d+", done.stdout)
    assert found is not None
    layers, other, cache, rows = 2 * 12, 27, 4, 2
    workspace = 512 * (4 * (256 + 2 * 512) + 2 * 256) * 4 / 2**20
    assert int(found[0]) <= layers + other + cache + rows + workspace + 10


@pytest.mark.slow
def test_guesses_that_broke_off_are_not_taken_for_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer without experts lies between two layers that share a slot. The next pass has no prompts."""
    options = model_configs.qwen3(num_hidden_layers=4, mlp_only_layers=[1])
    tiny_models.save(tiny_models.build("qwen3_moe", options), tmp_path)
    byte_tokenizer(tmp_path)
    prompts = [tiny_models.prompt(1, model_configs.VOCAB, seed=seed) for seed in range(3)]

    def answers(made: LLM) -> list[list[int]]:
        return [one.outputs[0].token_ids for one in made.generate(prompts, PARAMS)]

    wanted = answers(llm(tmp_path, None))
    way = replace(DISK, schedule="on-demand", micro_batch=3, likely_experts=12)
    real = StreamedExperts.load_chosen
    for call in range(2, 30):
        made = llm(tmp_path, way)
        count = 0

        def counted(self: StreamedExperts, *given: Any, call: int = call) -> int:
            nonlocal count
            count += 1
            loaded = real(self, *given)
            if count == call:
                raise KeyboardInterrupt
            return loaded

        with monkeypatch.context() as patched:
            patched.setattr(StreamedExperts, "load_chosen", counted)
            with pytest.raises(KeyboardInterrupt):
                answers(made)
        assert answers(made) == wanted, call


@pytest.mark.parametrize(("rows", "loads_pages"), [(3, False), (40, True)])
def test_few_rows_of_a_prompt_load_the_experts_that_they_choose(
    path: Path, monkeypatch: pytest.MonkeyPatch, rows: int, loads_pages: bool
) -> None:
    """Four of twelve experts: three rows choose at most 70 % of them, as a mean."""
    pages: list[int] = []
    load_page = Operations._load_page
    monkeypatch.setattr(
        Operations, "_load_page", lambda self, layer, page: [pages.append(page), load_page(self, layer, page)]
    )
    prompt = tiny_models.prompt(rows, model_configs.VOCAB, seed=rows)
    made = llm(path, WAYS["likely ones before"])
    output = made.generate([prompt], PARAMS)[0].outputs[0]
    assert bool(pages) == loads_pages
    assert output.token_ids == llm(path, None).generate([prompt], PARAMS)[0].outputs[0].token_ids
