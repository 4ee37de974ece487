"""`run-batch --base-url`: a server that runs already answers the lines."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.support.fake_batch_server import line, results, write_input

from moesaic.commands import cli
from moesaic.jobs.batch import window


@dataclass
class Shop:
    """A server on a socket that answers completions. `cut`: requests that it cuts off before it answers."""

    key: str | None = None
    cut: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while `cut` and `bodies` change."""
    url: str = ""

    def handler(self) -> type[BaseHTTPRequestHandler]:
        shop = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                if shop.key is not None and self.headers.get("Authorization") != f"Bearer {shop.key}":
                    self.answer(401, {"error": {"message": "no such key", "code": "invalid_api_key"}})
                else:
                    self.answer(200, {"data": [{"id": "first"}, {"id": "second"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with shop.lock:
                    shop.cut -= 1
                    if shop.cut >= 0:
                        self.close_connection = True
                        return
                    shop.bodies.append(body)
                choice = {"index": 0, "text": f"<{body['prompt']}>"}
                usage = {"prompt_tokens": 3, "completion_tokens": 5}
                self.answer(200, {"model": body["model"], "choices": [choice], "usage": usage})

            def answer(self, status: int, body: dict[str, Any]) -> None:
                raw = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *_: object) -> None:
                pass

        return Handler


@contextmanager
def opened(shop: Shop) -> Iterator[Shop]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), shop.handler())
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    shop.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield shop
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


@pytest.fixture
def run(files: tuple[Path, Path]) -> Callable[..., int]:
    return lambda *flags: cli.main(["run-batch", "-i", str(files[0]), "-o", str(files[1]), *flags])


def test_bodies_are_sent_as_they_are_and_may_name_several_models(
    files: tuple[Path, Path], run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    files[0].write_text(line("a", model="first") + "\n" + line("b", model="second") + "\n")
    with opened(Shop()) as shop:
        assert run("--base-url", shop.url + "/v1") == 0
        assert run("--base-url", shop.url) == 0, "everything is there already"
    assert "serves first, second" in capsys.readouterr().err
    assert sorted(body["model"] for body in shop.bodies) == ["first", "second"]
    found = {one["custom_id"]: one["response"]["body"] for one in results(files[1])}
    assert {name: body["choices"][0]["text"] for name, body in found.items()} == {"a": "<p-a>", "b": "<p-b>"}


def test_a_connection_that_breaks_is_made_again(
    files: tuple[Path, Path], run: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = write_input(files[0], 20)
    monkeypatch.setattr(window, "retry_delay", lambda attempt, asked: 0.01)
    with opened(Shop(cut=9)) as shop:
        assert run("--base-url", shop.url, "--max-in-flight", "4") == 0
    assert sorted(one["custom_id"] for one in results(files[1])) == sorted(ids)


def test_a_server_that_stays_away_ends_the_run_and_keeps_what_is_done(
    files: tuple[Path, Path],
    run: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_input(files[0], 3)
    monkeypatch.setattr(window, "retry_delay", lambda attempt, asked: 0.001)
    with opened(Shop(cut=1000)) as shop:
        assert run("--base-url", shop.url) == 1
    said = capsys.readouterr().err
    assert "at the last of 12 attempts; 0 of 3 results are in" in said and "Traceback" not in said
    with opened(Shop()) as shop:
        assert run("--base-url", shop.url) == 0


def test_the_key_is_sent_and_a_wrong_one_is_one_line(
    files: tuple[Path, Path],
    run: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_input(files[0], 1)
    with opened(Shop(key="right")) as shop:
        assert run("--base-url", shop.url, "--api-key", "wrong") == 1
        assert capsys.readouterr().err.splitlines()[-1].endswith("HTTP 401: no such key")
        assert results(files[1]) == []
        monkeypatch.setenv("MOESAIC_API_KEY", "right")
        assert run("--base-url", shop.url) == 0


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--base-url", "127.0.0.1"], "--base-url: got '127.0.0.1'; allowed: a URL such as http://127.0.0.1"),
        (["--base-url", "http://127.0.0.1:1", "--model", "demo"], "--model: not allowed with --base-url"),
        (["--base-url", "http://127.0.0.1:1", "--seed", "1"], "--seed: not allowed with --base-url"),
        (["--base-url", "http://127.0.0.1:1", "--expert-servers", "2"], "--expert-servers: not allowed"),
        (["--base-url", "http://127.0.0.1:1", "--fast-memory", "2GiB"], "--fast-memory: not allowed"),
        ([], "--model: got nothing; allowed: a checkpoint, or --base-url of a running server"),
        (
            ["--model", "demo", "--fast-memory", "1GiB", "--attention-workers", "2"],
            "allowed: 1 with --fast-mem",
        ),
    ],
)
def test_flags_that_do_not_go_together_are_one_line(
    files: tuple[Path, Path],
    run: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    says: str,
) -> None:
    write_input(files[0], 1)
    assert run(*flags) == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1
    assert not files[1].exists()


def test_nobody_at_the_address_is_one_line(
    files: tuple[Path, Path], run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    write_input(files[0], 1)
    assert run("--base-url", "http://127.0.0.1:1") == 1
    said = capsys.readouterr().err
    assert said.startswith("moesaic: http://127.0.0.1:1: ") and said.count("\n") == 1
