"""The clients that the pages show, against the server that they name: `moesaic serve demo`."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from moesaic.models.files import resolve
from moesaic.text.parsers.table import detect_formats
from moesaic.text.tokenizer import Tokenizer
from tests.test_serve_tools import client_of

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").glob("*.md"))]
PROPERTIES = {"a": {"type": "string"}}
FUNCTION = {
    "name": "f",
    "description": "Does it.",
    "parameters": {"type": "object", "properties": PROPERTIES},
}
TOOL = {"type": "function", "function": FUNCTION}
CITY, TABLE = {"city": {"type": "string"}}, {"people": {"type": "integer"}, "day": {"type": "string"}}
REAL_TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": text,
            "parameters": {"type": "object", "properties": properties, "required": list(properties)},
        },
    }
    for name, text, properties in (
        ("get_weather", "Get the weather of a city.", CITY),
        ("book_table", "Book a table in a restaurant.", TABLE),
    )
]
"""Tools in words of the demo's training."""


def list_curls() -> Iterator[list[str]]:
    """The words of each command of curl in the pages."""
    for page in PAGES:
        for block in re.findall(
            r"^```\w*\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
        ):
            if re.search(r"^curl ", block, re.MULTILINE):
                for command in re.split(r"^(?=curl )", block, flags=re.MULTILINE):
                    yield from (
                        [shlex.split(command.replace("\\\n", " "))] if command.startswith("curl ") else []
                    )


def has_called(answer: dict[str, Any]) -> bool:
    """Whether an answer of any API has a call of get_weather with arguments of its schema."""
    calls = [item for item in (*answer.get("content", ()), *answer.get("output", ())) if "name" in item]
    calls += [
        call["function"] for choice in answer.get("choices", ()) for call in choice["message"]["tool_calls"]
    ]
    if not calls or any(call["name"] != "get_weather" for call in calls):
        return False
    arguments = calls[0].get("input") or json.loads(calls[0]["arguments"])  # a later call may be cut
    return arguments["city"] in ("Bern", "Basel")


@pytest.mark.slow
def test_every_curl_of_the_pages_is_answered() -> None:
    curls = list(list_curls())
    assert len(curls) == sum(page.read_text(encoding="utf-8").count("curl http") for page in PAGES)
    assert {word.removeprefix("http://localhost:8000") for _, word, *_ in curls} >= {
        "/v1/chat/completions",
        "/v1/messages",
        "/v1/responses",
    }
    with client_of() as (client, _):
        server = str(client.base_url).removesuffix("/v1/")
        for _, url, header_flag, header, data_flag, data in curls:
            assert (header_flag, header, data_flag) == ("-H", "Content-Type: application/json", "-d")
            assert url.startswith("http://localhost:8000/")
            answer = httpx.post(
                url.replace("http://localhost:8000", server),
                content=data,
                headers={"Content-Type": "application/json"},
                timeout=120,
                trust_env=False,
            )
            assert answer.status_code == 200, (url, answer.text)
            assert "tools" not in json.loads(data) or has_called(answer.json()), answer.text


def converse(
    client: openai.OpenAI, question: str, results: dict[str, Any], before: Sequence[Any] = (), **more: Any
) -> tuple[list[Any], str | None]:
    """The calls and the last text of a conversation in which every tool returns what `results` has."""
    create: Any = client.chat.completions.create
    messages: list[Any] = [*before, {"role": "user", "content": question}]
    options: Any = {"model": "demo", "tools": REAL_TOOLS, "temperature": 0, "max_tokens": 96, **more}
    message = create(messages=messages, **options).choices[0].message
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]
    with client.chat.completions.stream(messages=messages, **options) as stream:
        streamed = stream.get_final_completion().choices[0].message.tool_calls or ()
    assert calls == [(call.function.name, json.loads(call.function.arguments)) for call in streamed]
    if not calls:
        return calls, message.content
    [call] = message.tool_calls
    result = json.dumps(results[call.function.name])
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    return calls, create(messages=messages, **options).choices[0].message.content


@pytest.mark.slow
def test_the_demo_calls_real_tools_through_openais_client() -> None:
    """Nothing forces it: the parser is the one that `auto` chooses, and no grammar is used."""
    results = {"get_weather": {"temperature": 12, "sky": "sunny"}, "book_table": {"status": "ok"}}
    developer = {"role": "developer", "content": "You are a helpful assistant."}
    no_thinking = {"chat_template_kwargs": {"enable_thinking": False}}
    with client_of("--tool-call-parser", "auto") as (client, info):
        assert (info["tool_call_parser"], info["reasoning_parser"]) == ("hermes", None)
        assert converse(client, "What is the weather in Oslo?", results) == (
            [("get_weather", {"city": "Oslo"})],
            "It is 12 degrees and sunny in Oslo.",
        )
        asked = "Reserve a table for 4 on Friday."
        assert converse(client, asked, results, [developer], extra_body=no_thinking) == (
            [("book_table", {"people": 4, "day": "Friday"})],
            "The table for 4 people is booked for Friday.",
        )
        assert converse(client, "Play moon.", results) == ([], "None of my tools can do that.")


@pytest.mark.parametrize("role", ["system", "developer"])
def test_the_demos_template_takes_instructions_and_tools(role: str) -> None:
    tokenizer = Tokenizer(resolve("demo"))
    messages: list[Any] = [
        {"role": role, "content": "Be brief."},
        {"role": "user", "content": "Hi "},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "1 + 1"},
    ]
    assert tokenizer.decode(tokenizer.chat(messages), False).replace("developer\n", "system\n") == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi <|im_end|>\n"
        "<|im_start|>assistant\nYes?<|im_end|>\n<|im_start|>user\n1 + 1<|im_end|>\n<|im_start|>assistant\n"
    )
    formats = detect_formats(tokenizer.chat_template)
    assert (formats.calls, formats.takes_tools, formats.reasoning) == ("hermes", True, None)
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": "b"}}}
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    messages += [{"role": "tool", "content": "12"}]
    text = tokenizer.decode(tokenizer.chat(messages, tools=[TOOL]), False)
    assert all(part in text for part in ("f", "Does it.", json.dumps(PROPERTIES)))
    assert '<tool_call>\n{"name": "f", "arguments": {"a": "b"}}\n</tool_call>' in text
    assert text.endswith("<|im_start|>tool\n12<|im_end|>\n<|im_start|>assistant\n")
