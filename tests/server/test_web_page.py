"""The page at /: its files, who may do what from it, and the stream that it shows."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from moesaic.core.errors import ConfigError, ScalingError
from moesaic.server import watching, web_page
from tests.support.fake_cluster import FakeCluster

from .conftest import ADMIN_KEY, NO_TLS, Launch, Live

KILL, EVENTS = "/v1/fault_tolerance/kill", "/v1/events"


def client(live: Live, key: str | None = None) -> httpx.Client:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx.Client(base_url=live.url, headers=headers, timeout=60, trust_env=False, verify=NO_TLS)


def test_every_file_has_its_type_and_a_strict_policy(live: Live) -> None:
    types = {"js": "text/javascript", "mjs": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
    with client(live) as http:
        for path in sorted(web_page.PATHS):
            answer = http.get(path)
            kind = types.get(path.rpartition(".")[2], "text/html")
            assert answer.status_code == 200
            assert answer.headers["content-type"].split(";")[0] == kind, path
            policy = answer.headers["content-security-policy"]
            assert policy.startswith("default-src 'self';") and "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
        assert http.get("/").text.startswith("<!doctype html>")


@pytest.mark.parametrize(
    "path",
    [
        *("/page", "/page/", "/page/index.html", "/page/none.js", "/page/vendor/", "/page/../app.py"),
        *("/page/%2e%2e/app.py", "/page/..%2fapp.py", "/page/app.js%00", "/page//app.js"),
        "/page/vendor/preact.LICENSE.txt",
    ],
)
def test_nothing_else_is_served(path: str, live: Live) -> None:
    with client(live) as http:
        assert http.get(path).status_code == 404


def test_files_ask_no_other_host_and_have_no_inline_code() -> None:
    page = web_page.FILES["/"].read_text()
    assert (
        not re.search(r"<script(?![^>]*\bsrc=)", page) and "<style" not in page and " on" not in page.lower()
    )
    for path, file in web_page.FILES.items():
        text = file.read_text()
        assert not re.search(r"\beval\(|new Function|innerHTML *=|dangerouslySetInnerHTML *=", text) or (
            "vendor" in path
        )
        for address in re.findall(r"""(?:src|href|from|import|url)[ =(]*["'](https?:[^"']+)""", text):
            raise AssertionError(f"{path} asks {address}")
        for name in re.findall(r"""^import [^"']*["']([^"']+)["']""", text, re.MULTILINE):
            assert (file.parent / name).is_file(), (path, name)


def test_libraries_have_their_version_and_licence() -> None:
    vendored = sorted((web_page.FOLDER / "vendor").glob("*.mjs"))
    assert [re.fullmatch(r"[a-z]+-\d+\.\d+\.\d+\.mjs", file.name) is not None for file in vendored] == [
        True
    ] * 3
    for file in vendored:
        licence = file.with_name(f"{file.name.partition('-')[0]}.LICENSE.txt").read_text()
        assert "Permission is hereby granted" in licence or "Apache License" in licence


def test_the_page_needs_no_key_and_what_it_does_needs_one(launch: Launch) -> None:
    cluster = FakeCluster()
    live = launch(api_key="s3cret", cluster=cluster)
    with client(live) as http:
        assert http.get("/").status_code == http.get("/page/app.js").status_code == 200
        assert http.get("/v1/models").status_code == http.get(EVENTS).status_code == 401
        assert http.post(KILL, json={"name": "expert server 1"}).status_code == 401
    assert cluster.killed == []
    assert live.post(KILL, name="expert server 1").status_code == 200
    assert cluster.killed == ["expert server 1"]


def test_a_kill_needs_the_admin_key_where_nothing_else_needs_one(launch: Launch) -> None:
    cluster = FakeCluster()
    live = launch(cluster=cluster)
    for path in (KILL, f"{KILL}%0a", f"{KILL}/", f"/{KILL}", KILL.upper()):
        with client(live) as http:
            assert http.post(path, json={"name": "expert server 1"}).status_code in (401, 404, 405)
    with client(live, "wrong") as http:
        assert http.post(KILL, json={"name": "expert server 1"}).status_code == 401
    assert cluster.killed == []
    with client(live, ADMIN_KEY) as http:
        answer = http.post(KILL, json={"name": "expert server 1"}).json()
        assert answer["killed"] == "expert server 1 was killed; it is started again" and answer["processes"]
        assert http.get(KILL).status_code == 405
    assert cluster.killed == ["expert server 1"]


@pytest.mark.parametrize(
    ("body", "status"),
    [({}, 400), ({"name": ""}, 400), ({"name": 3}, 400), ({"name": "x", "signal": 9}, 400)],
)
def test_a_kill_takes_one_name(body: dict[str, Any], status: int, launch: Launch) -> None:
    assert launch(cluster=FakeCluster()).post(KILL, **body).status_code == status


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (ConfigError.field("name", "x", "expert server 0"), 400),
        (ScalingError("expert server 0 has no process now: it is starting", conflict=True), 409),
    ],
)
def test_a_kill_that_is_not_possible_says_why(failure: Exception, status: int, launch: Launch) -> None:
    answer = launch(cluster=FakeCluster(failure=failure)).post(KILL, name="x")
    assert answer.status_code == status and str(failure) in answer.json()["error"]["message"]


