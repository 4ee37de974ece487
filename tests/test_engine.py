"""The engine against a worker that is a queue of messages."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from moesaic.core import messages
from moesaic.core.errors import EngineDeadError, OverloadedError, RequestError
from moesaic.core.request import FinishReason, Request, RequestOutput, SamplingParams, TokenLogprob
from moesaic.engine import Engine
from moesaic.testing import byte_tokenizer
from moesaic.text.tokenizer import Tokenizer
from moesaic.transport.local import LocalConnection, local_pair
from moesaic.transport.stream import encode
from tests.support import fake_worker

EOS = 256
SIZES = {
    "max_model_len": 64,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 64,
    "vocab_size": 257,
    "num_blocks": 8,
}


class Rig:
    """An engine, and the worker's end of its connection."""

    def __init__(self, tokenizer: Tokenizer, max_waiting: int | None = None, **changes: int) -> None:
        ours, self.worker = local_pair()
        self.ended: list[tuple[int, bool]] = []
        self.engine = Engine(
            ours,
            tokenizer,
            clock=lambda: 1.0,
            rng=random.Random(0),
            eos_token_ids=(EOS,),
            max_waiting=max_waiting,
            on_request_end=lambda request, late: self.ended.append((request.request_id, late)),
        )
        self.engine.receive(messages.Ready(fake_worker.info(**SIZES | changes)))

    def sent(self) -> list[messages.Message]:
        out = []
        while (message := self.worker.receive(0.0)) is not None:
            out.append(message)
        return out

    def requests(self) -> list[Request]:
        return [r for m in self.sent() if isinstance(m, messages.Submit) for r in m.requests]

    def token(self, request_id: int, token: int, finish: FinishReason | None = None) -> list[RequestOutput]:
        return self.engine.receive(messages.Tokens([request_id], [token], [finish]))

    def write(self, request_id: int, text: str) -> list[RequestOutput]:
        """Byte by byte; the outputs of all of them, stopping where the engine does."""
        out: list[RequestOutput] = []
        for token in self.engine.tokenizer.encode(text):
            out += self.token(request_id, token)
        return out


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path: Path = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer(path, ["<end>"])
    return Tokenizer(path)


@pytest.fixture
def rig(tokenizer: Tokenizer) -> Rig:
    return Rig(tokenizer)


def test_text_streams_and_the_end_of_sequence_is_hidden(rig: Rig) -> None:
    group = rig.engine.submit([1, 2], SamplingParams(max_tokens=10))
    (request,) = rig.requests()
    outputs = [*rig.write(request.request_id, "hé"), *rig.token(request.request_id, EOS, FinishReason.STOP)]
    assert [o.text for o in outputs] == ["h", "", "é", ""]
    assert {o.request_id for o in outputs} == {group}
    assert outputs[-1].finish_reason is FinishReason.STOP and outputs[-1].stop_reason is None
    assert rig.engine.num_unfinished == 0


def test_what_may_begin_a_stop_string_is_held_back_and_a_stop_string_cancels(rig: Rig) -> None:
    rig.engine.submit([1], SamplingParams(max_tokens=50, stop=["\nQ:", "END"]))
    (request,) = rig.requests()
    outputs = rig.write(request.request_id, "a\nb EN\nQ: never")
    assert [o.text for o in outputs] == ["a", "", "\nb", " ", "", "", "EN", "", ""]
    assert outputs[-1].finish_reason is FinishReason.STOP and outputs[-1].stop_reason == "\nQ:"
    assert rig.sent() == [messages.Cancel([request.request_id])]


def test_a_stop_string_of_a_million_characters_costs_no_more_than_the_text(rig: Rig) -> None:
    rig.engine.submit([1], SamplingParams(max_tokens=50, stop=["ab" + "c" * 1_000_000]))
    (request,) = rig.requests()
    outputs = rig.write(request.request_id, "xabccd")
    assert [o.text for o in outputs] == ["x", "", "", "", "", "abccd"]


