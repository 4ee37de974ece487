"""Spans of requests, as a collector gets them over real sockets."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

import httpx
import pytest

from moesaic.core import messages
from moesaic.core.request import FinishReason
from moesaic.server.meter import Times
from tests.server.conftest import MODEL, NO_TLS, Launch, Live

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra moesaic[otel] is missing")
pytest.importorskip("opentelemetry.sdk", reason="the extra moesaic[otel] is missing")

from moesaic.server.otlp import EXPORTER_LOG, MOST_CHILDREN, QUEUE_LOG, RequestSpans, list_parts
from tests.support.fake_collector import OF_ERROR, OF_NEITHER, Collector, SeenSpan, collecting

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
"""A traceparent from the standard's examples: version, trace, span, sampled."""
HELLO = {"prompt": "say:hello", "max_tokens": 20, "temperature": 0.5, "top_p": 0.9, "seed": 7}


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")  # milliseconds: spans leave at the end
    with collecting() as collector:
        yield collector


@contextmanager
def traced(launch: Launch, url: str, **options: Any) -> Iterator[Live]:
    """A server that sends its spans to `url`. All of them have been sent after the block."""
    with closing(RequestSpans(url, MODEL, "1.2.3")) as spans:
        live = launch(traced=spans.write, **options)
        yield live
        live.close()  # an answer may arrive before its request has ended
        live.thread.join(60)


def post(live: Live, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    headers = {"X-Request-Id": "chat-17", "traceparent": PARENT}
    with live.http as client:
        return client.post(path, json=body, headers=headers)


def only(collector: Collector) -> SeenSpan:
    [span] = collector.requests
    return span


def test_a_request_continues_the_trace_of_its_caller(launch: Launch, collector: Collector) -> None:
    with traced(launch, collector.url) as live:
        answer = post(live, **HELLO)
    span, usage = only(collector), answer.json()["usage"]
    assert (span.trace, span.parent, span.kind) == (*PARENT.split("-")[1:3], 2)
    assert span.attributes["gen_ai.request.id"] == "chat-17" == answer.headers["X-Request-Id"]
    assert span.resource["service.name"] == "moesaic" and span.resource["service.version"] == "1.2.3"
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": MODEL,
        "gen_ai.response.model": MODEL,
        "gen_ai.request.max_tokens": 20,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.seed": 7,
        "gen_ai.request.n": 1,
        "gen_ai.usage.prompt_tokens": usage["prompt_tokens"],
        "gen_ai.usage.completion_tokens": usage["completion_tokens"],
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.usage.num_sequences": 1,
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.latency.time_in_queue": 0.25,
        "http.response.status_code": 200,
        "url.path": "/v1/completions",
    }
    assert expected.items() <= span.attributes.items() and usage["completion_tokens"] == 6
    assert "error.type" not in span.attributes and span.status == OF_NEITHER
    assert "hello" not in str(span), "no text of prompts and answers"
    assert set(collector.paths) == {"/v1/traces"}


def test_latencies_add_up_and_children_lie_within(launch: Launch, collector: Collector) -> None:
    with traced(launch, collector.url, pace=0.001) as live:
        post(live, **HELLO)
    span = only(collector)
    first, whole, queue, prefill, decode, inference = (
        span.attributes[f"gen_ai.latency.{name}"]
        for name in ("time_to_first_token", "e2e", "time_in_queue", "time_in_model_prefill",
                     "time_in_model_decode", "time_in_model_inference")
    )  # fmt: skip
    assert 0 < first < whole and queue == 0.25 and prefill == max(0.0, first - queue)
    assert decode == pytest.approx(whole - first) and inference == pytest.approx(prefill + decode)
    children = collector.children(span)
    assert sorted(one.name for one in children) == ["decode", "prefill", "queue"]
    last = next(one for one in children if one.name == "decode")
    assert span.begin <= last.begin < last.end <= span.end


