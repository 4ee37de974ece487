"""The measurement of a link: with a clock that says how long each message took."""

from __future__ import annotations

import threading

import pytest

from moesaic.core.errors import ConnectionLost
from moesaic.core.messages import Alive, LinkTest, Message, Shutdown
from moesaic.transport import link_test
from moesaic.transport.host import this_host
from moesaic.transport.link_test import LinkTests, measure
from moesaic.transport.stream import StreamConnection, stream_pair


class Far:
    """A connection to a host `latency` seconds away that carries `bandwidth` bytes/s, and the time there."""

    def __init__(self, latency: float, bandwidth: float, answer: Message | None = None) -> None:
        self.now, self.sizes = 0.0, list[int]()
        self._latency, self._bandwidth, self._answer = latency, bandwidth, answer
        self._seconds = 0.0

    def send(self, message: Message) -> None:
        assert isinstance(message, LinkTest)
        self.sizes.append(len(message.payload))
        self._seconds = 2 * (self._latency + len(message.payload) / self._bandwidth)

    def receive(self, timeout: float | None = None) -> Message | None:
        assert timeout is not None
        self.now += min(timeout, self._seconds)
        if self._seconds > timeout:
            return None
        return self._answer or LinkTest(bytes(self.sizes[-1]))

    def close(self) -> None:
        """Nothing to close."""

    def clock(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("latency", "bandwidth", "largest"),
    [(1e-5, 1e10, 1 << 22), (1e-3, 1e8, 1 << 22), (1e-2, 1e7, 1 << 20), (0.1, 1e5, 1 << 16)],
)
def test_latency_and_bandwidth_are_those_of_the_link(latency: float, bandwidth: float, largest: int) -> None:
    far = Far(latency, bandwidth)
    found = measure(far, far.clock)
    assert found is not None
    assert found.latency == pytest.approx(latency)
    assert found.bandwidth == pytest.approx(bandwidth, rel=1e-6)
    assert max(far.sizes) == largest, "a slow link gets no large messages"


@pytest.mark.parametrize(("latency", "bandwidth"), [(10.0, 1e9), (0.1, 1e3)])
def test_it_ends_in_time(latency: float, bandwidth: float) -> None:
    far = Far(latency, bandwidth)
    assert measure(far, far.clock) is None
    assert far.now <= link_test.LIMIT_SECONDS


@pytest.mark.parametrize("answer", [LinkTest(b"x"), Alive()])
def test_another_answer_ends_the_connection(answer: Message) -> None:
    far = Far(1e-3, 1e9, answer)
    with pytest.raises(ConnectionLost, match=f"it sent {type(answer).__name__} during the test of its link"):
        measure(far, far.clock)


def test_a_host_is_measured_once_a_minute_and_this_one_never() -> None:
    far = Far(1e-3, 1e9)
    tests = LinkTests(far.clock)
    assert tests.link(this_host(), far) is None
    assert tests.link("", far) is None
    assert not far.sizes
    assert tests.link("boot:1", far) is not None
    assert tests.link("boot:1", far) is None
    assert tests.link("boot:2", far) is not None
    far.now += link_test.REPEAT_SECONDS
    assert tests.link("boot:1", far) is not None


def test_a_real_connection_sends_back_what_it_gets() -> None:
    """The other end does as `joining.enlisting.enlist`."""
    here, there = map(StreamConnection, stream_pair())

    def echo() -> None:
        while isinstance(message := there.receive(None), LinkTest):
            there.send(message)

    thread = threading.Thread(target=echo)
    thread.start()
    found = measure(here)
    here.send(Shutdown())
    thread.join()
    here.close()
    there.close()
    assert found is not None
    assert 0 < found.latency < link_test.LIMIT_SECONDS
    assert found.bandwidth > 0
