"""Drafts by a checkpoint's own layer for the token after the next one (`mtp`)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moesaic import LLM, SamplingParams
from moesaic.core.errors import ConfigError
from moesaic.core.request import NO_TOKEN
from moesaic.core.tokens import TokenBatch
from moesaic.llm import Completion
from moesaic.models import registry
from moesaic.models.kvcache.paged_kv import bytes_per_token
from moesaic.policy.scheduling.schedulers.actions import Action, Event, RunStep, StepDone, StepPlan
from moesaic.policy.scheduling.schedulers.lockstep import LockstepScheduler
from moesaic.policy.scheduling.step_prices import StepPrices
from moesaic.runtime.predicting import select_known_rows
from moesaic.runtime.sampling.checking import SampledTokens
from moesaic.testing import byte_tokenizer
from tests.support import gguf_files, pairs, prediction, quantizers, tiny_models
from tests.support.prediction import KINDS, VOCAB

MTP = {"method": "mtp", "num_speculative_tokens": 1}
NEW = 40
COMMON = tiny_models.prompt(20, VOCAB, seed=9)
PROMPTS = [[*COMMON, 5, 6, 7], [*COMMON, 8], tiny_models.prompt(9, VOCAB), [3]]
STRENGTHS = {"wrong": 1.0, "often right": 0.004}
"""How much attention and MLPs have to say. With little of it the layer is often right."""
RULES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.7, "top_p": 0.95, "seed": 5},
    "penalties": {"temperature": 0.0, "presence_penalty": 0.4, "repetition_penalty": 1.1},
    "stop tokens": {"temperature": 0.0, "stop_token_ids": list(range(0, VOCAB, 9)), "ignore_eos": False},
    "several": {"temperature": 1.0, "seed": 3, "n": 3},
    "scored": {"temperature": 0.0, "prompt_logprobs": 1},
    "ends soon": {"temperature": 0.0, "max_tokens": 2},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "not recorded": {"enforce_eager": True},
    "reference": {"kernels": "reference"},
    "chunks": {"max_num_batched_tokens": 9, "max_num_seqs": 4, "block_size": 3},
    "blocks run out": {"block_size": 4, "max_model_len": 80, "kv_cache_memory": "112 tokens"},
    "no prefix reuse": {"enable_prefix_caching": False},
    "two steps at once": {"inflight_batches": 2},
    "int8 cache": {"kv_cache_dtype": "int8"},
}


@pytest.fixture(autouse=True)
def prices_of_the_prior(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is drafted then depends on no clock."""
    monkeypatch.setattr(StepPrices, "record_duration", lambda self, rows, seconds: None)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    folder = tmp_path_factory.mktemp("prediction")

    @functools.cache
    def written(kind: str, strength: str) -> Path:
        return prediction.save(kind, folder / f"{kind} {strength}", STRENGTHS[strength])

    return written


def answers(llm: LLM, rules: str, bits: bool) -> list[Any]:
    """Tokens and how answers end; with their log-probabilities to the last bit."""
    params = SamplingParams(**{"max_tokens": NEW, "logprobs": 1, "ignore_eos": True, **RULES[rules]})
    found: list[Completion] = llm.generate(PROMPTS, params)
    return [
        (
            one.token_ids,
            one.finish_reason,
            [(e.token_id, e.logprob) for e in one.logprobs or [] if e and bits],
        )
        for completion in found
        for one in completion.outputs
    ]


def engine(path: Path, **settings: Any) -> LLM:
    """kv_cache_memory: a size, or a number of tokens for a model that predicts."""
    if settings.get("kv_cache_memory") == "112 tokens":
        spec = registry.read_spec(path)
        size = 112 * bytes_per_token(spec.kv, spec.num_layers + 1, torch.float32)
        settings["kv_cache_memory"] = f"{size / 1024}KiB"
    return LLM(str(path), threads=1, seed=3, **{"kv_cache_memory": "16MiB", **settings})


@pytest.mark.parametrize(
    ("kind", "strength", "rules", "settings"),
    pairs.params(
        KINDS, STRENGTHS, RULES, SETTINGS, fast=[("deepseek_v3", "often right", "greedy", "default")]
    ),
)
def test_every_token_and_logprob_is_the_same(
    checkpoints: Callable[[str, str], Path], kind: str, strength: str, rules: str, settings: str
) -> None:
    path, chosen = checkpoints(kind, strength), SETTINGS[settings]
    bits = settings != "reference"  # whose last bits depend on the other rows of a step
    expected = answers(engine(path, **chosen), rules, bits)
    llm = engine(path, speculative_config=MTP, **chosen)
    for _ in range(2):  # then with what the first round left in the prefix cache
        assert answers(llm, rules, bits) == expected
    counts, blocks = llm.stats().speculation, llm.stats().blocks
    assert blocks.num_used == 0 and counts.draft_tokens == counts.drafts
    if rules != "ends soon":
        assert counts.draft_tokens > 0
        assert counts.accepted_tokens > 0 or strength == "wrong" or rules not in ("greedy", "scored")
    if settings == "blocks run out" and rules == "greedy":
        assert llm.stats().preemptions > 0