def test_many_completions_with_a_long_stop_string_are_a_short_message(rig: Rig) -> None:
    """With a copy of it for each completion, nine MB became a frame that the worker does not accept."""
    for stop, ids in (("a" * 1_000_000, ()), ("a", [5] * 1_000_000)):
        rig.engine.submit([1], SamplingParams(n=4, max_tokens=50, stop=stop, stop_token_ids=ids))
        [message] = rig.sent()
        assert len(encode(message)) < 2_500


def test_many_completions_with_much_bias_are_refused(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moesaic.engine.MOST_BYTES", 1000)
    bias = dict.fromkeys(range(30), 1.0)
    rig.engine.submit([1] * 10, SamplingParams(n=2, max_tokens=1, logit_bias=bias))
    with pytest.raises(
        RequestError, match="n: got 3, for which .* have 1410 bytes in all; allowed: at most 1000"
    ):
        rig.engine.submit([1] * 10, SamplingParams(n=3, max_tokens=1, logit_bias=bias))


def test_the_stop_string_is_kept_when_asked_for(rig: Rig) -> None:
    rig.engine.submit([1], SamplingParams(max_tokens=50, stop=["END"], include_stop_str_in_output=True))
    (request,) = rig.requests()
    assert "".join(o.text for o in rig.write(request.request_id, "an END.")) == "an END"


def test_held_text_comes_out_when_the_length_is_reached(rig: Rig) -> None:
    rig.engine.submit([1], SamplingParams(max_tokens=2, stop=["END"]))
    (request,) = rig.requests()
    assert rig.token(request.request_id, rig.engine.tokenizer.encode("E")[0])[0].text == ""
    (last,) = rig.token(request.request_id, rig.engine.tokenizer.encode("N")[0], FinishReason.LENGTH)
    assert (last.text, last.finish_reason) == ("EN", FinishReason.LENGTH)


def test_stop_strings_wait_for_min_tokens(rig: Rig) -> None:
    rig.engine.submit([1], SamplingParams(max_tokens=9, min_tokens=4, stop=["a"]))
    (request,) = rig.requests()
    assert "".join(o.text for o in rig.write(request.request_id, "aabba")) == "aabb"


def test_a_stop_token_is_told_apart_from_the_end_of_sequence(rig: Rig) -> None:
    rig.engine.submit([1], SamplingParams(max_tokens=9, stop_token_ids=[65]))
    (request,) = rig.requests()
    (last,) = rig.token(request.request_id, 65, FinishReason.STOP)
    assert (last.text, last.stop_reason, last.token_ids) == ("", 65, [65])


def test_n_completions_have_their_own_seeds_and_indices(rig: Rig) -> None:
    group = rig.engine.submit([1], SamplingParams(n=3, seed=2**63 - 1, max_tokens=1))
    requests = rig.requests()
    assert [r.params.seed for r in requests] == [2**63 - 1, -(2**63), -(2**63) + 1]
    outputs = [rig.token(r.request_id, 65, FinishReason.LENGTH)[0] for r in reversed(requests)]
    assert [(o.request_id, o.index) for o in outputs] == [(group, 2), (group, 1), (group, 0)]


def test_a_seed_is_drawn_at_arrival_when_none_is_given(rig: Rig) -> None:
    rig.engine.submit([1], SamplingParams())
    rig.engine.submit([1], SamplingParams())
    seeds = [request.params.seed for request in rig.requests()]
    assert None not in seeds and seeds[0] != seeds[1]


def test_max_tokens_none_takes_what_the_context_leaves(rig: Rig) -> None:
    rig.engine.submit([1] * 60, SamplingParams(max_tokens=None))
    assert rig.requests()[0].params.max_tokens == 4


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ([], SamplingParams(), "prompt"),
        ([257], SamplingParams(), "prompt"),
        ([-1], SamplingParams(), "prompt"),
        ([1] * 64, SamplingParams(max_tokens=None), "prompt"),
        ([1] * 60, SamplingParams(max_tokens=5), "prompt"),
        ([1], SamplingParams(logit_bias={300: 1.0}), "logit_bias"),
        ([1], SamplingParams(stop_token_ids=[300]), "stop_token_ids"),
    ],
)
def test_what_cannot_be_served_is_refused_and_nothing_is_sent(
    rig: Rig, prompt: list[int], params: SamplingParams, field: str
) -> None:
    with pytest.raises(RequestError) as error:
        rig.engine.submit(prompt, params)
    assert error.value.field == field
    assert rig.sent() == [] and rig.engine.num_unfinished == 0


