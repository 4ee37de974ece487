from __future__ import annotations

import contextlib
import functools
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import pytest

from moesaic.config import ConnectionConfig, CorsConfig
from moesaic.core.errors import EngineDeadError
from moesaic.server.app import create_app
from moesaic.server.async_engine import AsyncEngine
from moesaic.server.elastic import admin_paths
from moesaic.server.guard import Access
from moesaic.server.hosts import Hosts
from moesaic.server.listener import bind
from moesaic.server.request_trace import RequestTrace
from moesaic.server.run import serve
from moesaic.server.service import Cluster, Service
from moesaic.server.unknown_fields import UnknownFields
from moesaic.testing import byte_tokenizer
from moesaic.text.tokenizer import Tokenizer
from tests.support.fake_worker import FakeWorker, engine_and_worker, make_tokenizer

MODEL = "org/fake-moe"
ADMIN_KEY = "adm1n"
"""Of servers without an API key."""
PATIENCE = 60.0
"""Seconds. What takes longer hangs."""
NO_TLS = httpx.create_ssl_context(verify=False, trust_env=False)
"""For clients of plain HTTP: each would read a file of certificates, which takes longer than the test."""


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass
class Live:
    """A server on a loopback port, in a thread, and its clients."""

    url: str
    front: AsyncEngine
    worker: FakeWorker
    api_key: str | None
    """None: it needs none. `ADMIN_KEY` is sent then, as changes need it."""
    thread: threading.Thread
    ended_by: list[BaseException] = field(default_factory=list)

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key or ADMIN_KEY}"}

    @property
    def http(self) -> httpx.Client:
        return httpx.Client(
            base_url=self.url, headers=self.headers, timeout=PATIENCE, trust_env=False, verify=NO_TLS
        )

    @functools.cached_property
    def openai(self) -> openai.OpenAI:
        key = self.api_key or "none"
        client = httpx.Client(trust_env=False, verify=NO_TLS)
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, http_client=client)

    def close(self) -> None:
        if "openai" in self.__dict__:
            self.openai.close()
        self.worker.die()

    def post(self, path: str, **body: object) -> httpx.Response:
        with self.http as client:
            return client.post(path, json=body)

    def get(self, path: str) -> httpx.Response:
        with self.http as client:
            return client.get(path)


Launch = Callable[..., Live]


@contextlib.contextmanager
def launched(tokenizer: Tokenizer) -> Iterator[Launch]:
    """A function that starts servers; they end with the context."""
    started: list[Live] = []

    def launch(
        *,
        api_key: str | None = None,
        ready: bool = True,
        max_waiting: int = 4,
        pace: float = 0.0,
        max_body_bytes: int = 2**16,
        default_sampling: dict[str, float] | None = None,
        cluster: Cluster | None = None,
        closed: bool = False,
        hosts: Hosts | None = None,
        body_seconds: float = 60.0,
        limits: ConnectionConfig = ConnectionConfig(),
        strict: bool = False,
        cors: CorsConfig = CorsConfig(),
        other_names: tuple[str, ...] = (),
        tokenizer_info: bool = False,
        tool_call_parser: str = "auto",
        reasoning_parser: str = "auto",
        traced: Callable[[RequestTrace], None] | None = None,
        **sizes: int,
    ) -> Live:
        """closed: as on an address that is no loopback address. sizes: see fake_worker.info."""
        front, worker = engine_and_worker(tokenizer, max_waiting=max_waiting, pace=pace)
        fields = UnknownFields(strict)
        service = Service(
            front,
            MODEL,
            default_sampling or {},
            version="1.2.3",
            cluster=cluster,
            tool_call_parser=tool_call_parser,
            reasoning_parser=reasoning_parser,
            fields=fields,
            other_names=other_names,
        )
        paths = frozenset() if cluster is None else admin_paths(closed)
        access = Access(api_key, api_key or ADMIN_KEY, paths, hosts)
        app = create_app(
            service,
            access=access,
            max_body_bytes=max_body_bytes,
            body_seconds=body_seconds,
            cors=cors,
            tokenizer_info=tokenizer_info,
            on_trace=traced,
        )
        listener = bind("127.0.0.1", 0)
        errors: list[BaseException] = []

        def run() -> None:
            try:
                serve(app, front, listener, limits=limits)
            except EngineDeadError as error:
                errors.append(error)

        thread = threading.Thread(target=run, name="server")
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        live = Live(url, front, worker, api_key, thread, errors)
        started.append(live)
        worker.start()
        thread.start()
        if ready:
            worker.ready(**sizes)
            _until(lambda: live.get("/health").status_code == 200)
        return live

    try:
        yield launch
    finally:
        for live in started:
            live.close()
        for live in started:
            live.thread.join(PATIENCE)
            assert not live.thread.is_alive()


def _until(condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
    deadline = threading.Event()
    for _ in range(int(seconds / 0.01)):
        if condition():
            return
        deadline.wait(0.01)
    raise AssertionError("it did not happen in time")


@pytest.fixture
def until() -> Callable[..., None]:
    return _until


@pytest.fixture
def launch(tokenizer: Tokenizer) -> Iterator[Launch]:
    """For tests that break or bend their server."""
    with launched(tokenizer) as launch:
        yield launch


@pytest.fixture(scope="module")
def live(tokenizer: Tokenizer) -> Iterator[Live]:
    """A healthy server that tests share."""
    with launched(tokenizer) as launch:
        yield launch()


AGENT = (
    "{{ reasoning_effort }}{{ enable_thinking }}{{ thinking }}{{ thinking_mode }}"
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.reasoning_content }}{{ '|' if m.reasoning_content }}"
    "{{ m.content }}{% for c in m.tool_calls %}"
    "<{{ c.id }} {{ c.function.name }} {{ c.function.arguments | tojson }}>{% endfor %}{{ m.tool_call_id }}"
    "{% endfor %}{% if not add_generation_prompt and not messages[-1].role == 'assistant' %}?{% endif %}"
    "{# <tool_call> <think> #}"
)
"""A template that knows tools and reasoning. The answer is what follows the last `say:` of the messages."""


@pytest.fixture(scope="package")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A healthy server whose model calls tools and reasons."""
    path = tmp_path_factory.mktemp("agent")
    byte_tokenizer(path, ["<s>", "</s>"], chat_template=AGENT, eos_token="</s>")
    with launched(Tokenizer(path)) as launch:
        yield launch(max_model_len=4096)


def prompt_of(live: Live) -> str:
    """The text of the last prompt that the worker got."""
    return live.worker.tokenizer.decode(live.worker.seen[-1].prompt_token_ids)


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The data of the named events of a stream."""
    found = []
    for event in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found
