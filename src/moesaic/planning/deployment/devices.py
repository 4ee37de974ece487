"""The modelled devices of a layout: curves by measurements or rooflines, for a few layers that stand for all.

A simulation of `few` layers takes that part of the time. Each of its layers takes as long as several of the
model's, so a token takes as long as with all of them.
"""

from __future__ import annotations

from dataclasses import replace

from moesaic.core.curves import Curve
from moesaic.core.paced_devices import LinkModel, PacedDevices
from moesaic.cost.sizes import ModelSizes
from moesaic.planning.deployment.layouts import Layout, attention_model
from moesaic.planning.sim.durations import build_machine_devices

NUMBER_BYTES = 4
"""Bytes of one number of a row between a worker and a server: moesaic sends float32."""


def build_layout_devices(
    model: ModelSizes, layout: Layout, inter_host_link: LinkModel, context: float
) -> PacedDevices:
    """The devices of one layer. context: mean number of cached tokens of a request."""
    curves, pool = layout.pool.curves, layout.pool
    workers = curves or build_machine_devices(attention_model(model, layout.ranks), pool.hardware, context)
    servers = curves or build_machine_devices(model, pool.hardware, context)
    curve = workers.attention
    if layout.ranks > 1:
        curve = _with_all_reduce(curve, layout, model.hidden * model.row_number)
    link = layout.link(inter_host_link)
    return PacedDevices(servers.source, curve, servers.experts, link, thresholds=servers.thresholds)


def _with_all_reduce(curve: Curve, layout: Layout, row: float) -> Curve:
    """The curve of a rank that adds up its rows of `row` bytes with the other ranks in each layer.

    A ring sends 2 * (ranks - 1) / ranks of the rows, and begins twice.
    """
    link, ranks = layout.pool.intra_host_link, layout.ranks
    part = 2 * (ranks - 1) / ranks * row / link.bandwidth
    points = tuple((rows, seconds + 2 * link.latency + rows * part) for rows, seconds in curve.points)
    return Curve(points, curve.per_expert)


def fold_layers(devices: PacedDevices, layers: int, simulated_layers: int) -> PacedDevices:
    """The devices of a simulation with `simulated_layers` layers in place of `layers`.

    A step has one more segment of attention than layers: it ends with one.
    """
    part = layers / simulated_layers
    link = LinkModel(devices.link.latency * part, devices.link.bandwidth / part)
    attention = devices.attention.times((layers + 1) / (simulated_layers + 1))
    return replace(devices, attention=attention, experts=devices.experts.times(part), link=link)


def reduce_layers(model: ModelSizes, layers: int) -> ModelSizes:
    """The model with `layers` layers, all of them with routed experts."""
    return replace(model, layers=layers, moe_layers=layers)


def to_tables(devices: PacedDevices) -> dict[str, object]:
    """The devices as the tables of a scenario."""
    return {
        "source": devices.source,
        "attention": {"points_ms": [[rows, 1e3 * seconds] for rows, seconds in devices.attention.points]},
        "experts": {
            "points_ms": [[rows, 1e3 * seconds] for rows, seconds in devices.experts.points],
            "per_expert_ms": 1e3 * devices.experts.per_expert,
        },
        "link": {"latency_us": 1e6 * devices.link.latency, "gb_per_s": devices.link.bandwidth / 1e9},
        "thresholds": {name: value for name, value in vars(devices.thresholds).items() if value is not None},
    }
