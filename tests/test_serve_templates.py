"""Hostile chat templates in the programs as a person runs them: `serve`, `run-batch` and `LLM`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

import moesaic
from moesaic import LLM
from moesaic.commands import cli
from moesaic.core.errors import RequestError
from moesaic.server.service import CHATS_AT_ONCE
from tests.support.processes import all_children, gone
from tests.test_serve import Server, start

DEMO = Path(moesaic.__file__).parent / "demo"
ASK = [{"role": "user", "content": "hi"}]
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
ONE_OPERATION = "{{ (messages|length + 9) ** (9 ** 9) }}"
GRACE = 10
"""Seconds that the server gives its clients after the last request; see moesaic.server.run."""


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Callable[[str], Server]]:
    """Starts servers with a template. They end with the test, also where it fails."""
    started: list[Server] = []

    def serve(template: str) -> Server:
        file = tmp_path / "hostile.jinja"
        file.write_text(template)
        started.append(start("--chat-template", str(file)))
        return started[-1]

    yield serve
    for server in started:
        server.process.kill()
        server.process.wait(60)
        assert server.process.stdout is not None
        server.process.stdout.close()


def renderers(pid: int) -> list[int]:
    """Ids of the processes that render templates, whichever thread of `pid` started them."""
    return [child for child in all_children(pid) if _is_renderer(child)]


def _is_renderer(pid: int) -> bool:
    try:
        return b"templates/__main__.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False  # it has ended


def chat(client: httpx.Client) -> httpx.Response:
    return client.post("/v1/chat/completions", json={"messages": ASK, "max_tokens": 2}, timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize(
    "template",
    [
        pytest.param(ENDLESS, id="loops"),
        pytest.param(ONE_OPERATION, id="one operation", marks=pytest.mark.full),
    ],
)
def test_a_hostile_template_delays_no_other_request_and_no_signal(
    serving: Callable[[str], Server], template: str
) -> None:
    server = serving(template)
    process = server.process
    with httpx.Client(base_url=server.url, timeout=60) as client, ThreadPoolExecutor(8) as threads:
        slow, began = [threads.submit(chat, client)], time.monotonic()
        for _ in range(3):
            assert client.get("/health").status_code == 200
            body = {"prompt": [5, 6], "max_tokens": 2, "ignore_eos": True}
            assert client.post("/v1/completions", json=body).status_code == 200
            time.sleep(0.3)
        done = any(one.done() for one in slow)
        assert not done or time.monotonic() - began > 5, "seconds that a template may run"
        _refused(slow)
        with pytest.raises(httpx.ReadTimeout):  # this client leaves
            client.post("/v1/chat/completions", json={"messages": ASK}, timeout=0.5)
        children = renderers(process.pid)
        late = [threads.submit(chat, client) for _ in range(CHATS_AT_ONCE + 2)]
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        assert process.wait(GRACE + 30) == 0
        statuses = [one.result(60).status_code for one in late]
    assert statuses.count(503) >= 2, "those that had not begun"
    assert set(statuses) == {400, 503}
    assert children and all(gone(pid) for pid in children)


def _refused(slow: list[Future[httpx.Response]]) -> None:
    for one in slow:
        answer = one.result(60)
        assert answer.status_code == 400
        says = "messages: the chat template ran for more than 5 seconds and was stopped"
        assert answer.json()["error"]["message"] == says


@pytest.mark.slow
def test_sigkill_of_the_server_ends_its_renderers(serving: Callable[[str], Server]) -> None:
    server = serving(ONE_OPERATION)
    with httpx.Client(base_url=server.url) as client, ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(chat, client)
        deadline = time.monotonic() + 60
        while len(children := renderers(server.process.pid)) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        server.process.kill()
        server.process.wait(60)
        assert waiting.exception(60) is not None
    deadline = time.monotonic() + 60
    while not all(gone(pid) for pid in children):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
def test_renderers_that_are_killed_are_replaced(serving: Callable[[str], Server]) -> None:
    server = serving("{{ messages[0].content }}")
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for _ in range(3):
            pids = renderers(server.process.pid)
            assert pids
            for pid in pids:
                subprocess.run(["kill", "-9", str(pid)], check=True)
            answers = [chat(client) for _ in range(3)]
            assert answers[-1].status_code == 200
            assert {answer.status_code for answer in answers} <= {200, 400}
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(30) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "is damaged: it is nested too deeply"),
        ("{{ 9 ** (9 ** 9) }}", "ran for more than 5 seconds and was stopped, while it was compiled"),
    ],
    ids=["nested", "a constant"],
)
def test_a_hostile_template_is_one_line_at_the_start(tmp_path: Path, template: str, says: str) -> None:
    file = tmp_path / "hostile.jinja"
    file.write_text(template)
    command = [sys.executable, "-m", "moesaic", "serve", "demo", "--port", "0", "--chat-template", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines() == [f"moesaic: {file}: the chat template {says}"]


@pytest.mark.slow
@pytest.mark.usefixtures("quick_workers")
def test_a_batch_has_the_same_limits(tmp_path: Path) -> None:
    (template := tmp_path / "hostile.jinja").write_text(
        "{% if messages[0].content == 'bad' %}{{ messages * 1000000000 }}{% endif %}{{ messages[0].content }}"
    )
    (lines := tmp_path / "in.jsonl").write_text(
        "".join(
            json.dumps(
                {
                    "custom_id": content,
                    "method": "POST",
                    "url": "/v1/chat/completions",
                    "body": {"messages": [{"role": "user", "content": content}], "max_tokens": 2},
                }
            )
            + "\n"
            for content in ("good", "bad", "<|im_end|>")
        )
    )
    out = tmp_path / "out.jsonl"
    flags = ["-i", str(lines), "-o", str(out), "--chat-template", str(template), "--threads", "1"]
    assert cli.main(["run-batch", "--model", "demo", *flags]) == 1
    results = {line["custom_id"]: line for line in map(json.loads, out.read_text().splitlines())}
    assert results["bad"]["response"]["status_code"] == 400
    assert "needed more than 256 MiB of memory" in results["bad"]["error"]["message"]
    assert results["good"]["response"]["status_code"] == 200
    usage = results["<|im_end|>"]["response"]["body"]["usage"]
    assert usage["prompt_tokens"] > 1


@pytest.mark.slow
@pytest.mark.full
def test_the_library_has_the_same_limits(tmp_path: Path) -> None:
    for file in DEMO.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "chat_template.jinja").write_text(
        "{% if messages[0].content == 'bad' %}{{ messages * 1000000000 }}{% endif %}{{ messages[0].content }}"
    )
    llm = LLM(str(tmp_path), threads=1)
    with pytest.raises(RequestError, match="the chat template needed more than 256 MiB of memory"):
        llm.chat([{"role": "user", "content": "bad"}])
    ids = llm.chat([{"role": "user", "content": "<|im_end|>"}])[0].prompt_token_ids
    assert len(ids) > 1
    allowing = LLM(str(tmp_path), threads=1, special_tokens_in_content=True)
    assert len(allowing.chat([{"role": "user", "content": "<|im_end|>"}])[0].prompt_token_ids) == 1
