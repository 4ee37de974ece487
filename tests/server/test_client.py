from __future__ import annotations

import asyncio

import pytest

from moesaic.core.errors import ConnectionLost
from moesaic.server.client import ApiError, Chunk, Client, Usage
from tests.support.fake_streaming_server import FakeServer


def chunks(client, path="/v1/completions", **body):
    async def collect():
        async with client:
            return [chunk async for chunk in client.stream(path, {"prompt": [1], "max_tokens": 3} | body)]

    return asyncio.run(collect())


def test_a_stream_is_chunks_with_times_text_and_counts():
    with FakeServer() as server:
        found = chunks(Client(server.url + "/v1/", clock=lambda: 7.0))
    text = "a\u2028b"
    assert found == [
        Chunk(7.0, text),
        Chunk(7.0, text),
        Chunk(7.0, text, "length"),
        Chunk(7.0, "", None, Usage(1, 3)),
    ]


def test_chat_has_a_first_chunk_without_text():
    with FakeServer() as server:
        found = chunks(Client(server.url), "/v1/chat/completions")
    assert [bool(chunk.text) for chunk in found] == [False, True, True, True, False]


def test_a_refusal_and_an_error_on_the_way():
    with FakeServer(status=429) as server, pytest.raises(ApiError, match="^HTTP 429: no thanks$") as caught:
        chunks(Client(server.url))
    assert caught.value.status == 429
    with FakeServer(fail_after=1) as server, pytest.raises(ApiError, match="the worker is gone"):
        chunks(Client(server.url))


def test_a_server_that_dies_or_falls_silent():
    with FakeServer(cut_after=1) as server, pytest.raises(ConnectionLost, match=server.url):
        chunks(Client(server.url))
    with FakeServer(first=5.0) as server, pytest.raises(ConnectionLost, match="ReadTimeout"):
        chunks(Client(server.url, timeout=0.1))


def test_models_of_something_else():
    async def models(app):
        async with Client(app=app) as client:
            return await client.models()

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"<html>"})

    async def broken(scope, receive, send):
        raise ZeroDivisionError

    with pytest.raises(ApiError, match="not a list of models"):
        asyncio.run(models(app))
    with pytest.raises(ApiError, match="HTTP 500"):
        asyncio.run(models(broken))


def test_a_reply_tells_how_long_to_wait():
    async def app(scope, receive, send):
        headers = [(b"retry-after", b"3"), (b"x-request-id", b"r")]
        await send({"type": "http.response.start", "status": 503, "headers": headers})
        await send({"type": "http.response.body", "body": b'{"error": {"message": "loading"}}'})

    async def get():
        async with Client(app=app) as client:
            return await client.get("/health")

    reply = asyncio.run(get())
    assert (reply.status, reply.retry_after, reply.request_id) == (503, 3.0, "r")
    with pytest.raises(ApiError, match="HTTP 503: loading") as caught:
        reply.require_success()
    assert caught.value.retry_after == 3.0
