"""The links between the hosts of a scenario with a topology."""

from __future__ import annotations

from moesaic.core.errors import ConfigError
from moesaic.core.topology import Topology, Way
from moesaic.planning.sim.device import Channel
from moesaic.planning.sim.timeline import Timeline


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
