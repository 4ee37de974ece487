"""/v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from moesaic.server.anthropic.answer import MessageWriter
from moesaic.server.blocks import BlockEvent, Finish
from moesaic.server.responses import PromptTokensDetails, Usage
from moesaic.server.unknown_fields import HEADER
from tests.server.conftest import MODEL, NO_TLS, Launch, Live, events_of, prompt_of

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS: list[Any] = [
    {
        "name": "get_weather",
        "description": "w",
        "input_schema": SCHEMA,
        "cache_control": {"type": "ephemeral"},
    },
    {"type": "custom", "name": "now", "input_schema": {"type": "object"}},
]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
THOUGHT = "<think>\nHm.\n</think>\n\n"


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def ask(live: Live, reply: str = "ok", **options: Any) -> httpx.Response:
    body = {"model": MODEL, "max_tokens": 1000, "messages": user(f"say:{reply}"), "tools": TOOLS}
    return live.post("/v1/messages", **body | options)


def collected(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The content blocks of a stream, as a client collects them."""
    blocks = list[dict[str, Any]]()
    for event in events:
        match event:
            case {"type": "content_block_start"}:
                assert event["index"] == len(blocks)
                blocks.append(dict(event["content_block"]))
            case {"delta": {"type": "input_json_delta", "partial_json": text}}:
                blocks[event["index"]].setdefault("json", []).append(text)
            case {"type": "content_block_delta", "delta": {"type": kind, **field}}:
                ((name, text),) = field.items()
                assert kind == f"{name}_delta" and event["index"] == len(blocks) - 1
                blocks[-1][name] += text
    for block in blocks:
        if "json" in block:
            text = "".join(block.pop("json"))
            try:
                block["input"] = json.loads(text)
            except json.JSONDecodeError:
                block["input"] = {"INVALID_JSON": text}
    return blocks


def test_a_message_has_anthropics_shape(agent: Live) -> None:
    answer = ask(agent, f"{THOUGHT}I look.\n{CALL}").json()
    assert answer.pop("id").startswith("msg_") and answer["content"][2].pop("id").startswith("call_")
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": ""},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "name": "get_weather", "input": {"city": "Bern"}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": len(prompt_of(agent)),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": len(f"{THOUGHT}I look.\n{CALL}") + 1,
        },
    }


def test_the_events_of_a_stream(agent: Live) -> None:
    response = ask(agent, f"{THOUGHT}Yes{NOW}", stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = events_of(response)
    message, call = events[0]["message"], events[12]["content_block"]
    assert message.pop("id").startswith("msg_") and call.pop("id").startswith("call_")
    tokens = len(prompt_of(agent))
    usage = {"input_tokens": tokens, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    start = {"type": "message", "role": "assistant", "model": MODEL, "content": []}
    start |= {"stop_reason": None, "stop_sequence": None, "usage": usage | {"output_tokens": 0}}

    def delta(index: int, kind: str, name: str, text: str) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": index, "delta": {"type": kind, name: text}}

    def begun(index: int, **block: Any) -> dict[str, Any]:
        return {"type": "content_block_start", "index": index, "content_block": block}

    assert events == [
        {"type": "message_start", "message": start},
        begun(0, type="thinking", thinking="", signature=""),
        *(delta(0, "thinking_delta", "thinking", letter) for letter in "Hm."),
        delta(0, "signature_delta", "signature", ""),
        {"type": "content_block_stop", "index": 0},
        begun(1, type="text", text=""),
        *(delta(1, "text_delta", "text", letter) for letter in "Yes"),
        {"type": "content_block_stop", "index": 1},
        begun(2, type="tool_use", name="now", input={}),
        delta(2, "input_json_delta", "partial_json", "{}"),
        {"type": "content_block_stop", "index": 2},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "tool_use", "stop_sequence": None},
            "usage": usage | {"output_tokens": len(f"{THOUGHT}Yes{NOW}") + 1},
        },
        {"type": "message_stop"},
    ]


TEXT, CALLED = {"type": "text"}, {"type": "tool_use"}


