"""A client that leaves frees what its request held."""

from __future__ import annotations

import socket
from collections.abc import Callable
from urllib.parse import urlsplit

import httpx
import pytest

from .conftest import MODEL, Launch, Live

Until = Callable[..., None]


def raw(live: Live, body: str) -> socket.socket:
    """A request sent by hand, so that it can be dropped by hand."""
    place = urlsplit(live.url)
    assert place.hostname is not None
    connection = socket.create_connection((place.hostname, place.port or 0), timeout=60)
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    return connection


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize("stream", ["true", "false"])
def test_a_dropped_connection_cancels(launch: Launch, until: Until, stream: str, paused: bool) -> None:
    live = launch(pace=0.02)
    if paused:
        live.worker.open.clear()
    body = f'{{"prompt": ["x", "y"], "n": 2, "max_tokens": 200, "stream": {stream}}}'
    with raw(live, body) as connection:
        until(lambda: len(live.worker.seen) == 4)
        if stream == "true" and not paused:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
    until(lambda: sorted(live.worker.cancelled) == [0, 1, 2, 3])
    assert live.front.engine.num_unfinished == 0
    live.worker.open.set()
    assert live.post("/v1/completions", prompt="say:ok").json()["choices"][0]["text"] == "ok"
    text = live.get("/metrics").text
    assert f'moesaic:request_success_total{{finished_reason="abort",model_name="{MODEL}"}} 4.0' in text or (
        f'moesaic:request_success_total{{model_name="{MODEL}",finished_reason="abort"}} 4.0' in text
    )


def test_closing_the_openai_stream_cancels(launch: Launch, until: Until) -> None:
    live = launch(pace=0.02)
    with live.openai.completions.create(model=MODEL, prompt="x", max_tokens=200, stream=True) as stream:
        next(iter(stream))
    until(lambda: live.worker.cancelled == [0])


def test_a_client_that_times_out_cancels(launch: Launch, until: Until) -> None:
    live = launch()
    live.worker.open.clear()
    with live.http as client, pytest.raises(httpx.ReadTimeout):
        client.post("/v1/completions", json={"prompt": "x"}, timeout=0.3)
    until(lambda: live.worker.cancelled == [0])


def test_a_body_that_never_ends_does_not_disturb_others(live: Live) -> None:
    with raw(live, "") as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert live.post("/v1/completions", prompt="say:ok").status_code == 200