@pytest.mark.parametrize(
    ("wrong", "allowed"),
    [
        ({"stop": 5}, "a list"),
        ({"stop_token_ids": 5}, "a list"),
        ({"logit_bias": [1]}, "numbers by token id"),
        ({"ignore_eos": "no"}, "True, False"),
    ],
)
def test_parameters_of_another_type_are_named(wrong: dict[str, Any], allowed: str) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(RequestError) as error:
        SamplingParams(**wrong)
    assert error.value.field == name and str(error.value) == f"{name}: got {value!r}; allowed: {allowed}"


def test_a_full_queue_refuses_until_something_ends(tokenizer: Tokenizer) -> None:
    rig = Rig(tokenizer, max_waiting=1)
    groups = [rig.engine.submit([1], SamplingParams()) for _ in range(3)]
    with pytest.raises(OverloadedError):
        rig.engine.submit([1], SamplingParams())
    rig.engine.cancel(groups[0])
    rig.engine.submit([1], SamplingParams())


def test_each_end_is_told_once_and_whether_the_worker_knows_it(rig: Rig) -> None:
    for _ in range(3):
        rig.engine.submit([1], SamplingParams(max_tokens=9, stop=["b"]))
    long, stopped, cancelled = (request.request_id for request in rig.requests())
    rig.token(long, 65, FinishReason.LENGTH)
    rig.write(stopped, "abc")
    rig.engine.cancel(cancelled)
    rig.engine.cancel(cancelled)
    rig.token(cancelled, 65, FinishReason.LENGTH)
    assert rig.ended == [(long, False), (stopped, True), (cancelled, True)]


def test_a_cancelled_request_says_nothing_more(rig: Rig) -> None:
    group = rig.engine.submit([1], SamplingParams(n=2))
    first, second = rig.requests()
    rig.token(first.request_id, 65, FinishReason.LENGTH)
    rig.engine.cancel(group)
    rig.engine.cancel(group)
    assert rig.sent() == [messages.Cancel([second.request_id])]
    assert rig.token(second.request_id, 66) == []


def test_prompt_logprobs_arrive_in_chunks_and_twice_after_a_preemption(rig: Rig) -> None:
    rig.engine.submit([1, 2, 3, 4], SamplingParams(prompt_logprobs=0))
    (request,) = rig.requests()
    entries = [TokenLogprob(token, -float(token), []) for token in (2, 3, 4)]
    for start, part in ((1, entries[:1]), (1, entries[:2]), (3, entries[2:])):
        rig.engine.receive(messages.PromptLogprobs(request.request_id, start, part))
    (first,) = rig.token(request.request_id, 65)
    assert first.prompt_logprobs == [None, *entries]
    assert rig.token(request.request_id, 65)[0].prompt_logprobs is None


def test_cached_tokens_and_stats_are_passed_on(rig: Rig) -> None:
    rig.engine.submit([1] * 20, SamplingParams())
    (request,) = rig.requests()
    rig.engine.receive(messages.RequestsAdmitted([request.request_id], [0.5], [16]))
    (output,) = rig.token(request.request_id, 65)
    assert (output.num_cached_tokens, output.num_prompt_tokens) == (16, 20)
    assert rig.engine.stats().num_unfinished == 1


def test_a_dead_worker_ends_everything_with_a_clear_error(tokenizer: Tokenizer) -> None:
    rig = Rig(tokenizer)
    rig.engine.submit([1], SamplingParams())
    rig.engine.receive(messages.WorkerFailed("out of memory", user_error=False))
    assert rig.engine.num_unfinished == 0
    with pytest.raises(EngineDeadError, match="out of memory"):
        rig.engine.submit([1], SamplingParams())


def test_a_connection_that_breaks_while_sending_is_a_dead_worker(tokenizer: Tokenizer) -> None:
    rig = Rig(tokenizer)
    assert isinstance(rig.engine._connection, LocalConnection)
    rig.engine._connection.close()
    with pytest.raises(EngineDeadError):
        rig.engine.submit([1], SamplingParams())
    assert rig.engine.dead is not None