@pytest.mark.parametrize(
    ("reply", "options", "content", "stop"),
    [
        ("Hi", {"tools": None}, [TEXT | {"text": "Hi"}], ("end_turn", None)),
        ("", {}, [], ("end_turn", None)),
        (NOW, {}, [CALLED | {"name": "now", "input": {}}], ("tool_use", None)),
        (
            f"{NOW} then",
            {},
            [CALLED | {"name": "now", "input": {}}, TEXT | {"text": " then"}],
            ("tool_use", None),
        ),
        (
            f"{NOW}{CALL}",
            {},
            [CALLED | {"name": "now"}, CALLED | {"name": "get_weather", "input": {"city": "Bern"}}],
            ("tool_use", None),
        ),
        (
            f"{NOW}{CALL}",
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            [CALLED | {"name": "now"}],
            ("tool_use", None),
        ),
        (
            CALL,
            {"max_tokens": 60},
            [CALLED | {"input": {"INVALID_JSON": '{"city": "B'}}],
            ("max_tokens", None),
        ),
        ("<think>Hm", {}, [{"type": "thinking", "thinking": "Hm"}], ("end_turn", None)),
        (
            f"{THOUGHT}Yes",
            {"thinking": {"type": "adaptive", "display": "omitted"}},
            [TEXT | {"text": "Yes"}],
            ("end_turn", None),
        ),
        (
            "One, two",
            {"stop_sequences": ["two", ", "]},
            [TEXT | {"text": "One"}],
            ("stop_sequence", ", "),
        ),
        (
            f"a{NOW}",
            {"tool_choice": {"type": "none"}},
            [TEXT | {"text": f"a{NOW}"}],
            ("end_turn", None),
        ),
        (
            CALL.replace('{"city"', "{city"),
            {},
            [TEXT | {"text": CALL.replace('{"city"', "{city")}],
            ("end_turn", None),
        ),
    ],
)
def test_a_stream_says_the_same_as_a_whole_answer(
    agent: Live, reply: str, options: dict[str, Any], content: list[Any], stop: tuple[str, str | None]
) -> None:
    whole = ask(agent, reply, **options).json()
    events = events_of(ask(agent, reply, stream=True, **options))
    assert [block | expected for block, expected in zip(whole["content"], content, strict=True)] == whole[
        "content"
    ]
    assert (whole["stop_reason"], whole["stop_sequence"]) == stop
    streamed = collected(events)
    for block in (*whole["content"], *streamed):
        block.pop("id", None)
    assert streamed == whole["content"]
    assert events[-2]["delta"] == {"stop_reason": stop[0], "stop_sequence": stop[1]}
    assert events[-2]["usage"] == whole["usage"]


def test_an_agent_calls_a_tool(agent: Live) -> None:
    first = ask(agent, f"{THOUGHT}I look.\n{CALL}").json()["content"]
    result = [{"type": "text", "text": "sunny"}, {"type": "text", "text": "warm"}]
    messages = [
        *user("How is it?"),
        {"role": "assistant", "content": [*first, {"type": "redacted_thinking", "data": "x"}]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": first[2]["id"], "content": result},
                {"type": "tool_result", "tool_use_id": "b", "content": "none", "is_error": True},
                {"type": "tool_result", "tool_use_id": "c"},
                {"type": "text", "text": "And", "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": "say:ok"},
            ],
        },
    ]
    system = [{"type": "text", "text": "Be"}, {"type": "text", "text": "kind"}]
    answer = ask(agent, messages=messages, system=system, metadata={"user_id": "u"}).json()
    assert answer["content"] == [{"type": "text", "text": "ok"}]
    call = f'<{first[2]["id"]} get_weather {{"city": "Bern"}}>'
    assert prompt_of(agent).partition("[system]")[2] == (
        f"Be\nkind[user]How is it?[assistant]Hm.|I look.{call}[tool]sunny\nwarm{first[2]['id']}"
        "[tool]Error: noneb[tool]c[user]And\nsay:ok"
    )