@pytest.mark.parametrize(
    ("path", "body", "operation"),
    [
        ("/v1/completions", HELLO, "text_completion"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, "chat"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9}, "chat"),
        ("/v1/responses", {"input": "x"}, "chat"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_every_api_and_streams_are_traced(
    launch: Launch, collector: Collector, path: str, body: dict[str, Any], operation: str, stream: bool
) -> None:
    with traced(launch, collector.url, other_names=("alias",)) as live:
        assert post(live, path, **body, model="alias", stream=stream).status_code == 200
    span = only(collector)
    assert span.attributes["gen_ai.operation.name"] == operation and span.attributes["url.path"] == path
    assert span.attributes["gen_ai.request.model"] == "alias"
    assert span.attributes["gen_ai.response.model"] == MODEL
    assert span.attributes["gen_ai.usage.completion_tokens"] == 6
    assert span.attributes["gen_ai.response.finish_reasons"] == ["stop"] and span.status == OF_NEITHER


def test_without_a_parent_a_trace_begins(launch: Launch, collector: Collector) -> None:
    with traced(launch, collector.url) as live:
        live.post("/v1/completions", **HELLO)
        with live.http as client:
            client.post("/v1/completions", json=HELLO, headers={"traceparent": "00-wrong"})
            client.post("/v1/completions", json=HELLO, headers={"traceparent": PARENT[:-1] + "0"})
            client.get("/v1/models")
    assert [span.parent for span in collector.requests] == ["", ""], "one caller does not sample"
    assert len({span.trace for span in collector.requests}) == 2


def test_a_client_that_leaves_is_an_aborted_request(
    launch: Launch, collector: Collector, until: Callable[..., None]
) -> None:
    with traced(launch, collector.url, pace=0.002) as live:
        with live.http as client, client.stream("POST", "/v1/completions", json={
            "prompt": "a", "max_tokens": 200, "stream": True}) as response:  # fmt: skip
            next(response.iter_lines())
        until(lambda: live.worker.cancelled)
    span = only(collector)
    assert span.attributes["gen_ai.response.finish_reasons"] == ["abort"] and span.status == OF_NEITHER
    assert 0 < span.attributes["gen_ai.usage.completion_tokens"] < 200


@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        ({"prompt": "a", "temperature": -1}, 400, "invalid_request_error"),
        ({"prompt": "a" * 300}, 400, "context_length_exceeded"),
        ({"prompt": "a", "model": "other"}, 404, "model_not_found"),
    ],
)
def test_a_refused_request_says_why(
    launch: Launch, collector: Collector, body: dict[str, Any], status: int, error: str
) -> None:
    with traced(launch, collector.url) as live:
        assert post(live, **body).status_code == status
    span = only(collector)
    assert span.attributes["http.response.status_code"] == status and span.attributes["error.type"] == error
    assert span.status == OF_NEITHER, "as OpenTelemetry wants it of a server and a client's mistake"
    assert "gen_ai.usage.prompt_tokens" not in span.attributes and collector.children(span) == []


def test_a_request_without_the_key_leaves_no_trace(launch: Launch, collector: Collector) -> None:
    with traced(launch, collector.url, api_key="geheim") as live, httpx.Client(verify=NO_TLS) as client:
        assert client.post(f"{live.url}/v1/completions", json=HELLO).status_code == 401
    assert collector.spans == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_worker_that_dies_is_an_error(
    launch: Launch, collector: Collector, stream: bool, until: Callable[..., None]
) -> None:
    with ThreadPoolExecutor(1) as pool, traced(launch, collector.url) as live:
        live.worker.open.clear()
        answer = pool.submit(post, live, **HELLO, stream=stream)
        until(lambda: live.worker.seen)
        live.worker.die()
        assert "the worker is gone" in answer.result(60).text
    span = only(collector)
    assert (span.status, span.message) == (OF_ERROR, "engine_dead")
    assert span.attributes["error.type"] == "engine_dead"
    assert span.attributes["http.response.status_code"] == (200 if stream else 503)
    assert span.attributes["gen_ai.response.finish_reasons"] == ["abort"]


