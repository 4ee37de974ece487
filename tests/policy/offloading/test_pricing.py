"""How a small change of the machine changes the price of a policy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moesaic.cost import ops
from moesaic.cost.hardware import Hardware, Level, Link, Processor
from moesaic.cost.routing import Routing
from moesaic.cost.sizes import PUBLISHED_MODELS
from moesaic.policy.offloading.pipeline import decode
from moesaic.policy.offloading.policies import CHOSEN_SHARE, Policy, Workload, max_rows_by_choice
from moesaic.policy.offloading.pricing import Pricing
from moesaic.policy.offloading.tasks import Kind, Lane

MODEL = replace(PUBLISHED_MODELS["mixtral-8x7b"], layers=4, moe_layers=4)
RAM = Level("RAM", 1e12, 1e11, Processor(1e12))
MACHINE = Hardware("two cores", RAM, RAM, Link(1e9, 1e9))
SERIAL = Policy("serial", micro_batch=8, micro_batches=2, slow_attention=True)
LAYERS, PARTS = 4, 2


def step(machine: Hardware, policy: Policy = SERIAL) -> float:
    return Pricing(MODEL, machine, Workload(100, 10)).step(policy).seconds


def test_each_transfer_pays_its_latency() -> None:
    """A micro-batch saves query, key and value and loads its rows. A layer loads a page."""
    late = replace(MACHINE, link=replace(MACHINE.link, latency=0.01))
    transfers = LAYERS * (PARTS * (3 + 1) + 1)
    assert step(late) - step(MACHINE) == pytest.approx(0.01 * transfers)


def test_each_change_of_lanes_pays_a_handover() -> None:
    late = replace(MACHINE, link=replace(MACHINE.link, handover=0.01))
    tasks = decode("serial", Pricing(MODEL, MACHINE, Workload(100, 10)).shape(SERIAL))
    changes = sum(one.lane is not tasks[one.needs[0]].lane for one in tasks if one.needs)
    assert changes > 4 * LAYERS
    assert step(late) - step(MACHINE) == pytest.approx(0.01 * changes)


def test_attention_and_overlap_are_their_processors() -> None:
    durations = Pricing(MODEL, MACHINE, Workload(100, 10)).durations.decode(SERIAL)
    slow = replace(RAM, processor=Processor(1e12, attention=0.5, overlap=0.0))
    other = Pricing(MODEL, replace(MACHINE, slow=slow), Workload(100, 10)).durations.decode(SERIAL)
    changed = {key for key in durations if durations[key] != other[key]}
    assert changed == {(Kind.ATTENTION, Lane.SLOW), (Kind.EXPERTS, Lane.SLOW)}
    assert other[Kind.ATTENTION, Lane.SLOW] > 2 * durations[Kind.ATTENTION, Lane.SLOW]


def test_each_computed_task_is_launched() -> None:
    """A micro-batch has pre-attention, attention and post-attention in each layer. Its head has no launch."""
    late = Processor(1e12, launch=0.01)
    level = replace(RAM, processor=late)
    fast, slow = replace(MACHINE, fast=level), replace(MACHINE, slow=level)
    assert step(fast) - step(MACHINE) == pytest.approx(0.01 * LAYERS * PARTS * 2)
    assert step(slow) - step(MACHINE) == pytest.approx(0.01 * LAYERS * PARTS)


def test_measured_experts_change_what_computes_them() -> None:
    workload = Workload(100, 10)
    processor = Processor(1e12, experts=((1.0, 1e8), (1000.0, 2e8)))
    known = replace(RAM, processor=processor)
    before, after = (Pricing(MODEL, replace(MACHINE, fast=fast), workload).durations for fast in (RAM, known))
    plain, other = before.decode(SERIAL), after.decode(SERIAL)
    assert {key for key in plain if plain[key] != other[key]} == {
        (Kind.POST_WITH_EXPERTS, Lane.FAST),
        (Kind.EXPERTS, Lane.FAST),
    }
    flops = 8 * 2 * 6 * MODEL.hidden * MODEL.expert_width
    rows = 8 * 2 / ops.uniform_distinct(8, 2, 8)
    assert other[Kind.EXPERTS, Lane.FAST] == pytest.approx(flops / processor.experts_flops(rows))
    prompts, longer = before.prefill(SERIAL, 2, 1), after.prefill(SERIAL, 2, 1)
    assert longer[Kind.PROMPT, Lane.FAST] > 2 * prompts[Kind.PROMPT, Lane.FAST]
    dense = [one.prefill(SERIAL, 2, 1, dense=True) for one in (before, after)]
    assert dense[0] == dense[1], "a dense layer has no experts"


def test_rows_that_choose_alike_load_less_on_demand() -> None:
    """All requests choose the same two of eight experts."""
    same = Routing.from_rows([np.tile([0, 1], (1, 4, 1))] * 4, 8)
    policy = replace(SERIAL, schedule="on-demand")
    tables = [
        Pricing(model, MACHINE, Workload(100, 10)).durations.decode(policy)
        for model in (MODEL, replace(MODEL, routing=same))
    ]
    loads = [table[Kind.LOAD_CHOSEN, Lane.LINK_DOWN] for table in tables]
    assert loads[1] == pytest.approx(2 * MODEL.expert * MODEL.number / 1e9)
    assert loads[0] > 3 * loads[1]


def test_on_demand_the_link_is_busy_while_gates_have_not_spoken() -> None:
    """Loading likely experts early keeps the link busy, so a step takes about as long as its loads."""
    policy = Policy("on-demand", 8, 2, slow_attention=False, slow_cache=0.0, static_experts=1)
    slow = replace(MACHINE, link=Link(1e10, 1e10))
    pricing = Pricing(MODEL, slow, Workload(100, 10))
    likely = pricing.durations.likely_experts(policy)
    assert 0 < likely < 7
    guessing = replace(policy, likely_experts=likely)
    before, after = (pricing.durations.decode(one) for one in (policy, guessing))
    moved = [
        sum(table[kind, Lane.LINK_DOWN] for kind in (Kind.LOAD_CHOSEN, Kind.LOAD_LIKELY))
        for table in (before, after)
    ]
    share = ops.distinct(MODEL, 16) / 8
    assert before[Kind.LOAD_LIKELY, Lane.LINK_DOWN] == 0
    assert after[Kind.LOAD_LIKELY, Lane.LINK_DOWN] == likely * MODEL.expert_bytes / slow.link.down_bandwidth
    assert moved[1] == pytest.approx(
        moved[0] + likely * (1 - share) * MODEL.expert_bytes / slow.link.down_bandwidth
    )
    assert pricing.step(guessing).seconds < pricing.step(policy).seconds
    assert pricing.step(guessing).seconds == pytest.approx(LAYERS * moved[1], rel=0.2)
    for other in (replace(policy, slow_cache=1.0), replace(policy, slow_attention=True)):
        assert not pricing.durations.likely_experts(other), "rows or caches come down, too"


@pytest.mark.parametrize(("num_experts", "top_k", "rows"), [(128, 8, 24), (8, 2, 5), (256, 8, 50), (4, 4, 0)])
def test_rows_that_choose_at_most_four_fifths(num_experts: int, top_k: int, rows: int) -> None:
    assert max_rows_by_choice(num_experts, top_k) == rows
    if rows:
        shares = [1 - (1 - top_k / num_experts) ** count for count in (rows, rows + 1)]
        assert shares[0] <= CHOSEN_SHARE < shares[1]
