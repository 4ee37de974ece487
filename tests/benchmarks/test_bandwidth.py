"""The bandwidth of connections, and the picture of a host's death."""

from __future__ import annotations

import argparse

import bandwidth
import pytest
from clusters import loss


def options(**changed: object) -> argparse.Namespace:
    usual = {"transport": ["tcp"], "mib": [1], "streams": [1], "seconds": 0.05, "turns": 1, "kv": False}
    return argparse.Namespace(**(usual | {"secret": "00" * 16} | changed))


def test_cases_name_what_is_measured() -> None:
    assert bandwidth.cases(options(mib=[0.5, 8])) == {
        "0.5 MiB": ["--bytes", str(1 << 19), "--streams", "1"],
        "8 MiB": ["--bytes", str(8 << 20), "--streams", "1"],
        "KV": ["--kv"],
    }
    assert list(bandwidth.cases(options(streams=[1, 2]))) == ["1 MiB x 1", "1 MiB x 2"]


@pytest.mark.full
@pytest.mark.parametrize("transport", ["shm", "unix", "tcp-plain", "tcp"])
@pytest.mark.parametrize("case", [["--bytes", "100000", "--streams", "2"], ["--kv"]], ids=["calls", "KV"])
def test_bytes_arrive_over_each_transport(transport: str, case: list[str]) -> None:
    assert bandwidth.measure(options(), None, transport, case) > 0


def test_the_picture_has_a_line_for_each_case() -> None:
    arguments = argparse.Namespace(min_replicas=[2, 1], hosts=3, before=1.0, bin=0.5)
    rows = [{"case": case, "bins": [4, 2, 6]} for case in loss.cases(arguments)]
    drawn = loss.picture(rows, arguments)
    assert "one of 3 hosts dies at 0 s" in drawn
    assert all(f">{name}</text>" in drawn for name in ("no fault", "min-replicas 2", "min-replicas 1"))
