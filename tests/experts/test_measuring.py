from __future__ import annotations

import numpy as np
import pytest

from moesaic.experts import measuring


class Cpu:
    """Reads for `read` seconds and takes `row` seconds for each row."""

    def __init__(self, read: float, row: float, first: float = 0.0) -> None:
        self.now, self.read, self.row, self.first = 0.0, read, row, first
        self.runs: list[int] = []

    def run(self, rows: int) -> None:
        self.now += self.read + rows * self.row + (0.0 if self.runs else self.first)
        self.runs.append(rows)

    def clock(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.parametrize(("read", "wanted"), [(0.012, 12.0), (0.006, 6.0), (0.0001, 1.0), (0.2, 64.0)])
def test_rows_that_take_as_long_as_reading(read: float, wanted: float) -> None:
    cpu = Cpu(read, 0.001, first=0.05)
    assert measuring.measure_ratio(cpu.run, {"a": read}, cpu.clock) == pytest.approx(wanted)


def test_it_is_measured_once_for_each_of_what_it_depends_on() -> None:
    cpu = Cpu(0.012, 0.001)
    first = measuring.measure_ratio(cpu.run, {"threads": 1}, cpu.clock)
    runs = len(cpu.runs)
    assert measuring.measure_ratio(cpu.run, {"threads": 1}, cpu.clock) == pytest.approx(first, abs=0.01)
    assert len(cpu.runs) == runs
    measuring.measure_ratio(cpu.run, {"threads": 2}, cpu.clock)
    assert len(cpu.runs) > runs


def test_it_takes_less_than_a_second_or_is_left_out() -> None:
    slow = Cpu(0.4, 0.001)
    assert measuring.measure_ratio(slow.run, {}, slow.clock) is None and slow.runs == [1]
    long = Cpu(0.1, 0.02)
    assert measuring.measure_ratio(long.run, {}, long.clock) == pytest.approx(5.0)
    assert long.runs == [1, 1, 16]


def test_every_held_expert_of_a_layer_gets_the_rows() -> None:
    from types import SimpleNamespace

    seen: list[tuple[int, list[int], list[int]]] = []

    def run(layer: int, parts: list[measuring.CallPairs]) -> None:
        (part,) = parts
        assert np.array_equal(part.result_rows, np.arange(len(part.experts))) and part.results.shape == (
            len(part.rows),
            8,
        )
        seen.append((layer, part.experts.tolist(), part.rows.tolist()))

    backend = SimpleNamespace(name="x", resident_experts={2: [1, 3], 5: [0], 7: []}, run=run)
    layout = SimpleNamespace(hidden=8, width=4, dtype="float32")
    found = measuring.measure_experts(backend, layout, 1)  # type: ignore[arg-type]
    assert found is not None and measuring.MIN_RATIO <= found <= measuring.MAX_RATIO
    assert seen[0] == (2, [1, 3], [0, 0]) and seen[1] == (5, [0], [0])
    assert seen[2] == (2, [1] * 16 + [3] * 16, [*range(16)] * 2)
    assert measuring.measure_experts(SimpleNamespace(resident_experts={}), layout, 1) is None  # type: ignore[arg-type]
