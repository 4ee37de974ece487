"""Long texts need much memory in a tokenizer, so their length and their number at a time are limited.

Their scores need much time.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from moesaic.server import completions, prompts
from moesaic.server.service import TEXTS_AT_ONCE

from .conftest import Launch, Live

MOST = 2048
"""Eight characters for each token of the context."""


@pytest.fixture
def live(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> Live:
    monkeypatch.setattr(prompts, "MOST_CHARACTERS", 100)
    monkeypatch.setattr(prompts, "_MAX_LOOP_SIZE", 30)
    return launch()


def test_a_text_that_would_take_gigabytes_is_refused(live: Live) -> None:
    assert live.post("/tokenize", prompt="x" * MOST).json()["count"] == MOST
    for body in ({"prompt": "x" * (MOST + 1)}, {"messages": [{"role": "user", "content": "x" * (MOST + 1)}]}):
        answer = live.post("/tokenize", **body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "string_above_max_length")
        assert error["message"] == f"{error['param']}: got {MOST + 1} characters; allowed: at most {MOST}"


def test_a_prompt_has_no_more_characters_than_any_other_text(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the longest token is very long."""
    monkeypatch.setitem(live.front.engine.tokenizer.__dict__, "longest_token", 100)
    for path, body in {
        "/v1/completions": {"prompt": ["x", "x" * (MOST + 1)]},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x" * (MOST + 1)}]},
    }.items():
        answer = live.post(path, **body)
        assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_few_long_texts_are_tokenized_at_a_time(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, going, most = live.front.engine.tokenizer, threading.Semaphore(0), 0
    encode, lock, now = tokenizer.encode, threading.Lock(), 0

    def slow(*given: object) -> list[int]:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        going.acquire(timeout=0.2)
        with lock:
            now -= 1
        return encode(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(tokenizer, "encode", slow)
    count = 5 * TEXTS_AT_ONCE
    with ThreadPoolExecutor(count) as threads:
        answers = threads.map(lambda _: live.post("/tokenize", prompt="x" * 40).status_code, range(count))
        assert list(answers) == [200] * count
    assert most == TEXTS_AT_ONCE


@pytest.mark.parametrize("stream", [False, True])
def test_scores_of_a_long_prompt_are_written_in_a_thread(
    stream: bool, live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, seen = live.front.engine.tokenizer, set()
    name = tokenizer.token_bytes

    def noting(token: int) -> bytes:
        seen.add(threading.current_thread())
        return name(token)

    monkeypatch.setattr(tokenizer, "token_bytes", noting)
    monkeypatch.setattr(completions, "_MAX_LOOP_TOKENS", 100)
    wanted = {"max_tokens": 1, "echo": True, "logprobs": 4, "stream": stream}
    assert "text_offset" in live.post("/v1/completions", prompt="x" * 20, **wanted).text
    [loop] = seen
    seen.clear()
    assert "text_offset" in live.post("/v1/completions", prompt="x" * 21, **wanted).text
    assert len(seen - {loop}) == 1


def test_many_completions_share_the_entries_of_a_call(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else two MB of logit_bias for 320 prompts become 700, and the connection to the worker breaks."""
    monkeypatch.setattr(prompts, "MOST_ENTRIES", 100)
    bias, ids = {str(number): 1.0 for number in range(50)}, [250] * 50
    chat = {"messages": [{"role": "user", "content": "say:x"}]}
    for path, prompt, copies in (
        ("/v1/completions", {"prompt": "say:x"}, {"n": 3}),
        ("/v1/completions", {"prompt": ["say:x"] * 3}, {}),
        ("/v1/chat/completions", chat, {"n": 3}),
    ):
        for name, entries in (("logit_bias", bias), ("stop_token_ids", ids)):
            answer = live.post(path, **prompt, **copies, **{name: entries})
            says = f"{name}: got 50 entries for each of 3 completions; allowed: at most 100 in all"
            assert (answer.status_code, answer.json()["error"]["message"]) == (400, says)
            assert answer.json()["error"]["param"] == name
    for path, prompt in (("/v1/completions", {"prompt": "say:x"}), ("/v1/chat/completions", chat)):
        assert live.post(path, **prompt, n=2, logit_bias=bias, stop_token_ids=ids).status_code == 200


def test_scores_of_prompts_in_one_answer_are_limited(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes some hundred bytes, and each of n completions repeats those of its prompt."""
    monkeypatch.setattr(prompts, "MOST_SCORES", 120)
    wanted = {"max_tokens": 1, "echo": True, "logprobs": 4}
    answer = live.post("/v1/completions", prompt=["x" * 5, "x" * 4], n=3, **wanted)
    says = "logprobs: got 4, with echo 135 log-probabilities of prompts in one answer; allowed: at most 120"
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, says)
    assert live.post("/v1/completions", prompt=["x" * 4] * 2, n=3, **wanted).status_code == 200
