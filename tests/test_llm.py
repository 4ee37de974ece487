"""The whole engine in one process: the same tokens whatever happens around a request."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import moesaic
from moesaic import RequestOutput, SamplingParams
from moesaic.core.errors import ConfigError, RequestError
from moesaic.core.offload import Offload
from moesaic.core.request import FinishReason
from moesaic.policy.scheduling.batching import BatchLimits
from moesaic.policy.scheduling.kvblocks import KVBlocks
from moesaic.policy.scheduling.schedulers.actions import Action, Event
from moesaic.policy.scheduling.schedulers.lockstep import LockstepScheduler
from moesaic.testing import byte_tokenizer

NEW = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.95, max_tokens=NEW, seed=11, ignore_eos=True)


def LLM(model: str, **settings: object) -> moesaic.LLM:
    """One thread: two of them on a busy machine wait for each other more than they compute."""
    return moesaic.LLM(model, threads=1, **settings)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3-MoE of a few thousand numbers, with a byte tokenizer."""
    path = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=257,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        max_position_embeddings=256,
        initializer_range=0.3,
        eos_token_id=256,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(path)
    byte_tokenizer(path, ["<end>"], chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
    return path


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    lengths = [1, 7, 16, 17, 40, 90, 130, 33]
    drawn = [rng.integers(0, 256, length).tolist() for length in lengths]
    return [*drawn, drawn[-2][:64] + drawn[-1]]  # the last one shares 64 tokens with another


@pytest.fixture(scope="module")
def expected(checkpoint: Path, prompts: list[list[int]]) -> list[list[int]]:
    """What transformers generates, one prompt at a time."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
        outputs.append(out[0, len(prompt) :].tolist())
    return outputs


def tokens(llm: moesaic.LLM, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in llm.generate(prompts, params)]


SETTINGS = {
    "plain": {},
    "one at a time": {"max_num_seqs": 1},
    "small chunks": {"max_num_batched_tokens": 9, "max_num_seqs": 9},
    "no prefix reuse": {"enable_prefix_caching": False},
    "small blocks": {"block_size": 3},
    "weights in own memory": {"mmap": False},
    "blocks run out": {"kv_cache_memory": "256KiB", "max_model_len": 180},
    "blocks run out in small chunks": {
        "kv_cache_memory": "256KiB",
        "max_model_len": 180,
        "max_num_batched_tokens": 16,
        "max_num_seqs": 12,
        "block_size": 4,
    },
}


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(settings, id=name, marks=() if "small chunks" in name else pytest.mark.slow)
        for name, settings in SETTINGS.items()
    ],
)
def test_greedy_tokens_equal_those_of_transformers(
    checkpoint: Path, prompts: list[list[int]], expected: list[list[int]], settings: dict[str, object]
) -> None:
    llm = LLM(str(checkpoint), **settings)
    assert tokens(llm, prompts, GREEDY) == expected
    assert tokens(llm, prompts[::-1], GREEDY) == expected[::-1]  # now with what the first round cached
    stats = llm.stats()
    assert (
        stats.blocks.num_used == 0
        and stats.blocks.num_free + stats.blocks.num_cached == stats.blocks.num_total
    )
    assert (stats.preemptions > 0) == ("kv_cache_memory" in settings)
    assert (stats.blocks.prefix_hits > 0) == settings.get("enable_prefix_caching", True)


@pytest.fixture(scope="module")
def alone(checkpoint: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Sampled tokens of each prompt with the engine to itself."""
    return [tokens(LLM(str(checkpoint)), [prompt], SAMPLED)[0] for prompt in prompts]


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_sampled_tokens_do_not_depend_on_company_chunks_or_preemption(
    checkpoint: Path, prompts: list[list[int]], alone: list[list[int]], settings: dict[str, object]
) -> None:
    assert tokens(LLM(str(checkpoint), **settings), prompts, SAMPLED) == alone


BANNED = replace(
    SAMPLED, bad_words=["a", "bc", "\x00\x01"], allowed_token_ids=range(128), frequency_penalty=0.3
)


@pytest.fixture(scope="module")
def banned_alone(checkpoint: Path, prompts: list[list[int]]) -> list[list[int]]:
    return [tokens(LLM(str(checkpoint)), [prompt], BANNED)[0] for prompt in prompts]


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_bans_act_in_their_request_alone_and_everywhere_alike(
    checkpoint: Path,
    prompts: list[list[int]],
    alone: list[list[int]],
    banned_alone: list[list[int]],
    settings: dict[str, object],
) -> None:
    params = [BANNED if index % 2 else SAMPLED for index in range(len(prompts))]
    found = [one.outputs[0].token_ids for one in LLM(str(checkpoint), **settings).generate(prompts, params)]
    assert found == [(banned_alone if index % 2 else alone)[index] for index in range(len(prompts))]
    for answer in banned_alone:
        assert set(answer) <= set(range(128)) - {ord("a")}
        assert not {(ord("b"), ord("c")), (0, 1)} & set(pairwise(answer))


def test_a_recorded_run_replays_into_a_fresh_scheduler(checkpoint: Path, prompts: list[list[int]]) -> None:
    journal: list[tuple[Event, float, list[Action]]] = []
    llm = LLM(
        str(checkpoint),
        kv_cache_memory="256KiB",
        max_model_len=180,
        max_num_batched_tokens=32,
        max_num_seqs=8,
        journal=lambda *entry: journal.append(entry),
    )
    for _ in zip(llm.stream(prompts[0], SAMPLED), range(3), strict=False):
        pass  # walks away after three tokens: a cancellation
    tokens(llm, prompts, replace(GREEDY, max_tokens=48))
    limits = BatchLimits(8, 32, 180)
    fresh = LockstepScheduler(limits, KVBlocks(llm.info.num_blocks, llm.info.block_size, True))
    for event, now, actions in journal:
        assert repr(fresh.handle(event, now)) == repr(actions)
    assert llm.stats().preemptions > 0


def test_streams_interleave_and_a_closed_one_frees_its_blocks(checkpoint: Path) -> None:
    llm = LLM(str(checkpoint))
    whole = llm.generate("abc", GREEDY)[0].outputs[0].token_ids
    first, second = llm.stream("abc", GREEDY), llm.stream("abc", GREEDY)
    pieces: list[RequestOutput] = []
    for one, _ in zip(first, range(5), strict=False):
        pieces.append(one)
        next(second)
    first.close()
    rest = [token for output in second for token in output.token_ids]
    assert [piece.token_ids[0] for piece in pieces] == whole[:5]
    assert rest == whole[-len(rest) :] and len(rest) >= NEW - 6
    tokens(llm, [[1]], GREEDY)
    assert llm.stats().blocks.num_used == 0


def test_n_completions_and_logprobs(checkpoint: Path) -> None:
    llm = LLM(str(checkpoint))
    params = SamplingParams(n=3, seed=4, max_tokens=5, logprobs=2, ignore_eos=True)
    (result,) = llm.generate("hello", params)
    assert len({tuple(output.token_ids) for output in result.outputs}) == 3
    for output in result.outputs:
        assert output.logprobs is not None
        assert [entry.token_id for entry in output.logprobs] == output.token_ids
    again = llm.generate("hello", SamplingParams(seed=5, max_tokens=5, ignore_eos=True))
    assert again[0].outputs[0].token_ids == result.outputs[1].token_ids  # seed + 1


@pytest.mark.parametrize(
    "settings", [{}, {"max_num_batched_tokens": 7, "max_num_seqs": 4}], ids=["whole", "chunked"]
)
def test_prompt_logprobs_equal_those_of_transformers(checkpoint: Path, settings: dict[str, object]) -> None:
    llm = LLM(str(checkpoint), **settings)
    prompt = np.random.default_rng(1).integers(0, 256, 40).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=3, ignore_eos=True)
    for _ in range(2):  # the second time its prefix is cached, and must be computed all the same
        (output,) = llm.generate([prompt], params)[0].outputs
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        with torch.no_grad():
            reference = torch.log_softmax(model(torch.tensor([prompt])).logits[0], dim=-1)
        assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(prompt)
        for position, entry in enumerate(output.prompt_logprobs[1:], start=1):
            assert entry is not None and entry.token_id == prompt[position]
            assert entry.logprob == pytest.approx(reference[position - 1, prompt[position]].item(), abs=1e-4)
            best = reference[position - 1].topk(3)
            assert [token for token, _ in entry.top] == best.indices.tolist()


