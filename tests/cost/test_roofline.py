from __future__ import annotations

from dataclasses import replace

import pytest

from moesaic.core.errors import ConfigError
from moesaic.cost.hardware import GIB, Hardware, Level, Link, Processor, from_tables
from moesaic.cost.machines import MACHINES, machine
from moesaic.cost.ops import Work
from moesaic.cost.roofline import Roofs, attention_seconds, seconds, seconds_with_experts

FIGURES = Roofs(peak_i=242e12, bandwidth_i=300e9, peak_j=1.3e12, bandwidth_j=100e9, link=16e9)
"""The L4 instance of MoE-Lightning's Figures 4 and 5."""
FAST = {"memory_gib": 1, "bandwidth_gib": 1, "tflops": 1}


def test_worked_example() -> None:
    """P1 is where the link's roof meets the CPU's peak. P2 is where it meets what the GPU reaches."""
    assert FIGURES.p1 == pytest.approx(81.25)
    assert FIGURES.p2(intensity_i=32) == pytest.approx(600.0)
    assert FIGURES.balance(intensity_i=32) == pytest.approx(600.0), "memory-bound there: P2 is the balance"
    assert FIGURES.p2(1e6) == pytest.approx(242e12 / 16e9)
    assert FIGURES.p2(1e6) < FIGURES.balance(1e6)


@pytest.mark.parametrize("intensity_j", [0.5, 4.0, 81.0, 82.0, 599.0, 601.0, 1e5])
def test_turning_points_are_where_the_smallest_roof_changes(intensity_j: float) -> None:
    """Equation 7 by brute force, for an operation with I_i = 32."""
    fetched = FIGURES.fetch_flops(32, intensity_j)
    assert fetched == min(242e12, 300e9 * 32, 16e9 * intensity_j)
    assert FIGURES.fetch_pays(intensity_j) == (intensity_j > FIGURES.p1)
    assert (fetched < FIGURES.at_i(32)) == (intensity_j < FIGURES.p2(32))


def test_p1_is_gone_where_fetching_is_as_fast_as_reading() -> None:
    assert replace(FIGURES, link=100e9).p1 == 0
    disk = Hardware("disk", machine("l4").fast, Level("disk", 1e12, 2e9, None), Link(2e9, 1e9))
    roofs = Roofs.from_hardware(disk)
    assert roofs.p1 == 0 and roofs.at_j(100) == 0 and roofs.fetch_pays(0.1)


def test_seconds_is_the_slower_roof() -> None:
    level = Level("RAM", 1e9, 10.0, Processor(100.0))
    assert seconds(Work(flops=1000, weights=50), level) == 10
    assert seconds(Work(flops=1000, weights=50, cache=50, activations=100), level) == 20
    assert seconds(Work(flops=1000), level, efficiency=0.5) == 20
    with pytest.raises(ValueError, match="no processor computes on disk"):
        seconds(Work(1.0), replace(level, name="disk", processor=None))


def test_what_does_not_overlap_is_added() -> None:
    """4 s of computing and 3 s of reading take 7 s one after the other."""
    for overlap, wanted in ((1.0, 4.0), (0.5, 5.5), (0.0, 7.0)):
        level = Level("RAM", 1e9, 2.0, Processor(1.0, overlap=overlap))
        assert seconds(Work(flops=4, weights=6), level) == wanted
    assert seconds(Work(flops=4, weights=6), level, efficiency=0.5) == 11
    slow = replace(level, processor=Processor(1.0, attention=0.5))
    assert attention_seconds(Work(flops=4, cache=6), slow) == 8


EXPERTS = ((1.0, 10.0), (4.0, 20.0), (64.0, 50.0))


@pytest.mark.parametrize(
    ("rows", "wanted"), [(1, 10.0), (2.5, 2.5 / 0.15), (4, 20.0), (64, 50.0), (1000, 50.0), (0.5, 5.0)]
)
def test_experts_have_the_rate_that_was_measured_with_their_rows(rows: float, wanted: float) -> None:
    """An expert takes 0.1 s for one row and 0.2 s for four. Half a row takes as long as one."""
    assert Processor(100.0, experts=EXPERTS).experts_flops(rows) == pytest.approx(wanted)


