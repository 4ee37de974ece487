"""Models with states: the same bits after any history of chunks, preemptions and prefix hits."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from moesaic import LLM, SamplingParams
from moesaic.core.metrics import WorkerStats
from moesaic.kernels import table
from moesaic.policy.scheduling.step_prices import StepPrices
from moesaic.testing import byte_tokenizer
from tests.support import model_configs, pairs, tiny_models
from tests.support.cluster_driver import Answer
from tests.support.drafting import Oracle

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not table.instruction_sets(), reason="no native kernels in this build"),
]
LONGEST = 490
ENDS = (1, 40, 63, 64, 65, 100, 127, 128, 129, 192, 200, 256, 300)
"""Lengths of prompts: around multiples of 64, of the blocks, and off both."""
FAMILIES = {"qwen3_next": model_configs.qwen3_next, "lfm2_moe": model_configs.lfm2}
NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
HISTORIES = {"qwen3_next": range(4, 8), "lfm2_moe": range(5, 9)}
TOGETHER = {"qwen3_next": 32, "lfm2_moe": 12}
"""Of each family: seeds of histories, and sequences at once. Both have the same scheduler and pages."""
STEMS = 3
"""Texts of which the prompts are prefixes."""


def prompts(draw: random.Random, count: int) -> list[list[int]]:
    """Prefixes of a few texts, some with a few tokens of their own."""
    found = []
    for _ in range(count):
        stem = tiny_models.prompt(max(ENDS), model_configs.VOCAB, seed=draw.randrange(STEMS))
        own = tiny_models.prompt(draw.choice((1, 7, 20)), model_configs.VOCAB, seed=draw.randrange(4))
        found.append(stem[: draw.choice(ENDS)] + (own if draw.random() < 0.5 else []))
    return found


def params(draw: random.Random, count: int) -> list[SamplingParams]:
    return [
        SamplingParams(
            max_tokens=draw.choice((1, 30, 90, 160)),
            temperature=draw.choice((0.0, 0.9)),
            seed=draw.randrange(3),
            ignore_eos=True,
            logprobs=0,
            prompt_logprobs=draw.choice((None, None, None, 0)),
        )
        for _ in range(count)
    ]


def settings(draw: random.Random) -> dict[str, Any]:
    """Of an engine. The smallest cache holds one longest request, so others are preempted."""
    seats = draw.choice((1, 4, 16))
    return {
        "max_num_seqs": seats,
        "max_num_batched_tokens": max(seats, draw.choice((7, 64, 100, 1000))),
        "block_size": draw.choice((4, 16, 48)),
        "kv_cache_memory": draw.choice(("1400KiB", "2MiB", "16MiB")),
        "enable_prefix_caching": draw.random() < 0.8,
        "enforce_eager": draw.random() < 0.3,
    }


class Engines:
    """A checkpoint, and what each request gets alone, in an engine that saw nothing before."""

    def __init__(self, kind: str, path: Path) -> None:
        self.kind = kind
        config = FAMILIES[kind](head_dim=64, num_key_value_heads=4)
        self.path = tiny_models.save(tiny_models.build(kind, config), path)
        byte_tokenizer(self.path)
        self._alone = self.engine(enable_prefix_caching=False, enforce_eager=True, max_num_seqs=1)
        self._known: dict[str, Answer] = {}

    def engine(self, **given: Any) -> LLM:
        return LLM(str(self.path), threads=1, max_model_len=LONGEST, **given)

    def wanted(self, prompt: list[int], params: SamplingParams) -> Answer:
        key = repr((prompt, params))
        if key not in self._known:
            [self._known[key]] = answers(self._alone, [prompt], [params])
        return self._known[key]


def answers(model: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[Answer]:
    found = []
    for completion in model.generate(prompts, params):
        [output] = completion.outputs
        found.append((output.token_ids, [entry.logprob for entry in output.logprobs or [] if entry]))
    return found


@pytest.fixture(scope="module", params=FAMILIES)
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engines:
    return Engines(request.param, tmp_path_factory.mktemp("states"))


def one_history(engines: Engines, seed: int) -> WorkerStats:
    """Several calls of one engine, each with some requests. Returns its statistics."""
    draw = random.Random(seed)
    oracle, drafting = Oracle([], right=0.5 + 0.2 * (seed % 3)), NGRAM if seed % 4 else None
    with patch("moesaic.runtime.drafting.make_drafter", lambda config: oracle):
        model = engines.engine(**settings(draw), speculative_config=drafting)
    for _ in range(draw.choice((1, 2, 4))):
        count = draw.choice((1, 3, 8))
        asked, how = prompts(draw, count), params(draw, count)
        wanted = [engines.wanted(*one) for one in zip(asked, how, strict=True)]
        for prompt, (tokens, _) in zip(asked, wanted, strict=True):
            oracle.learn(prompt, tokens)
        assert answers(model, asked, how) == wanted, f"history {seed}"
    stats = model.stats()
    states = stats.states
    assert states.seats_used == 0 and states.pages == states.pages_free + states.snapshots
    return stats


def test_random_histories(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        StepPrices, "record_duration", lambda self, rows, seconds: None
    )  # which depends on time
    found = [one_history(engines, seed) for seed in HISTORIES[engines.kind]]
    assert sum(stats.preemptions for stats in found) > 1
    drafts = [stats.speculation for stats in found]
    accepted = sum(one.accepted_tokens for one in drafts)
    assert 0 < accepted < sum(one.draft_tokens for one in drafts)


@pytest.mark.parametrize(
    "first", [pytest.param(range(n, n + 100), marks=pairs.REST) for n in range(100, 1100, 100)]
)
def test_a_thousand_histories(engines: Engines, first: range) -> None:
    for seed in first:
        one_history(engines, seed)


def test_many_sequences_leave_no_state_behind(engines: Engines) -> None:
    draw, count = random.Random(7), TOGETHER[engines.kind]
    asked, how = prompts(draw, count), params(draw, count)
    model = engines.engine(max_num_seqs=count, kv_cache_memory="64MiB")
    assert answers(model, asked, how) == [engines.wanted(*one) for one in zip(asked, how, strict=True)]
    states = model.stats().states
    assert (states.seats, states.seats_used) == (count, 0)
    assert states.pages == states.pages_free + states.snapshots and states.snapshots > 0


def test_prefixes_are_found_at_snapshots(engines: Engines) -> None:
    """A conversation computes only what is new, from the last multiple of 64 on."""
    model = engines.engine()
    greedy = SamplingParams(temperature=0.0, max_tokens=70, ignore_eos=True)
    text = tiny_models.prompt(150, model_configs.VOCAB)
    hits = []
    for _ in range(3):
        before = model.stats().blocks.prefix_hits
        [completion] = model.generate([text], greedy)
        hits.append(model.stats().blocks.prefix_hits - before)
        text = text + completion.outputs[0].token_ids + [3, 5]
    assert hits == [0, 192, 256]
