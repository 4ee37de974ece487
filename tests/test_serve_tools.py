"""Tools in `moesaic serve` as a person runs it: real processes, real checkpoints, the openai client."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support import scripted_checkpoint
from tests.test_serve import start

TEMPLATE = (
    "{{ tools | tojson }}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}{% endfor %}"
)
SCRIPT = (
    (
        "<0>",
        "<think>",
        "First the time.",
        "</think>",
        "<tool_call>",
        '{"name": "now", "arg',
        'uments": {}}',
        "</tool_call>",
    ),
    (
        "<1>",
        "I look.",
        "\n<tool_",
        'call>{"name": "get_weather", "arguments": {"city"',
        ': "Bern"}}',
        "</tool_",
        "call>",
    ),
    ("<2>", "It is sunny", " at noon in", " Bern."),
)
SPECIAL = ("<end>", "<0>", "<1>", "<2>", "<tool_call>", "</tool_call>")
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Bern", "Basel"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "now"}},
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
]


@contextlib.contextmanager
def client_of(*flags: str, model: str = "demo") -> Iterator[tuple[openai.OpenAI, dict[str, Any]]]:
    server = start(*flags, model=model)
    try:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            yield client, server.info
    finally:
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0
        assert server.process.stdout is not None
        server.process.stdout.close()


@pytest.mark.slow
def test_an_agent_and_a_model_that_calls_two_tools(tmp_path: Path) -> None:
    results = "messages | selectattr('role', 'eq', 'tool') | list | length"
    last = f"{{% if add_generation_prompt %}}<{{{{ {results} }}}}>{{% endif %}}"
    scripted_checkpoint.write(tmp_path, SCRIPT, SPECIAL, f"{TEMPLATE}{last}{{# <think> #}}")
    tools = {"now": lambda: "noon", "get_weather": lambda city: f"sunny in {city}"}
    messages: list[Any] = [{"role": "user", "content": "How is the weather?"}]
    answers: list[Any] = []
    with client_of("--served-model-name", "m", model=str(tmp_path)) as (client, info):
        assert (info["tool_call_parser"], info["reasoning_parser"]) == ("hermes", "qwen3")
        while not answers or answers[-1].finish_reason == "tool_calls":
            options: Any = {"model": "m", "messages": messages, "tools": TOOLS, "temperature": 0}
            answers.append(client.chat.completions.create(**options).choices[0])
            message = answers[-1].message
            with client.chat.completions.stream(**options) as stream:
                streamed = stream.get_final_completion().choices[0].message
            assert (streamed.content or None) == message.content
            assert [c.function.arguments for c in streamed.tool_calls or []] == [
                c.function.arguments for c in message.tool_calls or []
            ]
            messages.append(message.model_dump())
            for call in message.tool_calls or []:
                result = tools[call.function.name](**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    assert [message["content"] for message in messages[1:]] == [
        *(None, "noon", "I look.", "sunny in Bern", "It is sunny at noon in Bern.")
    ]
    assert answers[0].message.reasoning == "First the time." and answers[-1].finish_reason == "stop"


@pytest.mark.slow
def test_a_small_model_is_forced_to_call(tmp_path: Path) -> None:
    """The demo knows another form of calls. What forces it is the grammar."""
    file = tmp_path / "template.jinja"
    file.write_text(f"{TEMPLATE}{{# <tool_call> <function= #}}")
    with client_of("--chat-template", str(file), "--reasoning-parser", "none") as (client, info):
        assert (info["tool_call_parser"], info["reasoning_parser"]) == ("qwen3_coder", None)
        options: Any = {"tools": TOOLS, "parallel_tool_calls": False, "seed": 1, "max_tokens": 400}
        answers = client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "Hi"}],
            tool_choice={"type": "function", "function": {"name": "get_weather"}},
            n=3,
            **options,
        ).choices
        for answer in answers:
            assert answer.finish_reason == "stop" and answer.message.content is None
            (call,) = answer.message.tool_calls or []
            assert call.type == "function" and call.function.name == "get_weather"
            found = json.loads(call.function.arguments)
            assert found["city"] in ("Bern", "Basel") and found["days"] in range(1, 10)
            assert len(found) == 2
