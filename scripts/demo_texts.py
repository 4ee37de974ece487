"""Writes what the demo answers into the pages that ask it something.

    python -m scripts.demo_texts            writes the answers
    python -m scripts.demo_texts --check    exit code 1 where a page shows another answer, and which

A page asks with a block of Python, of `curl` or of other commands. If the line MARK and a block of text stand
below it, that text is what the block above prints. A server of the demo answers blocks that name
http://localhost:8000. Of an answer to `curl` only the text and the calls are shown. Questions should be
greedy: then a checkpoint always gives the same answers.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parent.parent
MARK = "<!-- scripts/demo_texts.py wrote this answer of the demo -->"
ADDRESS = "http://localhost:8000"
"""The address of a server in the pages."""
_FENCE = "```"
_ASKED = re.compile(
    rf"^{_FENCE}(?P<language>\w*)\n(?P<question>(?:(?!{_FENCE}).*\n)*){_FENCE}\n\n"
    rf"{re.escape(MARK)}\n{_FENCE}text\n(?P<answer>(?:(?!{_FENCE}).*\n)*){_FENCE}\n",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Question:
    """A block of a page that asks the demo, and the answer that stands below it."""

    language: str
    text: str
    answer: str


def list_pages(root: Path = ROOT) -> list[Path]:
    """The pages that may ask the demo."""
    folders = ("docs", "docs/ideas", "examples", "training")
    return [root / "README.md", *(page for name in folders for page in sorted((root / name).glob("*.md")))]


def list_questions(page: str) -> list[Question]:
    """The questions of a page, in their order. It stops at a mark that is not between two blocks."""
    found = [Question(one["language"], one["question"], one["answer"]) for one in _ASKED.finditer(page)]
    if page.count(MARK) != len(found):
        raise SystemExit(f"got {page.count(MARK)} marks; allowed: {len(found)}, each between two blocks")
    return found


def replace_answers(page: str, url: str) -> str:
    """The page with the answers that the demo gives now. url: the server's, without a path."""

    def replace(found: re.Match[str]) -> str:
        answer = ask(Question(found["language"], found["question"], found["answer"]), url)
        before, after = found.start("answer") - found.start(), found.end("answer") - found.start()
        return f"{found[0][:before]}{answer}{found[0][after:]}"

    return _ASKED.sub(replace, page)


def ask(question: Question, url: str) -> str:
    """What a question prints, with a new line at its end."""
    text = question.text.replace(ADDRESS, url)
    if question.language == "python":
        return _run([sys.executable, "-c", text])
    if text.startswith("curl "):
        commands = re.split(r"^(?=curl )", text, flags=re.MULTILINE)
        return "".join(f"{_post(command)}\n" for command in commands if command)
    return _run(["bash", "-e", "-c", text])


def _run(command: list[str]) -> str:
    """What a command prints, in the project's folder and with this Python's programs."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PATH": path}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{command[-1]}\nended with {done.returncode}: {done.stderr}")
    return done.stdout.rstrip("\n") + "\n"


def _post(command: str) -> str:
    """The texts and the calls of the answer to a `curl URL -H HEADER -d BODY`."""
    words = shlex.split(command.replace("\\\n", " "))
    name, _, value = words[words.index("-H") + 1].partition(": ")
    with httpx.Client(timeout=120, trust_env=False) as client:
        answer = client.post(words[1], content=words[words.index("-d") + 1], headers={name: value})
    if answer.status_code != 200:
        raise SystemExit(f"{command}\ngot {answer.status_code}: {answer.text}")
    return "\n".join(list_parts(answer.json()))


def list_parts(answer: Any) -> Iterator[str]:
    """The texts and the calls of an answer of OpenAI's chats, completions or responses, or of Anthropic's."""
    for choice in answer.get("choices", ()):
        yield from filter(None, [choice.get("text") or choice.get("message", {}).get("content")])
        for call in choice.get("message", {}).get("tool_calls") or ():
            yield _tell_call(call["function"]["name"], json.loads(call["function"]["arguments"]))
    for item in (*(answer.get("content") or ()), *(answer.get("output") or ())):
        if "name" in item:
            yield _tell_call(item["name"], item.get("input") or json.loads(item["arguments"]))
        else:
            yield from (part["text"] for part in item.get("content", [item]))


def _tell_call(name: str, arguments: Any) -> str:
    return f"a call of {name} with {json.dumps(arguments, ensure_ascii=False)}"


@contextmanager
def serving() -> Iterator[str]:
    """The address of a server of the demo."""
    command = [sys.executable, "-m", "moesaic", "serve", "demo", "--port", "0", "--json"]
    with subprocess.Popen([*command, "--disable-log-stats"], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield str(json.loads(server.stdout.readline())["url"])
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(timeout=60)


def list_changes(root: Path = ROOT) -> dict[Path, tuple[str, str]]:
    """Each page with another answer than the demo's -> its text, and the text that it should have."""
    pages = {page: page.read_text(encoding="utf-8") for page in list_pages(root)}
    pages = {page: text for page, text in pages.items() if list_questions(text)}
    if not pages:
        return {}
    with serving() as url:
        written = {page: (text, replace_answers(text, url)) for page, text in pages.items()}
    return {page: texts for page, texts in written.items() if texts[0] != texts[1]}


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args(arguments)
    changes = list_changes()
    for page, (before, after) in changes.items():
        name = str(page.relative_to(ROOT))
        print("".join(unified_diff(before.splitlines(True), after.splitlines(True), name, name, n=0)), end="")
        if not options.check:
            page.write_text(after, encoding="utf-8")
    if options.check and changes:
        print("the demo answers otherwise; run: python -m scripts.demo_texts")
    return 1 if options.check and changes else 0


if __name__ == "__main__":
    raise SystemExit(main())
