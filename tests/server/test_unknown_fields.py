"""Fields of other servers' clients: what asks for nothing or is unknown is accepted and named."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from fastapi import Request

from moesaic.server.requests import ChatRequest
from moesaic.server.unknown_fields import HEADER, MAX_LOGGED_NAMES, MAX_UNKNOWN_FIELDS, UnknownFields, clean

from .conftest import MODEL, Launch, Live
from .test_chat import ASK

NOTHING: dict[str, Any] = {
    "tools": [],
    "tool_choice": "none",
    "parallel_tool_calls": True,
    "include_reasoning": True,
    "functions": [],
    "function_call": "none",
    "logit_bias": {},
    "verbosity": "medium",
    "audio": None,
    "modalities": ["text"],
    "prediction": None,
    "web_search_options": None,
    "store": True,
    "metadata": {"trace": "x"},
    "service_tier": "flex",
    "safety_identifier": "u-1",
    "prompt_cache_key": "k",
    "user": "me",
    "top_logprobs": 0,
    "stop": [],
}
"""Fields of OpenAI that this server knows, with values that ask for nothing."""
UNKNOWN: dict[str, Any] = {
    # Open WebUI, LibreChat
    "chat_id": "c1",
    "session_id": "s1",
    "id": "m1",
    "background_tasks": {"title_generation": False},
    "features": {"web_search": False},
    "variables": {},
    "model_item": {},
    "filter_ids": [],
    "conversationId": "x",
    "promptPrefix": None,
    "endpoint": "custom",
    "resendFiles": True,
    # LangChain, litellm, Continue
    "extra_headers": {},
    "timeout": 600,
    "num_retries": 2,
    "caching": False,
    "api_version": "v1",
    "drop_params": True,
    "mock_response": None,
    "stream_timeout": 5,
    "prompt_cache_retention": "24h",
    "fim": False,
    "completionOptions": {},
    "reasoning": None,
    "thinking": None,
    "title": "t",
    # llama.cpp, ollama, text-generation-webui
    "cache_prompt": True,
    "slot_id": -1,
    "id_slot": -1,
    "samplers": "kxyt",
    "n_keep": 0,
    "mirostat": 0,
    "keep_alive": "5m",
    "options": {"num_ctx": 4096},
    "num_ctx": 4096,
    "repeat_last_n": 64,
    "tfs_z": 1.0,
    "typical_p": 1.0,
    "dry_multiplier": 0,
    "timings_per_token": True,
    "return_progress": False,
    # vLLM and SGLang
    "request_id": "r",
    "cache_hint": "s",
    "spaces_between_special_tokens": True,
    "vllm_xargs": None,
    "use_beam_search": False,
    "length_penalty": 1.0,
    "lora_path": None,
}
"""Fields that other servers' clients send."""


def test_harmless_fields_are_accepted_and_the_unknown_ones_are_named(live: Live) -> None:
    assert len(NOTHING) + len(UNKNOWN) > 46
    sent = {"messages": ASK, "model": MODEL, **NOTHING, **UNKNOWN}
    with live.http as client:
        for name, value in (NOTHING | UNKNOWN).items():
            answer = client.post("/v1/chat/completions", json={"messages": ASK, name: value})
            assert answer.status_code == 200, answer.text
            assert answer.headers.get(HEADER) == (name if name in (*UNKNOWN, "store") else None)
        together = client.post("/v1/chat/completions", json=sent)
    assert together.status_code == 200
    shown = together.headers[HEADER].split(", ")
    assert len(shown) == 21 and shown[-1] == "..." and set(shown[:-1]) < {*UNKNOWN, "store"}


