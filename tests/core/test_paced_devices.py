from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from moesaic.core.curves import Curve
from moesaic.core.errors import ConfigError
from moesaic.core.paced_devices import LinkModel, PacedDevices, read

GOOD = {
    "source": '"a paper"',
    "dilation": "10.0",
    "attention": "{ points_ms = [[128, 2.7], [256, 5.4]] }",
    "experts": "{ points_ms = [[0, 0.25]], per_expert_ms = 0.5 }",
    "link": "{ latency_us = 5, gb_per_s = 30 }",
}


def write(path: Path, **changes: str | None) -> Path:
    lines = {key: value for key, value in {**GOOD, **changes}.items() if value is not None}
    path.write_text("\n".join(f"{key} = {value}" for key, value in lines.items()))
    return path


def test_a_file(tmp_path: Path) -> None:
    assert read(write(tmp_path / "a.toml")) == PacedDevices(
        "a paper",
        Curve(((128.0, 1e-3 * 2.7), (256.0, 1e-3 * 5.4))),
        Curve(((0.0, 0.25e-3),), 0.5e-3),
        LinkModel(1e-6 * 5, 30e9),
        10.0,
    )
    assert read(write(tmp_path / "a.toml", dilation=None)).dilation == 1.0


def test_the_files_of_the_repository_are_right() -> None:
    files = list((Path(__file__).parents[2] / "benchmarks" / "papers").glob("*.toml"))
    assert files and all(read(file).source for file in files)


@pytest.mark.parametrize("rows", [0, 1, 10, 55, 100, 150, 300, 1000])
def test_a_curve_is_level_then_straight_lines(rows: int) -> None:
    """Beside the slow form: the line through the two points around, or the last two."""
    points = ((10.0, 1.0), (100.0, 2.0), (200.0, 5.0))
    pairs = [(a, b) for a, b in pairwise(points) if rows <= b[0]] or [points[1:]]
    (few, short), (many, long) = pairs[0]
    wanted = short + max(0.0, rows - few) * (long - short) / (many - few)
    assert Curve(points).seconds(rows) == pytest.approx(wanted)
    assert Curve(points, 0.5).seconds(rows, 3) == pytest.approx(wanted + 1.5)
    assert Curve(points[:1]).seconds(rows) == 1.0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"source": None}, r"source: got None; allowed: a text"),
        ({"dilation": "0"}, r"dilation: got 0; allowed: a number above 0"),
        ({"dilation": "inf"}, r"dilation: got inf; allowed"),
        ({"speed": "1"}, r"unknown speed; allowed: source, dilation, attention, experts, link"),
        ({"link": "{ latency_us = 5 }"}, r"link.gb_per_s: got None; allowed: a number above 0"),
        ({"link": "{ latency_us = -1, gb_per_s = 1 }"}, r"link.latency_us: got -1; allowed: a number of at"),
        ({"link": None}, r"link: got None; allowed: a table with latency_us, gb_per_s"),
        (
            {"attention": "{ points_ms = [] }"},
            r"attention.points_ms: got \[\]; allowed: a list of \[rows, mil",
        ),
        ({"attention": "{ points_ms = [[1, true]] }"}, r"attention.points_ms: got \[1, True\]; allowed"),
        ({"attention": "{ points_ms = [[2, 1], [1, 2]] }"}, r"attention.points_ms: got .*ascending rows"),
        ({"attention": "{ points_ms = [[1, 1]], per_expert_ms = 1 }"}, r"unknown attention.per_expert_ms"),
        ({"experts": "{ points_ms = [[1, 1]], per_expert_ms = 'x' }"}, r"experts.per_expert_ms: got 'x'"),
        ({"source": "'a\nb"}, r"is not a TOML file"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, changes: dict[str, str | None], said: str) -> None:
    with pytest.raises(ConfigError, match=rf"^--paced: .*{said}"):
        read(write(tmp_path / "a.toml", **changes))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--paced: got .*none.toml.*allowed: a file to read \(No such"):
        read(tmp_path / "none.toml")
