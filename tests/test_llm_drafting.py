"""Drafted tokens change how many steps an answer takes, and nothing that anybody can read of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from moesaic import LLM, SamplingParams
from moesaic.llm import Completion
from moesaic.policy.scheduling.step_prices import StepPrices
from tests.support import pairs
from tests.support.drafting import Oracle

NEW = 40
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
CODE = '''def add(a, b):
    """Add two numbers."""
    return a + b


def sub(a, b):
    """Subtract two numbers."""
    return a - b
'''
PROMPTS = ("# Copy\n" + CODE + "\n# Copy\n" + CODE[:60], "def mul(a, b):\n", CODE[:40], CODE[:40] + "x")
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "top_p": 0.95, "seed": 5},
}
RULES: dict[str, dict[str, Any]] = {
    "none": {"ignore_eos": True},
    "penalties": {"presence_penalty": 0.4, "frequency_penalty": 0.2, "repetition_penalty": 1.1},
    "bans": {"bad_words": ["return", " = "], "logit_bias": {7: 1.5}, "ignore_eos": True},
    "min_tokens": {"min_tokens": 25, "stop_token_ids": list(range(40, 140))},
    "stop tokens": {"stop_token_ids": list(range(300, 420))},
    "stop strings": {"stop": ["+ b", "):"], "include_stop_str_in_output": True},
    "structured": {"structured_outputs": {"regex": "(def [a-z]{1,9}[(]a, b[)]:\n){2,9}"}},
    "several": {"n": 3, "ignore_eos": True},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "not recorded": {"enforce_eager": True},
    "chunks": {"max_num_batched_tokens": 9, "max_num_seqs": 4, "block_size": 3},
    "blocks run out": {"block_size": 4, "max_model_len": 160, "kv_cache_memory": "600KiB"},
    "no prefix reuse": {"enable_prefix_caching": False},
}

Answer = tuple[list[int], str, object, object, list[tuple[int, float, list[tuple[int, float]]] | None]]


def params(sampling: str, rules: str) -> SamplingParams:
    return SamplingParams(
        **{"max_tokens": NEW, "logprobs": 2, "temperature": 0.0, **SAMPLING[sampling], **RULES[rules]}
    )


def answers(found: list[Completion]) -> list[Answer]:
    return [
        (
            one.token_ids,
            one.text,
            one.finish_reason,
            one.stop_reason,
            [None if e is None else (e.token_id, e.logprob, e.top) for e in one.logprobs or []],
        )
        for completion in found
        for one in completion.outputs
    ]


def engine(**settings: Any) -> LLM:
    return LLM("demo", threads=1, seed=3, **{"kv_cache_memory": "32MiB", **settings})


@functools.cache
def alone(sampling: str, rules: str) -> list[Answer]:
    """Without drafts."""
    return answers(engine().generate(PROMPTS, params(sampling, rules)))


@pytest.fixture(autouse=True)
def prices_of_the_prior(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is drafted then depends on no clock."""
    monkeypatch.setattr(StepPrices, "record_duration", lambda self, rows, seconds: None)


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[Answer], float], None]:
    """Makes a drafter that knows these answers and is right with a probability."""

    def known(found: list[Answer], right: float) -> None:
        tokenizer = engine().tokenizer
        each = len(found) // len(PROMPTS)
        pairs_of = [(tokenizer.encode(PROMPTS[i // each]), one[0]) for i, one in enumerate(found)]
        monkeypatch.setattr("moesaic.runtime.drafting.make_drafter", lambda config: Oracle(pairs_of, right))

    return known


@pytest.mark.parametrize(
    ("sampling", "rules", "settings", "right"),
    pairs.params(SAMPLING, RULES, SETTINGS, (0.5, 0.9, 1.0), fast=[("greedy", "none", "default", 0.9)]),
)
def test_every_token_and_logprob_is_the_same(
    oracle: Callable[[list[Answer], float], None], sampling: str, rules: str, settings: str, right: float
) -> None:
    expected = alone(sampling, rules)
    oracle(expected, right)
    llm = engine(speculative_config=NGRAM, **SETTINGS[settings])
    for _ in range(2):  # then with what the first round left in the prefix cache
        assert answers(llm.generate(PROMPTS, params(sampling, rules))) == expected
    counts, blocks = llm.stats().speculation, llm.stats().blocks
    assert 0 < counts.accepted_tokens <= counts.draft_tokens and counts.accepted_per_pos[0] > 0
    assert (counts.accepted_tokens < counts.draft_tokens) or right == 1.0
    assert blocks.num_used == 0
    if (settings, rules) == ("blocks run out", "none"):
        assert llm.stats().preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.3])
def test_ngrams_are_accepted(temperature: float) -> None:
    asked = replace(params("sampled", "none"), temperature=temperature)
    wanted, llm = answers(engine().generate(PROMPTS, asked)), engine(speculative_config=NGRAM)
    assert answers(llm.generate(PROMPTS, asked)) == wanted
    counts = llm.stats().speculation
    assert counts.accepted_tokens > 5 and counts.drafts > 5
