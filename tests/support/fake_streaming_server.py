"""A small HTTP server in a thread that streams tokens at a known pace."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from dataclasses import dataclass, field
from http import HTTPStatus
from types import TracebackType
from typing import Any, Self


@dataclass
class FakeServer:
    """first: seconds to the first token. step: seconds between tokens."""

    first: float = 0.02
    step: float = 0.005
    status: int = 200
    usage: bool = True
    cut_after: int | None = None
    """Close the connection after this many tokens."""
    fail_after: int | None = None
    """Send an error event after this many tokens."""
    tokenize_status: int = 200
    max_model_len: int | None = 1000
    metrics: list[str] = field(default_factory=list)
    """The answers of /metrics, one after another. Without one left it is 404."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """When each request for tokens came."""

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(ready,))
        self._thread.start()
        ready.wait()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()
        self._loop.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def _serve(self, ready: threading.Event) -> None:
        self._loop.run_until_complete(self._main(ready))

    async def _main(self, ready: threading.Event) -> None:
        self._end = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self._port = server.sockets[0].getsockname()[1]
        ready.set()
        await self._end.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._connection(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while not reader.at_eof():
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                size = next(
                    (int(x.split(":")[1]) for x in head.lower().split("\r\n") if "content-length" in x), 0
                )
                body = json.loads(await reader.readexactly(size)) if size else None
                self.headers.append(head)
                await self._answer(head.split()[1], body, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, path: str, body: Any, writer: asyncio.StreamWriter) -> None:
        match path:
            case "/v1/models":
                card: dict[str, Any] = {"id": "fake"}
                if self.max_model_len is not None:
                    card["max_model_len"] = self.max_model_len
                self._send(writer, 200, {"data": [card]})
            case "/tokenize":
                self._send(writer, self.tokenize_status, {"tokens": [3, 1, 4, 1, 5]})
            case "/metrics" if self.metrics:
                self._send_raw(writer, 200, self.metrics.pop(0).encode())
            case "/metrics":
                self._send(writer, 404, {})
            case _:
                self.times.append(time.perf_counter())
                self.bodies.append(body)
                await self._generate(path, body, writer)

    def _send(self, writer: asyncio.StreamWriter, status: int, value: Any) -> None:
        self._send_raw(writer, status, json.dumps(value).encode())

    def _send_raw(self, writer: asyncio.StreamWriter, status: int, raw: bytes) -> None:
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Length: {len(raw)}\r\n\r\n"
        writer.write(head.encode() + raw)

    async def _generate(self, path: str, body: Any, writer: asyncio.StreamWriter) -> None:
        if self.status != 200:
            self._send(writer, self.status, {"error": {"message": "no\nthanks", "code": "x"}})
            return
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        chat = "chat" in path
        if chat:
            self._event(writer, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for number in range(body["max_tokens"]):
            await asyncio.sleep(self.step if number else self.first)
            if number == self.cut_after:
                writer.close()
                return
            if number == self.fail_after:
                self._event(writer, {"error": {"message": "the worker is gone", "code": "engine_dead"}})
                break
            text = "a\u2028b"
            part = {"delta": {"content": text}} if chat else {"text": text}
            last = number == body["max_tokens"] - 1
            self._event(writer, {"choices": [part | {"finish_reason": "length" if last else None}]})
        if self.usage:
            prompt = 7 if chat else len(body["prompt"])
            counts = {"prompt_tokens": prompt, "completion_tokens": body["max_tokens"]}
            self._event(writer, {"choices": [], "usage": counts})
        self._raw_event(writer, b"[DONE]")
        writer.write(b"0\r\n\r\n")

    def _event(self, writer: asyncio.StreamWriter, value: Any) -> None:
        self._raw_event(writer, json.dumps(value, ensure_ascii=False).encode())

    def _raw_event(self, writer: asyncio.StreamWriter, raw: bytes) -> None:
        data = b": a comment\r\ndata: " + raw + b"\n\n"
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