def test_experts_in_two_types_take_the_seconds_of_both() -> None:
    """Gate and up are two thirds of the flops. Three flops of each row take 2/6 + 1/2 s with one row."""
    packed = (("int4_offset", ((1.0, 6.0), (8.0, 12.0))), ("int8_16", ((1.0, 2.0), (8.0, 8.0))))
    processor = Processor(100.0, experts=EXPERTS, packed_rates=packed)
    assert processor.experts_flops(1, "int4_offset+int8_16") == pytest.approx(3 / (2 / 6 + 1 / 2))
    assert processor.experts_flops(8, "int4_offset+int8_16") == pytest.approx(3 / (2 / 12 + 1 / 8))
    assert processor.rates("int4_offset") == packed[0][1]
    assert processor.rates("int4_offset+fp8") == EXPERTS, "one of the types was not measured"
    assert processor.has_rates("int4_offset+int8_16") and not processor.has_rates("int4_offset+fp8")


def test_experts_in_two_types_that_were_measured_together_have_that_rate() -> None:
    packed = (("q4_k", ((1.0, 6.0),)), ("q4_k+q6_k", ((1.0, 4.0),)))
    processor = Processor(100.0, experts=EXPERTS, packed_rates=packed)
    assert processor.experts_flops(1, "q4_k+q6_k") == 4 and processor.has_rates("q4_k+q6_k")
    assert processor.rates("q4_k+q5_k") == EXPERTS and not processor.has_rates("q6_k")
    level = Level("core", GIB, GIB, replace(processor, packed_rates=packed))
    machine = Hardware("two cores", level, level, Link(GIB, GIB))
    read = from_tables(machine.to_tables()).fast.processor
    assert read is not None and read.experts_flops(1, "q4_k+q6_k") == pytest.approx(4)


def test_experts_are_priced_apart_where_they_were_measured() -> None:
    level = Level("RAM", 1e9, 10.0, Processor(100.0))
    beside, routed = Work(flops=1000), Work(flops=200, weights=40)
    assert seconds_with_experts(beside, routed, 4, level) == seconds(beside + routed, level) == 12
    assert seconds_with_experts(beside, routed, 4, level, 0.5) == 24
    known = replace(level, processor=Processor(100.0, experts=EXPERTS))
    assert seconds_with_experts(beside, routed, 4, known) == 10 + 10
    assert seconds_with_experts(beside, routed, 4, known, 0.5) == 20 + 10
    assert seconds_with_experts(beside, Work(), 4, known) == 10
    assert Processor(100.0, experts=EXPERTS).times(2) == Processor(
        200.0, experts=((1.0, 20.0), (4.0, 40.0), (64.0, 100.0))
    )


def test_a_measured_machine_is_its_file() -> None:
    level = Level("core", GIB, GIB, Processor(1e12, 0.5, 0.75, 0.0, ((1.0, 2e9), (8.0, 9e9)), 1e-4))
    known = Hardware("two cores", level, level, Link(GIB, GIB, None, 6e-5, 2e-5))
    found = from_tables(known.to_tables())
    assert (found.fast.processor, found.link.down_bandwidth) == (level.processor, GIB)
    assert (found.link.latency, found.link.handover) == pytest.approx((6e-5, 2e-5))
    told = known.to_tables()["fast"]
    assert told["experts"] == [{"rows": 1.0, "gflops": 2.0}, {"rows": 8.0, "gflops": 9.0}]
    assert "experts" not in machine("t4").to_tables()["fast"]
    plain = from_tables(machine("t4").to_tables())
    assert (plain.link.latency, plain.link.handover) == (0, 0)


