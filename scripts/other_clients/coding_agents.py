"""Coding agents with their default settings: a call, its result, a second turn, and compaction.

Each agent runs in a scratch folder that is also its home. Its settings name the server and turn off updates
and statistics. All others are its defaults.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from scripts.other_clients.programs import find_program
from scripts.other_clients.relay import CALL, Relay, find_last_text, list_messages

Tasks = Iterator[tuple[str, Callable[[], object]]]
KEY = "none"


def of_claude_code(url: str, folder: Path) -> Tasks:
    program = find_program("claude")
    folder.mkdir()

    def run(relay: Relay, *line: str, text: str) -> None:
        environment = {
            "ANTHROPIC_BASE_URL": relay.url,
            "ANTHROPIC_API_KEY": KEY,
            "ANTHROPIC_MODEL": "made",
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": "made",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        }
        said = run_agent([program, "-p", "--output-format", "json", *line], folder, environment, text)
        answer = json.loads(said)
        assert not answer["is_error"] and answer["result"], said

    def call() -> None:
        with Relay(url, tool="Bash") as relay:
            run(relay, text=f"{CALL}.")
            run(relay, "--continue", text=f"{CALL} once more.")
            relay.check_calls(2)
            relay.force_each_tool()

    def compact() -> None:
        with Relay(url) as relay:
            run(relay, "--continue", text=make_digits(150_000))
            run(relay, "--continue", text=make_digits(100_000))
            run(relay, "--continue", text="Go on.")
        check_compaction(relay)
        assert [exchange.status for exchange in relay.refused] == [400]
        assert "prompt is too long" in relay.refused[0].answer, relay.refused

    yield TURNS, call
    yield "a prompt longer than the context: refused once, compacted, and it goes on", compact


def of_codex(url: str, folder: Path) -> Tasks:
    program = find_program("codex")
    folder.mkdir()

    def run(relay: Relay, *line: str, text: str) -> None:
        home = folder / ".codex"
        home.mkdir(exist_ok=True)
        settings = CODEX % relay.url
        (home / "config.toml").write_text(settings, encoding="utf-8")
        line = ("exec", *line, "--skip-git-repo-check", "--json", "-")
        said = run_agent([program, *line], folder, {"CODEX_HOME": str(home)}, text)
        events = [json.loads(event) for event in said.splitlines() if event.startswith("{")]
        assert events[-1]["type"] == "turn.completed", said

    def call() -> None:
        with Relay(url, tool="exec_command") as relay:
            run(relay, text=f"{CALL}.")
            run(relay, "resume", "--last", text=f"{CALL} once more.")
            relay.check_calls(2)
            relay.force_each_tool()

    def compact() -> None:
        with Relay(url) as relay:
            run(relay, "resume", "--last", text=make_digits(235_000))
            run(relay, "resume", "--last", text="Go on.")
        check_compaction(relay)
        assert not relay.refused, relay.refused

    def call_in_namespace() -> None:
        with Relay(url, tool="multi_agent_v1__close_agent") as relay:
            run(relay, text=f"{CALL}.")
            relay.check_calls(1)
        results = [
            item for item in relay.exchanges[-1].body["input"] if item["type"] == "function_call_output"
        ]
        assert results and "unsupported" not in results[0]["output"], results

    def overflow() -> None:
        with Relay(url) as relay:
            said = expect_failure(run, relay, "resume", "--last", text=make_digits(200_000))
        assert "ran out of room in the model" in said, said
        assert [exchange.status for exchange in relay.exchanges] == [400], relay.exchanges

    yield TURNS, call
    yield "a call of a tool in a namespace, and its result", call_in_namespace
    yield "a conversation longer than its own limit: compacted, and it goes on", compact
    yield "a prompt longer than the context: it says so, since it compacts only by its own limit", overflow


def of_opencode(url: str, folder: Path) -> Tasks:
    program = find_program("opencode")
    folder.mkdir()

    def run(relay: Relay, *line: str, text: str) -> None:
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "name": "moesaic",
            "options": {"baseURL": f"{relay.url}/v1", "apiKey": KEY},
            "models": {"made": {"name": "made", "limit": {"context": 262144, "output": 4096}}},
        }
        settings = {"provider": {"moesaic": provider}, "model": "moesaic/made", "autoupdate": False}
        (folder / "opencode.json").write_text(json.dumps(settings), encoding="utf-8")
        environment = {"OPENCODE_DISABLE_MODELS_FETCH": "1"}
        said = run_agent([program, "run", "--format", "json", *line], folder, environment, text)
        events = [json.loads(event) for event in said.splitlines()]
        assert events and all(event["type"] != "error" for event in events), said

    def call() -> None:
        with Relay(url, tool="glob") as relay:
            run(relay, text=f"{CALL}.")
            run(relay, "--continue", text=f"{CALL} once more.")
            relay.check_calls(2)
            relay.force_each_tool()

    def compact() -> None:
        with Relay(url) as relay:
            run(relay, "--continue", text=make_digits(230_000))
            said = expect_failure(run, relay, "--continue", text=make_digits(30_000))
            run(relay, "--continue", text="Go on.")
        assert "ContextOverflowError" in said and '"text":"ls"' in said, said
        check_compaction(relay)
        assert relay.refused
        assert all("context_length_exceeded" in exchange.answer for exchange in relay.refused), relay.refused

    yield TURNS, call
    yield "a prompt longer than the context: refused once, compacted, and it goes on", compact


def of_qwen_code(url: str, folder: Path) -> Tasks:
    program = find_program("qwen")
    folder.mkdir()

    def run(relay: Relay, *line: str, text: str) -> None:
        environment = {
            "OPENAI_BASE_URL": f"{relay.url}/v1",
            "OPENAI_API_KEY": KEY,
            "OPENAI_MODEL": "made",
        }
        home = folder / ".qwen"
        home.mkdir(exist_ok=True)
        settings = {"privacy": {"usageStatisticsEnabled": False}, "general": {"disableAutoUpdate": True}}
        (home / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
        line = ("--auth-type", "openai", "--output-format", "json", *line)
        events = json.loads(run_agent([program, *line], folder, environment, text))
        assert events[-1]["type"] == "result" and not events[-1]["is_error"], events

    def call() -> None:
        with Relay(url, tool="glob") as relay:
            run(relay, text=f"{CALL}.")
            run(relay, "--continue", text=f"{CALL} once more.")
            relay.check_calls(2)
            relay.force_each_tool()

    def compact() -> None:
        with Relay(url) as relay:
            run(relay, "--continue", text=make_digits(230_000))
            run(relay, "--continue", text="Go on.")
        check_compaction(relay)
        assert not relay.refused, relay.refused

    yield TURNS, call
    yield "a conversation longer than its own limit: compacted, and it goes on", compact


def of_aider(url: str, folder: Path) -> Tasks:
    program = find_program("aider")
    folder.mkdir()

    def talk() -> None:
        with Relay(url) as relay:
            environment = {"OPENAI_API_BASE": f"{relay.url}/v1", "OPENAI_API_KEY": KEY}
            environment |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
            quiet = ("--no-check-update", "--analytics-disable", "--no-show-model-warnings", "--no-git")
            for text in ("Name a file.", "Name it again."):
                line = [program, "--model", "openai/made", "--yes-always", "--no-pretty", *quiet]
                said = run_agent([*line, "--restore-chat-history", "--message", text], folder, environment)
                assert "ls" in said.splitlines(), said
            assert len(relay.exchanges) >= 2 and not relay.refused, relay.exchanges
            assert any("Name a file." in json.dumps(list_messages(sent.body)) for sent in relay.exchanges[1:])

    yield "two turns with the history of the first (it uses no tools)", talk


CODEX = """
model = "made"
model_provider = "moesaic"
check_for_update_on_startup = false
[model_providers.moesaic]
name = "moesaic"
base_url = "%s/v1"
wire_api = "responses"
[analytics]
enabled = false
"""
TURNS = "a call, its result, and the same in a second turn; then each of its tools, forced by name"

AGENTS: dict[str, Callable[[str, Path], Tasks]] = {
    "claude-code": of_claude_code,
    "codex": of_codex,
    "opencode": of_opencode,
    "qwen-code": of_qwen_code,
    "aider": of_aider,
}


def check_compaction(relay: Relay) -> None:
    """Raises AssertionError unless the last prompt is far shorter than the longest."""
    sizes = [len(json.dumps(list_messages(exchange.body))) for exchange in relay.exchanges]
    last = [find_last_text(exchange.body)[:200] for exchange in relay.exchanges]
    assert sizes[-1] < 2 * max(sizes) / 3, (sizes, last)


def expect_failure(run: Callable[..., None], *line: Any, text: str) -> str:
    """Returns what an agent said that failed. Raises AssertionError if it did not fail."""
    try:
        run(*line, text=text)
    except AssertionError as error:
        return str(error)
    raise AssertionError(f"the agent did not fail: {line[1:]}")


def make_digits(count: int) -> str:
    """Returns lines of digits. In the made checkpoint each digit is a token."""
    draw = random.Random(0)
    digits = "".join(draw.choices("0123456789", k=count))
    return "\n".join(digits[start : start + 100] for start in range(0, count, 100))


def run_agent(line: list[str], folder: Path, environment: dict[str, str], text: str = "") -> str:
    """Returns what an agent printed. Raises AssertionError if it failed."""
    own = {"HOME": str(folder), "PATH": os.environ["PATH"], "TERM": "dumb", "LANG": "C.UTF-8"}
    done = subprocess.run(
        line,
        cwd=folder,
        env=own | environment,
        input=text,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, (done.returncode, done.stdout[-3000:], done.stderr[-3000:])
    return done.stdout