def test_the_end_of_sequence_ends_an_answer_and_min_tokens_puts_it_off(checkpoint: Path) -> None:
    llm = LLM(str(checkpoint))
    free = llm.generate("x", SamplingParams(temperature=0.0, max_tokens=200))[0].outputs[0]
    stop = SamplingParams(temperature=0.0, max_tokens=200, stop_token_ids=free.token_ids[3:4])
    cut = llm.generate("x", stop)[0].outputs[0]
    first = free.token_ids.index(free.token_ids[3])
    assert cut.token_ids == free.token_ids[: first + 1] and cut.finish_reason is FinishReason.STOP
    later = SamplingParams(temperature=0.0, max_tokens=20, min_tokens=10, stop_token_ids=stop.stop_token_ids)
    output = llm.generate("x", later)[0].outputs[0]
    assert not set(output.token_ids[:10]) & {*stop.stop_token_ids, 256}


def test_chat_and_texts(checkpoint: Path) -> None:
    llm = LLM(str(checkpoint))
    said = [{"role": "user", "content": "hello"}]
    one = llm.chat(said, GREEDY)
    assert one[0].text == llm.generate("hello", GREEDY)[0].text
    parts = [{"type": "text", "text": "hello"}]
    assert llm.chat([{"role": "user", "content": parts}], GREEDY)[0].text == one[0].text
    assert llm.chat([{"role": "assistant", "content": None}, *said], GREEDY)[0].text == one[0].text
    ids = llm.tokenizer.encode("hello")
    for form in ({"prompt": "hello"}, {"prompt_token_ids": ids}, torch.tensor(ids), np.array(ids)):
        assert llm.generate(form, GREEDY)[0].prompt_token_ids == ids  # type: ignore[arg-type]
        assert llm.generate([form], GREEDY)[0].text == llm.generate("hello", GREEDY)[0].text
    two = llm.chat([[{"role": "user", "content": text}] for text in ("a", "b")], GREEDY)
    assert len(two) == 2
    assert llm.chat([]) == []


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"offload": Offload(1 << 30, "cgopipe", 2, 4, prefill_rows=19)}, "offload"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "speculative_config"),
    ],
    ids=["offload", "tensor parallelism", "drafted tokens"],
)
def test_routing_is_refused_where_no_worker_would_report_it(
    checkpoint: Path, settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=f"^routing: got a function; allowed: None with {named}$"):
        LLM(str(checkpoint), routing=[].append, **settings)


