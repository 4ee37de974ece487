"""`moesaic chat`: a conversation in the terminal, or one answer to what a pipe brings."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TextIO

from rich.console import Console

from moesaic.commands.client_options import Chat
from moesaic.commands.conversation import Answer, Conversation
from moesaic.commands.starting import settle
from moesaic.config import (
    CacheConfig,
    ClusterConfig,
    ModelConfig,
    OffloadConfig,
    SchedulerConfig,
    WorkerConfig,
)
from moesaic.core.errors import ConfigError, ConnectionLost, MoesaicError
from moesaic.server.client import Chunk, Client
from moesaic.trace import logs

DIM, PLAIN = "\x1b[2m", "\x1b[0m"
PROMPT, CONTINUATION = ">>> ", "... "
QUOTES = '"""'
"""Begins and ends a message of several lines."""
HELP = f"""\
/clear    forget the conversation, except for the system prompt
/exit     leave, as Ctrl-D does
/help     this list
{QUOTES}       begins a message of several lines; the same ends it. A line that ends with \\ goes on, too
Ctrl-C    stops an answer. What has arrived stays in the conversation"""
COMMANDS = ("/clear", "/exit", "/help")
_CONTROL = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
"""Control characters, which a terminal would obey. A model must not move its cursor."""


class Screen:
    """Shows answers. terminal: reasoning is dim, and control characters are left out.

    Without a terminal only the content is written, as it is.
    """

    def __init__(self, stream: TextIO, terminal: bool) -> None:
        self._stream = stream
        self._terminal = terminal
        self._dim = False

    def show(self, chunk: Chunk) -> None:
        if self._terminal:
            self._write(chunk.reasoning, True)
        self._write(chunk.content, False)
        self._stream.flush()

    def end(self, line: str = "") -> None:
        """End an answer. line: shown below it, dim, on a terminal."""
        self._write("", False)
        dim = f"\n{DIM}{line.translate(_CONTROL)}{PLAIN}" if line and self._terminal else ""
        self._stream.write(f"{PLAIN if self._dim else ''}{dim}\n")
        self._dim = False
        self._stream.flush()

    def _write(self, text: str, dim: bool) -> None:
        if not text:
            return
        if self._terminal and dim != self._dim:
            self._stream.write(DIM if dim else f"{PLAIN}\n\n")
            self._dim = dim
        self._stream.write(text.translate(_CONTROL) if self._terminal else text)


def run(options: Chat) -> int:
    """Talk until the end of the input. Returns the exit code."""
    logs.set_up("chat", "warning")
    terminal = sys.stdin.isatty()
    with asyncio.Runner() as runner, _run_conversation(runner, options) as conversation:
        screen = Screen(sys.stdout, terminal and sys.stdout.isatty())
        if not terminal:
            return _answer_pipe(runner, conversation, screen)
        _edit_lines()
        print(f"Talking to {conversation.model}. /help lists the commands, /exit ends.", flush=True)
        _talk(runner, conversation, screen)
    return 0


@contextmanager
def _run_conversation(runner: asyncio.Runner, options: Chat) -> Iterator[Conversation]:
    """The conversation with the server or the model of `options`, in the loop of `runner`."""
    context = _open_conversation(options)
    conversation = runner.run(context.__aenter__())
    try:
        yield conversation
    finally:
        runner.run(context.__aexit__(None, None, None))


@asynccontextmanager
async def _open_conversation(options: Chat) -> AsyncIterator[Conversation]:
    sampling = {"temperature": options.temperature, "max_tokens": options.max_tokens}
    fields = {name: value for name, value in sampling.items() if value is not None}
    if options.url is not None:
        async with Client(options.url, api_key=options.api_key) as client:
            name = options.model or await _first_model(client)
            yield Conversation(client, name, options.system_prompt, fields)
        return
    from moesaic.jobs.batch.local import serving  # slow imports, which a server elsewhere does not need

    model = ModelConfig(options.target, max_model_len=options.max_model_len, threads=options.threads)
    disk = options.prefix_cache_disk or CacheConfig.prefix_cache_disk
    cache = CacheConfig(prefix_cache_dir=options.prefix_cache_dir, prefix_cache_disk=disk)
    worker = WorkerConfig(model, cache, SchedulerConfig(max_num_seqs=1), log_level="warning")
    worker, _ = settle(worker, ClusterConfig(), OffloadConfig())
    local = serving(worker, (options.target,), chat_template=options.chat_template)
    with Console(stderr=True).status(f"loading {options.target}"):
        server = await local.__aenter__()
    try:
        async with server.client as client:
            yield Conversation(client, options.target, options.system_prompt, fields)
    finally:
        await local.__aexit__(None, None, None)


async def _first_model(client: Client) -> str:
    try:
        models = await client.models()
    except ConnectionLost as error:
        raise ConnectionLost(
            f"{error}; start a server with moesaic serve MODEL, or name a model here: moesaic chat MODEL"
        ) from error
    if not models:
        raise ConfigError(f"--model: {client.base_url} names no model, so give one")
    return str(models[0].get("id"))


def _answer_pipe(runner: asyncio.Runner, conversation: Conversation, screen: Screen) -> int:
    """Answer all of the standard input as one message. Returns the exit code."""
    question = sys.stdin.read().strip()
    if not question:
        raise ConfigError("the standard input is empty; allowed: one message, or a terminal")
    runner.run(conversation.ask(question, Answer(), screen.show))
    screen.end()
    return 0


def _talk(runner: asyncio.Runner, conversation: Conversation, screen: Screen) -> None:
    """Read messages and answer them until the end."""
    while True:
        try:
            text = read_message(input).strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\n(/exit or Ctrl-D ends)", flush=True)
            continue
        if text == "/exit":
            return
        if text == "/clear":
            conversation.clear()
            print("(the conversation is empty)", flush=True)
        elif re.fullmatch(r"/\w+", text):
            complaint = "" if text in COMMANDS else f"{text}: no such command\n"
            print(f"{complaint}{HELP}", flush=True)
        elif text:
            _answer(runner, conversation, screen, text)


def _answer(runner: asyncio.Runner, conversation: Conversation, screen: Screen, text: str) -> None:
    answer, question_time = Answer(), time.perf_counter()
    try:
        runner.run(conversation.ask(text, answer, screen.show))
    except KeyboardInterrupt:
        screen.end("stopped")
    except MoesaicError as error:
        screen.end()
        line = f"moesaic: {' '.join(str(error).split())}; this message is not part of the conversation"
        print(line, file=sys.stderr, flush=True)
    else:
        screen.end(answer.describe_speed(question_time))


def read_message(ask: Callable[[str], str]) -> str:
    """Read a message. ask: shows a prompt and returns the next line; it raises EOFError at the end."""
    line = ask(PROMPT)
    if line.lstrip().startswith(QUOTES):
        lines = [line.lstrip().removeprefix(QUOTES)]
        while not lines[-1].rstrip().endswith(QUOTES):
            lines.append(ask(CONTINUATION))
        lines[-1] = lines[-1].rstrip().removesuffix(QUOTES)
        return "\n".join(lines)
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(ask(CONTINUATION))
    return "\n".join(lines)


def _edit_lines() -> None:
    """Let `input` edit its line and recall earlier ones, where Python has readline."""
    try:
        import readline
    except ImportError:
        return
    # Otherwise each line of a pasted text would be a message of its own.
    readline.parse_and_bind("set enable-bracketed-paste on")