@pytest.mark.parametrize(
    ("path", "body", "names"),
    [
        ("/v1/completions", {"prompt": "say:A", "suffix": "", "slot_id": 1}, "slot_id"),
        ("/v1/completions", {"prompt": "say:A", "stream": True, "slot_id": 1}, "slot_id"),
        ("/tokenize", {"prompt": "x", "with_pieces": True}, "with_pieces"),
        ("/detokenize", {"tokens": [65], "x": 1}, "x"),
        (
            "/v1/chat/completions",
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {}}]},
                    {
                        "role": "assistant",
                        "content": "y",
                        "timestamp": 5,
                        "annotations": [],
                        "tool_calls": [],
                    },
                    {"role": "user", "content": "z", "timestamp": 6, "files": []},
                ],
                "stream": True,
                "stream_options": {"include_obfuscation": True, "x": 1},
            },
            "stream_options.x, messages.content.cache_control, messages.timestamp, messages.files",
        ),
    ],
)
def test_unknown_fields_are_named_by_their_path(
    live: Live, path: str, body: dict[str, object], names: str
) -> None:
    answer = live.post(path, **body)
    assert answer.status_code == 200, answer.text
    assert sorted(answer.headers[HEADER].split(", ")) == sorted(names.split(", "))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("functions", [{}]), ("audio", {"voice": "a"}), ("prediction", {"type": "content"})],
        *[("web_search_options", {}), ("verbosity", "loud"), ("tools", [{}]), ("tool_choice", "required")],
        *[("grammar", "root ::= x"), ("documents", [{"text": "x"}]), ("chat_template", "{{ x }}")],
        *[("use_beam_search", True), ("length_penalty", 2.0), ("thinking_token_budget", 5), ("echo", True)],
        *[("mirostat", 2), ("typical_p", 0.9), ("max_new_tokens", 5), ("repeat_penalty", 1.1)],
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        ("messages", [{"role": "user", "content": "x", "audio": {"id": "x"}}]),
    ],
)
def test_what_would_change_the_answer_is_refused(live: Live, field: str, value: object) -> None:
    answer = live.post("/v1/chat/completions", **{"messages": ASK, field: value})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, field)
    assert field in error["message"]


def test_a_suffix_is_refused_unless_it_is_empty(live: Live) -> None:
    answer = live.post("/v1/completions", prompt="x", suffix="end")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "suffix")


def test_strict_fields_refuses_by_name(launch: Launch) -> None:
    live = launch(strict=True)
    messages = [{"role": "user", "content": "x", "timestamp": 1}]
    for body, says in (
        ({"messages": ASK, "chat_id": "x"}, "chat_id: not a parameter"),
        ({"messages": messages}, "messages[0].timestamp: not a parameter"),
        ({"messages": ASK, "stream": True, "stream_options": {"x": 1}}, "stream_options.x: not a parameter"),
    ):
        answer = live.post("/v1/chat/completions", **body)
        assert answer.status_code == 400
        assert says in answer.json()["error"]["message"]
        assert answer.json()["error"]["code"] == "unknown_parameter"
    assert live.post("/v1/chat/completions", messages=ASK, tools=[]).status_code == 200


def ask(fields: UnknownFields, body: dict[str, Any]) -> list[str]:
    request = Request({"type": "http"})
    fields.check(ChatRequest.model_validate_json(json.dumps({"messages": ASK, **body})), request)
    return list(request.state.ignored)


def test_each_name_is_logged_once_and_not_more_than_the_limit(caplog: pytest.LogCaptureFixture) -> None:
    fields = UnknownFields()
    with caplog.at_level(logging.WARNING, "moesaic.server.unknown_fields"):
        ask(fields, {"a": 1})
        ask(fields, {"a": 2, "b": 1})
        assert [line.getMessage().partition(":")[0] for line in caplog.records] == ["a", "b"]
        for start in range(0, 400, 40):
            ask(fields, {f"x{number}": 1 for number in range(start, start + 40)})
        assert len(caplog.records) == MAX_LOGGED_NAMES + 1
        assert "further unknown fields" in caplog.records[-1].getMessage()


def test_names_cannot_forge_headers_or_log_lines() -> None:
    names = ask(UnknownFields(), {"a\r\nSet-Cookie: x": 1, "\x1b[2J": 1, "é" * 5000: 1, "": 1})
    assert names == ["a??Set-Cookie??x", "??2J", "?" * 64, "?"]
    assert clean("messages.content-x_1") == "messages.content-x_1"


@pytest.mark.slow
def test_a_body_of_many_unknown_fields_costs_no_more_than_the_limit() -> None:
    fields = UnknownFields()
    names = ask(fields, {f"x{number}": 1 for number in range(20 * MAX_UNKNOWN_FIELDS)})
    assert len(names) == 21
    assert len(fields._logged_names) == MAX_LOGGED_NAMES + 1
