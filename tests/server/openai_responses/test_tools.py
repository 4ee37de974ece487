"""Tools of a response that are no functions: namespaces, custom tools, and those of OpenAI's servers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from moesaic.server.unknown_fields import HEADER
from tests.server.conftest import Live, events_of, prompt_of

FUNCTION = {
    "type": "function",
    "name": "f",
    "strict": False,
    "parameters": {"type": "object", "properties": {}},
}
PATCH = {"type": "custom", "name": "patch", "description": "Patches.", "format": {"type": "text"}}
AGENTS = {"type": "namespace", "name": "agents", "description": "d", "tools": [FUNCTION, PATCH]}
LARK = {**PATCH, "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}}
REGEX = {**PATCH, "format": {"type": "grammar", "syntax": "regex", "definition": "a+"}}


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def ask(live: Live, reply: str, **body: Any) -> Any:
    response = live.post("/v1/responses", input=f"say:{reply}", **body)
    assert response.status_code == 200, response.text
    return response


def test_functions_of_a_namespace_come_back_with_it(agent: Live) -> None:
    answer = ask(agent, call("agents__f"), tools=[FUNCTION, AGENTS]).json()
    [item] = answer["output"]
    assert (item["type"], item["name"], item["namespace"]) == ("function_call", "f", "agents")
    assert '"name": "agents__f"' in prompt_of(agent) and '"name": "f"' in prompt_of(agent)
    assert [tool["type"] for tool in answer["tools"]] == ["function", "namespace"]


def test_a_custom_tool_is_called_with_its_input(agent: Live) -> None:
    [item] = ask(agent, call("patch", input='a "b"\n'), tools=[PATCH]).json()["output"]
    assert item.pop("id").startswith("ctc_") and item.pop("call_id")
    assert item == {"type": "custom_tool_call", "status": "completed", "name": "patch", "input": 'a "b"\n'}
    [item] = ask(agent, call("agents__patch", input="x"), tools=[AGENTS]).json()["output"]
    assert (item["name"], item["namespace"], item["input"]) == ("patch", "agents", "x")


def test_the_stream_of_a_custom_call(agent: Live) -> None:
    events = events_of(ask(agent, call("patch", input="abc"), tools=[PATCH], stream=True))
    names = [event["type"] for event in events[2:-1]]
    assert names == [
        "response.output_item.added",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.output_item.done",
    ]
    assert events[2]["item"]["input"] == "" and events[3]["delta"] == events[4]["input"] == "abc"
    assert events[5]["item"] == events[-1]["response"]["output"][0]


@pytest.mark.parametrize("tool", [LARK, REGEX])
def test_the_model_is_told_the_grammar_of_an_input(agent: Live, tool: dict[str, Any]) -> None:
    ask(agent, "ok", tools=[tool])
    assert json.dumps(f"grammar:\n{tool['format']['definition']}")[1:-1] in prompt_of(agent)


def test_a_regex_constrains_a_forced_input(agent: Live) -> None:
    choice = {"type": "custom", "name": "patch"}
    ask(agent, call("patch", input="aa"), tools=[REGEX], tool_choice=choice)
    assert "^(?:a+)$" in agent.worker.seen[-1].grammar
    refused = agent.post("/v1/responses", input="x", tools=[LARK], tool_choice=choice)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("tool_choice: a call of 'patch' cannot be forced")


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "web_search", "external_web_access": False, "filters": None},
        {"type": "local_shell"},
        {"type": "mcp", "server_label": "x", "server_url": "http://x", "tools": 7},
        {"type": "code_interpreter", "container": {"type": "auto"}},
    ],
    ids=lambda tool: tool["type"],
)
def test_a_tool_that_nobody_here_runs_is_left_out_and_named(agent: Live, tool: dict[str, Any]) -> None:
    response = ask(agent, "ok", tools=[FUNCTION, tool], tool_choice="auto")
    assert f"tools.{tool['type']}" in response.headers[HEADER]
    assert tool["type"] not in prompt_of(agent).partition("[user]")[0]
    refused = agent.post(
        "/v1/responses", input="x", tools=[FUNCTION, tool], tool_choice={"type": tool["type"]}
    )
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == f"tool_choice: got {tool['type']!r}; allowed: 'f'"


def test_allowed_tools_are_the_only_ones(agent: Live) -> None:
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]}
    ask(agent, call("f"), tools=[FUNCTION, PATCH], tool_choice=choice)
    assert "patch" not in prompt_of(agent) and "f" in agent.worker.seen[-1].grammar
    ask(agent, "ok", tools=[FUNCTION, PATCH], tool_choice=choice | {"mode": "auto"})
    assert not agent.worker.seen[-1].grammar


def test_a_history_of_every_kind_of_call(agent: Live) -> None:
    items = [
        {"role": "user", "content": "hi"},
        {"type": "function_call", "call_id": "a", "name": "f", "namespace": "agents", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "1"},
        {"type": "custom_tool_call", "call_id": "b", "name": "patch", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "2"}]},
        {
            "type": "local_shell_call",
            "id": "c",
            "call_id": "c",
            "action": {"type": "exec", "command": ["ls"]},
        },
        {"type": "local_shell_call_output", "id": "c", "output": "3"},
        {"type": "web_search_call", "id": "w", "action": {"type": "search"}, "status": "completed"},
        {"type": "compaction", "encrypted_content": "x", "content": 7},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "user", "content": "say:ok"},
    ]
    response = agent.post("/v1/responses", input=items)
    assert response.status_code == 200, response.text
    assert response.headers[HEADER] == "input.web_search_call, input.compaction"
    assert prompt_of(agent) == (
        "[user]hi[assistant]<a agents__f {}>[tool]1a"
        '[assistant]<b patch {"input": "x"}>[tool]2b'
        '[assistant]<c local_shell {"type": "exec", "command": ["ls"]}>[tool]3c'
        "[assistant]No.[user]say:ok"
    )


@pytest.mark.parametrize("verbosity", ["low", "medium", "high"])
def test_every_verbosity_is_taken(agent: Live, verbosity: str) -> None:
    ask(agent, "ok", text={"format": {"type": "text"}, "verbosity": verbosity})


def test_a_schema_of_a_namespace_is_named_by_its_place(agent: Live) -> None:
    deep = json.loads('{"a":' * 120 + "1" + "}" * 120)
    tools = [PATCH, {**AGENTS, "tools": [FUNCTION, {**FUNCTION, "name": "g", "parameters": deep}]}]
    error = agent.post("/v1/responses", input="say:ok", tools=tools).json()["error"]
    assert error["message"].startswith("tools[1].tools[1].parameters: nested more than")
