"""The page in a real browser, in front of clusters on several hosts and servers that do not know routes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from moesaic.core.cluster_status import ClusterStatus, HostStatus, LinkStatus
from tests.support import browser
from tests.support.browser import Page
from tests.support.fake_cluster import FakeCluster
from tests.test_page_in_browser import CUT, PALE

from .conftest import ADMIN_KEY, Launch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(browser.program() is None, reason="there is no Chromium on this machine"),
]
WAITS = "waiting for a host: no node has 2 CPU free; 2 nodes have 1 of 5 CPU free"
FAR, FARTHER = "10.0.0.2", "2001:db8:85a3:1234:5678:8a2e:370:7334"
HOSTS = [
    HostStatus("", ["attention worker 0", "expert server 1"]),
    HostStatus(FAR, ["expert server 2", "expert server 3"]),
    HostStatus(FARTHER, []),
]
LINKS = [
    LinkStatus("", FAR, 9.5e-5, 1.25e9, "measured"),
    LinkStatus("", FARTHER, 2.5e-3, 1.1e8, "assumed"),
    LinkStatus(FAR, FARTHER, 2.6e-3, 1.1e8, "assumed"),
]


class Hosts(FakeCluster):
    """Two servers on another host, one of them suspected, and a server that waits for a host."""

    def __init__(self, several: bool = True) -> None:
        super().__init__()
        self.servers, self.several = 4, several
        self.changed: dict[str, dict[str, Any]] = {}
        """Name of a process -> fields that differ."""

    def report(self) -> ClusterStatus:
        found = super().report()
        processes = [
            replace(one, stage="serving", **self.changed.get(one.name, {})) for one in found.processes
        ]
        hosts, links = (HOSTS, LINKS) if self.several else (HOSTS[:1], [])
        return replace(found, processes=processes, hosts=hosts, links=links)


@pytest.fixture
def page() -> Iterator[Page]:
    with browser.browser() as opened:
        opened.size(1280, 900)
        yield opened
        assert [error for error in opened.errors if "status of 40" not in error] == []


def live_view(page: Page, url: str) -> None:
    page.open(f"{url}/#key={ADMIN_KEY}")
    page.until("document.readyState == 'complete' && document.querySelectorAll('.tab').length > 1")
    page.run("document.querySelectorAll('.tab')[1].click()")
    page.until("document.querySelector('.card')")


def groups(page: Page) -> list[list[str]]:
    """The title of each group of processes, and their names."""
    script = "[...document.querySelectorAll('.there')].map((one) => [...one.querySelectorAll('h3')]"
    found: list[list[str]] = page.run(f"{script}.map((name) => name.firstChild.textContent.trim()))")
    return found


def test_processes_stand_under_their_hosts(page: Page, launch: Launch) -> None:
    cluster = Hosts()
    live_view(page, launch(cluster=cluster).url)
    cluster.changed = {
        "expert server 2": {"suspected": True},
        "expert server 4": {"waiting": WAITS, "host": ""},
    }
    page.until("document.querySelector('.card .change')")
    assert groups(page) == [
        ["this server's host", "attention worker 0", "expert server 1"],
        [FAR, "expert server 2", "expert server 3"],
        [FARTHER],
        ["without a host", "expert server 4"],
    ]
    rows = page.run("[...document.querySelectorAll('.links tr')].map((one) => one.innerText)")
    assert [row.split("\t") for row in rows[1:]] == [
        [f"this server's host – {FAR}", "95 µs", "1.25 GB/s", "measured"],
        [f"this server's host – {FARTHER}", "2.5 ms", "110 MB/s", "assumed"],
        [f"{FAR} – {FARTHER}", "2.6 ms", "110 MB/s", "assumed"],
    ]
    text, log = page.text(), page.run("document.querySelector('.log').innerText")
    assert "1 suspected: nothing is heard of it" in text
    assert WAITS in text and f"expert server 4: {WAITS}" in log and "expert server 2 is suspected" in log
    assert page.run("[...document.querySelectorAll('.card.busy .stage')].map((one) => one.innerText)") == [
        "suspected"
    ]
    for scheme in ("light", "dark"):
        for width in (360, 1280):
            page.size(width, 900)
            page.scheme(scheme)
            page.until(f"innerWidth == {width}")
            page.until(f"!{PALE}.length")  # colours change within a moment
            assert page.run(CUT) == [], (scheme, width)
    cluster.changed = {}
    page.until("document.querySelector('.log').innerText.includes('expert server 2 is trusted again')")


def test_a_kill_says_what_was_done(page: Page, launch: Launch) -> None:
    cluster = Hosts()
    live_view(page, launch(cluster=cluster).url)
    for _ in range(2):
        page.click(".kill[aria-label$='expert server 3']")
        page.until("document.querySelector('.kill.armed') || document.querySelector('.log li')")
    page.until("document.querySelector('.log').innerText.includes('was killed; it is started again')")
    assert cluster.killed == ["expert server 3"]


def test_on_one_host_there_is_no_word_of_hosts(page: Page, launch: Launch) -> None:
    live_view(page, launch(cluster=Hosts(several=False)).url)
    assert [len(group) for group in groups(page)] == [5]
    assert "host" not in page.run("document.querySelector('.live').innerText").lower()


KEPT = "localStorage.setItem('moesaic', JSON.stringify({ colour: 'expert', settings: { max_tokens: '20' } }))"
"""What the browser may have kept of an earlier server."""
COLOURS = "document.querySelectorAll('.colours button:disabled').length"


def chat(page: Page, url: str) -> None:
    page.open(url)
    page.until("document.querySelector('.model')?.textContent == 'org/fake-moe'")
    page.run(KEPT)
    page.open(f"{url}/?again")
    page.until("location.search && document.querySelector('.model')?.textContent == 'org/fake-moe'")


def test_colours_are_off_where_nobody_knows_routes(page: Page, launch: Launch) -> None:
    """The browser has kept the choice of colours, and the answer comes nevertheless."""
    chat(page, launch().url)
    page.until(f"{COLOURS} == 3")
    assert "--fast-memory" in page.run("document.querySelector('.colours').innerText")
    assert page.run("document.querySelector('.colours [aria-pressed=true]').innerText") == "Off"
    page.run("document.querySelector('.empty li button').click()")
    page.until("document.querySelector('.assistant footer')?.innerText.includes('tokens')")
    assert page.run("document.querySelector('.assistant .error')") is None


def test_a_refused_request_switches_colours_off_where_the_state_is_secret(page: Page, launch: Launch) -> None:
    chat(page, launch(cluster=Hosts(), closed=True).url)
    assert page.run(COLOURS) == 0
    page.run("document.querySelector('.empty li button').click()")
    page.until("document.querySelector('.assistant .error')")
    page.until(f"{COLOURS} == 3")
    page.click(".assistant footer .link")
    page.until("document.querySelector('.assistant footer')?.innerText.includes('tokens')")
