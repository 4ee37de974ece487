"""Streams on an event loop, without HTTP."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from moesaic.core import messages
from moesaic.core.errors import EngineDeadError, OverloadedError, RequestError
from moesaic.core.request import RequestOutput, SamplingParams
from moesaic.server.async_engine import AsyncEngine
from moesaic.server.errors import NotServingError
from moesaic.text.tokenizer import Tokenizer
from tests.support.fake_worker import FakeWorker, byte_ids, engine_and_worker

pytestmark = pytest.mark.anyio

FOREVER = SamplingParams(max_tokens=200)


class Pair:
    def __init__(self, front: AsyncEngine, worker: FakeWorker) -> None:
        self.front = front
        self.worker = worker

    def ids(self, text: str) -> list[int]:
        return byte_ids(text, self.worker.tokenizer)

    async def text(self, prompt: str, **params: Any) -> str:
        outputs = self.front.generate(self.ids(prompt), SamplingParams(**params))
        return "".join([output.text async for output in outputs])


@pytest.fixture
async def pair(tokenizer: Tokenizer) -> AsyncIterator[Pair]:
    front, worker = engine_and_worker(tokenizer, pace=0.001)
    front.start()
    worker.start()
    worker.ready()
    await asyncio.wait_for(front.wait_ready(), 5)
    yield Pair(front, worker)
    worker.die()
    await asyncio.wait_for(front.worker_ended.wait(), 60)


async def eventually(condition: Any) -> None:
    for _ in range(6000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen in time")


async def test_many_prompts_at_once_keep_apart(pair: Pair) -> None:
    texts = await asyncio.gather(*(pair.text(f"say:{number}", n=1) for number in range(8)))
    assert texts == [str(number) for number in range(8)]


async def test_a_call_of_many_prompts_is_one_stream(pair: Pair) -> None:
    jobs = [(pair.ids("say:ab"), SamplingParams(n=2)), (pair.ids("say:c"), SamplingParams())]
    got: dict[tuple[int, int], str] = {}
    async for number, output in pair.front.open(jobs):
        got[number, output.index] = got.get((number, output.index), "") + output.text
    assert got == {(0, 0): "ab", (0, 1): "ab", (1, 0): "c"}


async def test_closing_the_iterator_cancels(pair: Pair) -> None:
    outputs = pair.front.generate(pair.ids("x"), FOREVER)
    assert isinstance(await anext(outputs), RequestOutput)
    await outputs.aclose()  # type: ignore[attr-defined]
    await eventually(lambda: pair.worker.cancelled == [0])
    assert pair.front.engine.num_unfinished == 0


async def test_cancelling_the_task_cancels_the_request(pair: Pair) -> None:
    task = asyncio.create_task(pair.text("x", max_tokens=200))
    await eventually(lambda: pair.worker.seen)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await eventually(lambda: pair.worker.cancelled == [0])


async def test_closing_a_finished_stream_does_nothing(pair: Pair) -> None:
    stream = pair.front.open([(pair.ids("say:a"), SamplingParams())])
    assert [output.text async for _, output in stream] == ["a", ""]
    stream.close()
    stream.close()
    assert pair.worker.cancelled == []


@pytest.mark.parametrize("bad", ["", "x" * 999])
async def test_all_or_none_are_submitted(pair: Pair, bad: str) -> None:
    jobs = [(pair.ids(text), FOREVER) for text in ("x", "y", bad)]
    with pytest.raises(RequestError):
        pair.front.open(jobs)
    await eventually(lambda: sorted(pair.worker.cancelled) == [0, 1])
    with pytest.raises(RequestError, match="at most 8"):
        pair.front.open([(pair.ids("x"), SamplingParams())] * 9)
    running = pair.front.open([(pair.ids("x"), FOREVER)])
    with pytest.raises(OverloadedError):
        pair.front.open([(pair.ids("x"), SamplingParams())] * 8)
    assert pair.front.engine.num_unfinished == 1
    running.close()


async def test_the_death_of_the_worker_ends_every_stream(pair: Pair) -> None:
    pair.worker.open.clear()
    tasks = [asyncio.create_task(pair.text("x")) for _ in range(3)]
    await eventually(lambda: len(pair.worker.seen) == 3)
    pair.worker.die()
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
    assert [type(result) for result in results] == [EngineDeadError] * 3
    with pytest.raises(EngineDeadError):
        await pair.text("x")
    with pytest.raises(EngineDeadError):
        await pair.front.wait_ready()


async def test_what_came_before_the_death_is_still_delivered(pair: Pair) -> None:
    stream = pair.front.open([(pair.ids("say:abc"), SamplingParams()), (pair.ids("x"), FOREVER)])
    await eventually(lambda: pair.front.engine.num_unfinished == 1)
    pair.worker.die()
    await pair.front.worker_ended.wait()
    texts = ["", ""]

    async def read() -> None:
        async for number, output in stream:
            texts[number] += output.text

    with pytest.raises(EngineDeadError):
        await read()
    assert texts[0] == "abc"


async def test_a_bug_in_the_engine_hangs_nobody(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(message: messages.ToEngine) -> list[RequestOutput]:
        raise ZeroDivisionError("oops")

    seen: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: seen.append(context))
    monkeypatch.setattr(pair.front.engine, "receive", broken)
    with pytest.raises(EngineDeadError, match="oops"):
        await asyncio.wait_for(pair.text("x"), 5)
    assert isinstance(seen[0]["exception"], ZeroDivisionError)


async def test_a_bug_in_the_reader_hangs_nobody(tokenizer: Tokenizer) -> None:
    class Broken:
        def receive(self, timeout: float | None = None) -> None:
            raise ZeroDivisionError("oops")

    front, worker = engine_and_worker(tokenizer)
    loud = AsyncEngine(front.engine, Broken())
    seen: list[BaseException | None] = []
    hook, threading.excepthook = threading.excepthook, lambda args: seen.append(args.exc_value)
    try:
        loud.start()
        with pytest.raises(EngineDeadError, match="oops"):
            await asyncio.wait_for(loud.wait_ready(), 5)
        await eventually(lambda: seen)
    finally:
        threading.excepthook = hook
        worker.die()
    assert isinstance(seen[0], ZeroDivisionError)


async def test_draining_lets_the_running_finish_and_takes_no_more(pair: Pair) -> None:
    running = asyncio.create_task(pair.text("x", max_tokens=30))
    await eventually(lambda: pair.worker.seen)
    draining = asyncio.create_task(pair.front.drain())
    await asyncio.sleep(0)
    with pytest.raises(NotServingError, match="shutting down"):
        await pair.text("x")
    assert not draining.done()
    assert len(await running) == 30
    await asyncio.wait_for(draining, 5)


async def test_a_worker_that_dies_while_loading(tokenizer: Tokenizer) -> None:
    front, worker = engine_and_worker(tokenizer)
    front.start()
    with pytest.raises(NotServingError, match="loading"):
        front.open([([1], SamplingParams())])
    waiting = asyncio.create_task(front.wait_ready())
    worker.connection.send(messages.WorkerFailed("no such file", user_error=True))
    with pytest.raises(EngineDeadError, match="no such file"):
        await asyncio.wait_for(waiting, 5)
    assert front.failure is not None and front.failure.user_error
    worker.connection.close()


async def test_how_the_worker_ended_is_asked(tokenizer: Tokenizer) -> None:
    front, worker = engine_and_worker(tokenizer)
    front = AsyncEngine(front.engine, front._connection, describe_end=lambda: "killed by signal 9")
    front.start()
    worker.connection.close()
    await asyncio.wait_for(front.worker_ended.wait(), 60)
    assert front.engine.dead == "killed by signal 9"


OUTAGE = messages.Outage("no attention worker serves")


async def test_an_outage_ends_what_has_no_token_and_refuses_what_comes(pair: Pair) -> None:
    begun = pair.front.generate(pair.ids("x"), FOREVER)
    assert isinstance(await anext(begun), RequestOutput)
    pair.worker.open.clear()
    waiting = asyncio.create_task(pair.text("x"))
    await eventually(lambda: len(pair.worker.seen) == 2)
    pair.worker.connection.send(OUTAGE)
    with pytest.raises(NotServingError, match="requests are not computed now: no attention worker") as told:
        await asyncio.wait_for(waiting, 5)
    assert told.value.code == "unavailable" and told.value.retry_after
    with pytest.raises(NotServingError, match="no attention worker"):
        pair.front.require_serving()
    pair.front.require_loaded()
    await eventually(lambda: pair.worker.cancelled == [1])
    pair.worker.connection.send(messages.Outage(""))
    pair.worker.open.set()
    await eventually(lambda: not pair.front._outage.reason)
    assert await pair.text("say:a") == "a"
    assert isinstance(await anext(begun), RequestOutput), "an answer that has begun waits"
    await begun.aclose()  # type: ignore[attr-defined]


async def test_an_outage_without_a_replacement_ends_begun_answers_too(pair: Pair) -> None:
    begun = pair.front.generate(pair.ids("x"), FOREVER)
    await anext(begun)
    pair.worker.open.clear()
    pair.worker.connection.send(messages.Outage("no attention worker serves", ends_begun_answers=True))
    with pytest.raises(NotServingError, match="no attention worker"):
        while True:
            await asyncio.wait_for(anext(begun), 5)
    assert pair.front.engine.num_unfinished == 0


async def test_a_drain_ends_within_its_limit(pair: Pair) -> None:
    begun = pair.front.generate(pair.ids("x"), FOREVER)
    await anext(begun)
    pair.worker.open.clear()
    waiting = asyncio.create_task(pair.text("x"))
    await eventually(lambda: len(pair.worker.seen) == 2)
    await asyncio.wait_for(pair.front.drain(0.05), 5)
    for answer in (waiting, asyncio.create_task(anext(begun))):
        with pytest.raises(NotServingError, match=r"the answer had not ended after 0.05 s \(--shutdown-t"):
            while True:
                await asyncio.wait_for(answer, 5)
                answer = asyncio.create_task(anext(begun))