def test_rates_of_quantised_experts_and_of_conversions_are_in_the_file() -> None:
    packed = (("fp8", ((1.0, 3e9), (8.0, 9e9))), ("int4", ((1.0, 5e9),)))
    level = Level("core", GIB, GIB, Processor(1e12, experts=((1.0, 2e9),), packed_rates=packed))
    known = Hardware("a core", level, level, Link(GIB, GIB, conversions=(("columns", 2e9), ("int4", 1e9))))
    found = from_tables(known.to_tables())
    assert found.fast.processor == level.processor
    assert dict(found.link.conversions) == pytest.approx(dict(known.link.conversions))
    assert found.fast.processor is not None
    assert [found.fast.processor.experts_flops(1, kind) for kind in ("int4", "mxfp4", None)] == [
        5e9,
        2e9,
        2e9,
    ]
    doubled = found.fast.processor.times(2).rates("fp8")
    assert doubled == ((1.0, 6e9), (8.0, 18e9))


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_is_its_file(name: str) -> None:
    found, known = from_tables(machine(name).to_tables()), machine(name)
    assert found.name == known.name and found.fast.room == pytest.approx(known.fast.room)
    assert found.slow.processor == known.slow.processor and found.fast.processor == known.fast.processor
    assert found.link.down_bandwidth == pytest.approx(known.link.down_bandwidth)


def test_ranks_multiply_the_fast_level_alone() -> None:
    one, two = machine("t4"), machine("t4").parallel(2)
    assert two.fast.memory == 2 * one.fast.memory and two.fast.bandwidth == 2 * one.fast.bandwidth
    assert one.fast.processor and two.fast.processor
    assert two.fast.processor.flops == 2 * one.fast.processor.flops
    assert (two.slow, two.link) == (one.slow, one.link) and two.name == "2 x t4"
    assert one.with_slow(7.0).slow.memory == 7 and one.with_slow(bandwidth=3.0).slow.bandwidth == 3


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({}, r"\[link\] is missing"),
        ({"link": {"down_gib": 16}}, r"\[fast\] is missing"),
        ({"link": {"down_gib": 0}}, "link.down_gib: got 0; allowed: a number above 0"),
        ({"link": {"down": 16}}, "link: got 'down'"),
        ({"gpu": {}}, "hardware file: got 'gpu'"),
        (
            {"link": {"down_gib": 1}, "fast": {"memory_gib": 1, "bandwidth_gib": 1}},
            "fast.tflops is missing",
        ),
        (
            {
                "link": {"down_gib": 1},
                "fast": {"memory_gib": 1, "bandwidth_gib": 1, "tflops": 1, "usable": 2},
            },
            "fast.usable: got 2; allowed: a number above 0 up to 1",
        ),
        (
            {"link": {"down_gib": 1}, "fast": FAST | {"experts": [{"type": "int3", "rows": 1, "gflops": 1}]}},
            "fast.experts.type: got 'int3'; allowed: fp8, int8",
        ),
        (
            {"link": {"down_gib": 1, "convert_gib": {"int3": 1}}, "fast": FAST, "slow": FAST},
            "link.convert_gib: got 'int3'; allowed: fp8, int8",
        ),
        ({"link": {"down_gib": 1, "convert_gib": 3}, "fast": FAST, "slow": FAST}, "link.convert_gib: got 3"),
        ({"link": {"down_gib": 1}, "fast": FAST | {"overlap": -0.1}}, "a number of 0 or more up to 1"),
        ({"link": {"down_gib": 1}, "fast": FAST | {"overlap": 1.5}}, "fast.overlap: got 1.5"),
        ({"link": {"down_gib": 1, "latency_us": -1}, "fast": FAST, "slow": FAST}, "link.latency_us: got -1"),
    ],
)
def test_a_wrong_file_is_refused_by_its_key(tables: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_tables(tables)


def test_unknown_machines_and_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match="--hardware: got 'b200'; allowed: t4, l4"):
        machine("b200")
    with pytest.raises(ConfigError, match="--gpus: got 0"):
        machine("t4").parallel(0)
    assert machine("l4").fast.memory == 24 * GIB
