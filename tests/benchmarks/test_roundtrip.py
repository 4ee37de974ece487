"""Round trips: when a measurement ends, and that clients and servers of each shape meet."""

from __future__ import annotations

import argparse
import importlib.util

import pytest
import roundtrip
import roundtrip_peers


def options(**changed: object) -> argparse.Namespace:
    usual = {"shape": "1+1", "rounds": 5, "warmup": 1, "seconds": 20.0, "spin": 0.0, "debug": False}
    usual |= {"turns": 1}
    return argparse.Namespace(**(usual | {"secret": "00" * 16} | changed))


def test_rounds_end_by_number_or_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0

    def once() -> None:
        nonlocal now
        now += 2.0

    monkeypatch.setattr("roundtrip.time.perf_counter", lambda: now)
    assert roundtrip.timed(once, 3, 60.0) == [2.0, 2.0, 2.0]
    assert roundtrip.timed(once, 1000, 5.0) == [2.0, 2.0, 2.0]  # the third began at 4 s
    assert roundtrip.timed(once, 0, 5.0) == []


def test_fewer_rounds_are_told() -> None:
    row = {"p50_us": 3749.1, "p99_us": 9530.0, "rounds": 412}
    assert roundtrip.cell(row, 1000) == "3,749 / 9,530 (412)"
    assert roundtrip.cell(row, 412) == "3,749 / 9,530"


def test_every_transport_has_a_server_and_a_client() -> None:
    foreign = {roundtrip.family(name) for name in roundtrip.TRANSPORTS} - {"calls"}
    assert foreign == set(roundtrip_peers.SERVE) == set(roundtrip_peers.ASK)
    assert set(roundtrip_peers.NEEDS.values()) == set(roundtrip_peers.INSTALL)


def test_transports_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"tcp": 2e-6, "tcp-plain": 1e-6}
    order: list[tuple[str, int]] = []

    def measure(options: argparse.Namespace, transport: str, batch: int) -> list[list[float]]:
        order.append((transport, batch))
        return [[seconds[transport] * batch] * 3]

    monkeypatch.setattr("roundtrip.measure", measure)
    found = list(roundtrip.results(options(transport=["tcp", "tcp-plain"], batch=[1, 16], turns=2)))
    assert order == [("tcp", 1), ("tcp-plain", 1)] * 2 + [("tcp", 16), ("tcp-plain", 16)] * 2
    medians = [(row["transport"], row["batch"], row["p50_us"]) for row in found]
    assert medians == [("tcp", 1, 2), ("tcp", 16, 32), ("tcp-plain", 1, 1), ("tcp-plain", 16, 16)]


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["tcp", "tcp-plain"])
def test_calls_with_and_without_encryption_make_all_rounds(transport: str) -> None:
    assert [len(times) for times in roundtrip.measure(options(), transport, 1)] == [5]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["2+2", "1+3"])
def test_all_clients_make_all_rounds(where: str) -> None:
    found = roundtrip.measure(options(shape=where), "unix", 1)
    assert [len(times) for times in found] == [5] * int(where[0])


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["gloo", "zmq-ipc", "nixl", "nixl-flag", "calls-nixl"])
def test_peers_make_all_rounds(transport: str) -> None:
    if importlib.util.find_spec(roundtrip_peers.NEEDS[transport]) is None:
        pytest.skip(roundtrip_peers.INSTALL[roundtrip_peers.NEEDS[transport]])
    found = roundtrip.measure(options(shape="2+2"), transport, 1)
    assert [len(times) for times in found] == [5, 5]


def test_what_is_missing_is_left_out_with_a_hint(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("roundtrip.importlib.util.find_spec", lambda name: None)
    assert list(roundtrip.results(options(transport=["nixl"], batch=[1]))) == []
    assert "nixl: left out; pip install --no-deps nixl nixl-cu12" in capsys.readouterr().err


@pytest.mark.slow
def test_a_client_that_fails_ends_the_measurement() -> None:
    with pytest.raises(SystemExit, match="--debug"):
        roundtrip.measure(options(), "unix", -1)
