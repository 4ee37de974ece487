"""/v1/messages and /v1/responses of `moesaic serve` as a person runs it: real processes and checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.server.conftest import events_of
from tests.support import scripted_checkpoint
from tests.test_serve_tools import SCRIPT, SPECIAL, TEMPLATE, TOOLS, WEATHER, client_of

FLAT: list[Any] = [{"name": "get_weather", "input_schema": WEATHER}]
"""Anthropic's form of a tool."""
ASK: list[Any] = [{"role": "user", "content": "How is the weather?"}]


def is_weather(value: Any) -> bool:
    return bool(value["city"] in ("Bern", "Basel") and value["days"] in range(1, 10) and len(value) == 2)


def post(client: openai.OpenAI, path: str, **body: Any) -> httpx.Response:
    url = str(client.base_url).removesuffix("/v1/") + path
    answer = httpx.post(url, json={"model": "demo", **body}, timeout=120, trust_env=False)
    answer.raise_for_status()
    return answer


@pytest.mark.slow
def test_the_demo_is_forced_to_call(tmp_path: Path) -> None:
    """The model knows another form of tools. Streamed and whole answers are the same."""
    file = tmp_path / "template.jinja"
    file.write_text(f"{TEMPLATE}{{# <tool_call> #}}")
    with client_of("--chat-template", str(file), "--reasoning-parser", "none") as (client, _):
        body = {"messages": ASK, "tools": FLAT, "tool_choice": {"type": "any"}, "temperature": 0}
        more = {"max_tokens": 300, "disable_parallel_tool_use": True}
        whole = post(client, "/v1/messages", **body, **more).json()
        [used] = [block for block in whole["content"] if block["type"] == "tool_use"][:1]
        assert is_weather(used["input"]) and whole["stop_reason"] in ("tool_use", "max_tokens")
        counted = post(client, "/v1/messages/count_tokens", messages=ASK, tools=FLAT).json()
        assert counted["input_tokens"] == whole["usage"]["input_tokens"]

        events = events_of(post(client, "/v1/messages", **body, **more, stream=True))
        assert events[0]["type"] == "message_start" and events[-1]["type"] == "message_stop"
        pieces = [
            event["delta"]["partial_json"]
            for event in events
            if event.get("index") == 0 and event["type"] == "content_block_delta"
        ]
        assert len(pieces) > 1 and json.loads("".join(pieces)) == used["input"]

        options: Any = {"model": "demo", "input": "How is the weather?", "temperature": 0}
        options |= {"tool_choice": "required", "max_output_tokens": 100_000, "parallel_tool_calls": False}
        options["tools"] = [{"type": "function", "name": "get_weather", "parameters": WEATHER}]
        answer = client.responses.create(**options)
        call = answer.output[0]
        assert call.type == "function_call" and is_weather(json.loads(call.arguments))
        with client.responses.stream(**options) as stream:
            deltas = [one.delta for one in stream if one.type == "response.function_call_arguments.delta"]
            streamed = stream.get_final_response().output[0]
        assert streamed.type == "function_call" and streamed.arguments == call.arguments == "".join(deltas)

        said = client.responses.create(
            model="demo",
            input="Hi",
            temperature=0,
            max_output_tokens=2,
            include=["message.output_text.logprobs"],
        )
        assert said.output[0].type == "message" and said.output[0].content[0].type == "output_text"
        assert len(said.output[0].content[0].logprobs or []) == said.usage.output_tokens == 2  # type: ignore[union-attr]


@pytest.mark.slow
def test_a_budget_cuts_the_reasoning(tmp_path: Path) -> None:
    """The model thinks one token before it calls. With a budget of 0 it thinks none, and still calls."""
    scripted_checkpoint.write(
        tmp_path,
        SCRIPT,
        SPECIAL,
        f"{TEMPLATE}{{% if add_generation_prompt %}}<0>{{% endif %}}{{# <think> #}}",
    )
    with client_of("--served-model-name", "demo", model=str(tmp_path)) as (client, _):
        tools: Any = [{"name": "now", "input_schema": {"type": "object"}}]
        found = [
            client.chat.completions.create(
                model="demo",
                messages=ASK,
                tools=TOOLS,
                temperature=0,
                extra_body={"thinking_token_budget": budget},
            ).choices[0]
            for budget in (-1, 1, 0)
        ]
        reasons = [getattr(one.message, "reasoning", None) for one in found]
        assert reasons == ["First the time.", "First the time.", None]
        assert all(one.message.tool_calls and one.finish_reason == "tool_calls" for one in found)
        for budget, thought in ((1, ["First the time."]), (2, ["First the time."])):
            answer = post(
                client,
                "/v1/messages",
                messages=ASK,
                tools=tools,
                max_tokens=100,
                temperature=0,
                thinking={"type": "enabled", "budget_tokens": budget},
            ).json()
            assert [one["thinking"] for one in answer["content"] if one["type"] == "thinking"] == thought
            assert answer["stop_reason"] == "tool_use"