def test_a_last_message_of_the_assistant_is_continued(agent: Live) -> None:
    messages = [*user("x"), {"role": "assistant", "content": [{"type": "text", "text": "say:more"}]}]
    assert ask(agent, messages=messages).json()["content"] == [{"type": "text", "text": "more"}]


def test_a_limit_above_the_context_is_reduced(agent: Live) -> None:
    assert ask(agent, max_tokens=10**9).status_code == 200
    request = agent.worker.seen[-1]
    assert request.params.max_tokens == 4096 - len(request.prompt_token_ids)
    assert ask(agent, "x" * 5000).json()["error"]["type"] == "invalid_request_error"


def test_sampling_reaches_the_model(agent: Live) -> None:
    ask(agent, temperature=0.5, top_p=0.25, top_k=7)
    params = agent.worker.seen[-1].params
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.25, 7)


@pytest.mark.parametrize(
    ("options", "seen"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "TrueTrueenabled"),
        ({"thinking": {"type": "disabled"}}, "noneFalseFalsedisabled"),
        ({"output_config": {"effort": "high"}}, "high"),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}, "lowTrueTrueadaptive"),
        ({}, ""),
    ],
)
def test_thinking_is_a_variable_of_the_template(agent: Live, options: dict[str, Any], seen: str) -> None:
    ask(agent, tools=[], **options)
    assert prompt_of(agent) == f"{seen}[user]say:ok"


def test_a_call_can_be_forced(agent: Live) -> None:
    for choice, names in (
        ({"type": "any"}, {"get_weather", "now"}),
        ({"type": "tool", "name": "now"}, {"now"}),
        ({"type": "auto"}, set()),
    ):
        assert ask(agent, NOW, tool_choice=choice).json()["stop_reason"] == "tool_use"
        grammar = agent.worker.seen[-1].grammar
        assert {name for name in ("get_weather", "now") if name in grammar} == names
    form = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    for fields in ({"output_config": form}, {"output_format": form["format"]}):
        assert ask(agent, "{}", **fields).json()["content"] == [{"type": "text", "text": "{}"}]
        assert agent.worker.seen[-1].grammar
    answer = ask(agent, "{}", output_config=form, output_format=form["format"])
    assert answer.status_code == 400 and "output_config.format" in answer.json()["error"]["message"]
    examples = [{"name": "f", "input_schema": {"type": "object"}, "input_examples": [{"a": 1}]}]
    assert ask(agent, tools=examples).headers["X-Moesaic-Ignored-Fields"] == "tools.input_examples"


def test_a_budget_ends_the_reasoning(agent: Live, live: Live) -> None:
    ask(agent, thinking={"type": "enabled", "budget_tokens": 9})
    budget = agent.worker.seen[-1].params.reasoning
    assert budget is not None and (budget.tokens, budget.endings[0]) == (9, "</think>")
    assert bytes(budget.end_ids) == b"</think>"
    answer = ask(live, tools=None, thinking={"type": "enabled", "budget_tokens": 9})
    assert answer.status_code == 200, "nothing is to be ended where a model does not reason"
    assert live.worker.seen[-1].params.reasoning is None
    wrong = ask(agent, thinking={"type": "disabled", "budget_tokens": 9})
    assert (wrong.status_code, wrong.json()["error"]["message"]) == (
        400,
        "thinking.budget_tokens: got 9; allowed with the type 'enabled', not 'disabled'",
    )


def tokens_of(live: Live, **body: Any) -> Any:
    return live.post("/v1/messages/count_tokens", **body).json()["input_tokens"]


