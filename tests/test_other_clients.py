"""The checkpoint and the relay with which `make clients` tries agents."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import openai
import pytest
from scripts.other_clients import checkpoint
from scripts.other_clients.coding_agents import make_digits
from scripts.other_clients.relay import CALL, Relay

from tests.test_serve_tools import client_of

SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "deep": {"type": "boolean"},
        "limits": {"type": "array", "items": {"type": "integer"}},
        "more": {"type": "object", "additionalProperties": {"type": "string"}},
    },
    "required": ["path", "deep", "limits"],
}


@pytest.mark.slow
def test_each_api_calls_a_tool_where_the_prompt_asks_for_it(tmp_path: Path) -> None:
    checkpoint.write(tmp_path)
    question = f"{CALL}."
    with (
        client_of("--served-model-name", "made", model=str(tmp_path)) as (client, info),
        Relay(info["url"], tool="list_files") as relay,
        openai.OpenAI(base_url=f"{relay.url}/v1", api_key="none", max_retries=0) as relayed,
    ):
        function = {"name": "list_files", "description": "Files", "parameters": SCHEMA}
        chat = [{"role": "user", "content": question}]
        answer = relayed.chat.completions.create(
            model="made", messages=chat, tools=[{"type": "function", "function": function}]
        ).choices[0]
        arguments = json.loads(answer.message.tool_calls[0].function.arguments)
        assert isinstance(arguments["path"], str) and isinstance(arguments["deep"], bool)
        called = answer.message.model_dump(exclude_none=True)
        result = {"role": "tool", "tool_call_id": called["tool_calls"][0]["id"], "content": "none"}
        ended = relayed.chat.completions.create(
            model="made",
            messages=[*chat, called, result],
            tools=[{"type": "function", "function": function}],
        ).choices[0]
        assert (ended.message.content, ended.finish_reason) == ("ls", "stop")

        item = relayed.responses.create(
            model="made", input=question, tools=[{"type": "function", **function}]
        ).output[0]
        assert (item.type, item.name) == ("function_call", "list_files")
        tool = {"name": "list_files", "description": "Files", "input_schema": SCHEMA}
        body = {"model": "made", "messages": chat, "tools": [tool], "max_tokens": 200}
        blocks = httpx.post(f"{relay.url}/v1/messages", json=body, trust_env=False).json()["content"]
        assert [block["name"] for block in blocks if block["type"] == "tool_use"] == ["list_files"]
        with pytest.raises(openai.BadRequestError, match="maximum context length is 262144 tokens"):
            relayed.responses.create(model="made", input=make_digits(270_000))
        assert [exchange.is_forced for exchange in relay.exchanges] == [True, False, True, True, False]
        assert [exchange.status for exchange in relay.refused] == [400]
        relay.exchanges = relay.exchanges[:2]
        relay.check_calls(1)
        with pytest.raises(AssertionError):
            relay.check_calls(2)
        assert client.models.list().data[0].id == "made"
