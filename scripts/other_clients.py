"""Tries other people's clients against a real server: tools, structured output, streams, token counts.

    python -m venv clients
    clients/bin/pip install openai anthropic litellm langchain-openai llm
    clients/bin/python scripts/other_clients.py .venv/bin/moesaic

Serves the demo with a chat template that takes tools. Its answers are nonsense of the right form: grammars
force the calls. Prints a line for each thing that a client did. Exits 1 if one of them failed. A client that
is not installed is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

TEMPLATE = """{% if tools %}<|im_start|>system
Tools: {% for t in tools %}{{ t | tojson }}{% endfor %}
A call is <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>
{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
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

    def call() -> None:
        answer = client.chat.completions.create(
            model="demo", messages=ASK, tools=[TOOL], tool_choice="required", max_tokens=200
        )
        [called] = answer.choices[0].message.tool_calls[:1]
        is_city(called.function.arguments)
        result = {"role": "tool", "tool_call_id": called.id, "content": "sunny"}
        again = [*ASK, answer.choices[0].message.model_dump(exclude_none=True), result]
        client.chat.completions.create(model="demo", messages=again, tools=[TOOL], max_tokens=20)

    def streamed() -> None:
        pieces = client.chat.completions.create(
            model="demo", messages=ASK, tools=[TOOL], tool_choice="required", max_tokens=200, stream=True
        )
        deltas = [call for piece in pieces for call in piece.choices[0].delta.tool_calls or []]
        is_city("".join(one.function.arguments or "" for one in deltas if one.index == 0))

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
    yield "parse with a pydantic model", parsed
    yield "responses.create with a tool", response
    yield "responses.stream", response_stream


def of_anthropic(url: str) -> Iterator[tuple[str, Callable[[], object]]]:
    import anthropic

    client: Any = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    tool = {"name": "get_weather", "description": "Weather", "input_schema": CITY}

    def call() -> None:
        counted = client.messages.count_tokens(model="demo", messages=ASK, tools=[tool])
        answer = client.messages.create(
            model="demo", messages=ASK, tools=[tool], tool_choice={"type": "any"}, max_tokens=200
        )
        assert counted.input_tokens == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
        used = next(block for block in answer.content if block.type == "tool_use")
        is_city(used.input)
        result = {"type": "tool_result", "tool_use_id": used.id, "content": "sunny"}
        again = [
            *ASK,
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": [result]},
        ]
        client.messages.create(model="demo", messages=again, tools=[tool], max_tokens=20)

    def streamed() -> None:
        with client.messages.stream(model="demo", messages=ASK, max_tokens=20) as stream:
            text = "".join(stream.text_stream)
            assert text == stream.get_final_message().content[0].text and text

    yield "count tokens, call a tool, send its result back", call
    yield "messages.stream", streamed


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


CLIENTS = {
    "openai": of_openai,
    "anthropic": of_anthropic,
    "litellm": of_litellm,
    "langchain-openai": of_langchain,
    "llm": of_llm,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("moesaic", help="the program")
    options = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder) / "tools.jinja"
        template.write_text(TEMPLATE, encoding="utf-8")
        line = [options.moesaic, "serve", "demo", "--port", "0", "--json", "--chat-template", str(template)]
        with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            url = json.loads(server.stdout.readline())["url"]
            try:
                for name, client in CLIENTS.items():
                    failed += _tried(name, client, url)
            finally:
                server.terminate()
    return 1 if failed else 0


def _tried(name: str, client: Callable[[str], Iterator[tuple[str, Callable[[], object]]]], url: str) -> int:
    """How many things of a client failed."""
    failed = 0
    try:
        tasks = list(client(url))
    except ImportError as error:
        print(f"{name}: left out ({error})")
        return 0
    for what, task in tasks:
        try:
            task()
        except Exception:
            failed += 1
            print(f"{name}: FAILED: {what}")
            traceback.print_exc()
        else:
            print(f"{name}: {what}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
