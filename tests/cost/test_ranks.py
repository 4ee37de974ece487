from __future__ import annotations

from dataclasses import replace

import pytest

from moesaic.cost import ops
from moesaic.cost.hardware import GIB, Hardware, Level, Link, Processor
from moesaic.cost.machines import MACHINES
from moesaic.cost.ranks import model_of_rank, share_of_rank
from moesaic.cost.sizes import PUBLISHED_MODELS, GroupedQuery, ModelSizes

HERE = Hardware(
    "two cores",
    Level("RAM", 8 * GIB, 10 * GIB, Processor(1e11, prefill=0.5)),
    Level("disk", 100 * GIB, GIB, None),
    Link(0.2 * GIB, 0.1 * GIB, latency=1e-4),
)


def test_worked_example() -> None:
    model = ModelSizes("tiny", 2, 16, 100, GroupedQuery(8, 2, 4), 2, 8, 2, 10)
    mine = model_of_rank(model, 4, 2)
    assert mine.attention == GroupedQuery(2, 1, 4)
    assert (mine.experts, mine.top_k, mine.expert) == (2, 0.5, model.expert)
    assert mine.routed_bytes == model.routed_bytes / 4 and mine.other_bytes < model.other_bytes


def test_a_rank_projects_all_heads_that_are_normalized_together() -> None:
    model = ModelSizes("tiny", 2, 16, 100, GroupedQuery(8, 2, 4, normed_heads=(8, 2)), 2, 8, 2, 10)
    mine = model_of_rank(model, 2, 4)
    assert mine.attention.projection_sizes(16) == (16 * 4 * (8 + 2 + 1), 16 * 4 * 4)
    assert mine.cache(1, 2.0) == model.cache(1, 2.0) / 2


@pytest.mark.parametrize("name", ["mixtral-8x7b", "deepseek-v2-lite", "qwen3-30b-a3b", "olmoe-1b-7b"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_together_are_the_model(name: str, ranks: int) -> None:
    """Routed experts and heads add up to those of the model. What is whole on every rank counts once for each
    rank."""
    model = PUBLISHED_MODELS[name]
    mine = model_of_rank(model, ranks, model.experts // ranks)
    for rows in (1, 7, 300):
        whole, part = ops.routed_experts(model, rows), ops.routed_experts(mine, rows)
        for one, other in ((whole.flops, part.flops), (whole.bytes, part.bytes)):
            assert ranks * other == pytest.approx(one)
        attended = ops.attention(model, rows, 100, 2.0), ops.attention(mine, rows, 100, 2.0)
        assert ranks * attended[1].flops == attended[0].flops
    assert model.weights < ranks * mine.weights < model.weights + ranks * model.other_bytes
    if isinstance(model.attention, GroupedQuery):
        assert ranks * mine.cache(1, 2.0) == model.cache(1, 2.0)
    else:
        assert mine.cache(1, 2.0) == model.cache(1, 2.0), "a latent is whole on each"


def test_ranks_share_processor_bandwidth_and_link_but_not_memory() -> None:
    mine = share_of_rank(HERE, 2)
    assert mine.fast == replace(
        HERE.fast,
        bandwidth=5 * GIB,
        processor=replace(HERE.fast.processor, flops=5e10),  # type: ignore[type-var]
    )
    assert (mine.link.down_bandwidth, mine.link.up_bandwidth, mine.link.latency) == (
        0.1 * GIB,
        0.05 * GIB,
        1e-4,
    )
    assert mine.slow == HERE.slow and share_of_rank(HERE, 1) == HERE


@pytest.mark.parametrize(("gpus", "together"), [(4, 1), (8, 1), (2, 2), (3, 2), (1, 4)])
def test_ranks_have_gpus_of_their_own_and_share_ram_and_link(gpus: int, together: int) -> None:
    """If there are fewer GPUs than ranks, the GPU with the most ranks counts."""
    machine = MACHINES["t4"]
    mine = share_of_rank(machine, 4, gpus)
    assert mine.fast.memory == machine.fast.memory / together
    assert mine.fast.bandwidth == machine.fast.bandwidth / together
    assert mine.fast.processor and machine.fast.processor and mine.slow.processor and machine.slow.processor
    assert mine.fast.processor.flops == machine.fast.processor.flops / together
    assert mine.slow.processor.flops == machine.slow.processor.flops / 4
    for one, whole in (
        (mine.slow.memory, machine.slow.memory),
        (mine.slow.bandwidth, machine.slow.bandwidth),
    ):
        assert one == whole / 4
    link = replace(machine, link=replace(machine.link, staging=GIB)).link
    shared = share_of_rank(replace(machine, link=link), 4, gpus).link
    assert (shared.down_bandwidth, shared.up_bandwidth, shared.staging) == (
        link.down_bandwidth / 4,
        link.up_bandwidth / 4,
        GIB / 4,
    )
