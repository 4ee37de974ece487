from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gpu.test_hardware import Host

from moesaic.cost.hardware import GIB, Hardware, from_tables
from moesaic.kernels.table import REFERENCE, pick
from moesaic.offload.reading import IN_FLIGHT
from moesaic.planning.hardware import disk, measure, memory, products
from moesaic.planning.hardware.measure import FULL, SHORT, Effort, Measuring, Processing
from moesaic.planning.hardware.memory import Reading
from moesaic.planning.hardware.products import Rate
from moesaic.runtime.machine import cores

PAGE = 4096
TINY = Effort(
    seconds=1e-4,
    read_bytes=1 << 16,
    copy_bytes=1 << 12,
    disk=disk.Sizes(file=16 * PAGE, least=8 * PAGE, blocks=(PAGE, 4 * PAGE)),
    products=products.Sizes(hidden=64, width=32, matrices=2, rows=(1, 4), most_rows=8),
)


@pytest.fixture(autouse=True)
def small_caches_and_threads_put_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(memory, "choose_read_bytes", lambda least, available: least)
    monkeypatch.setattr(memory, "choose_matrix_bytes", lambda available: 0)
    before = torch.get_num_threads()
    yield
    pick("cpu", "auto").set_threads(cores(), False)
    torch.set_num_threads(before)


def quiet(what: str, done: int, total: int) -> None: ...


def kinds(lines: Any, *keys: str) -> list[tuple[Any, ...]]:
    return [tuple(line[key] for key in keys) for line in lines]


def test_ram_over_a_disk(tmp_path: Path) -> None:
    shown: list[str] = []
    measuring = Measuring(TINY, lambda what, done, total: shown.append(what), threads=2)
    found = measuring.ram_over_disk(tmp_path, "two cores")
    dtype = "bfloat16" if torch.bfloat16 in pick("cpu").unconverted_dtypes else "float32"
    assert found.name == "two cores" and found.source.endswith(
        f"by microbenchmarks: {pick('cpu').name}, weights in {dtype}"
    )
    assert found.fast.name == "RAM, 2 threads" and found.fast.processor is not None
    assert found.slow.name == "disk" and found.slow.processor is None and found.link.staging is None
    told = found.measurements
    again = [line["gib"] * GIB for line in told["disk"] if line["repeated"] and line["readers"] == IN_FLIGHT]
    assert found.slow.bandwidth == found.link.down_bandwidth == pytest.approx(max(again))
    assert found.link.up_bandwidth == pytest.approx(told["write_gib"] * GIB)
    assert kinds(told["memory"], "threads", "dtype")[:2] == [(1, dtype), (2, dtype)]
    assert found.fast.bandwidth == pytest.approx(told["memory"][1]["gib"] * GIB), "all threads, that type"
    mine = [line["gflops"] * 1e9 for line in told["products"] if line["dtype"] == dtype]
    assert found.fast.processor.flops == pytest.approx(max(mine)) and len(mine) == 4
    assert list(dict.fromkeys(shown)) == [
        *("writing the file to read", "disk", "memory", "products on cpu"),
    ]


def test_a_file_is_read_and_nothing_written(tmp_path: Path) -> None:
    file = tmp_path / "shard"
    file.write_bytes(b"x" * (16 * PAGE))
    found = Measuring(TINY, quiet, threads=1).ram_over_disk(file, "x")
    assert found.link.up_bandwidth == found.link.down_bandwidth and "write_gib" not in found.measurements
    assert kinds(found.measurements["disk"], "block_kib", "readers") == [
        *((16, 1), (4, 1), (16, 1), (4, IN_FLIGHT), (16, IN_FLIGHT)),
    ]
    assert found.measurements["file"] == str(file)


def test_one_thread_is_measured_once(tmp_path: Path) -> None:
    found = Measuring(TINY, quiet, threads=1).ram_over_disk(tmp_path, "x").measurements
    assert {line["threads"] for line in found["memory"]} == {1}
    assert len(found["memory"]) == len({line["dtype"] for line in found["memory"]})


def test_a_gpus_memory_over_ram() -> None:
    """The CPU takes the GPU's place."""
    found = Measuring(TINY, quiet, threads=1).gpu_over_ram(Host(), "box")
    assert found.fast.name == "a GPU that is none" and found.fast.memory == 64 << 20
    assert found.slow.name == "RAM, 1 thread" and found.slow.usable == 0.8
    assert found.fast.processor is not None and found.slow.processor is not None
    told = found.measurements
    copied = {(line["way"], line["pinned"]): line["gib"] * GIB for line in told["link"]}
    assert found.link.down_bandwidth == pytest.approx(copied["down", True])
    assert found.link.up_bandwidth == pytest.approx(copied["up", True])
    assert found.link.staging == pytest.approx(copied["staging", True])
    assert kinds(told["fast_memory"], "dtype") == [("bfloat16",), ("float32",)]
    assert found.fast.bandwidth == pytest.approx(told["fast_memory"][0]["gib"] * GIB)
    assert "slow_memory" in told and "fast_products" in told and "disk" not in told


def test_what_was_measured_is_a_file_for_plans(tmp_path: Path) -> None:
    for found in (
        Measuring(TINY, quiet, threads=1).ram_over_disk(tmp_path, "x"),
        Measuring(TINY, quiet, threads=1).gpu_over_ram(Host(), "y"),
    ):
        read = from_tables(found.to_tables())
        assert isinstance(read, Hardware) and read.measurements == found.measurements
        assert read.fast.bandwidth == pytest.approx(found.fast.bandwidth)


def test_kernels_that_widen_are_measured_in_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "pick", lambda device, wanted: REFERENCE)
    found = Measuring(TINY, quiet, threads=1).ram_over_disk(tmp_path, "x")
    assert {line["dtype"] for line in found.measurements["products"]} == {"float32"}
    assert found.source.endswith("weights in float32")


def test_a_level_speaks_of_its_first_type_and_of_all_threads() -> None:
    readings = (
        *(Reading(1, "bfloat16", 1.0), Reading(2, "bfloat16", 2.0)),
        *(Reading(1, "float32", 3.0), Reading(2, "float32", 4.0)),
    )
    rates = (
        *(Rate("dense", "bfloat16", 8, 50.0), Rate("dense", "bfloat16", 64, 40.0)),
        Rate("dense", "float32", 64, 70.0),
    )
    experts = (
        *(Rate("experts", "bfloat16", 8, 30.0), Rate("experts", "bfloat16", 1, 10.0)),
        Rate("experts", "float32", 8, 20.0),
    )
    level = Processing("RAM", "native", 100, readings, rates).level()
    assert (level.bandwidth, level.room) == (2.0, 90.0) and level.processor is not None
    assert level.processor.experts == ()
    known = Processing("RAM", "native", 100, readings, rates + experts).level().processor
    assert known is not None and known.experts == ((1.0, 10.0), (8.0, 30.0))
    assert (level.processor.flops, level.processor.prefill) == (50.0, 0.8)


def test_the_short_way_is_shorter() -> None:
    assert (
        SHORT.seconds < FULL.seconds
        and SHORT.disk.file < FULL.disk.file
        and SHORT.read_bytes < FULL.read_bytes
    )
    assert len(SHORT.products.rows) < len(FULL.products.rows)