def test_mistakes_are_one_line_and_leave_the_engine_working(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="no such setting"):
        LLM(str(checkpoint), max_seqs=3)
    with pytest.raises(ConfigError, match="--kv-cache-memory"):
        LLM(str(checkpoint), kv_cache_memory="16KiB")
    with pytest.raises(ConfigError, match="--max-model-len"):
        LLM(str(checkpoint), max_model_len=1000)
    for schedule in ("barrier", "async"):
        with pytest.raises(ConfigError, match="--schedule: got .*; allowed: lockstep without --expert-serve"):
            LLM(str(checkpoint), schedule=schedule)
    llm = LLM(str(checkpoint))
    with pytest.raises(RequestError):
        llm.generate(["fine", ""], GREEDY)
    for wrong in ([GREEDY], [], {"max_tokens": 2}, {}, 5, [GREEDY, None]):
        with pytest.raises(ConfigError, match="params"):
            llm.generate(["a", "b"], wrong)  # type: ignore[arg-type]
    for prompt in (
        {"prompt": 5},
        {"prompt_token_ids": "text"},
        {"prompt": "a", "multi_modal_data": {}},
        [1, 2.5],
        {"text": "a"},
    ):
        with pytest.raises(RequestError, match="^prompt: got .*; allowed: text, a list of token ids"):
            llm.generate([prompt], GREEDY)  # type: ignore[list-item]
    with pytest.raises(RequestError, match="^messages: content: got {'type': 'image'}; allowed: a text"):
        llm.chat([{"role": "user", "content": [{"type": "image"}]}])
    assert len(llm.generate(["fine"], GREEDY)[0].outputs[0].token_ids) == NEW
