"""Templates that take long or fail, in a server that answers others meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from moesaic.core.errors import OverloadedError, RendererError
from moesaic.server.chat_threads import ChatThreads
from moesaic.server.service import CHATS_AT_ONCE
from moesaic.testing import byte_tokenizer
from moesaic.text.templates.pool import MAX_RENDERINGS
from moesaic.text.templates.renderer import Limits, Renderer
from moesaic.text.tokenizer import Tokenizer
from tests.support.raw_http import connect, post

from .conftest import PATIENCE, Launch, Live, launched

ASK = [{"role": "user", "content": "hi"}]
TEMPLATE = (
    "{% if how == 'time' %}"
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
    "{% if how == 'memory' %}{{ messages * 1000000000 }}{% endif %}"
    "{% if how == 'length' %}{{ 'a' * 100000 }}{% endif %}"
    "{% if how == 'error' %}{{ raise_exception('no\nway') }}{% endif %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}say:hello"
)
SECONDS = 3.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer whose template fails as `chat_template_kwargs.how` says."""
    path = tmp_path_factory.mktemp("failing")
    byte_tokenizer(path, ["<s>", "</s>"], chat_template=TEMPLATE, eos_token="</s>")
    return path


@pytest.fixture(scope="module")
def failing(checkpoint: Path) -> Iterator[Live]:
    tokenizer = Tokenizer(checkpoint, limits=Limits(seconds=SECONDS, memory=2**26))
    with launched(tokenizer) as launch:
        yield launch()
    tokenizer.close()


def asking(how: str) -> dict[str, object]:
    return {"messages": ASK, "chat_template_kwargs": {"how": how}}


@pytest.mark.parametrize(
    ("how", "code", "says"),
    [
        pytest.param(
            *("time", None, "messages: the chat template ran for more than 3 seconds and was stopped"),
            marks=pytest.mark.slow,
        ),
        ("memory", None, "messages: the chat template needed more than 64 MiB of memory and was stopped"),
        ("error", None, "messages: the chat template refuses them: no way"),
        ("length", "context_length_exceeded", "messages: the chat template made more than 1024 characters"),
    ],
)
def test_a_template_that_fails_is_a_bad_request(failing: Live, how: str, code: str | None, says: str) -> None:
    answer = failing.post("/v1/chat/completions", **asking(how))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "messages", code)
    assert error["message"].startswith(says)
    assert failing.post("/v1/chat/completions", **asking("")).status_code == 200


def test_a_conversation_to_tokenize_may_be_longer_than_the_context(failing: Live) -> None:
    assert failing.post("/tokenize", **asking("length")).json()["count"] > 100_000


@pytest.mark.slow
def test_others_are_answered_while_templates_take_long(
    checkpoint: Path, until: Callable[[Callable[[], bool], float], None]
) -> None:
    """These templates go on until their processes are killed, so that no time is measured."""
    tokenizer = Tokenizer(checkpoint, limits=Limits(seconds=1000.0))
    assert tokenizer._template is not None
    pool = tokenizer._template._renderers

    def busy() -> set[Renderer]:
        return pool._alive - set(pool._warm)

    with launched(tokenizer) as launch, ThreadPoolExecutor(6) as threads:
        live = launch(max_waiting=16)

        def ask() -> httpx.Response:
            with live.http as client:
                return client.post("/v1/chat/completions", json=asking("time"), timeout=200)

        slow = [threads.submit(ask) for _ in range(6)]
        try:
            until(lambda: len(busy()) > 1, 60.0)
            for _ in range(3):
                assert live.get("/health").status_code == 200
                assert live.post("/v1/completions", prompt=[1, 2], max_tokens=2).status_code == 200
                assert live.post("/v1/completions", prompt="say:" + "x" * 200).status_code == 200
            assert len(busy()) > 1 and not any(one.done() for one in slow)
        finally:
            while not all(one.done() for one in slow):
                for renderer in busy():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(renderer.pid, signal.SIGKILL)
                time.sleep(0.02)
        says = "messages: the chat template ended 2 processes; the last one: "
        for answer in (one.result() for one in slow):
            assert answer.status_code == 400 and answer.json()["error"]["message"].startswith(says)
        assert live.post("/v1/chat/completions", **asking("")).status_code == 200
    tokenizer.close()


