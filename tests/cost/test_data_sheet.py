"""Machines by the figures of data sheets, computed by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moesaic.commands.plan import find_hardware
from moesaic.core.errors import ConfigError
from moesaic.cost.data_sheet import DataSheet, Rules, predict_machine, read_machine

SHEET = DataSheet("a desktop", 8, (3.0, 5.0), "avx2", 2, 3200, 32)
TABLE: dict[str, Any] = {
    "cores": 8,
    "ghz": [3.0, 5.0],
    "isa": "avx2",
    "channels": 2,
    "mt_per_s": 3200,
    "memory_gib": 32,
}
EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "data-sheet.toml"


def test_a_machine_counted_by_hand() -> None:
    assert SHEET.peak == 2 * 8 * 3.2e9
    machine = predict_machine(SHEET, rules=Rules(read_share=0.5, core_read=1e10, wait=1e-6))
    processor = machine.fast.processor
    assert processor is not None
    assert machine.fast.bandwidth == 0.5 * 51.2e9 and machine.fast.room == 32 * 2**30
    assert processor.flops == pytest.approx(8 * 4e9 * 25) and processor.launch == pytest.approx(8e-6)
    assert machine.link.down_bandwidth == 1e9


def test_few_cores_do_not_read_all_that_many_channels_give() -> None:
    server = replace(SHEET, channels=12, threads=3, disk_gb_per_s=5.0)
    machine = predict_machine(server, rules=Rules(read_share=1.0, core_read=1e10, wait=0.0))
    assert machine.fast.bandwidth == 3e10 and machine.link.down_bandwidth == 5e9
    wider = predict_machine(replace(server, threads=8, sockets=2), rules=Rules(1.0, 1e10, 0.0))
    assert wider.fast.bandwidth == 8e10


def test_more_threads_than_cores_wait_but_do_not_compute() -> None:
    one, two = (predict_machine(replace(SHEET, threads=threads)).fast.processor for threads in (8, 16))
    assert one is not None and two is not None
    assert one.flops == two.flops and two.launch == 2 * one.launch


def test_unquantised_weights_are_multiplied_more_slowly() -> None:
    plain, quantised = (predict_machine(SHEET, kind).fast.processor for kind in (False, True))
    assert plain is not None and quantised is not None and plain.flops < quantised.flops / 2


def test_the_table_of_a_file_is_the_data_sheet() -> None:
    found = read_machine({"sheet": TABLE | {"name": "a desktop"}})
    assert found == predict_machine(SHEET)
    more = {"sockets": 2, "threads": 4, "disk_gb_per_s": 3.5, "name": "a desktop"}
    assert read_machine({"sheet": TABLE | more}) == predict_machine(
        replace(SHEET, sockets=2, threads=4, disk_gb_per_s=3.5)
    )


def test_the_example_is_a_machine() -> None:
    machine = find_hardware(str(EXAMPLE))
    assert machine.name == "Ryzen 9 7950X" and machine.fast.bandwidth == pytest.approx(0.8 * 83.2e9)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"isa": "sse"}, "sheet.isa: got 'sse'; allowed: avx512_vnni, apple, avx2"),
        ({"cores": 0}, "sheet.cores: got 0; allowed: an integer of at least 1"),
        ({"cores": 8.5}, "sheet.cores: got 8.5; allowed: an integer"),
        ({"cores": True}, "sheet.cores: got True"),
        ({"channels": "two"}, "sheet.channels: got 'two'; allowed: a number above 0"),
        ({"mt_per_s": float("inf")}, "sheet.mt_per_s: got inf"),
        ({"memory_gib": float("nan")}, "sheet.memory_gib: got nan"),
        ({"ghz": 4.0}, "sheet.ghz: got 4.0; allowed: [base clock, maximum boost clock]"),
        ({"ghz": [4.0, -1]}, "sheet.ghz: got -1; allowed: a number above 0"),
        ({"speed": 1}, "sheet: got 'speed'; allowed: name, ghz, isa, cores"),
    ],
)
def test_a_wrong_value_is_named(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_machine({"sheet": TABLE | change})
    assert f"hardware file: {said}" in str(caught.value)


def test_a_missing_key_and_a_second_table_are_named() -> None:
    with pytest.raises(ConfigError, match=r"sheet\.isa is missing"):
        read_machine({"sheet": {key: value for key, value in TABLE.items() if key != "isa"}})
    for tables in ({"sheet": TABLE, "fast": {}}, {"sheet": 3}):
        with pytest.raises(ConfigError, match="the only one of its file"):
            read_machine(tables)
