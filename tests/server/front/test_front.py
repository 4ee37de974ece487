"""A front whose models are threads of this process: what it passes on, and what it answers itself."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from moesaic.core.errors import ConfigError, EngineDeadError
from moesaic.policy.fleet.model_pool import ModelPool
from moesaic.server import events
from moesaic.server.app import create_app
from moesaic.server.front.app import create_front
from moesaic.server.front.fleet import FleetModel, ModelFleet
from moesaic.server.front.model_process import ModelProcess
from moesaic.server.guard import Access
from moesaic.server.listener import bind, listen
from moesaic.server.run import serve
from moesaic.server.service import Service
from moesaic.text.tokenizer import Tokenizer
from tests.server.conftest import NO_TLS, PATIENCE
from tests.support.fake_worker import engine_and_worker

Until = Callable[..., None]
ASK = [{"role": "user", "content": "say:hi"}]
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "say:hi", "max_tokens": 2}),
    ("/v1/chat/completions", {"messages": ASK, "max_tokens": 2}),
    ("/v1/messages", {"messages": ASK, "max_tokens": 2}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 2}),
]
ERROR_EVENTS = {
    "/v1/completions": 'data: {"error":{"message":"model \'a\': it cannot',
    "/v1/chat/completions": 'data: {"error":{"message":"model \'a\': it cannot',
    "/v1/messages": 'event: error\ndata: {"type": "error", "error": {"type": "overloaded_error"',
    "/v1/responses": 'event: error\ndata: {"type": "error", "code": "model_load_failed"',
}


class ThreadedModel:
    """The server of one model on a Unix socket, in a thread, as if it were a process."""

    def __init__(self, name: str, tokenizer: Tokenizer, socket: Path) -> None:
        self.name, self.socket, self.key, self.pid = name, socket, "inner", 1
        self.exit_code: int | None = None
        self.info = {"max_model_len": 512}
        self.may_load = threading.Event()
        """Set where it loads at once."""
        self.may_load.set()
        self.fails = False
        self.end_event = asyncio.Event()
        self.engine, self.worker = engine_and_worker(tokenizer, max_waiting=4)
        self.heads: list[dict[str, str]] = []
        self._listening = threading.Event()
        self._thread = threading.Thread(target=self._serve, name=f"model {name}")
        self._thread.start()
        self._listening.wait(PATIENCE)
        self.worker.start()
        self.worker.ready()

    def _serve(self) -> None:
        app = create_app(
            Service(self.engine, self.name, other_names=(f"{self.name}2",)), access=Access(admin_key=self.key)
        )

        async def note_headers(scope: Any, receive: Any, send: Any) -> None:
            self.heads.append({name.decode(): value.decode() for name, value in scope.get("headers", ())})
            await app(scope, receive, send)

        with contextlib.suppress(EngineDeadError), listen("", 0, str(self.socket)) as listener:
            self._listening.set()
            serve(note_headers, self.engine, listener)

    async def wait_ready(self) -> bool:
        await asyncio.to_thread(self.may_load.wait)
        if self.fails:
            self.end_event.set()
        return not self.end_event.is_set()

    def describe_end(self) -> str:
        return "no such weights"

    async def stop(self) -> None:
        self.end_event.set()

    def kill(self) -> None:
        self.end_event.set()

    def close(self) -> None:
        self.may_load.set()
        self.worker.die()
        self._thread.join(PATIENCE)


class LiveFront:
    """A front on a loopback port, in a thread."""

    def __init__(self, models: list[ThreadedModel], key: str | None, **settings: Any) -> None:
        self.models = {model.name: model for model in models}
        pool = ModelPool([model.name for model in models], max_loaded=2)
        self.fleet = ModelFleet([self._describe(model) for model in models], pool, **settings)
        listener = bind("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        app = create_front(self.fleet, access=Access(key), max_body_bytes=2**16)
        self._loop: asyncio.AbstractEventLoop | None = None

        async def note_loop() -> None:
            self._loop = asyncio.get_running_loop()

        def run() -> None:
            with contextlib.suppress(EngineDeadError):
                serve(app, self.fleet, listener, report=note_loop)

        self._thread = threading.Thread(target=run, name="front")
        self._thread.start()
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self.client = httpx.Client(
            base_url=self.url, headers=headers, timeout=PATIENCE, trust_env=False, verify=NO_TLS
        )

    def _describe(self, model: ThreadedModel) -> FleetModel:
        async def launch() -> ModelProcess:
            model.end_event = asyncio.Event()
            return model  # type: ignore[return-value]

        async def measure() -> int:
            return 1

        names = (model.name, f"{model.name}2")
        return FleetModel(names, model.name, 2, launch, measure, lambda info, need: need)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def close(self) -> None:
        self.client.get("/live")
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self.fleet.worker_ended.set)
        self._thread.join(PATIENCE)
        self.client.close()


Make = Callable[..., LiveFront]


@pytest.fixture
def make(tokenizer: Tokenizer, tmp_path: Path) -> Iterator[Make]:
    with contextlib.ExitStack() as stack:

        def make(names: str = "ab", key: str | None = None, **settings: Any) -> LiveFront:
            models = [ThreadedModel(name, tokenizer, tmp_path / name) for name in names]
            for model in models:
                stack.callback(model.close)
            front = LiveFront(models, key, **settings)
            stack.callback(front.close)
            return front

        yield make


def without_ids(text: str) -> str:
    """An answer without what differs from one call to the next."""
    changing = ("id", "created", "created_at", "completed_at", "item_id", "response_id")

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: clean(item) for name, item in value.items() if name not in changing}
        return [clean(item) for item in value] if isinstance(value, list) else value

    lines = []
    for line in text.splitlines():
        _, brace, rest = line.partition("{")
        lines.append(json.dumps(clean(json.loads(brace + rest))) if brace else line)
    return "\n".join(lines)


@pytest.mark.slow
def test_each_api_answers_as_the_model_alone_does(make: Make) -> None:
    front = make()
    direct = httpx.Client(
        transport=httpx.HTTPTransport(uds=str(front.models["b"].socket), verify=False), base_url="http://b"
    )
    calls = [*CALLS, ("/tokenize", {"prompt": "hi"}), ("/detokenize", {"tokens": [5]})]
    calls.append(("/v1/messages/count_tokens", {"messages": ASK}))
    with direct:
        for path, fields in calls:
            for stream in (False, True) if (path, fields) in CALLS else (False,):
                body = fields | {"model": "b", "extra": 1} | ({"stream": True} if stream else {})
                answer, expected = front.post(path, **body), direct.post(path, json=body)
                assert answer.status_code == expected.status_code == 200, answer.text
                assert without_ids(answer.text) == without_ids(expected.text)
                own = ("date", "server", "x-request-id", "connection")
                heads = [{k: v for k, v in one.headers.items() if k not in own} for one in (answer, expected)]
                if not stream:
                    heads = [head | {"content-length": ""} for head in heads]
                assert heads[0] == heads[1]


@pytest.mark.slow
def test_requests_name_a_model_and_keys_stay_here(make: Make) -> None:
    front = make(key="s3cret")
    body = {"prompt": "say:hi", "max_tokens": 2}
    client = front.client
    answer = client.post("/v1/completions", json=body | {"model": "a2"}, headers={"X-Request-Id": "mine"})
    assert answer.status_code == 200 and answer.headers["X-Request-Id"] == "mine"
    head = front.models["a"].heads[-1]
    assert head["x-request-id"] == "mine" and head["authorization"] == "Bearer inner"
    assert not front.models["b"].heads
    assert front.post("/v1/completions?model=b", **body).json()["model"] == "b"
    for wrong, value in (({}, "nothing"), ({"model": "c"}, "'c'"), ({"model": 5}, "5")):
        answer = front.post("/v1/completions", **(body | wrong))
        assert answer.status_code == 404
        text = f"model: got {value}; this server serves 'a', 'a2', 'b', 'b2'"
        assert answer.json()["error"] | {"type": ""} == {
            "message": text, "type": "", "param": "model", "code": "model_not_found",
        }  # fmt: skip
    assert client.post("/v1/completions", json=body, headers={"Authorization": "no"}).status_code == 401
    assert client.post("/v1/completions", content=b"{").status_code == 400
    assert client.post("/v1/completions", content=b"x" * 2**17).status_code == 413
    assert client.get("/v1/completions").status_code == 405
    assert client.get("/nowhere").status_code == 404
    assert front.post("/v1/embeddings").json()["error"]["code"] == "unsupported_endpoint"
    assert client.head("/v1/models").status_code == 200 and client.get("/").status_code == 200
    paths = client.get("/openapi.json").json()["paths"]
    assert {"/v1/completions", "/models/load", "/v1/models"} <= set(paths)


@pytest.mark.slow
def test_metrics_of_all_loaded_models_are_on_one_page(make: Make) -> None:
    front = make()
    for name in "ab":
        assert front.post("/v1/completions", model=name, prompt="say:hi", max_tokens=2).status_code == 200
    text = front.client.get("/metrics").text
    assert text.count("# TYPE moesaic:generation_tokens_total counter") == 1
    for name in "ab":
        assert f'moesaic:model_loads_total{{model_name="{name}"}} 1.0' in text
        assert f'moesaic:model_loaded{{model_name="{name}"}} 1.0' in text
        assert f'moesaic:generation_tokens_total{{model_name="{name}"}}' in text


@pytest.mark.slow
@pytest.mark.parametrize(("path", "body"), CALLS)
@pytest.mark.parametrize("fails", [False, True])
def test_a_stream_gets_pings_until_its_model_is_loaded(
    make: Make, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], fails: bool
) -> None:
    monkeypatch.setattr(events, "PING_SECONDS", 0.02)
    front = make("a")
    front.models["a"].may_load.clear()
    front.models["a"].fails = fails
    ping = 'event: ping\ndata: {"type":"ping"}\n\n' if path == "/v1/messages" else ": ping\n\n"
    text = ""
    with front.client.stream("POST", path, json=body | {"model": "a", "stream": True}) as response:
        assert response.status_code == 200
        for part in response.iter_text():
            text += part
            if text.count(ping) > 2:
                front.models["a"].may_load.set()
    if fails:
        assert ERROR_EVENTS[path] in text
    else:
        assert '"error":{' not in text and text.count("data: ") > text.count("event: ping") + 1


@pytest.mark.slow
def test_a_request_waits_for_its_model_as_long_as_it_may(make: Make, until: Until) -> None:
    front = make("ab", load_wait=0.0)
    front.models["a"].may_load.clear()
    body = {"model": "a", "prompt": "say:hi", "max_tokens": 2}
    answer = front.post("/v1/completions", **body)
    assert answer.status_code == 503 and answer.headers["Retry-After"] == "1"
    assert answer.json()["error"]["message"] == "model 'a' is not loaded now"
    front.post("/v1/completions", **body)  # it was measured before, and loads now
    assert front.client.get("/v1/models/a").json()["status"] == {"value": "loading"}
    assert front.client.get("/v1/events?model=a").status_code == 503
    front.models["a"].may_load.set()
    until(lambda: front.client.get("/v1/models/a").json()["status"] == {"value": "loaded"})
    assert front.post("/v1/completions", **body).status_code == 200
    with front.client.stream("GET", "/v1/events?model=a") as response:  # which does not keep it in memory
        assert next(response.iter_lines()) == "event: update"
        assert front.post("/models/unload", model="a").json() == {"success": True}
        until(lambda: front.client.get("/v1/models/a").json()["status"] == {"value": "unloaded"})


@pytest.mark.slow
def test_too_many_requests_for_one_load_get_429(make: Make, until: Until) -> None:
    front = make("a")
    front.models["a"].may_load.clear()
    body = {"model": "a", "prompt": "say:hi", "max_tokens": 2}
    answers: list[int] = []
    threads = [
        threading.Thread(target=lambda: answers.append(front.post("/v1/completions", **body).status_code))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    until(lambda: front.fleet.pool.count_waiting("a") == 2)
    answer = front.post("/v1/completions", **body)
    assert answer.status_code == 429 and "--max-queue" in answer.json()["error"]["message"]
    front.models["a"].may_load.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert answers == [200, 200]


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request_at_the_model(make: Make, until: Until, stream: bool) -> None:
    front = make("a")
    worker = front.models["a"].worker
    front.post("/v1/completions", model="a", prompt="say:hi", max_tokens=2)
    worker.open.clear()
    body = {"model": "a", "prompt": "x", "max_tokens": 200, "stream": stream}
    with pytest.raises(httpx.ReadTimeout), httpx.Client(trust_env=False, verify=NO_TLS) as client:
        client.post(f"{front.url}/v1/completions", json=body, timeout=0.3)
    until(lambda: worker.cancelled == [1])
    worker.open.set()
    until(lambda: not front.fleet.pool.models["a"].running)


@pytest.mark.slow
def test_a_failed_load_is_told_and_tried_again(make: Make) -> None:
    front = make("a")
    model = front.models["a"]
    model.fails, model.exit_code = True, 2
    body = {"model": "a", "prompt": "say:hi", "max_tokens": 2}
    answer = front.post("/v1/completions", **body)
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "model 'a': it cannot be loaded: no such weights"
    failure = {"value": "unloaded", "failed": True, "exit_code": 2}
    status = front.client.get("/v1/models/a").json()["status"]
    assert status == failure | {"error": "it cannot be loaded: no such weights"}
    assert front.client.get("/health").status_code == 503
    assert front.client.get("/live").status_code == 200
    model.fails, model.exit_code = False, None
    assert front.post("/v1/completions", **body).status_code == 200
    assert front.client.get("/health").status_code == 200


def test_a_socket_that_nobody_listens_at_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with listen("", 0, str(path)):
        with pytest.raises(ConfigError, match="--uds: cannot listen at .*: Address already in use"):
            listen("", 0, str(path)).__enter__()
        stale = path.rename(tmp_path / "t")
    with listen("", 0, str(stale)):
        assert stale.is_socket()
    assert not stale.exists()
