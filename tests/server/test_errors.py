"""Whatever is wrong is answered in OpenAI's shape, by name, and never with a 500."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
import openai
import pytest
from pydantic import ValidationError

from moesaic.core import messages
from moesaic.core.request import NO_TOKEN, FinishReason
from moesaic.server import prompts
from moesaic.server.requests import CompletionRequest
from tests.support.raw_http import connect, head, read

from .conftest import MODEL, NO_TLS, Launch, Live
from .test_chat import ASK

Until = Callable[..., None]


def error_of(response: httpx.Response) -> dict[str, str]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    return error


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("temperature", "hot", "temperature: got 'hot'; Input should be a valid number"),
        ("temperature", True, "valid number"),
        ("temperature", -1, "greater than or equal to 0"),
        ("n", True, "valid integer"),
        ("n", 1.0, "valid integer"),
        ("n", 0, "greater than or equal to 1"),
        ("max_tokens", "5", "valid integer"),
        ("max_tokens", 0, "with echo"),
        ("min_tokens", 20, "min_tokens"),
        ("top_p", 0, "greater than 0"),
        ("best_of", 2, "best_of: got 2"),
        ("stop", "", "at least 1 character"),
        ("stop", ["x"] * 17, "at most 16"),
        ("stop", 5, "valid string or Input should be a valid list"),
        ("logit_bias", {"x": 1}, "logit_bias"),
        ("logit_bias", {"65": 101}, "less than or equal to 100"),
        ("logit_bias", {"9999": 1}, "9999"),
        ("seed", 2**63, "less than or equal to"),
        ("logprobs", 21, "less than or equal to 20"),
        ("prompt", [], "empty"),
        ("prompt", "", "empty"),
        ("prompt", [[]], "empty"),
        ("prompt", ["x" * 300], "context length"),
        ("prompt", [1, "a"], "prompt[1]: got 'a'; Input should be a valid integer"),
        ("prompt", [999], "999"),
        ("prompt", {"a": 1}, "prompt"),
        ("prompt", ["a"] * 2049, "2049 prompts"),
        ("stream_options", {"include_usage": True}, "with stream true"),
        ("suffix", "x", "suffix: not supported"),
        ("grammar", "x", "grammar: not supported"),
    ],
)
def test_the_field_is_named(live: Live, field: str, value: object, says: str) -> None:
    response = live.post("/v1/completions", **{"prompt": "x", field: value})
    error = error_of(response)
    assert response.status_code == 400
    assert (error["param"], error["type"]) == (field, "invalid_request_error")
    assert says in error["message"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "not valid JSON"),
        (b"", "empty"),
        (b"[]", "valid dictionary"),
        (b'{"prompt": "x", "temperature": NaN}', "NaN"),
        (b'{"prompt": "x", "metadata": {"a": -Infinity}}', "-Infinity"),
        (b'{"prompt": "x", "temperature": 1e999}', "finite"),
        (b'{"prompt": "\\ud83d"}', "Unicode"),
        (b'{"prompt": "x", "\\udc00": 1}', "Unicode"),
        (b'{"prompt": "\xff"}', "Unicode"),
        (b'{"prompt": ' + b"[" * 30000 + b"]" * 30000 + b"}", ""),
        (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", ""),
        (b'{"temperature": 1}', "prompt: missing"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_what_is_no_proper_json_is_refused(live: Live, path: str, content: bytes, says: str) -> None:
    if "chat" in path:
        content = content.replace(b'{"prompt": "x", ', b'{"messages": [{"role": "user", "content": "x"}], ')
        says = says.replace("prompt:", "messages:")
    with live.http as client:
        response = client.post(path, content=content, headers={"Content-Type": "application/json"})
    error = error_of(response)
    assert response.status_code == 400
    if b'"prompt": "\xff' not in content:
        assert says in error["message"]


def test_a_pair_of_surrogates_is_a_character(live: Live) -> None:
    with live.http as client:
        headers = {"Content-Type": "application/json"}
        content = b'{"prompt": "say:\\ud83d\\ude00"}'
        response = client.post("/v1/completions", content=content, headers=headers)
    assert response.json()["choices"][0]["text"] == "\U0001f600"


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", None])
def test_the_content_type_must_be_json(live: Live, kind: str | None) -> None:
    headers = {} if kind is None else {"Content-Type": kind}
    with live.http as client:
        response = client.post("/v1/completions", content=b'{"prompt": "x"}', headers=headers)
    assert response.status_code == 400
    assert "Content-Type: application/json" in error_of(response)["message"]


def test_paths_and_methods(live: Live) -> None:
    assert live.get("/v1/nothing").status_code == 404
    assert error_of(live.get("/v1/nothing"))["type"] == "invalid_request_error"
    response = live.get("/v1/completions")
    assert response.status_code == 405 and response.headers["allow"] == "POST"
    error_of(response)
    missing = live.post("/v1/completions", prompt="x", model="other")
    assert missing.status_code == 404
    assert error_of(missing)["code"] == "model_not_found"


@pytest.mark.parametrize("told", [True, False])
def test_a_huge_body_is_413(live: Live, told: bool) -> None:
    body = json.dumps({"prompt": "x" * 2**17}).encode()
    pieces = (body[start : start + 4096] for start in range(0, len(body), 4096))
    with live.http as client:
        headers = {"Content-Type": "application/json"}
        response = client.post("/v1/completions", content=body if told else pieces, headers=headers)
    assert response.status_code == 413
    assert error_of(response)["code"] == "body_too_large"


def test_many_large_bodies_at_once_are_503(launch: Launch, until: Until) -> None:
    """Each is allowed, but all together would take too much memory. Afterwards there is room again."""
    live = launch(max_body_bytes=1000)
    port = int(live.url.rsplit(":", 1)[1])
    body = json.dumps({"prompt": "x" * 900}).encode()
    with ExitStack() as stack:
        socks = [stack.enter_context(connect(port)) for _ in range(20)]
        for sock in socks:
            sock.sendall(head("/tokenize", 950, "Connection: close") + body[:900])
        first = read(socks[-1])
        assert first is not None and (first.status, first.code) == (503, "too_many_bytes")
        assert first.headers["retry-after"] == "1"
    until(lambda: live.post("/tokenize", prompt="x" * 900).status_code == 200)


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer wrong", "Basic s3cret", "Bearer s3cret\u00e9", "s3cret"]
)
def test_a_wrong_key_is_401(launch: Launch, header: str) -> None:
    live = launch(api_key="s3cret")
    client = httpx.Client(
        base_url=live.url,
        headers={"Authorization": header.encode("latin-1")},
        trust_env=False,
        verify=NO_TLS,
    )
    with client:
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            response = client.post(path, json={"prompt": "x"})
            assert response.status_code == 401
            assert error_of(response)["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
        assert client.get("/v1/models").status_code == 401
        assert client.get("/v1/nothing").status_code == 401
        assert {client.get(path).status_code for path in ("/health", "/metrics", "/version")} == {200}


def test_the_right_key_is_let_in(launch: Launch) -> None:
    live = launch(api_key="s3cret")
    assert live.openai.models.list().data[0].id == MODEL
    wrong = live.openai.with_options(api_key="nope")
    with pytest.raises(openai.AuthenticationError):
        wrong.models.list()


def test_load_beyond_the_queue_is_429_and_nothing_is_lost(launch: Launch, until: Until) -> None:
    live = launch(max_waiting=2)  # and four running
    live.worker.open.clear()
    with ThreadPoolExecutor(12) as pool:
        calls = [pool.submit(live.post, "/v1/completions", prompt="say:ok") for _ in range(12)]
        until(lambda: sum(call.done() for call in calls) == 6, seconds=60)
        live.worker.open.set()
        responses = [call.result(60) for call in calls]
    refused = [response for response in responses if response.status_code == 429]
    served = [response for response in responses if response.status_code == 200]
    assert len(refused) == 6 and len(served) == 6
    assert all(int(response.headers["retry-after"]) >= 1 for response in refused)
    assert error_of(refused[0])["code"] == "rate_limit_exceeded"
    assert all(response.json()["choices"][0]["text"] == "ok" for response in served)
    assert live.post("/v1/completions", prompt="say:ok").status_code == 200


def test_a_call_that_overloads_half_way_leaves_nothing_behind(launch: Launch, until: Until) -> None:
    live = launch(max_waiting=0)
    live.worker.open.clear()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(live.post, "/v1/completions", prompt="say:ok")
        until(lambda: live.front.engine.num_unfinished == 1)
        assert live.post("/v1/completions", prompt=["x"] * 4).status_code == 429
        until(lambda: len(live.worker.cancelled) == 3)
        assert live.front.engine.num_unfinished == 1
        # A prompt of the batch that is wrong takes the others with it.
        assert live.post("/v1/completions", prompt=["x", "y" * 999]).status_code == 400
        until(lambda: len(live.worker.cancelled) == 4)
        live.worker.open.set()
        assert first.result(60).status_code == 200


def test_a_call_that_no_queue_would_ever_take_is_not_told_to_come_back(launch: Launch) -> None:
    live = launch(max_waiting=2)  # and four running
    refused = live.post("/v1/completions", prompt=["x"] * 4, n=2)
    assert refused.status_code == 400 and "retry-after" not in refused.headers
    assert error_of(refused)["param"] == "prompt"
    assert "4 prompts, 8 completions in all; allowed in one call: at most 6" in refused.text
    assert live.post("/v1/completions", prompt=["x"] * 3, n=2, max_tokens=1).status_code == 200


def test_what_can_never_be_served_is_not_tokenized(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    live = launch(max_waiting=2)

    def encode(*_: object) -> list[int]:
        raise AssertionError("a text was tokenized")

    monkeypatch.setattr(live.front.engine.tokenizer, "encode", encode)
    many = live.post("/v1/completions", prompt=["x"] * 4, n=2)
    assert "4 prompts, 8 completions in all; allowed in one call: at most 6" in many.text
    # 256 tokens, none of them longer than </s>.
    says = (
        "this model's maximum context length is 256 tokens. However, you requested up to 1035 tokens "
        "(1025 in the {0}, 10 in the completion); shorten the {0} or the completion"
    )
    for long in ("x" * 1025, ["x", "x" * 1025]):
        refused = error_of(live.post("/v1/completions", prompt=long, max_tokens=10))
        assert refused["message"] == f"prompt: {says.format('prompt')}"
        assert refused["code"] == "context_length_exceeded"
    messages = [{"role": "user", "content": "x" * 1000}, {"role": "user", "content": "x" * 25}]
    chat = error_of(live.post("/v1/chat/completions", messages=messages, max_tokens=10))
    assert chat["message"] == f"messages: {says.format('messages')}"


@pytest.mark.parametrize(
    ("path", "body", "field", "tokens"),
    [
        ("/v1/completions", {"prompt": "x" * 300, "max_tokens": 10}, "prompt", (300, 10)),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x" * 300}], "max_tokens": 10},
            "messages",
            (326, 10),
        ),
        ("/v1/responses", {"input": "x" * 300, "max_output_tokens": 10}, "input", (326, 1)),
    ],
)
def test_a_prompt_that_is_too_long_is_told_with_both_numbers(
    live: Live, path: str, body: dict[str, object], field: str, tokens: tuple[int, int]
) -> None:
    error = error_of(live.post(path, **body))
    assert error["message"] == (
        f"{field}: this model's maximum context length is 256 tokens. However, you requested {sum(tokens)} "
        f"tokens ({tokens[0]} in the {field}, {tokens[1]} in the completion); shorten the {field} or the "
        "completion"
    )
    assert (error["type"], error["param"], error["code"]) == (
        "invalid_request_error",
        field,
        "context_length_exceeded",
    )


@pytest.mark.parametrize(("length", "tokens"), [(300, "326"), (1100, "up to 1100")])
def test_anthropics_clients_are_told_in_its_words(live: Live, length: int, tokens: str) -> None:
    """A text that is not tokenized has its bytes as an upper bound."""
    messages = [{"role": "user", "content": "x" * length}]
    answer = live.post("/v1/messages", messages=messages, max_tokens=10)
    message = f"prompt is too long: {tokens} tokens > 255 maximum"
    assert answer.status_code == 400
    assert answer.json()["error"] == {"type": "invalid_request_error", "message": message}


def test_what_takes_long_does_not_hold_up_others(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = live.front.engine.tokenizer
    threads: set[str] = set()

    def noting(method: Callable[..., object]) -> Callable[..., object]:
        def call(*given: object, **named: object) -> object:
            if threading.current_thread() is not live.worker:
                threads.add(threading.current_thread().name)
            return method(*given, **named)

        return call

    for name in ("encode", "token"):
        monkeypatch.setattr(tokenizer, name, noting(getattr(tokenizer, name)))
    monkeypatch.setattr(prompts, "_MAX_LOOP_SIZE", 30)
    assert live.post("/v1/completions", prompt=["x" * 10] * 3, max_tokens=1).status_code == 200
    (loop,) = threads
    threads.clear()
    assert live.post("/v1/completions", prompt=["x" * 10] * 4, max_tokens=1).status_code == 200
    assert live.post("/tokenize", prompt="x" * 40, return_token_strs=True).json()["token_strs"] == ["x"] * 40
    assert threads and loop not in threads


def test_of_many_wrong_items_one_is_looked_for() -> None:
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate({"prompt": [5] * 1000 + ["x"]})
    assert caught.value.error_count() == 4, "one of each form that a prompt may have"


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"role": "a b", "content": "x", "name": "f"}, "{0,31}$'"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "should be 'text'"),
    ],
)
def test_reasons_are_those_of_the_field_that_is_named(
    live: Live, message: dict[str, object], says: str
) -> None:
    refused = live.post("/v1/chat/completions", messages=[message])
    assert refused.status_code == 400
    assert error_of(refused)["message"].endswith(says)


def test_nothing_is_served_before_the_worker_is_ready(launch: Launch) -> None:
    live = launch(ready=False)
    with live.http as client:
        calls = [client.get("/health"), client.get("/v1/models")]
    calls.append(live.post("/v1/completions", prompt="x"))
    calls.append(live.post("/v1/chat/completions", messages=ASK))
    calls.append(live.post("/tokenize", prompt="x"))
    assert {response.status_code for response in calls} == {503}
    assert {error_of(response)["code"] for response in calls} == {"loading"}
    assert live.get("/metrics").status_code == 200


def test_the_worker_dies_and_every_request_gets_an_answer(launch: Launch, until: Until) -> None:
    live = launch()
    live.worker.open.clear()
    with ThreadPoolExecutor(3) as pool:
        whole = [pool.submit(live.post, "/v1/completions", prompt="x") for _ in range(2)]
        stream = pool.submit(live.post, "/v1/chat/completions", messages=ASK, stream=True)
        until(lambda: live.front.engine.num_unfinished == 3, seconds=60)
        live.worker.die()
        assert [call.result(60).status_code for call in whole] == [503, 503]
        assert error_of(whole[0].result())["code"] == "engine_dead"
        event = stream.result(60).text.split("\n\n")[0]
    assert json.loads(event.removeprefix("data: "))["error"]["code"] == "engine_dead"
    live.thread.join(60)
    assert not live.thread.is_alive()
    assert "the worker is gone" in str(live.ended_by[0])


def test_an_error_in_a_stream_reaches_the_openai_client(launch: Launch) -> None:
    live = launch(pace=0.05)
    stream = live.openai.completions.create(model=MODEL, prompt="x", max_tokens=100, stream=True)
    next(iter(stream))
    live.worker.die()
    with pytest.raises(openai.APIError, match="worker is gone"):
        list(stream)


def test_the_workers_last_words_are_passed_on(launch: Launch, until: Until) -> None:
    live = launch()
    live.worker.open.clear()
    words = messages.WorkerFailed("out of memory", user_error=False)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(live.post, "/v1/completions", prompt="x")
        until(lambda: live.front.engine.num_unfinished == 1, seconds=60)
        live.worker.connection.send(words)
        response = call.result(60)
    assert response.status_code == 503 and "out of memory" in error_of(response)["message"]


def break_off(live: Live) -> None:
    """The worker says of every request under way that its logits are not finite."""
    ids = sorted(live.worker.running)
    live.worker.running.clear()
    reasons: list[FinishReason | None] = [FinishReason.ERROR] * len(ids)
    live.worker.connection.send(messages.Tokens(ids, [NO_TOKEN] * len(ids), reasons))


@pytest.mark.parametrize("n", [1, 2])
def test_logits_that_are_not_finite_are_500(n: int, launch: Launch, until: Until) -> None:
    live = launch()
    live.worker.open.clear()
    with ThreadPoolExecutor(3) as pool:
        calls = [
            pool.submit(live.post, "/v1/completions", prompt="x", n=n),
            pool.submit(live.post, "/v1/chat/completions", messages=ASK, n=n),
        ]
        until(
            lambda: live.front.engine.num_unfinished == 2 * n and len(live.worker.running) == 2 * n,
            seconds=60,
        )
        break_off(live)
        responses = [call.result(60) for call in calls]
    for response in responses:
        error = error_of(response)
        assert response.status_code == 500 and error["type"] == "server_error"
        assert error["code"] == "non_finite_logits" and "logits are not finite" in error["message"]
    assert live.front.engine.num_unfinished == 0
    live.worker.open.set()
    assert live.post("/v1/completions", prompt="say:ok").json()["choices"][0]["text"] == "ok"
    text = live.get("/metrics").text
    assert f'moesaic:corrupted_requests_total{{model_name="{MODEL}"}} {2 * n}.0' in text
    assert f'request_success_total{{finished_reason="error",model_name="{MODEL}"}} {2 * n}.0' in text


def test_a_stream_whose_logits_are_not_finite_ends_with_an_error(launch: Launch, until: Until) -> None:
    live = launch()
    live.worker.open.clear()
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(live.post, "/v1/chat/completions", messages=ASK, stream=True)
        until(lambda: len(live.worker.running) == 1, seconds=60)
        break_off(live)
        events = call.result(60).text.strip().split("\n\n")
    error = json.loads(events[-1].removeprefix("data: ") if "[DONE]" not in events[-1] else events[-2][6:])
    assert error["error"]["code"] == "non_finite_logits" and error["error"]["type"] == "server_error"
    stream = live.openai.completions.create(model=MODEL, prompt="x", max_tokens=100, stream=True)
    until(lambda: len(live.worker.running) == 1, seconds=60)
    break_off(live)
    with pytest.raises(openai.APIError, match="logits are not finite"):
        list(stream)
