"""The machines that a plan may use (`moesaic plan --cluster`): devices, links and prices.

A specification is a TOML file, or a short text such as `8xh100,2hosts`: eight devices on two hosts. With
several tables [[machines]] the plan compares them. Each deployment uses machines of one table.

    [links]                    # what one device sends
    inside_latency_us = 3.0    # between devices of a host
    inside_gb_per_s = 450.0
    latency_us = 10.0          # between hosts
    gb_per_s = 50.0

    [[machines]]
    names = ["a", "b"]         # optional: of the hosts
    hosts = 2
    devices = 4                # of each host
    device = "h100"            # a machine of `moesaic plan`, or a file of `moesaic hardware measure`
    curves = "measured.toml"   # optional: a file of curves, in place of the device's roofline
    price_per_hour = 12.0      # optional: of one host

    [[between]]                # optional, as in a file of --topology: all devices of a host share this link
    hosts = ["a", "b"]
    latency_us = 10.0
    gb_per_s = 12.5
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import MISSING, dataclass, field, replace
from pathlib import Path
from typing import Any

from moesaic.core import paced_devices
from moesaic.core.curves import TableChecker
from moesaic.core.errors import ConfigError
from moesaic.core.home import expand_home
from moesaic.core.paced_devices import LinkModel, PacedDevices
from moesaic.core.topology import HostLink, pairs
from moesaic.cost.data_sheet import read_machine
from moesaic.cost.hardware import Hardware
from moesaic.cost.machines import MACHINES
from moesaic.planning.sim.fields import names, number, read, setting, text, whole_number

FLAG = "--cluster"
SHORT = re.compile(
    r"(?P<count>\d+)x(?P<device>[^,]+)(,(?P<hosts>\d+)hosts?)?(,price=(?P<price>\d+(\.\d+)?))?"
)
SHORT_FORM = "a .toml file, or DEVICESxMACHINE[,HOSTShosts][,price=PER_HOUR], such as 8xh100,2hosts,price=30"
GPU_LINKS = {"a100": 300.0, "h100": 450.0, "h200": 450.0}
"""10^9 bytes/s that a device sends to others of its host by NVLink, from data sheets. By the first word of
the machine's name. Other devices use their link to the host."""
INTRA_HOST_LATENCY, INTER_HOST_LATENCY = 3e-6, 10e-6
"""Seconds of one way, inside of a host and between hosts. Assumed where the specification has none."""
INTER_HOST_BANDWIDTH = 12.5e9
"""Bytes/s that a device sends to other hosts: 100 Gbit/s. Assumed where the specification has none."""


@dataclass(frozen=True, kw_only=True)
class _Links:
    """The table [links]. None: an assumption of this module, which the plan then names."""

    inside_latency_us: float | None = setting(None, number())
    inside_gb_per_s: float | None = setting(None, number(is_exclusive=True))
    latency_us: float | None = setting(None, number())
    gb_per_s: float | None = setting(None, number(is_exclusive=True))


@dataclass(frozen=True, kw_only=True)
class _Machines:
    """A table [[machines]]."""

    hosts: int = setting(1, whole_number(1))
    names: tuple[str, ...] = setting((), names())
    """The names of the hosts. Without it: FIRST_HOST, HOST2 and so on."""
    devices: int = setting(1, whole_number(1))
    device: str = setting(MISSING, text(f"{', '.join(MACHINES)}, or a .toml file of a machine"))
    curves: str | None = setting(None, text("the path of a file of curves"))
    price_per_hour: float | None = setting(None, number())


@dataclass(frozen=True)
class Pool:
    """Hosts of one kind."""

    name: str
    hardware: Hardware
    """The figures of one device. Its slow level is the host's memory."""
    hosts: int = 1
    devices_per_host: int = 1
    """Devices of each host."""
    intra_host_link: LinkModel = field(
        default_factory=lambda: LinkModel(INTRA_HOST_LATENCY, INTER_HOST_BANDWIDTH)
    )
    """The link between devices of a host."""
    price_per_hour: float | None = None
    """Price of one host."""
    names: tuple[str, ...] = ("FIRST_HOST",)
    """The names of the hosts."""
    curves: PacedDevices | None = None
    """Measured curves. None: by the roofline of `hardware`."""

    @property
    def devices(self) -> int:
        return self.hosts * self.devices_per_host

    @property
    def on_gpu(self) -> bool:
        """Whether the devices are GPUs: the level below them computes, too."""
        return self.hardware.slow.processor is not None


@dataclass(frozen=True)
class ClusterSpec:
    """The machines that a plan may use."""

    pools: tuple[Pool, ...]
    inter_host_link: LinkModel
    """The link from one device to those of other hosts."""
    assumptions: tuple[str, ...] = ()
    """What was assumed of links, one sentence each."""
    links: tuple[HostLink, ...] = ()
    """Links of two hosts, each of which all devices of a host share."""

    @property
    def has_prices(self) -> bool:
        """Whether every host has a price."""
        return all(pool.price_per_hour is not None for pool in self.pools)

    def describe(self) -> str:
        """The cluster in words. Example: "8 x h100 on 2 hosts"."""
        parts = [
            f"{pool.devices} x {pool.name} on {pool.hosts} host{'s' if pool.hosts > 1 else ''}"
            for pool in self.pools
        ]
        return " or ".join(parts)


