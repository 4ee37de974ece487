"""/v1/responses, most of it through the openai client."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pydantic
import pytest

from moesaic.server.openai_responses.body import ResponsesRequest
from moesaic.server.openai_responses.conversation import make_chat
from moesaic.server.openai_responses.tools import Toolbox
from tests.server.conftest import MODEL, Launch, Live, events_of, prompt_of

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS: list[Any] = [
    {"type": "function", "name": "get_weather", "description": "w", "parameters": SCHEMA, "strict": True},
    {"type": "function", "name": "now", "parameters": {"type": "object"}},
]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
THOUGHT = "<think>\nHm.\n</think>\n\n"


def create(live: Live, reply: str = "ok", **options: Any) -> Any:
    options = {"model": MODEL, "input": f"say:{reply}", "tools": TOOLS} | options
    return live.openai.responses.create(**options)


def test_a_response_has_openais_shape(agent: Live) -> None:
    body = {"input": f"say:{THOUGHT}I look.\n{CALL}", "tools": TOOLS, "instructions": "Be kind."}
    more = {"metadata": {"a": "b"}, "user": "u", "store": True, "truncation": "auto", "top_logprobs": 0}
    answer = agent.post("/v1/responses", **body, **more).json()
    assert answer.pop("id").startswith("resp_") and answer.pop("completed_at") >= answer.pop("created_at")
    ids = [item.pop("id") for item in answer["output"]]
    assert [each.split("_")[0] for each in ids] == ["rs", "msg", "fc"] and len(set(ids)) == 3
    assert answer["output"][2].pop("call_id").startswith("call_")
    tokens, made = len(prompt_of(agent)), len(f"{THOUGHT}I look.\n{CALL}") + 1
    text = {"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}
    assert answer == {
        "object": "response",
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "model": MODEL,
        "output": [
            {
                "type": "reasoning",
                "status": "completed",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "Hm."}],
            },
            {"type": "message", "status": "completed", "role": "assistant", "content": [text]},
            {
                "type": "function_call",
                "status": "completed",
                "name": "get_weather",
                "arguments": '{"city": "Bern"}',
            },
        ],
        "usage": {
            "input_tokens": tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": made,
            "output_tokens_details": {"reasoning_tokens": len(THOUGHT.rstrip())},
            "total_tokens": tokens + made,
        },
        "instructions": "Be kind.",
        "max_output_tokens": None,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_logprobs": 0,
        "tools": [TOOLS[0], TOOLS[1] | {"description": None, "strict": None}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "text": {"format": {"type": "text"}},
        "reasoning": {"effort": None, "summary": None},
        "metadata": {"a": "b"},
        "user": "u",
        "truncation": "disabled",
        "store": False,
        "background": False,
        "previous_response_id": None,
        "service_tier": "default",
    }


def test_the_events_of_a_stream(agent: Live) -> None:
    response = agent.post("/v1/responses", input=f"say:{THOUGHT}Yes{NOW}", tools=TOOLS, stream=True)
    events = events_of(response)
    assert [event.pop("sequence_number") for event in events] == list(range(len(events)))
    created, last = events[0]["response"], events[-1]["response"]
    assert events[1] == {"type": "response.in_progress", "response": created}
    assert (created["status"], created["output"], created["usage"]) == ("in_progress", [], None)
    assert last["status"] == "completed" and last["id"] == created["id"] and last["usage"]["output_tokens"]
    reasoning, message, call = last["output"]

    def place(index: int, item: dict[str, Any], part: bool = True) -> dict[str, Any]:
        found = {"item_id": item["id"], "output_index": index}
        return found | ({"content_index": 0} if part else {})

    def named(name: str, /, **fields: Any) -> dict[str, Any]:
        return {"type": f"response.{name}", **fields}

    expected = list[dict[str, Any]]()
    for index, item, name, letters in (
        (0, reasoning, "reasoning_text", "Hm."),
        (1, message, "output_text", "Yes"),
    ):
        where = place(index, item)
        said = {"logprobs": []} if name == "output_text" else {}
        part = item["content"][0]
        begun = item | {"content": [], "status": "in_progress"}
        expected += [
            named("output_item.added", output_index=index, item=begun),
            named("content_part.added", **where, part=part | {"text": ""}),
            *(named(f"{name}.delta", **where, **said, delta=letter) for letter in letters),
            named(f"{name}.done", **where, **said, text=letters),
            named("content_part.done", **where, part=part),
            named("output_item.done", output_index=index, item=item),
        ]
    where = place(2, call, part=False)
    begun = call | {"arguments": "", "status": "in_progress"}
    expected += [
        named("output_item.added", output_index=2, item=begun),
        named("function_call_arguments.delta", **where, delta="{}"),
        named("function_call_arguments.done", **where, name="now", arguments="{}"),
        named("output_item.done", output_index=2, item=call),
        named("completed", response=last),
    ]
    assert events[2:] == expected


@pytest.mark.parametrize(
    ("reply", "options", "output"),
    [
        ("Hi", {"tools": []}, [("message", "Hi")]),
        ("", {}, []),
        (NOW, {}, [("function_call", "{}")]),
        (f"{NOW} then", {}, [("function_call", "{}"), ("message", " then")]),
        (f"{NOW}{CALL}", {}, [("function_call", "{}"), ("function_call", '{"city": "Bern"}')]),
        (f"{NOW}{CALL}", {"parallel_tool_calls": False}, [("function_call", "{}")]),
        ("<think>Hm", {}, [("reasoning", "Hm")]),
        (f"a{NOW}", {"tool_choice": "none"}, [("message", f"a{NOW}")]),
    ],
)
def test_a_stream_says_the_same_as_a_whole_answer(
    agent: Live, reply: str, options: dict[str, Any], output: list[tuple[str, str]]
) -> None:
    def seen(response: Any) -> list[tuple[str, str]]:
        return [
            (item.type, item.arguments if item.type == "function_call" else item.content[0].text)
            for item in response.output
        ]

    whole = create(agent, reply, **options)
    with agent.openai.responses.stream(
        **{"model": MODEL, "input": f"say:{reply}", "tools": TOOLS, **options}
    ) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert seen(whole) == seen(final) == output
    assert whole.status == final.status == "completed" and whole.usage == final.usage
    added = [event.item.type for event in events if event.type == "response.output_item.added"]
    assert added == [kind for kind, _ in output]
    texts = [event.text for event in events if event.type == "response.output_text.done"]
    assert "".join(texts) == final.output_text


def test_a_limit_beyond_the_context_is_reduced(agent: Live) -> None:
    answer = create(agent, "x" * 4050, max_output_tokens=100_000, tools=[])
    request = agent.worker.seen[-1]
    assert request.params.max_tokens == 4096 - len(request.prompt_token_ids)
    assert answer.max_output_tokens == 100_000 and answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize("top", [None, 0, 2])
def test_texts_have_log_probabilities(agent: Live, top: int | None) -> None:
    """Those of their own tokens: not of reasoning, of tags or of a call."""
    reply = f"{THOUGHT}Yes <tool_x> ü\n{CALL}"
    options = {"include": ["message.output_text.logprobs"], "top_logprobs": top, "temperature": 0}
    whole = create(agent, reply, **options)
    *events, last = create(agent, reply, stream=True, **options)
    assert whole.top_logprobs == (top or 0)
    for response in (whole, last.response):
        text = response.output[1].content[0]
        assert bytes(one.bytes[0] for one in text.logprobs).decode() == text.text == "Yes <tool_x> ü"
        assert all(len(one.top_logprobs) == (top or 0) and one.logprob <= 0 for one in text.logprobs)
    pieces = [event for event in events if event.type == "response.output_text.delta"]
    for piece in pieces:
        assert (
            "".join(chr(one.model_extra["bytes"][0]) for one in piece.logprobs).encode("latin-1")
            == piece.delta.encode()
        )
    done = [event for event in events if event.type == "response.output_text.done"]
    assert [one.to_dict() for piece in pieces for one in piece.logprobs] == [
        one.to_dict() for event in done for one in event.logprobs
    ]
    assert create(agent, reply, top_logprobs=2).output[1].content[0].logprobs == []


def test_a_call_that_is_cut_off_is_incomplete(agent: Live) -> None:
    whole = create(agent, f"a{CALL}", max_output_tokens=60)
    *_, last = create(agent, f"a{CALL}", max_output_tokens=60, stream=True)
    assert last.type == "response.incomplete"
    for response in (whole, last.response):
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert [item.status for item in response.output] == ["completed", "incomplete"]
        assert response.output[1].arguments == '{"city": "' and response.usage.output_tokens == 60


def test_an_agent_calls_a_tool(agent: Live) -> None:
    first = create(agent, f"{THOUGHT}I look.\n{CALL}").output
    call_id = first[2].call_id
    items = [
        {"role": "developer", "content": "Be kind"},
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "How"}, {"type": "input_text", "text": "is it?"}],
        },
        *first,
        {"type": "function_call_output", "call_id": call_id, "output": "sunny"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Sunny."}]},
        {"role": "user", "content": "say:ok"},
    ]
    answer = create(agent, input=items, instructions="You help.")
    assert answer.output_text == "ok"
    assert prompt_of(agent).partition("[system]")[2] == (
        "You help.[developer]Be kind[user]How\nis it?"
        f'[assistant]Hm.|I look.<{call_id} get_weather {{"city": "Bern"}}>[tool]sunny{call_id}'
        "[assistant]Sunny.[user]say:ok"
    )


REASONING = {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "S"}]}
SECRET = {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "x"}
MESSAGE = {"role": "assistant", "content": "A"}
CALLED = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}


@pytest.mark.parametrize(
    ("items", "merged"),
    [
        ([REASONING, MESSAGE, CALLED, CALLED], [("S", "A", 2)]),
        ([CALLED, MESSAGE], [(None, "A", 1)]),
        ([REASONING, REASONING, CALLED], [("S\nS", None, 1)]),
        ([REASONING, MESSAGE, REASONING, CALLED], [("S", "A", 0), ("S", None, 1)]),
        ([MESSAGE, MESSAGE], [(None, "A", 0), (None, "A", 0)]),
        ([SECRET, CALLED], [(None, None, 1)]),
        ([SECRET], []),
    ],
)
def test_items_of_one_answer_make_one_message(items: list[Any], merged: list[Any]) -> None:
    body = ResponsesRequest.model_validate({"input": [{"role": "developer", "content": "D"}, *items]})
    first, *messages = make_chat(body, Toolbox(None)).messages
    assert first.role == "developer"
    assert [(m.reasoning_content, m.content, len(m.tool_calls or [])) for m in messages] == merged


class Place(pydantic.BaseModel):
    city: str


def test_an_answer_can_have_a_form(agent: Live) -> None:
    answer = agent.openai.responses.parse(model=MODEL, input='say:{"city": "Bern"}', text_format=Place)
    assert answer.output_parsed == Place(city="Bern")
    assert "city" in agent.worker.seen[-1].grammar
    assert (
        answer.text is not None
        and answer.text.format is not None
        and answer.text.format.type == "json_schema"
    )
    create(agent, "{}", text={"format": {"type": "json_object"}})
    assert agent.worker.seen[-1].grammar


def test_a_call_can_be_forced(agent: Live) -> None:
    for choice, names in (
        ("required", {"get_weather", "now"}),
        ({"type": "function", "name": "now"}, {"now"}),
        ("auto", set()),
    ):
        answer = create(agent, NOW, tool_choice=choice)
        assert answer.output[0].name == "now"
        given = answer.tool_choice if isinstance(choice, str) else answer.tool_choice.to_dict()
        assert given == choice
        grammar = agent.worker.seen[-1].grammar
        assert {name for name in ("get_weather", "now") if name in grammar} == names
    assert create(agent, tools=[], tool_choice="auto").output_text == "ok"


def test_sampling_and_effort_reach_the_model(agent: Live) -> None:
    options = {"temperature": 0.5, "top_p": 0.25, "max_output_tokens": 7, "reasoning": {"effort": "high"}}
    answer = create(agent, tools=[], **options)
    params = agent.worker.seen[-1].params
    assert (params.temperature, params.top_p, params.max_tokens) == (0.5, 0.25, 7)
    assert (answer.temperature, answer.top_p, answer.reasoning.effort) == (0.5, 0.25, "high")
    assert prompt_of(agent) == "high[user]say:ok"


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "keeps no state"),
        ({"conversation": "conv_1"}, "conversation", "keeps no state"),
        ({"background": True}, "background", "keeps no state"),
        ({"input": []}, "input", "at least 1 item"),
        ({"input": [{"role": "user"}]}, "input", "input[0].content: missing"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input", "input[0].role: got 'tool'"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "input: it has no content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input",
            "input[0].content[0].type: got 'input_image'",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]},
            "input",
            "input[0].content[0].type: got 'input_file'",
        ),
        ({"input": [CALLED | {"call_id": None}]}, "input", "input[0].call_id: missing"),
        ({"input": [SECRET]}, "input", "input: it has no content"),
        ({"input": "x" * 5000}, "input", "context length"),
        (
            {"tool_choice": {"type": "web_search"}},
            "tool_choice",
            "tool_choice: got 'web_search'; allowed: 'get_",
        ),
        ({"tools": [{"type": "custom"}]}, "tools", "tools[0].name: missing"),
        (
            {"tools": [{"type": "custom", "name": "a b"}]},
            "tools",
            "'a b'; allowed: 1 to 64 characters: letters",
        ),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "got 'f'"),
        ({"top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text", "text.format.schema: missing"),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}},
            "text.format",
            "text.format",
        ),
    ],
)
def test_what_is_wrong_is_named(agent: Live, body: dict[str, Any], param: str, says: str) -> None:
    response = agent.post("/v1/responses", **{"input": "say:ok", "tools": TOOLS} | body)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert says in error["message"]


@pytest.mark.parametrize("depth", [120, 900])
def test_a_schema_that_is_nested_deeply_is_named(agent: Live, depth: int) -> None:
    deep = json.loads('{"a":' * depth + "1" + "}" * depth)
    tools = [{"type": "function", "name": "f", "parameters": deep}]
    answer = agent.post("/v1/responses", input="say:ok", tools=tools)
    assert answer.status_code == 400
    assert "tools[0].parameters: nested more than 100 levels" in answer.json()["error"]["message"]


def test_an_error_in_a_stream_is_an_event(launch: Launch) -> None:
    live = launch(pace=0.05)
    stream = live.openai.responses.create(model=MODEL, input="hi", max_output_tokens=100, stream=True)
    events = iter(stream)
    while next(events).type != "response.output_text.delta":
        pass
    live.worker.die()
    *_, last = events
    assert last.type == "response.failed" and last.response.status == "failed"
    assert last.response.error.code == "server_error"
    assert "the worker is gone" in last.response.error.message
    with pytest.raises(openai.InternalServerError):
        live.openai.responses.create(model=MODEL, input="hi")


def test_a_client_that_leaves_cancels(launch: Launch, until: Callable[..., None]) -> None:
    live = launch()
    live.worker.open.clear()
    for number, stream in enumerate((False, True)):
        with live.http as client, pytest.raises(httpx.ReadTimeout):
            client.post("/v1/responses", json={"input": "hi", "stream": stream}, timeout=0.2)
        until(lambda number=number: live.worker.cancelled == list(range(number + 1)))
