"""Endpoints that are not there, and HEAD."""

from __future__ import annotations

import pytest

from .conftest import Launch, Live


@pytest.mark.parametrize(
    ("path", "subject"),
    [
        ("/v1/embeddings", "embeddings"),
        ("/v1/rerank", "rerank"),
        ("/v1/score", "rerank"),
        ("/v1/images/generations", "images"),
        ("/v1/audio/transcriptions", "audio"),
        ("/v1/files", "stored files"),
        ("/v1/responses/resp_1/cancel", "stored responses"),
    ],
)
def test_what_is_not_there_says_so(live: Live, path: str, subject: str) -> None:
    answer = live.post(path, model="m", input="x")
    assert answer.status_code == 404
    assert answer.json()["error"] == {
        "message": f"POST {path}: this server generates text and has no {subject}",
        "type": "invalid_request_error",
        "param": None,
        "code": "unsupported_endpoint",
    }


def test_an_unknown_path_is_a_404_as_before(live: Live) -> None:
    assert live.get("/v1/unknown").json()["error"]["code"] is None


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/metrics", "/version", "/", "/docs"])
def test_head_has_the_headers_of_get(live: Live, path: str) -> None:
    with live.http as client:
        head, get = client.head(path), client.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == get.headers["content-type"]


def test_head_needs_what_get_needs(launch: Launch, live: Live) -> None:
    with live.http as client:
        assert client.head("/v1/chat/completions").status_code == 405
        assert client.head("/nowhere").status_code == 404
    locked = launch(api_key="k")
    with locked.http as client:
        assert client.head("/v1/models", headers={"Authorization": "Bearer x"}).status_code == 401


def test_a_model_has_the_keys_of_vllm(live: Live) -> None:
    card = live.get("/v1/models").json()["data"][0]
    assert card["root"] == card["id"] and card["parent"] is None
    [permission] = card["permission"]
    assert permission["object"] == "model_permission" and permission["allow_sampling"] is True


def test_whole_answers_have_the_fields_that_clients_read(live: Live) -> None:
    chat = live.post("/v1/chat/completions", messages=[{"role": "user", "content": "x"}]).json()
    completion = live.post("/v1/completions", prompt="say:x").json()
    assert chat["system_fingerprint"] is None and chat["prompt_logprobs"] is None
    assert chat["choices"][0]["message"]["reasoning"] is None
    assert completion["system_fingerprint"] is None and completion["choices"][0]["prompt_logprobs"] is None