@pytest.mark.parametrize(
    ("kind", "strength", "settings"),
    [
        ("deepseek_v3", "wrong", "default"),
        ("glm4_moe", "wrong", "chunks"),
        ("glm4_moe", "often right", "no prefix reuse"),
        ("deepseek_v3", "often right", "blocks run out"),
    ],
)
@pytest.mark.slow
def test_it_proposes_what_the_layer_says(
    checkpoints: Callable[[str, str], Path],
    kind: str,
    strength: str,
    settings: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Row by row as transformers' layers over the whole answer, in chunks, after drafts and preemption."""
    path, seen = checkpoints(kind, strength), dict[tuple[int, int], int]()
    handle = LockstepScheduler.handle
    plans: dict[int, StepPlan] = {}

    def recorded(self: LockstepScheduler, event: Event, now: float) -> list[Action]:
        if isinstance(event, StepDone) and event.proposed_tokens is not None:
            plan, proposed = plans[event.step], event.proposed_tokens
            batch, drafted = (
                plan.batch,
                plan.num_draft_tokens if len(plan.num_draft_tokens) else [0] * len(plan.sampled_sequences),
            )
            counts = [1] * len(plan.sampled_sequences) if event.counts is None else event.counts.tolist()
            for sequence, draft, count, token in zip(
                plan.sampled_sequences, drafted, counts, proposed, strict=True
            ):
                row = batch.query_starts[sequence + 1] - 1 - draft + count - 1
                seen[int(plan.request_ids[sequence]), int(batch.positions[row])] = int(token)
        actions = handle(self, event, now)
        plans.update((one.plan.step, one.plan) for one in actions if isinstance(one, RunStep))
        return actions

    monkeypatch.setattr(LockstepScheduler, "handle", recorded)
    llm = engine(path, speculative_config=MTP, **SETTINGS[settings] | {"enable_prefix_caching": False})
    params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
    found = llm.generate(PROMPTS, params)
    first = min(request for request, _ in seen)
    for number, (prompt, completion) in enumerate(zip(PROMPTS, found, strict=True)):
        tokens = [*prompt, *completion.outputs[0].token_ids]
        wanted = prediction.proposals(kind, path, tokens)
        mine = {place: token for (request, place), token in seen.items() if request == first + number}
        assert len(mine) >= 12 and max(mine) == len(wanted) - 1
        assert mine == {place: wanted[place] for place in mine}
    counts, preempted = llm.stats().speculation, llm.stats().preemptions
    assert (preempted > 0) is (settings == "blocks run out")
    assert counts.drafts > 0 and (strength == "wrong" or counts.accepted_tokens > counts.drafts / 2)


def test_the_rows_whose_next_token_is_known() -> None:
    """A decode whose draft was right, a part of a prompt, a decode whose draft was wrong, a prompt's end."""
    batch = TokenBatch(
        token_ids=np.array([10, 11, 20, 21, 30, 39, 40, 41]),
        positions=np.array([5, 6, 0, 1, 8, 9, 3, 4]),
        query_starts=np.array([0, 2, 4, 6, 8]),
        context_lens=np.array([7, 2, 10, 5]),
        block_tables=np.arange(4)[:, None],
        logit_rows=np.array([0, 1, 4, 5, 7]),
    )
    sampled, drafted = np.array([0, 2, 3]), np.array([1, 1, 0])
    following = np.array([-1, 22, -1, -1])
    plan = StepPlan(0, batch, np.arange(4), np.zeros(4), sampled, np.array([]), drafted, following)
    found = SampledTokens(np.array([11, 12, 31, NO_TOKEN]), [], np.array([2, 1, 1]))
    known, rows = select_known_rows(plan, found)
    assert rows.tolist() == [0, 1, 2, 3, 4, 6, 7]
    assert known.token_ids.tolist() == [11, 12, 21, 22, 31, 41, 0]
    assert known.positions.tolist() == [5, 6, 0, 1, 8, 3, 4]
    assert known.query_starts.tolist() == [0, 2, 4, 5, 7]
    assert known.context_lens.tolist() == [7, 2, 9, 5]
    assert known.logit_rows.tolist() == [1, 4, 6]


@pytest.mark.slow
def test_what_has_no_such_layer_is_refused(checkpoints: Callable[[str, str], Path], tmp_path: Path) -> None:
    allowed = "method: got 'mtp'; allowed: ngram; mtp for safetensors of deepseek_v3, glm4_moe, kimi_k2 whose"
    with pytest.raises(ConfigError, match=allowed):
        engine(Path("demo"), speculative_config=MTP)
    without = tiny_models.save(
        tiny_models.build("glm4_moe", prediction.options("glm4_moe", 3)), tmp_path / "a"
    )
    byte_tokenizer(without)
    with pytest.raises(ConfigError, match="tensor model.layers.3.* is missing"):
        engine(without, speculative_config=MTP)
    tiny_models.edit(without, num_nextn_predict_layers=0)
    with pytest.raises(ConfigError, match=allowed):
        engine(without, speculative_config=MTP)
    file, _ = gguf_files.write(without, tmp_path / "gguf")
    with pytest.raises(ConfigError, match=allowed):
        engine(file, speculative_config=MTP)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_quantised_checkpoints_have_it_too(
    checkpoints: Callable[[str, str], Path], kind: str, tmp_path: Path
) -> None:
    path, _ = quantizers.quantize(
        checkpoints(kind, "often right"), tmp_path, quantizers.FORMATS["fp8 blocks"]
    )
    byte_tokenizer(path)
    llm = engine(path, speculative_config=MTP)
    assert answers(llm, "greedy", True) == answers(engine(path), "greedy", True)
    assert llm.stats().speculation.accepted_tokens > 20
