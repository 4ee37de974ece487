"""`moesaic chat`: messages, the screen, and real terminals."""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest
from tests.server.conftest import NO_TLS
from tests.support.fake_streaming_server import FakeServer
from tests.support.processes import all_children, gone
from tests.support.terminal import Terminal
from tests.test_serve import COMMAND

from moesaic.commands import cli
from moesaic.commands.chat import Screen, read_message
from moesaic.commands.conversation import Answer, Conversation
from moesaic.server.client import Chunk, Client, Usage

CHAT = (sys.executable, "-m", "moesaic", "chat")


@pytest.mark.parametrize(
    ("lines", "message", "left"),
    [
        (["Hi", "x"], "Hi", 1),
        (["one\\", "two\\", "three", "x"], "one\ntwo\nthree", 1),
        (['"""one', "", ' two"""', "x"], "one\n\n two", 1),
        (['"""all in one"""', "x"], "all in one", 1),
        (['"""', "a", '"""', "x"], "\na\n", 1),
    ],
)
def test_a_message_may_have_several_lines(lines: list[str], message: str, left: int) -> None:
    prompts: list[str] = []

    def ask(prompt: str) -> str:
        prompts.append(prompt)
        return lines.pop(0)

    assert read_message(ask) == message
    assert len(lines) == left and set(prompts[1:]) <= {"... "} and prompts[0] == ">>> "


def test_a_terminal_shows_reasoning_dim_and_obeys_no_control_character() -> None:
    out = io.StringIO()
    screen = Screen(out, terminal=True)
    screen.show(Chunk(0.0, "hm\x1b[2J", reasoning="hm\x1b[2J"))
    screen.show(Chunk(0.0, "Yes\x07\nno"))
    screen.end("3 tokens")
    assert out.getvalue() == "\x1b[2mhm[2J\x1b[0m\n\nYes\nno\n\x1b[2m3 tokens\x1b[0m\n"


def test_a_pipe_gets_the_content_as_it_is() -> None:
    out = io.StringIO()
    screen = Screen(out, terminal=False)
    screen.show(Chunk(0.0, "hmYes\x07", reasoning="hm"))
    screen.end("3 tokens")
    assert out.getvalue() == "Yes\x07\n"


def test_the_line_below_an_answer() -> None:
    answer = Answer()
    for at, text in ((3.0, "a"), (4.0, "b"), (5.0, "c")):
        answer.add(Chunk(at, text))
    assert answer.describe_speed(2.5) == "first after 0.50 s"
    answer.add(Chunk(5.0, "", "length", Usage(2, 3)))
    assert answer.describe_speed(2.5) == (
        "3 tokens, 1.0 tokens/s, first after 0.50 s, cut off at the maximum number of tokens"
    )
    assert Answer().describe_speed(0.0) == ""


