"""/v1/chat/completions, most of it through the openai client."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .conftest import MODEL, Live
from .test_completions import events

ASK: list[Any] = [{"role": "user", "content": "hi"}]


def replying(text: str) -> dict[str, object]:
    return {"chat_template_kwargs": {"reply": text}}


def test_a_chat_has_openais_shape(live: Live) -> None:
    answer = live.post("/v1/chat/completions", model=MODEL, messages=ASK).json()
    assert answer.pop("id").startswith("chatcmpl-")
    assert answer.pop("created") > 1_600_000_000
    prompt_tokens = answer["usage"].pop("prompt_tokens")
    assert prompt_tokens == len("[user]hi[assistant]say:hello")
    assert answer["usage"].pop("total_tokens") == prompt_tokens + 6
    assert answer == {
        "object": "chat.completion",
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hello", "refusal": None, "reasoning": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {"completion_tokens": 6, "prompt_tokens_details": {"cached_tokens": 0}},
        "system_fingerprint": None,
        "prompt_logprobs": None,
    }


def test_text_parts_are_joined_and_roles_kept(live: Live) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages: list[Any] = [{"role": "system", "content": "s"}, {"role": "user", "content": parts}]
    live.openai.chat.completions.create(model=MODEL, messages=messages)
    prompt = live.worker.tokenizer.decode(live.worker.seen[-1].prompt_token_ids)
    assert prompt == "[system]s[user]a\nb[assistant]say:hello"


def test_without_a_limit_the_answer_may_fill_the_context(live: Live) -> None:
    live.openai.chat.completions.create(model=MODEL, messages=ASK)
    request = live.worker.seen[-1]
    assert request.params.max_tokens == 256 - len(request.prompt_token_ids)


@pytest.mark.parametrize("limits", [{"max_tokens": 2}, {"max_completion_tokens": 2, "max_tokens": 9}])
def test_either_spelling_of_the_limit(live: Live, limits: dict[str, Any]) -> None:
    choice = live.openai.chat.completions.create(model=MODEL, messages=ASK, **limits).choices[0]
    assert choice.message.content == "he" and choice.finish_reason == "length"


def test_the_role_is_sent_before_a_token_is_counted(live: Live) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    messages = [{"role": "user", "content": "say:AB"}]
    answer = live.post("/v1/chat/completions", messages=messages, stream=True, stream_options=options)
    chunks = [json.loads(chunk) for chunk in events(answer.text)[:-1]]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts[:2] == [0, 1] and counts == sorted(counts)


def test_a_stream_says_role_text_end_and_usage(live: Live) -> None:
    stream = live.openai.chat.completions.create(
        model=MODEL,
        messages=ASK,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=replying("ok"),
    )
    chunks = list(stream)
    deltas = [chunk.choices[0].delta.model_dump(exclude_unset=True) for chunk in chunks[:-1]]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "o"}, {"content": "k"}, {}]
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None, None, None, "stop"]
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 3
    assert all(chunk.object == "chat.completion.chunk" and chunk.usage is None for chunk in chunks[:-1])


def test_n_streams_are_told_apart(live: Live) -> None:
    stream = live.openai.chat.completions.create(model=MODEL, messages=ASK, stream=True, n=3)
    texts = ["", "", ""]
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == ["hello"] * 3
    whole = live.openai.chat.completions.create(model=MODEL, messages=ASK, n=3)
    assert [choice.message.content for choice in whole.choices] == texts


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(live: Live, stream: bool) -> None:
    body = {"messages": ASK, "logprobs": True, "top_logprobs": 2, "stream": stream, **replying("h\u20ac")}
    response = live.post("/v1/chat/completions", **body)
    if stream:
        events = [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]
        choices = [event["choices"][0] for event in events]
    else:
        choices = [response.json()["choices"][0]]
    content = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert content[0]["token"] == "h" and content[0]["bytes"] == [104] and content[0]["logprob"] == -0.5
    assert [top["logprob"] for top in content[0]["top_logprobs"]] == [-0.5, -1.5]
    assert [entry["bytes"] for entry in content[1:4]] == [[0xE2], [0x82], [0xAC]]
    assert len(content) == 5


def test_stop_and_continue_final_message(live: Live) -> None:
    choice = live.openai.chat.completions.create(model=MODEL, messages=ASK, stop=["ll"]).choices[0]
    assert choice.message.content == "he" and choice.finish_reason == "stop"
    messages: list[Any] = [*ASK, {"role": "assistant", "content": "say:more"}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    choice = live.openai.chat.completions.create(model=MODEL, messages=messages, extra_body=options).choices[
        0
    ]
    assert choice.message.content == "more"


def test_an_answer_can_be_sent_back_as_it_came(live: Live) -> None:
    first = live.openai.chat.completions.create(model=MODEL, messages=ASK).choices[0].message
    again: list[Any] = [*ASK, first.model_dump(), *ASK]
    assert live.openai.chat.completions.create(model=MODEL, messages=again).choices


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "", "content": "x"}]}, "messages", "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "messages[0].tool_call_id: missing"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "c"}]}, "messages", "role 'tool'"),
        ({"messages": [{"role": "user", "content": "x", "reasoning": "c"}]}, "messages", "role 'assistant'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "content[0]"),
        ({"messages": [{"role": "user", "content": "x" * 300}]}, "messages", "context length"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs true"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", "less than or equal to 20"),
        ({"logprobs": 1}, "logprobs", "boolean"),
        ({"tools": [{}]}, "tools", "missing"),
        ({"tools": [{"type": "web_search"}]}, "tools", "tools[0].type: got 'web_search'"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f"}}]},
            "tools",
            "template of this model takes",
        ),
        ({"tool_choice": "required"}, "tool_choice", "only with tools"),
        ({"tool_choice": "any"}, "tool_choice", "'required'"),
        ({"reasoning_effort": "most"}, "reasoning_effort", "'none', 'minimal'"),
        ({"response_format": {"type": "yaml"}}, "response_format", "response_format.type"),
        ({"functions": [{}]}, "functions", "not supported"),
        ({"modalities": ["audio"]}, "modalities", "modalities[0]"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "cannot be set"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs", "cannot be set"),
        ({"continue_final_message": True}, "continue_final_message", "add_generation_prompt"),
        (
            {
                "messages": [{"role": "system", "content": "x"}],
                "chat_template_kwargs": {"allow_system": False},
            },
            "messages",
            "no system message",
        ),
    ],
)
def test_what_is_wrong_is_named(live: Live, body: dict[str, object], param: str, says: str) -> None:
    response = live.post("/v1/chat/completions", **{"messages": ASK, **body})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert says in error["message"]


def test_harmless_forms_are_accepted(live: Live) -> None:
    body = {"response_format": {"type": "text"}, "tool_choice": "none", "tools": None, "modalities": ["text"]}
    assert live.post("/v1/chat/completions", messages=ASK, **body).status_code == 200
    assert live.openai.chat.completions.create(model=MODEL, messages=ASK, tools=[]).choices
