"""Devices that compute one run after another, the streams by which they send rows, and links of hosts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from moesaic.core.errors import ConfigError
from moesaic.core.paced_devices import LinkModel
from moesaic.core.topology import Topology, Way
from moesaic.planning.sim.timeline import Timeline

Span = Callable[[str, str, float, float, dict[str, int]], None]
"""Gets (device, what it did, begin, end, numbers of it) of each run, for a trace."""


@dataclass(eq=False)
class Device:
    """A device such as a GPU. Processes that share it take turns, in the order in which they ask."""

    name: str
    timeline: Timeline
    span: Span | None = None
    busy: float = 0.0
    """Seconds that it has computed so far, those of a run under way included."""
    runs: int = 0
    _free: float = 0.0
    """When the runs so far end."""

    def compute(
        self, process: str, label: str, seconds: float, **numbers: int
    ) -> Generator[float, None, None]:
        """Compute for `seconds`, once the device is free. Yields the seconds until the end."""
        now = self.timeline.now
        begin = max(now, self._free)
        self._free = begin + seconds
        self.busy += seconds
        self.runs += 1
        if self.span is not None:
            self.span(process, label, begin, self._free, numbers)
        if self._free > now:
            yield self._free - now

    def busy_until(self, now: float) -> float:
        """Seconds that it has computed up to `now`."""
        return self.busy - max(0.0, self._free - now)


@dataclass(eq=False)
class Channel:
    """A direction of a link. Messages pass one after another. Each then travels for the link's latency."""

    timeline: Timeline
    link: LinkModel
    size: int = 0
    """Bytes so far."""
    busy: float = 0.0
    """Seconds for which messages have passed so far."""
    _free: float = 0.0

    def send(self, size: float, arrive: Callable[[], None]) -> float:
        """Send `size` bytes; `arrive` is called when all of them have arrived. Returns that time."""
        passing = size / self.link.bandwidth
        self._free = max(self.timeline.now, self._free) + passing
        self.busy += passing
        self.size += round(size)
        arrival = self._free + self.link.latency
        self.timeline.schedule(arrival, arrive)
        return arrival


def _no_channel(sender: str, receiver: str) -> Channel | None:
    return None


@dataclass(eq=False)
class Stream:
    """What a device sends passes one after another, on its own host and to devices without a shared link."""

    name: str
    timeline: Timeline
    link: LinkModel
    channel: Callable[[str, str], Channel | None] = _no_channel
    """Returns the link that a host's devices share, for the names of a sender and a receiver, or None."""
    sent_bytes: Counter[str] = field(default_factory=Counter)
    """Bytes by receiver."""

    def __post_init__(self) -> None:
        self._own_channel = Channel(self.timeline, self.link)

    @property
    def busy(self) -> float:
        """Seconds that it has sent so far, without those on shared links."""
        return self._own_channel.busy

    def send(self, receiver: str, size: float, arrive: Callable[[], None]) -> float:
        """Send `size` bytes; `arrive` is called when all of them have arrived. Returns that time.

        A message to the own device takes no time and uses no link.
        """
        # Also without time the message is an event: it arrives after what was set for this moment before.
        if receiver == self.name:
            self.timeline.schedule(self.timeline.now, arrive)
            return self.timeline.now
        self.sent_bytes[receiver] += round(size)
        return (self.channel(self.name, receiver) or self._own_channel).send(size, arrive)


class HostLinks:
    """Which device is on which host. All devices of a host share its link to another host."""

    def __init__(self, timeline: Timeline, topology: Topology, is_colocated: bool) -> None:
        """is_colocated: server i shares the device of worker i."""
        self.topology = topology
        self.channels: dict[tuple[str, str], Channel] = {}
        """(from, to) -> that direction of their link. Those that were used so far."""
        self._timeline = timeline
        self._is_colocated = is_colocated

    def channel(self, sender: str, receiver: str) -> Channel | None:
        """What messages from one device to another pass. None if both are on one host."""
        ends = self._host(sender), self._host(receiver)
        if ends[0] == ends[1]:
            return None
        if ends not in self.channels:
            self.channels[ends] = Channel(self._timeline, self.topology.link(*ends))
        return self.channels[ends]

    def measure_traffic(self) -> dict[tuple[str, str], tuple[int, float]]:
        """(from, to) -> bytes that have passed so far, and the seconds for which they did."""
        return {ends: (channel.size, channel.busy) for ends, channel in self.channels.items()}

    def way(self, worker: int, server: int) -> Way:
        """The way from a worker to a server."""
        return self.topology.way(worker, server)

    def _host(self, device: str) -> str:
        kind, _, number = device.rpartition(" ")
        if kind == "server":
            return self.topology.host_of_server(int(number))
        return self.topology.host_of_worker(int(number))

    def check(self, ranks: int) -> None:
        """Raise ConfigError if a worker and the server beside it are on different hosts."""
        for rank in range(ranks) if self._is_colocated else ():
            ends = self.topology.host_of_worker(rank), self.topology.host_of_server(rank)
            if ends[0] != ends[1]:
                allowed_host = f"{ends[0]!r}, as worker {rank}, with servers.beside_workers"
                raise ConfigError.field(f"links.topology: host of server {rank}", ends[1], allowed_host)