class Streaming:
    """An application that answers with one word, and keeps the bodies of its requests."""

    def __init__(self, status: int = 200) -> None:
        self.bodies: list[Any] = []
        self.status = status

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        self.bodies.append(json.loads((await receive())["body"]))
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        event = json.dumps({"choices": [{"delta": {"reasoning_content": "hm", "content": "word"}}]})
        await send({"type": "http.response.body", "body": f"data: {event}\n\n".encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


def test_a_conversation_sends_its_history_and_no_reasoning() -> None:
    app = Streaming()

    async def talk() -> Conversation:
        async with Client(app=app) as client:
            talk = Conversation(client, "m", "Be brief.", {"max_tokens": 3})
            await talk.ask("one", Answer(), lambda chunk: None)
            await talk.ask("two", Answer(), lambda chunk: None)
            app.status = 400
            with pytest.raises(Exception, match="HTTP 400"):
                await talk.ask("refused", Answer(), lambda chunk: None)
            return talk

    talked = asyncio.run(talk())
    said = [f"{one['role']}: {one['content']}" for one in app.bodies[1]["messages"]]
    assert said == ["system: Be brief.", "user: one", "assistant: word", "user: two"]
    assert app.bodies[0]["stream"] is True and app.bodies[0]["max_tokens"] == 3
    assert [one["content"] for one in talked.messages] == ["Be brief.", "one", "word", "two", "word"]
    talked.clear()
    assert [one["role"] for one in talked.messages] == ["system"]


def test_an_answer_of_an_application_arrives_piece_by_piece_and_leaving_ends_it() -> None:
    left = asyncio.Event()

    async def endless(scope: dict[str, Any], receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        event = json.dumps({"choices": [{"text": "x"}]})
        await send({"type": "http.response.body", "body": f"data: {event}\n\n".encode(), "more_body": True})
        assert (await receive())["type"] == "http.disconnect"
        left.set()

    async def read_one() -> str:
        async with Client(app=endless) as client:
            stream = client.stream("/x", {})
            first = await anext(stream)
            await stream.aclose()
            return first.text

    assert asyncio.run(read_one()) == "x"
    assert left.is_set()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("chat demo --model x", "--model: got 'x'; allowed: nothing where demo is the model"),
        ("chat http://h --prefix-cache-dir d", "--prefix-cache-dir: got 'd'; allowed: nothing with a server"),
        ("chat http://h --threads 2", "--threads: got '2'; allowed: nothing with a server's URL"),
        ("chat localhost:8000", "'localhost:8000'; allowed: a model, or a URL such as http://localhost:8000"),
        ("chat demo --max-tokens 0", "--max-tokens: got 0; allowed: an integer of at least 1"),
    ],
)
def test_mistakes(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(line.split()) == 2
    assert message in capsys.readouterr().err


def test_no_server_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi"))
    assert cli.main(["chat", "http://127.0.0.1:1"]) == 1
    error = capsys.readouterr().err
    assert "start a server with moesaic serve MODEL" in error and error.count("\n") == 1


def test_a_pipe_is_one_message(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as server:
        monkeypatch.setattr(sys, "stdin", io.StringIO("two\nlines\n"))
        assert cli.main(["chat", server.url, "--max-tokens", "2", "--system-prompt", "Hm"]) == 0
    assert capsys.readouterr().out == "a\u2028b" * 2 + "\n"
    messages = [{"role": "system", "content": "Hm"}, {"role": "user", "content": "two\nlines"}]
    assert server.bodies[0]["messages"] == messages
    with FakeServer() as server:
        monkeypatch.setattr(sys, "stdin", io.StringIO(" \n"))
        assert cli.main(["chat", server.url]) == 2


@pytest.mark.slow
def test_a_refused_message_is_one_line_and_the_chat_goes_on() -> None:
    with FakeServer(status=400) as server, Terminal(*CHAT, server.url) as terminal:
        terminal.wait_for(">>> ")
        for _ in range(2):
            terminal.type("Hi\n")
            terminal.wait_for("moesaic: HTTP 400: no thanks; this message is not part of the conversation")
            terminal.wait_for(">>> ")
        terminal.type("/exit\n")
        assert terminal.wait() == 0
    assert [len(body["messages"]) for body in server.bodies] == [1, 1]


@pytest.mark.slow
def test_ctrl_c_stops_the_answer_and_not_the_program() -> None:
    with FakeServer(step=3600.0) as server, Terminal(*CHAT, server.url, "--max-tokens", "9") as terminal:
        terminal.wait_for("Talking to fake.*\n.*>>> ")
        terminal.type("Hi\n")
        terminal.wait_for("a\u2028b")
        terminal.type("\x03")
        terminal.wait_for("stopped\n.*>>> ")
        terminal.press_until("\x03", "/exit or Ctrl-D ends")
        terminal.type("again\n")
        terminal.wait_for("a\u2028b")
        terminal.type("\x03")
        terminal.wait_for("stopped\n.*>>> ")
        terminal.type("\x04")
        assert terminal.wait() == 0
    said = [one["content"] for one in server.bodies[1]["messages"]]
    assert said == ["Hi", "a\u2028b", "again"], "what had arrived stays in the conversation"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    process = subprocess.Popen([*COMMAND, "--json"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield json.loads(process.stdout.readline())["url"]
    process.terminate()
    process.communicate()


def answer(url: str, messages: Sequence[dict[str, str]]) -> str:
    with httpx.Client(base_url=url, trust_env=False, verify=NO_TLS, timeout=60) as client:
        body = {"model": "demo", "messages": list(messages), "temperature": 0, "max_tokens": 24}
        return str(client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"])


GREEDY = ("--temperature", "0", "--max-tokens", "24")


@pytest.mark.slow
def test_a_terminal_over_a_real_server(url: str) -> None:
    """Two answers, the second one with the history, and one after /clear. Each is that of the API."""
    system = {"role": "system", "content": "You are short."}
    first = [system, {"role": "user", "content": "Hello"}]
    one = answer(url, first)
    second = [*first, {"role": "assistant", "content": one}, {"role": "user", "content": "And\nthen?"}]
    two = answer(url, second)
    with Terminal(*CHAT, url, *GREEDY, "--system-prompt", "You are short.") as terminal:
        terminal.wait_for(">>> ")
        terminal.type("Hello\n")
        shown = terminal.wait_for(r"\d+ tokens, .*tokens/s.*\n.*>>> ")
        assert one in shown
        terminal.type("And\\\n")
        terminal.wait_for(r"\.\.\. ")
        terminal.type("then?\n")
        assert two in terminal.wait_for(r"\d+ tokens, .*\n.*>>> ")
        terminal.type("/clear\n")
        terminal.wait_for("the conversation is empty")
        terminal.type("/what\n")
        assert "/what: no such command" in terminal.wait_for("stops an answer")
        terminal.type("Hello\n")
        assert one in terminal.wait_for(r"\d+ tokens, .*\n.*>>> ")
        terminal.type("/exit\n")
        assert terminal.wait() == 0


@pytest.mark.slow
def test_a_model_is_loaded_for_the_chat_and_answers_as_a_server_does(url: str) -> None:
    command = [*CHAT, "demo", *GREEDY, "--threads", "1"]
    done = subprocess.run(command, input="Hello\n", capture_output=True, text=True, check=True)
    assert done.stdout == answer(url, [{"role": "user", "content": "Hello"}]) + "\n"


@pytest.mark.slow
def test_a_model_in_a_terminal_leaves_no_process() -> None:
    with Terminal(*CHAT, "demo", *GREEDY, "--threads", "1") as terminal:
        terminal.wait_for("Talking to demo.*\n.*>>> ")
        terminal.type("Hello\n")
        terminal.wait_for(r"\d+ tokens, .*\n.*>>> ")
        below = all_children(terminal.process.pid)
        assert below
        terminal.type("\x04")
        assert terminal.wait() == 0
        for _ in range(3000):
            if all(map(gone, below)):
                return
            time.sleep(0.01)
        raise AssertionError(f"of {below} some are still there")