def test_tokens_are_counted_without_the_engine(
    launch: Launch, agent: Live, until: Callable[..., None]
) -> None:
    shared = {"system": "Be kind", "tools": TOOLS, "thinking": {"type": "enabled", "budget_tokens": 9}}
    for messages in (user("say:ok"), [*user("x"), {"role": "assistant", "content": "say:ok"}]):
        used = ask(agent, messages=messages, **shared).json()["usage"]["input_tokens"]
        assert tokens_of(agent, messages=messages, **shared) == used
    assert tokens_of(agent, messages=user("x" * 9000)) == len("[user]") + 9000, "more than the context holds"
    live = launch(max_waiting=1)
    live.worker.open.clear()
    with ThreadPoolExecutor(5) as pool:
        calls = [pool.submit(ask, live, tools=None) for _ in range(5)]
        until(lambda: len(live.worker.seen) == 5, seconds=60)
        full = ask(live, tools=None)
        assert (full.status_code, full.json()["error"]["type"]) == (429, "rate_limit_error")
        assert tokens_of(live, messages=user("hi")) == len("[user]hi[assistant]say:hello")
        live.worker.open.set()
        assert all(call.result(60).status_code == 200 for call in calls)


def test_cached_tokens_are_counted_apart() -> None:
    usage = Usage(
        prompt_tokens=9,
        completion_tokens=2,
        total_tokens=11,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=4),
    )

    async def blocks() -> AsyncIterator[BlockEvent]:
        yield Finish("stop", None, usage)

    found = asyncio.run(MessageWriter("m", 9).build_answer(blocks())).usage
    assert (found.input_tokens, found.cache_read_input_tokens, found.output_tokens) == (5, 4, 2)


BLOCK = {"type": "text", "text": "x"}


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"max_tokens": None}, "max_tokens: got None"),
        ({"messages": []}, "messages: got []"),
        ({"messages": [{"role": "user", "content": []}]}, "messages: they have no content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role: got 'tool'"),
        (
            {"messages": [{"role": "user", "content": [BLOCK, {"type": "image", "source": {}}]}]},
            "messages[0].content[1].type: got 'image'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
            "messages[0].content[0].type: got 'document'",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}
                        ],
                    }
                ]
            },
            "messages[0].content[0].content[0].type: got 'image'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            "messages[0].content[0].tool_use_id: missing",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}
                ]
            },
            "allowed only with the role 'assistant'",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}],
                    }
                ]
            },
            "needs a tool_result",
        ),
        ({"messages": [{"role": "assistant", "content": ""}]}, "has no text"),
        ({"tools": [{"name": "web_search"}]}, "tools[0].input_schema: missing"),
        ({"tools": [{"name": "x" * 129, "input_schema": {}}]}, "; allowed: 1 to 128 characters: letters"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name: got 'a b'"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name: missing"),
        ({"tool_choice": {"type": "tool", "name": "f"}}, "got 'f'; allowed: 'get_weather', 'now'"),
        ({"tool_choice": {"type": "any"}, "tools": None}, "tool_choice: allowed only with tools"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers: not supported"),
    ],
)
def test_what_is_wrong_is_named(agent: Live, body: dict[str, Any], says: str) -> None:
    response = ask(agent, **body)
    answer = response.json()
    assert response.status_code == 400 and answer["type"] == "error"
    assert answer["error"]["type"] == "invalid_request_error" and says in answer["error"]["message"]


@pytest.mark.parametrize("depth", [120, 900])
def test_what_is_nested_deeply_is_named(agent: Live, depth: int) -> None:
    deep = json.loads('{"a":' * depth + "1" + "}" * depth)
    called = {"type": "tool_use", "id": "a", "name": "now", "input": deep}
    messages = [*user("x"), {"role": "assistant", "content": [called]}, *user("say:ok")]
    for options, says in (
        ({"messages": messages}, "the input of a tool_use: nested more than 100 levels deep"),
        ({"tools": [{"name": "f", "input_schema": deep}]}, "tools[0].input_schema: nested more than 100"),
    ):
        answer = ask(agent, **options)
        assert answer.status_code == 400 and says in answer.json()["error"]["message"]


@pytest.mark.parametrize("depth", [120, 900])
def test_a_call_whose_input_is_nested_deeply_is_passed_on_as_text(agent: Live, depth: int) -> None:
    deep = f'{{"a": {"[" * depth}{"]" * depth}}}'
    answer = ask(agent, CALL.replace('{"city": "Bern"}', deep), max_tokens=4000).json()
    assert answer["content"][0]["input"] == {"INVALID_JSON": deep}


