"""The header Host of a server without a key, and requests that a proxy would read otherwise."""

from __future__ import annotations

import pytest

from moesaic.server.hosts import Hosts
from tests.support.fake_cluster import FakeCluster
from tests.support.raw_http import ask, get, head, post

from .conftest import ADMIN_KEY, Launch

LOCAL = Hosts.from_listener("127.0.0.1", "127.0.0.1")
PUBLIC = Hosts.from_listener("0.0.0.0", "0.0.0.0", ("Moesaic.Example",))


@pytest.mark.parametrize(
    ("header", "local", "public"),
    [
        ("localhost", True, True),
        ("LOCALHOST:8000", True, True),
        ("localhost.:8000", True, True),
        ("a.localhost:8000", True, True),
        ("127.0.0.1:8000", True, True),
        ("127.9.9.9", True, True),
        ("[::1]:8000", True, True),
        ("::1", True, True),
        ("192.168.1.5:8000", False, True),
        ("[fe80::1%25eth0]:8000", False, True),
        ("moesaic.example:8000", False, True),
        ("moesaic.example.", False, True),
        ("evil.example", False, False),
        ("evil.example:8000", False, False),
        ("localhost.evil.example", False, False),
        ("127.0.0.1.evil.example", False, False),
        ("evillocalhost", False, False),
        ("127.0.0.1:80:evil.example", False, False),
        ("[::1", True, True),
        ("[]", False, False),
        ("[::1].evil.example", False, False),
        ("[::1]evil.example:8000", False, False),
        ("[::1]:evil.example", False, False),
        (":8000", False, False),
        ("", False, False),
        ("\xe9", False, False),
    ],
)
def test_hosts(header: str, local: bool, public: bool) -> None:
    assert (LOCAL.allow(header), PUBLIC.allow(header)) == (local, public)


def test_a_star_allows_every_host() -> None:
    assert Hosts.from_listener("127.0.0.1", "127.0.0.1", ("*",)).allow("evil.example")


def test_the_name_of_host_is_allowed() -> None:
    assert Hosts.from_listener("127.0.0.1", "127.0.0.1", ("box.lan.",)).allow("box.lan.:8000")
    assert Hosts.from_listener("Box.lan", "10.0.0.3").allow("box.lan:8000")


def test_a_page_that_resolves_to_this_machine_is_refused(launch: Launch) -> None:
    cluster = FakeCluster()
    live = launch(cluster=cluster, hosts=LOCAL)
    port = int(live.url.rsplit(":", 1)[1])
    body = {"expert_servers": 1}
    for path in ("/v1/models", "/v1/fault_tolerance/status", "/nothing"):
        answer = ask(port, head(path, None, "Connection: close", host="evil.example"))
        assert answer is not None and (answer.status, answer.code) == (403, "host_not_allowed")
    assert b"Host: got 'evil.example'; allowed: localhost" in answer.body
    assert b"--allowed-hosts" in answer.body and b"--api-key" in answer.body
    changed = post("/scale_elastic_ep", body, f"Authorization: Bearer {ADMIN_KEY}", "Connection: close")
    refused = ask(port, changed.replace(b"localhost", b"evil.example"))
    assert refused is not None and refused.code == "host_not_allowed"
    assert cluster.asked == []
    assert get(port, "/v1/models") == get(port, "/health", host="evil.example") == 200


def test_with_a_key_every_host_is_allowed(launch: Launch) -> None:
    live = launch(api_key="s3cret", hosts=LOCAL)
    port = int(live.url.rsplit(":", 1)[1])
    lines = ("Authorization: Bearer s3cret", "Connection: close")
    answer = ask(port, head("/v1/models", None, *lines, host="moesaic.example"))
    assert answer is not None and answer.status == 200


def test_a_body_with_two_lengths_ends_the_connection(launch: Launch) -> None:
    """A proxy that believes Content-Length would take the second request for a part of the first."""
    body = b'{"prompt": "x"}'
    chunked = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    first = head("/v1/completions", len(chunked), "Transfer-Encoding: chunked") + chunked
    port = int(launch().url.rsplit(":", 1)[1])
    answer = ask(port, first + head("/v1/models", None, "Connection: close"))
    assert answer is not None and (answer.status, answer.code) == (400, "invalid_http")
