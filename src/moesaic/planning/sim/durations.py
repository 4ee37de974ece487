"""How long the devices of a scenario take: from a file of modelled devices, or from a machine's roofline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from moesaic.core import paced_devices
from moesaic.core.curves import Curve
from moesaic.core.errors import ConfigError
from moesaic.core.paced_devices import LinkModel, PacedDevices
from moesaic.cost import ops, roofline
from moesaic.cost.hardware import Hardware
from moesaic.cost.machines import MACHINES
from moesaic.cost.ops import Work
from moesaic.cost.sizes import ModelSizes
from moesaic.planning.sim.scenario import LINKS, Scenario
from moesaic.policy.scheduling.schedulers.actions import StepPlan

ROWS = tuple(2**power for power in range(15))
"""Rows for which a roofline is evaluated. Between them the curve is straight."""


def build_scenario_devices(scenario: Scenario, model: ModelSizes) -> PacedDevices:
    """The devices and the link of a scenario. Raises ConfigError for a file that cannot be read."""
    name_or_tables, topology = scenario.devices, scenario.topology
    if isinstance(name_or_tables, str) and name_or_tables in MACHINES:
        for name in () if topology is not None else LINKS:
            if getattr(scenario.links, name) is None:
                raise ConfigError(f"links.{name}: it is missing, with devices {name_or_tables!r}")
        context = sum(scenario.workload.prompt) / 2 + sum(scenario.workload.answer) / 4
        devices = build_machine_devices(model, MACHINES[name_or_tables], context)
    else:
        devices = _read_devices(scenario, name_or_tables)
    if topology is not None:
        return replace(devices, link=topology.intra_host_link)
    link = LinkModel(
        _scale_or_default(scenario.links.latency_us, 1e-6, devices.link.latency),
        _scale_or_default(scenario.links.gb_per_s, 1e9, devices.link.bandwidth),
    )
    return replace(devices, link=link)


def _read_devices(scenario: Scenario, devices: str | dict[str, object]) -> PacedDevices:
    try:
        if isinstance(devices, dict):
            return paced_devices.parse_tables(devices, "the scenario")
        if not devices.endswith(".toml"):
            raise ConfigError.field("devices", devices, ", ".join((*MACHINES, "a .toml file")))
        return paced_devices.read(scenario.path(devices))
    except ConfigError as error:
        raise ConfigError(
            "devices" + str(error).removeprefix(paced_devices.FLAG).removeprefix("devices")
        ) from error


def _scale_or_default(value: float | None, unit: float, default: float) -> float:
    return default if value is None else unit * value


def build_machine_devices(model: ModelSizes, machine: Hardware, context: float) -> PacedDevices:
    """The devices of a known machine by its roofline, where every request has `context` cached tokens.

    A run of experts takes the time to read the chosen experts, and then that of its products. The link must
    be given by the scenario.
    """
    level = machine.fast
    launch = 0.0 if level.processor is None else level.processor.launch

    def attention(rows: float) -> float:
        products = ops.query_key_value(model, rows) + ops.output_projection(model, rows)
        products += ops.gate(model, rows) + ops.shared(model, rows)
        attention_work = ops.attention(model, rows, context, model.number)
        return launch + roofline.seconds(products, level) + roofline.attention_seconds(attention_work, level)

    def experts(pairs: float) -> float:
        wide = pairs * (2 * model.hidden + 2 * model.expert_width) * model.row_number
        return launch + roofline.seconds(Work(2 * pairs * model.expert, activations=wide), level)

    return PacedDevices(
        f"{machine.name} by its roofline, {context:.0f} cached tokens a request; {machine.source}",
        Curve(tuple((rows, attention(rows)) for rows in ROWS)),
        Curve(tuple((pairs, experts(pairs)) for pairs in ROWS), model.expert_bytes / level.bandwidth),
        LinkModel(0.0, 1.0),  # a placeholder, which the scenario's links replace
    )


@dataclass(frozen=True)
class Durations:
    """The durations of runs, as workers and servers ask for them."""

    devices: PacedDevices
    segments: int
    """Number of segments of a step. The last one ends with the sampler."""
    sampler: float | None = None
    """Seconds of the last segment. None: as the others."""

    def attention(self, plan: StepPlan, segment: int) -> float:
        """Seconds of a run of a segment. A step without rows takes none."""
        if segment == self.segments - 1 and self.sampler is not None:
            return self.sampler
        rows = plan.batch.num_rows
        return self.devices.attention.seconds(rows) if rows else 0.0

    @property
    def experts(self) -> Callable[[int, int], float]:
        """(pairs, experts) of a run of a server -> seconds."""
        return self.devices.experts.seconds
