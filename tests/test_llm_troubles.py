"""The engine in one process when something breaks: an interrupt, an error, a strange request."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

from moesaic import LLM, SamplingParams
from moesaic.core.errors import CheckpointError, RequestError
from moesaic.experts.client import DirectExperts
from moesaic.runtime.executor import Executor
from moesaic.runtime.step.recorded_runner import RecordedRunner
from tests.support.failing_methods import raises_at

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo", threads=1, max_num_batched_tokens=64)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("out of memory")])
@pytest.mark.parametrize("call", [1, 2, 7])
def test_an_interrupted_step_leaves_the_engine_working(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, error: BaseException, call: int
) -> None:
    prompts = [list(range(1, 100)), [5, 6, 7]]
    wanted = [result.outputs[0].token_ids for result in llm.generate(prompts, GREEDY)]
    raises_at(monkeypatch, RecordedRunner, "begin", call, error)
    with pytest.raises(type(error)):
        llm.generate([[9, 8, 7, *prompt] for prompt in prompts], GREEDY)
    assert [result.outputs[0].token_ids for result in llm.generate(prompts, GREEDY)] == wanted
    stats = llm.stats()
    assert (stats.running, stats.waiting, stats.blocks.num_used) == (0, 0, 0)


@pytest.mark.parametrize("call", [7, *(pytest.param(call, marks=pytest.mark.slow) for call in (1, 6, 9, 12))])
def test_a_step_interrupted_between_its_layers_leaves_the_engine_working(
    monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    # A new engine: its first prefill and then its first steps of one row are computed, and may be recorded.
    llm = LLM("demo", threads=1, enable_prefix_caching=False)
    wanted = LLM("demo", threads=1).generate([[1, 2, 3]], GREEDY)[0].outputs[0].token_ids
    raises_at(monkeypatch, DirectExperts, "submit", call, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2, 3]], GREEDY)
    assert llm.generate([[1, 2, 3]], GREEDY)[0].outputs[0].token_ids == wanted


def kept(llm: LLM) -> list[int]:
    """The requests that the sampler knows."""
    return list(llm._worker._executor._sampler._rows)


@pytest.mark.parametrize("broken", ["_emit", "_admit"])
def test_an_interrupt_before_a_request_is_let_go_keeps_nothing_of_it(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """Its only token is told and it is released in one breath; between the two comes the interrupt."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    wanted = llm.generate([5, 6, 7], params)[0].outputs[0].token_ids
    with monkeypatch.context() as patched:
        raises_at(patched, Executor, broken, 1, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            llm.generate([5, 6, 7], params)
    assert llm.generate([5, 6, 7], params)[0].outputs[0].token_ids == wanted
    assert kept(llm) == []


def test_an_interrupted_stream_takes_no_token_from_another(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=12, seed=3, ignore_eos=True)
    wanted = llm.generate([[5, 6, 7]], params)[0].outputs[0].token_ids
    steady, other = llm.stream([5, 6, 7], params), llm.stream([9, 9], params)
    tokens = [token for _ in range(3) for token in next(steady).token_ids]
    next(other)
    raises_at(monkeypatch, RecordedRunner, "begin", 2, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        list(other)
    tokens += [token for output in steady for token in output.token_ids]
    assert tokens == wanted


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1e-300},
        {"stop_token_ids": range(256), "min_tokens": 4},
        {"temperature": 1e-5, "top_p": 1e-300},
        {"seed": 2**63 - 1, "n": 3},
        {"seed": -(2**63), "top_k": 2**63 - 1},
        {"logit_bias": {7: 100}, "temperature": 1e6, "min_p": 1.0},
    ],
)
def test_no_parameters_break_the_engine(llm: LLM, params: dict[str, Any]) -> None:
    whole = SamplingParams(**{"seed": 1, "max_tokens": 5, "ignore_eos": True} | params)
    first, second = (llm.generate([[1, 2, 3]], whole)[0].outputs for _ in range(2))
    assert [output.token_ids for output in first] == [output.token_ids for output in second]
    assert all(len(output.token_ids) == 5 for output in first)


def test_numbers_that_no_message_can_carry_are_refused() -> None:
    for name in ("top_k", "min_tokens"):
        with pytest.raises(RequestError, match=f"{name}: got {2**70}; .*at most {2**63 - 1}"):
            SamplingParams(max_tokens=None, **{name: 2**70})
    assert SamplingParams(stop=None, stop_token_ids=None, logit_bias=None) == SamplingParams()  # type: ignore[arg-type]


def test_prompts_are_texts_or_integers_of_any_library(llm: LLM) -> None:
    wanted = llm.generate([[1, 2, 3]], GREEDY)[0].outputs[0].token_ids
    for prompt in (np.array([1, 2, 3]), [np.array([1, 2, 3])], (1, 2, 3)):
        assert llm.generate(prompt, GREEDY)[0].outputs[0].token_ids == wanted  # type: ignore[arg-type]
    for wrong in ([[1.5]], [["a"]], [{"prompt_token_ids": [1.5]}]):
        with pytest.raises(RequestError, match="allowed: text, a list of token ids"):
            llm.generate(wrong, GREEDY)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_dropped_llm_frees_its_memory() -> None:
    llm = LLM("demo", threads=1, max_model_len=64, max_num_seqs=2)
    next(llm.stream([1], GREEDY))
    model = weakref.ref(llm._worker)
    del llm
    gc.collect()
    assert model() is None


def test_a_missing_tokenizer_is_told_before_the_weights_are_read(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        LLM(str(tmp_path))