def load(spec_text: str) -> ClusterSpec:
    """The cluster of a file or of the short form.

    Raises ConfigError with one line that names the field, its value and what is allowed.
    """
    if not spec_text.endswith(".toml"):
        return _parse_short_form(spec_text)
    path = expand_home(spec_text)
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError.field(FLAG, spec_text, f"a file to read ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{FLAG}: {spec_text}: not a TOML file: {error}") from error
    try:
        return parse(tables, path.parent)
    except ConfigError as error:
        raise ConfigError(f"{FLAG}: {error}") from error


def _parse_short_form(spec_text: str) -> ClusterSpec:
    match = SHORT.fullmatch(spec_text.replace(" ", ""))
    if match is None:
        raise ConfigError.field(FLAG, spec_text, SHORT_FORM)
    count, hosts = int(match["count"]), int(match["hosts"] or 1)
    if not hosts or not count or count % hosts:
        raise ConfigError.field(FLAG, spec_text, f"as many devices on each host; {count} and {hosts} hosts")
    machines: dict[str, Any] = {"hosts": hosts, "devices": count // hosts, "device": match["device"]}
    if match["price"] is not None:
        machines["price_per_hour"] = float(match["price"])
    try:
        return parse({"machines": [machines]}, Path())
    except ConfigError as error:
        raise ConfigError(f"{FLAG}: {error}") from error


def parse(tables: dict[str, Any], folder: Path) -> ClusterSpec:
    """The cluster of parsed tables. folder: where its paths begin.

    Raises ConfigError that names the field.
    """
    for name in tables:
        if name not in ("machines", "links", "between"):
            raise ConfigError.field(name, tables[name], "only these tables: machines, links, between")
    machines = tables.get("machines")
    if not isinstance(machines, list) or not machines:
        raise ConfigError.field("machines", machines, "at least one table [[machines]]")
    links = read(_Links, tables.get("links", {}), "links.")
    pools, assumptions = [], []
    for index, machine in enumerate(machines):
        table = read(_Machines, machine, f"machines.{index}.")
        pool = _pool(table, folder, f"machines.{index}.")
        intra_host_link, notes = _build_intra_host_link(pool, links)
        pools.append(replace(pool, intra_host_link=intra_host_link))
        assumptions += notes
    if any(pool.hosts > 1 for pool in pools) and links.gb_per_s is None:
        assumptions.append(
            f"Assumed: a device sends {INTER_HOST_BANDWIDTH / 1e9:g} GB/s to other hosts (links.gb_per_s)."
        )
    latency = INTER_HOST_LATENCY if links.latency_us is None else 1e-6 * links.latency_us
    rate = INTER_HOST_BANDWIDTH if links.gb_per_s is None else 1e9 * links.gb_per_s
    return ClusterSpec(
        tuple(pools), LinkModel(latency, rate), tuple(assumptions), _read_host_links(tables, pools)
    )


def _read_host_links(tables: dict[str, Any], pools: list[Pool]) -> tuple[HostLink, ...]:
    """The tables [[between]]."""
    links = tables.get("between", [])
    if not isinstance(links, list):
        raise ConfigError.field("between", links, "tables [[between]]")
    host_names = [name for pool in pools for name in pool.names]
    try:
        return pairs(TableChecker("links", "the cluster"), links, set(host_names))
    except ConfigError as error:
        raise ConfigError(str(error).removeprefix("links: the cluster: ")) from error


def _pool(table: _Machines, folder: Path, place: str) -> Pool:
    hardware = _hardware(table.device, folder, place)
    curves = None
    if table.curves is not None:
        try:
            curves = paced_devices.read(folder / expand_home(table.curves))
        except ConfigError as error:
            raise ConfigError(f"{place}curves{str(error).removeprefix(paced_devices.FLAG)}") from error
    return Pool(
        hardware.name,
        hardware,
        table.hosts,
        table.devices,
        price_per_hour=table.price_per_hour,
        names=_names(table, place),
        curves=curves,
    )


def _names(table: _Machines, place: str) -> tuple[str, ...]:
    """The names of the hosts."""
    if not table.names:
        return ("FIRST_HOST", *(f"HOST{number}" for number in range(2, table.hosts + 1)))
    if len(table.names) != table.hosts or len(set(table.names)) < table.hosts:
        allowed_names = f"{table.hosts} different names, as {place}hosts"
        raise ConfigError.field(f"{place}names", list(table.names), allowed_names)
    return table.names


def _hardware(name: str, folder: Path, place: str) -> Hardware:
    if name.lower() in MACHINES:
        return MACHINES[name.lower()]
    if not name.endswith(".toml"):
        raise ConfigError.field(f"{place}device", name, f"{', '.join(MACHINES)}, or a .toml file")
    try:
        return read_machine(tomllib.loads((folder / expand_home(name)).read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError.field(f"{place}device", name, f"a file to read ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{place}device: {name}: not a TOML file: {error}") from error


def _build_intra_host_link(pool: Pool, links: _Links) -> tuple[LinkModel, list[str]]:
    """The link between devices of a host, and what was assumed of it."""
    latency = INTRA_HOST_LATENCY if links.inside_latency_us is None else 1e-6 * links.inside_latency_us
    if links.inside_gb_per_s is not None:
        return LinkModel(latency, 1e9 * links.inside_gb_per_s), []
    rate = 1e9 * GPU_LINKS.get(pool.name.partition("-")[0], pool.hardware.link.down_bandwidth / 1e9)
    # A single device sends nothing inside of its host, so nothing was assumed.
    if pool.devices_per_host == 1:
        return LinkModel(latency, rate), []
    note = f"Assumed: a {pool.name} sends {rate / 1e9:g} GB/s inside of its host (links.inside_gb_per_s)."
    return LinkModel(latency, rate), [note]
