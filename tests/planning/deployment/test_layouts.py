from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from moesaic.core.curves import Curve
from moesaic.core.paced_devices import LinkModel, PacedDevices
from moesaic.cost.sizes import KNOWN
from moesaic.planning.deployment import devices, spec
from moesaic.planning.deployment.layouts import Layout, compute_memory, list_layouts
from tests.support.small_scenario import MODEL

MIXTRAL = KNOWN["mixtral-8x7b"]
GIB = 2.0**30


def test_what_is_possible_on_three_devices() -> None:
    small = replace(MODEL, experts=2)
    found = {one.describe() for one in list_layouts(spec.load("3xh100"), small)}
    assert found == {
        "1 attention + 1 experts",
        "1 attention + 2 experts",
        "2 attention + 1 experts",
        "1 attention of 2 ranks + 1 experts",
        "1 x (attention and experts)",
        "2 x (attention and experts)",  # no third one: the model has two experts
    }


def test_every_layout_starts_with_serve_on_the_first_host() -> None:
    machines = spec.load("8xh100,2hosts,price=10")
    found = list(list_layouts(machines, MIXTRAL))
    assert all(one.first_host_servers >= 1 and one.devices <= 8 for one in found)
    assert all(one.hosts == 1 for one in found if one.is_colocated)
    wide = next(one for one in found if (one.workers, one.ranks, one.servers) == (1, 2, 6))
    assert (wide.first_host_servers, wide.hosts, wide.price_per_hour) == (2, 2, 20)
    assert wide.link(machines.inter_host_link) == machines.inter_host_link
    assert (
        found[0].hosts == 1 and found[0].link(machines.inter_host_link) == machines.pools[0].intra_host_link
    )


def test_many_devices_are_not_all_counted_out() -> None:
    assert len(list(list_layouts(spec.load("128xh100,16hosts"), KNOWN["deepseek-v3"]))) < 1500


def test_memory_of_mixtral() -> None:
    """Mixtral has 32 layers with 8 experts of 336 MiB in bf16, and 2 * 8 * 128 numbers of a cached token."""
    [pool] = spec.load("8xh100").pools
    found = compute_memory(MIXTRAL, Layout(pool, 2, 1, 4))
    assert found.server_bytes == 32 * 2 * 3 * 4096 * 14336 * 2
    assert found.token_bytes == 32 * 2 * 8 * 128 * 2
    assert found.kv_tokens == int((0.9 * 80 * GIB - MIXTRAL.other) / found.token_bytes)
    assert compute_memory(MIXTRAL, Layout(pool, 2, 1, 1)).kv_tokens == 0, "84 GiB of experts do not fit"
    twice = compute_memory(MIXTRAL, Layout(pool, 2, 1, 4), min_replicas=2)
    assert twice.server_bytes == 2 * found.server_bytes
    ranks = compute_memory(MIXTRAL, Layout(pool, 1, 2, 4))
    assert ranks.token_bytes == found.token_bytes / 2 and ranks.worker_bytes < found.worker_bytes
    beside = compute_memory(MIXTRAL, Layout(pool, 4, 1, 4, is_colocated=True))
    assert beside.cache_bytes == 0.9 * 80 * GIB - found.worker_bytes - found.server_bytes


def test_fewer_layers_take_as_long() -> None:
    given = PacedDevices("made up", Curve(((1.0, 0.5),)), Curve(((1.0, 0.25),), 0.125), LinkModel(2.0, 16.0))
    found = devices.fold_layers(given, layers=8, simulated_layers=2)
    assert found.attention.seconds(1) * 3 == pytest.approx(given.attention.seconds(1) * 9)
    assert found.experts.seconds(1, 2) * 2 == pytest.approx(given.experts.seconds(1, 2) * 8)
    assert (found.link.latency, found.link.bandwidth) == (8.0, 4.0)


def test_ranks_share_attention_and_add_up_rows() -> None:
    [pool] = spec.load("8xh100").pools
    link = LinkModel(1e-5, 1e10)
    one = devices.build_layout_devices(MIXTRAL, Layout(pool, 1, 1, 1), link, 1000)
    four = devices.build_layout_devices(MIXTRAL, Layout(pool, 1, 4, 1), link, 1000)
    assert four.experts == one.experts and four.link == pool.intra_host_link
    assert one.attention.seconds(512) / 4 < four.attention.seconds(512) < one.attention.seconds(512)
    slow = replace(pool, intra_host_link=LinkModel(1.0, 1e12))
    assert devices.build_layout_devices(MIXTRAL, Layout(slow, 1, 4, 1), link, 1000).attention.seconds(1) > 2.0


def test_measured_curves_replace_the_roofline(tmp_path: Path) -> None:
    curves = PacedDevices("measured", Curve(((1.0, 0.5),)), Curve(((1.0, 0.25),)), LinkModel(1.0, 1.0))
    pool = replace(spec.load("2xh100").pools[0], curves=curves)
    found = devices.build_layout_devices(MIXTRAL, Layout(pool, 1, 1, 1), LinkModel(1e-5, 1e10), 1000)
    assert (found.source, found.attention, found.link) == ("measured", curves.attention, pool.intra_host_link)
    assert {one.ranks for one in list_layouts(spec.ClusterSpec((pool,), LinkModel(0, 1)), MIXTRAL)} == {1}