def test_keys_and_errors_are_anthropics(launch: Launch) -> None:
    live = launch(api_key="s3cret", max_body_bytes=1000)
    body = {"model": MODEL, "max_tokens": 10, "messages": user("hi")}

    def status(headers: dict[str, str], path: str = "/v1/messages", **more: Any) -> tuple[int, str]:
        response = httpx.post(
            live.url + path, json=body | more, headers=headers, trust_env=False, verify=NO_TLS
        )
        answer = response.json()
        return response.status_code, answer["error"]["type"] if response.status_code != 200 else answer[
            "type"
        ]

    right = {"x-api-key": "s3cret", "anthropic-version": "2023-06-01"}
    assert status(right) == status({"Authorization": "Bearer s3cret"}) == (200, "message")
    assert status({"x-api-key": "wrong"}) == status({}) == (401, "authentication_error")
    assert status(right, "/v1/messages/batches") == (404, "not_found_error")
    assert status(right, model="claude") == (404, "not_found_error")
    assert status(right, messages=user("x" * 2000)) == (413, "request_too_large")
    assert status({}, "/v1/chat/completions") == (401, "invalid_request_error"), "OpenAI's"
    live = launch(ready=False, api_key="s3cret")
    assert status(right) == (503, "overloaded_error")


def test_an_error_in_a_stream_is_an_event(launch: Launch, until: Callable[..., None]) -> None:
    live = launch(pace=0.05)
    with live.http as client:
        body = {"max_tokens": 100, "messages": user("hi"), "stream": True}
        with client.stream("POST", "/v1/messages", json=body) as response:
            lines = response.iter_lines()
            assert next(lines) == "event: message_start"
            live.worker.die()
            *_, name, data, end = lines
    assert (name, end) == ("event: error", "")
    error = json.loads(data.removeprefix("data: "))
    assert error["type"] == "error" and error["error"]["type"] == "overloaded_error"
    assert "the worker is gone" in error["error"]["message"]


def test_a_client_that_leaves_cancels(launch: Launch, until: Callable[..., None]) -> None:
    live = launch()
    live.worker.open.clear()
    for number, stream in enumerate((False, True)):
        body = {"max_tokens": 100, "messages": user("hi"), "stream": stream}
        with live.http as client, pytest.raises(httpx.ReadTimeout):
            client.post("/v1/messages", json=body, timeout=0.2)
        until(lambda number=number: live.worker.cancelled == list(range(number + 1)))


def test_tools_that_others_run_are_left_out_and_named(agent: Live) -> None:
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    deferred = {**TOOLS[0], "defer_loading": True}
    answer = ask(agent, CALL, tools=[search, deferred])
    assert answer.headers[HEADER] == "tools.web_search_20250305"
    assert answer.json()["content"][0]["name"] == "get_weather"
    assert "web_search" not in prompt_of(agent)
    deep = json.loads('{"a":' * 120 + "1" + "}" * 120)
    error = ask(agent, tools=[search, TOOLS[0] | {"input_schema": deep}]).json()["error"]
    assert error["message"].startswith("tools[1].input_schema: nested")
    error = ask(agent, tools=[search, TOOLS[0]], tool_choice={"type": "tool", "name": "web_search"}).json()
    assert error["error"]["message"] == "tool_choice: got 'web_search'; allowed: 'get_weather'"


def test_a_long_name_and_a_reference_to_a_tool(agent: Live) -> None:
    name = "mcp__" + "a" * 120
    messages = [
        *user("hi"),
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": name, "input": {}}]},
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t",
                    "content": [{"type": "tool_reference", "tool_name": name}],
                },
                {"type": "text", "text": "say:ok"},
            ],
        },
    ]
    answer = ask(agent, tools=[{"name": name, "input_schema": {}}], messages=messages)
    assert answer.status_code == 200, answer.text
    assert f"[tool]{name}t[user]say:ok" in prompt_of(agent)