def test_one_process_cannot_be_killed(live: Live) -> None:
    assert live.post(KILL, name="attention worker 0").status_code == 404


def events(lines: Iterator[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    name = ""
    for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


def test_the_stream_begins_with_everything_and_goes_on_with_what_changed(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "INTERVAL", 0.01)
    cluster = FakeCluster(pairs=np.array([[3, 4], [5, 6]]))
    live = launch(cluster=cluster)
    with client(live) as http, http.stream("GET", EVENTS) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        found = events(answer.iter_lines())
        name, first = next(found)
        assert name == "update" and first["type"] == "update"
        assert first["load"] == {"layers": [1, 2], "pairs": [[3, 4], [5, 6]]}
        assert [one["name"] for one in first["processes"]] == [
            *("attention worker 0", "expert server 1", "expert server 2")
        ]
        worker, server, _ = first["processes"]
        assert worker["worker"]["running"] == 2 and server["worker"] is None
        assert server["held"] == {"1": "0, 2-3"} and "pid" not in server and "address" not in server
        assert [host["name"] for host in first["hosts"]] == ["", "b"]
        assert first["links"][0]["source"] == "measured" and server["suspected"] is False
        assert first["cluster"]["counters"]["failovers"] == 3 and first["cluster"]["single"] == 1
        assert set(next(found)[1]) == {"type", "time"}
        cluster.servers = 3
        changed = next(data for _, data in found if len(data) > 2)
        assert set(changed) == {"type", "time", "processes"} and len(changed["processes"]) == 4


def test_one_process_has_figures_too(live: Live) -> None:
    with client(live) as http, http.stream("GET", EVENTS) as answer:
        _, first = next(events(answer.iter_lines()))
    assert first["cluster"] is first["processes"] is first["load"] is first["hosts"] is None
    assert first["engine"]["blocks"].keys() == {"used", "cached", "total"}
    assert first["model"]["name"] == "org/fake-moe" and first["model"]["experts"] == 2


def test_nothing_looks_at_the_server_once_the_viewer_has_left(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, until: Any
) -> None:
    monkeypatch.setattr(watching, "INTERVAL", 0.01)
    cluster = FakeCluster()
    asked: list[int] = []
    report = cluster.report
    monkeypatch.setattr(cluster, "report", lambda: asked.append(1) or report())
    live = launch(cluster=cluster)
    assert not asked
    with client(live) as http, http.stream("GET", EVENTS) as answer:
        found = events(answer.iter_lines())
        next(found)
        until(lambda: len(asked) > 5)

    def quiet() -> bool:
        before = len(asked)
        live.get("/health")
        time.sleep(0.1)
        return len(asked) == before

    until(quiet)


def test_the_stream_ends_when_the_server_is_drained(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "INTERVAL", 0.01)
    live = launch()
    with client(live) as http, http.stream("GET", EVENTS) as answer:
        found = events(answer.iter_lines())
        next(found)
        live.front.draining = True
        last = list(found)[-1]
    assert last == ("end", {"type": "end", "reason": "the server is shutting down and takes no new requests"})


def test_there_is_no_stream_while_the_model_loads(launch: Launch) -> None:
    assert launch(ready=False).get(EVENTS).status_code == 503


def test_a_public_server_without_a_key_tells_nobody_about_its_processes(launch: Launch) -> None:
    live = launch(cluster=FakeCluster(), closed=True)
    with client(live) as http:
        assert http.get(EVENTS).status_code == 401
    with client(live, ADMIN_KEY) as http, http.stream("GET", EVENTS) as answer:
        assert answer.status_code == 200


def test_routes_are_refused_where_nobody_knows_them(live: Live) -> None:
    answer = live.post("/v1/completions", prompt="a", return_routed_experts=True)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "return_routed_experts"
