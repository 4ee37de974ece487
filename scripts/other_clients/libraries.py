"""Clients that are Python packages."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

CITY = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Bern", "Basel"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
ASK: Any = [{"role": "user", "content": "What is the weather in Bern?"}]
TOOL: Any = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Weather", "parameters": CITY},
}

WEATHER: Any = {
    "name": "get_weather",
    "description": "Get the weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
"""A tool that the demo calls by itself, as nothing forces it to."""
RESULT, SAID = json.dumps({"temperature": 12, "sky": "sunny"}), "It is 12 degrees and sunny in Bern."
"""What that tool returns, and what the demo says of it."""
ANTHROPIC_TOOL: Any = {"name": "get_weather", "description": "Weather", "input_schema": CITY}


def is_city(value: Any) -> None:
    """Raises AssertionError unless the value keeps to the schema CITY."""
    found = json.loads(value) if isinstance(value, str) else value
    assert found["city"] in ("Bern", "Basel") and 1 <= found["days"] <= 9, found


def of_openai(url: str) -> Iterator[tuple[str, Callable[[], object]]]:
    import openai
    from pydantic import BaseModel, Field

    client: Any = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    class City(BaseModel):
        city: Literal["Bern", "Basel"]
        days: Annotated[int, Field(ge=1, le=9)]

    own: Any = {"model": "demo", "tools": [{"type": "function", "function": WEATHER}], "temperature": 0}

    def call() -> None:
        answer = client.chat.completions.create(messages=ASK, max_tokens=200, **own)
        [called] = answer.choices[0].message.tool_calls
        assert json.loads(called.function.arguments) == {"city": "Bern"}, called
        result = {"role": "tool", "tool_call_id": called.id, "content": RESULT}
        again = [*ASK, answer.choices[0].message.model_dump(exclude_none=True), result]
        said = client.chat.completions.create(messages=again, max_tokens=40, **own).choices[0].message.content
        assert said == SAID, said

    def streamed() -> None:
        pieces = client.chat.completions.create(messages=ASK, max_tokens=200, stream=True, **own)
        deltas = [call for piece in pieces for call in piece.choices[0].delta.tool_calls or []]
        arguments = "".join(one.function.arguments or "" for one in deltas if one.index == 0)
        assert json.loads(arguments) == {"city": "Bern"}, arguments

    def forced() -> None:
        answer = client.chat.completions.create(
            model="demo", messages=ASK, tools=[TOOL], tool_choice="required", max_tokens=200
        )
        is_city(answer.choices[0].message.tool_calls[0].function.arguments)

    def parsed() -> None:
        answer = client.chat.completions.parse(
            model="demo", messages=ASK, response_format=City, temperature=0, max_tokens=300
        )
        assert answer.choices[0].message.parsed is not None

    def response() -> None:
        tool = {"type": "function", **TOOL["function"]}
        answer = client.responses.create(
            model="demo", input="Weather?", tools=[tool], tool_choice="required", max_output_tokens=200
        )
        is_city(next(item.arguments for item in answer.output if item.type == "function_call"))

    def response_stream() -> None:
        with client.responses.stream(model="demo", input="Hello", max_output_tokens=20) as stream:
            kinds = [event.type for event in stream]
        assert kinds[0] == "response.created" and "response.output_text.delta" in kinds, kinds

    yield "call a tool and send its result back", call
    yield "a streamed call", streamed
    yield "a call that is forced to a schema", forced
    yield "parse with a pydantic model", parsed
    yield "responses.create with a tool", response
    yield "responses.stream", response_stream


def of_anthropic(url: str) -> Iterator[tuple[str, Callable[[], object]]]:
    import anthropic

    client: Any = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    tool = {key: value for key, value in WEATHER.items() if key != "parameters"}
    own: Any = {"model": "demo", "tools": [tool | {"input_schema": WEATHER["parameters"]}]}

    def call() -> None:
        counted = client.messages.count_tokens(messages=ASK, **own)
        answer = client.messages.create(messages=ASK, max_tokens=200, temperature=0, **own)
        assert counted.input_tokens == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
        used = next(block for block in answer.content if block.type == "tool_use")
        assert used.input == {"city": "Bern"}, used
        result = {"type": "tool_result", "tool_use_id": used.id, "content": RESULT}
        again = [
            *ASK,
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": [result]},
        ]
        said = client.messages.create(messages=again, max_tokens=40, temperature=0, **own)
        assert said.content[0].text == SAID, said

    def streamed() -> None:
        with client.messages.stream(model="demo", messages=ASK, max_tokens=20) as stream:
            text = "".join(stream.text_stream)
            assert text == stream.get_final_message().content[0].text and text

    yield "count tokens, call a tool, send its result back", call
    yield "messages.stream", streamed
    yield "three turns of a coding agent, each counted before", partial(_coding_agent, client)


def _coding_agent(client: Any) -> None:
    """Streamed turns with a system prompt, tools, thinking and cache marks; each is counted before."""
    mark = {"cache_control": {"type": "ephemeral"}}
    second = {"name": "now", "description": "Time", "input_schema": {"type": "object", "properties": {}}}
    fixed: Any = {
        "model": "demo",
        "system": [{"type": "text", "text": "You write code.", **mark}],
        "tools": [ANTHROPIC_TOOL, second | mark],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    turns: Any = [{"role": "user", "content": [{"type": "text", "text": "Begin.", **mark}]}]
    for name in ("get_weather", "now", "get_weather"):
        counted = client.messages.count_tokens(messages=turns, **fixed)
        choice = {"type": "tool", "name": name, "disable_parallel_tool_use": True}
        with client.messages.stream(
            messages=turns, max_tokens=2000, tool_choice=choice, metadata={"user_id": "u"}, **fixed
        ) as stream:
            answer = stream.get_final_message()
        usage = answer.usage
        assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
        assert answer.stop_reason == "tool_use" and answer.content[0].name == name
        result = {"type": "tool_result", "tool_use_id": answer.content[0].id, "content": "done"}
        turns += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]


def of_litellm(url: str) -> Iterator[tuple[str, Callable[[], object]]]:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would ask another host for prices
    import litellm

    common: Any = {"api_base": f"{url}/v1", "api_key": "none", "messages": ASK}

    def call() -> None:
        answer: Any = litellm.completion(
            "openai/demo", tools=[TOOL], tool_choice="required", max_tokens=200, **common
        )
        is_city(answer.choices[0].message.tool_calls[0].function.arguments)

    def schema() -> None:
        form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
        answer: Any = litellm.completion("openai/demo", response_format=form, max_tokens=200, **common)
        is_city(answer.choices[0].message.content)

    def responses() -> None:
        answer: Any = litellm.responses(
            model="openai/demo", input="Hello", api_base=f"{url}/v1", api_key="none", max_output_tokens=20
        )
        assert answer.output

    yield "call a tool", call
    yield "a JSON Schema", schema
    yield "responses", responses


def of_langchain(url: str) -> Iterator[tuple[str, Callable[[], object]]]:
    from langchain_openai import ChatOpenAI

    chat: Any = ChatOpenAI(model="demo", base_url=f"{url}/v1", api_key="none", max_tokens=200, max_retries=0)  # type: ignore[arg-type]
    schema = {"title": "City", "description": "A city", **CITY}

    def call() -> None:
        is_city(chat.bind_tools([TOOL], tool_choice="any").invoke("Weather?").tool_calls[0]["args"])

    def stream() -> None:
        assert "".join(str(piece.content) for piece in chat.stream("Hello"))

    yield "bind_tools", call
    yield "with_structured_output", lambda: is_city(chat.with_structured_output(schema).invoke("Weather?"))
    yield (
        "with_structured_output by a call",
        lambda: is_city(chat.with_structured_output(schema, method="function_calling").invoke("Weather?")),
    )
    yield "stream", stream


def of_llm(url: str) -> Iterator[tuple[str, Callable[[], object]]]:
    import llm  # noqa: F401

    def command() -> None:
        with tempfile.TemporaryDirectory() as folder:
            models = f'- model_id: m\n  model_name: demo\n  api_base: "{url}/v1"\n  api_key_name: none\n'
            (Path(folder) / "extra-openai-models.yaml").write_text(models, encoding="utf-8")
            (Path(folder) / "keys.json").write_text('{"none": "none"}', encoding="utf-8")
            line = [str(Path(sys.executable).parent / "llm"), "-m", "m", "Hello", "-o", "max_tokens", "20"]
            environment = {**os.environ, "LLM_USER_PATH": folder}
            done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
            assert done.returncode == 0 and done.stdout.strip(), done.stderr

    yield "a prompt on the command line", command


def of_agents(url: str) -> Iterator[tuple[str, Callable[[], object]]]:
    import agents
    import openai
    from pydantic import BaseModel

    agents.set_tracing_disabled(True)

    class Report(BaseModel):
        city: Literal["Bern", "Basel"]
        good: bool

    async def two_tools(kind: Any) -> None:
        """An agent calls a tool, a second one calls another with that result, and a third one reports."""

        def get_weather(city: Literal["Bern", "Basel"]) -> str:
            """Weather"""
            return f"sunny in {city}"

        def now(zone: Literal["UTC"]) -> str:
            """Time"""
            return f"noon in {zone}"

        tools = [agents.function_tool(get_weather), agents.function_tool(now)]
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            history: Any = [{"role": "user", "content": "Weather?"}]
            for name, ends in (("get_weather", "sunny in "), ("now", "noon in UTC"), (None, "")):
                agent = agents.Agent(
                    name="a",
                    instructions="Be kind",
                    model=kind("demo", client),
                    tools=tools if name else [],
                    tool_use_behavior="stop_on_first_tool",
                    output_type=None if name else Report,
                    model_settings=agents.ModelSettings(
                        tool_choice=name, parallel_tool_calls=False if name else None, temperature=0
                    ),
                )
                done = await agents.Runner.run(agent, history, max_turns=2)
                if name:
                    assert done.final_output.startswith(ends), done.final_output
                else:
                    assert isinstance(done.final_output, Report)
                history = [*done.to_input_list(), {"role": "user", "content": "And then?"}]

    for kind in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
        yield (
            f"two tools in turn, then a report, by {kind.__name__}",
            lambda k=kind: asyncio.run(two_tools(k)),
        )