def test_a_move_to_another_worker_is_an_event(
    launch: Launch, collector: Collector, until: Callable[..., None]
) -> None:
    with ThreadPoolExecutor(1) as pool, traced(launch, collector.url) as live:
        live.worker.open.clear()
        answer = pool.submit(post, live, **HELLO)
        until(lambda: live.worker.seen)
        request_id = live.worker.seen[0].request_id
        live.worker.connection.send(messages.RequestsAdmitted([request_id], [0.5], [3]))
        live.worker.connection.send(messages.RequestsMoved([request_id, 12345]))
        live.worker.open.set()
        assert answer.result(60).status_code == 200
    span = only(collector)
    [(name, moment)] = span.events
    assert name == "moved to another worker" and span.begin < moment < span.end
    assert span.attributes["gen_ai.usage.cache_read.input_tokens"] == 3
    assert span.attributes["gen_ai.latency.time_in_queue"] == 0.5


def test_each_of_several_completions_has_its_children(launch: Launch, collector: Collector) -> None:
    with traced(launch, collector.url, max_num_seqs=64) as live:
        post(live, prompt=["say:a", "say:bc"], n=2)
        post(live, prompt="say:a", n=MOST_CHILDREN + 1)
    few, many = collector.requests
    numbers = [one.attributes["moesaic.completion"] for one in collector.children(few)]
    assert numbers == sorted([*range(4)] * 3)
    assert few.attributes["gen_ai.usage.num_sequences"] == 4
    assert few.attributes["gen_ai.response.finish_reasons"] == ["stop"] * 4
    assert few.attributes["gen_ai.usage.completion_tokens"] == 2 * 2 + 2 * 3
    assert many.attributes["gen_ai.usage.num_sequences"] == MOST_CHILDREN + 1
    assert collector.children(many) == []


def test_parts_end_where_a_completion_ended() -> None:
    times = Times(10.0)
    assert list(list_parts(times)) == []
    times.queue_seconds, times.finish = 2.0, FinishReason.ABORT
    assert list(list_parts(times)) == [("queue", 10.0, 12.0)]
    times.first, times.last = 13.0, 15.0
    assert list(list_parts(times))[1:] == [("prefill", 12.0, 13.0), ("decode", 13.0, 15.0)]


def test_a_dead_collector_is_one_line_until_it_answers(
    launch: Launch,
    collector: Collector,
    until: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    collector.answer = 404
    with traced(launch, collector.url.removesuffix("/v1/traces"), max_waiting=64) as live:
        for _ in range(5):
            assert live.post("/v1/completions", **HELLO).status_code == 200
        until(lambda: "takes no spans" in caplog.text)
        collector.answer = 200
        for _ in range(200):
            live.post("/v1/completions", **HELLO)
            if collector.spans:
                break
        until(lambda: "takes spans again" in caplog.text)
    lines = [record for record in caplog.records if record.name.startswith(("moesaic.server.otlp", "opent"))]
    assert len(lines) == 2 and {record.levelno for record in lines} == {logging.WARNING}
    assert f"127.0.0.1:{collector.url.split(':')[2].split('/')[0]} takes no spans" in lines[0].getMessage()
    assert "404" in lines[0].getMessage() and set(collector.paths) == {"/v1/traces"}


def test_a_slow_collector_is_one_line(
    launch: Launch, collector: Collector, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "4")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "2")
    for one in logging.getLogger(QUEUE_LOG).filters:
        vars(one).clear()  # the library says the same once in 20 s, and another test may have been first
    with traced(launch, collector.url) as live:
        for _ in range(2):
            collector.open.clear()
            for _ in range(5):
                assert live.post("/v1/completions", **HELLO).status_code == 200
            collector.open.set()
    lines = [record.getMessage() for record in caplog.records if record.name == "moesaic.server.otlp"]
    assert len(lines) == 1 and "is too slow" in lines[0] and "opentelemetry" not in caplog.text
    assert len(collector.spans) < 40


def test_a_collector_that_never_answers_holds_nothing_up(
    launch: Launch, until: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests are answered, and so is the end of the server: without its limit `close` takes 30 s."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "4")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "2")
    monkeypatch.setattr("moesaic.server.otlp.CLOSE_SECONDS", 0.01)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        traced(launch, f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces") as live,
    ):
        for _ in range(20):
            assert live.post("/v1/completions", **HELLO).status_code == 200
    until(lambda: "last-spans" not in [thread.name for thread in threading.enumerate()])
    assert logging.getLogger(EXPORTER_LOG).propagate, "as it was before"