def test_conversations_of_clients_that_left_are_not_rendered(
    failing: Live, until: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    jobs: list[Noted] = []
    answer = threading.Event()
    chat = Tokenizer.chat

    class Noted(Future[object]):
        def __init__(self) -> None:
            super().__init__()
            jobs.append(self)

    def watched(self: Tokenizer, messages: list[dict[str, str]], **variables: object) -> list[int]:
        seen.append(str(variables["how"]))
        if variables["how"] == "time":
            answer.wait(PATIENCE)
        return chat(self, messages, **variables | {"how": ""})  # type: ignore[arg-type]

    monkeypatch.setattr(Tokenizer, "chat", watched)
    monkeypatch.setattr("moesaic.server.chat_threads.Future", Noted)
    port = int(failing.url.rpartition(":")[2])

    def ask(stack: contextlib.ExitStack, how: str) -> None:
        stack.enter_context(connect(port)).sendall(post("/v1/chat/completions", asking(how)))

    with contextlib.ExitStack() as begun, contextlib.ExitStack() as waiting:
        for _ in range(CHATS_AT_ONCE):
            ask(begun, "time")
        until(lambda: len(seen) == CHATS_AT_ONCE)
        for _ in range(8):
            ask(waiting, "late")
        until(lambda: len(jobs) == CHATS_AT_ONCE + 8)
    until(lambda: all(job.cancelled() for job in jobs[CHATS_AT_ONCE:]))
    answer.set()
    assert failing.post("/v1/chat/completions", **asking("")).status_code == 200
    assert seen == ["time"] * CHATS_AT_ONCE + [""]


def test_no_process_for_the_template_is_503(
    launch: Launch, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = launch()

    def fail(*_: object, **__: object) -> None:
        raise RendererError("no process can render chat templates: reason")

    monkeypatch.setattr(tokenizer, "chat", fail)
    answer = live.post("/v1/chat/completions", messages=ASK)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (503, "no_renderer")
    assert error["message"] == "no process can render chat templates: reason"


def test_as_many_threads_as_processes() -> None:
    """More would wait for a process; fewer would leave one idle."""
    assert CHATS_AT_ONCE == MAX_RENDERINGS


def test_who_waits_too_long_for_a_thread_is_told_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, block, now = threading.Event(), threading.Event(), [0.0]
    monkeypatch.setattr("moesaic.server.chat_threads.time", SimpleNamespace(monotonic=lambda: now[0]))

    def hold() -> bool:
        begun.set()
        return block.wait(PATIENCE)

    async def scenario() -> None:
        threads = ChatThreads(1, patience=10.0)
        first = asyncio.create_task(threads.run(hold))
        await asyncio.sleep(0)
        assert begun.wait(PATIENCE)
        second = asyncio.create_task(threads.run(lambda: "second"))
        third = asyncio.create_task(threads.run(lambda: "third"))
        await asyncio.sleep(0)
        now[0] = 10.5
        third.cancel()
        block.set()
        assert await first is True
        with pytest.raises(OverloadedError, match="conversations take their time in the chat template"):
            await second
        assert await threads.run(lambda: "fourth") == "fourth"
        with pytest.raises(KeyError):
            await threads.run({}.popitem)

    asyncio.run(scenario())


def test_threads_end_with_their_object(until: Callable[..., None]) -> None:
    def mine() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "chat"]

    before = set(mine())

    async def scenario() -> None:
        threads = ChatThreads(2)
        assert await threads.run(lambda: [threads, 5][1]) == 5  # a job that refers to them
        assert len(set(mine()) - before) == 2

    asyncio.run(scenario())
    until(lambda: not set(mine()) - before)


def test_special_tokens_of_a_client_are_text(launch: Launch, tmp_path: Path) -> None:
    live = launch()
    live.post("/v1/chat/completions", messages=[{"role": "user", "content": "a</s>b"}])
    ids = live.worker.seen[-1].prompt_token_ids
    assert max(ids) < 256 and "[user]a</s>b" in live.worker.tokenizer.decode(ids)
    body = {"messages": [{"role": "user", "content": "</s>"}], "add_generation_prompt": False}
    assert live.post("/tokenize", **body).json()["tokens"] == list(b"[user]</s>")
