"""Tries other people's clients against a real server: tools, structured output, streams, token counts.

    python -m venv clients
    clients/bin/pip install openai anthropic litellm langchain-openai llm openai-agents
    clients/bin/pip install "lm-eval[api]" guidellm playwright
    npm install openai @anthropic-ai/sdk
    clients/bin/python -m scripts.other_clients .venv/bin/moesaic

Programs may stand in environments of their own: they are looked for beside this Python and in PATH. node
finds its packages in the working directory. A browser is `chromium` in PATH.

Serves the demo with a chat template that takes tools. Its answers are nonsense of the right form: grammars
force the calls. Prints a line for each thing that a client did. Exits 1 if one of them failed. A client that
is not installed is left out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from scripts.other_clients import libraries, programs

TEMPLATE = """{% if tools %}<|im_start|>system
Tools: {% for t in tools %}{{ t | tojson }}{% endfor %}
A call is <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>
{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


CLIENTS = {
    "openai": libraries.of_openai,
    "anthropic": libraries.of_anthropic,
    "litellm": libraries.of_litellm,
    "langchain-openai": libraries.of_langchain,
    "llm": libraries.of_llm,
    "openai-agents": libraries.of_agents,
    "lm-eval": programs.of_lm_eval,
    "guidellm": programs.of_guidellm,
    "node": programs.of_node,
    "chromium": programs.of_browser,
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
        line += ["--enable-tokenizer-info-endpoint", "--allowed-origins", "*"]
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
