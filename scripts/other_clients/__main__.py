"""Tries other people's clients against a real server: tools, structured output, streams, token counts.

    scripts/try_clients    installs current versions of them all, and tries each; `make clients`
    python -m scripts.other_clients .venv/bin/moesaic --only codex,aider

Programs are looked for beside this Python, in `node_modules` of the working directory, and in PATH. node
finds its packages in the working directory. A browser is `chromium` in PATH.

Libraries and load generators ask the demo. It calls tools by itself, and where a schema is strange to it, a
grammar forces the call. Frameworks and coding agents ask a made checkpoint of a long context
(`checkpoint.py`), agents through a relay that forces calls (`relay.py`). Prints a line for each thing that a
client did. Exits 1 if one of them failed. A client that is not installed is left out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path

from scripts.other_clients import coding_agents, frameworks, libraries, programs

Client = Callable[[str], Iterator[tuple[str, Callable[[], object]]]]

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
"""Clients of the demo."""
FRAMEWORKS = {
    "pydantic-ai": frameworks.of_pydantic_ai,
    "instructor": frameworks.of_instructor,
    "ai-sdk": frameworks.of_ai_sdk,
}
"""Clients of the made checkpoint, as the coding agents are."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("moesaic", type=Path, help="the program")
    parser.add_argument("--only", default="", help="names of clients, with commas between them")
    options = parser.parse_args()
    names = [*CLIENTS, *FRAMEWORKS, *coding_agents.AGENTS]
    chosen = options.only.split(",") if options.only else names
    if unknown := [name for name in chosen if name not in names]:
        parser.error(f"--only {options.only}: {unknown[0]} is none of {', '.join(names)}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made = folder / "made"
        demo = ["demo", "--enable-tokenizer-info-endpoint"]
        failed = try_clients(options.moesaic, [*demo, "--allowed-origins", "*"], CLIENTS, chosen)
        made.mkdir()
        python = options.moesaic.parent / "python"
        subprocess.run([python, "-m", "scripts.other_clients.checkpoint", str(made)], check=True)
        agents = {name: partial(agent, folder=folder / name) for name, agent in coding_agents.AGENTS.items()}
        served = [str(made), "--served-model-name", "made"]
        failed += try_clients(options.moesaic, served, FRAMEWORKS | agents, chosen)
    return 1 if failed else 0


def try_clients(
    moesaic: Path, arguments: list[str], clients: Mapping[str, Client], chosen: Collection[str]
) -> int:
    """Returns how many things failed that the chosen clients did with a server of these arguments."""
    if not any(name in chosen for name in clients):
        return 0
    line = [str(moesaic), "serve", *arguments, "--port", "0", "--json"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = json.loads(server.stdout.readline())["url"]
        try:
            return sum(_tried(name, client, url) for name, client in clients.items() if name in chosen)
        finally:
            server.terminate()


def _tried(name: str, client: Client, url: str) -> int:
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
