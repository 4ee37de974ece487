"""Chooses the replica that computes an expert, and when a server counts as gone. Each client decides for
itself.

Expert-as-a-Service (section 3): a client that waits too long masks the server in its own table and sends the
same rows to another server that holds the experts. No agreement is needed, because servers keep no state of
requests. The paper leaves some points open. We decide them so:

- Choice: the server of the client's own rank first, then servers of its own host, then those of other hosts.
  On its host the one with the fewest outstanding pairs is chosen. On other hosts it is the one whose link
  would carry its outstanding pairs and these first. If no links are known, all servers count as near.
- Timeout: a server is late when it showed no progress for `factor` times the expected duration of its
  outstanding work. The expectation uses the pace that it showed so far. The timeout is at most `ceiling`
  seconds, so that a frozen server costs less than a second. A server without a measured pace gets
  `unmeasured_seconds`.
- Shortest timeout: `round_trips` times the longest silence of any server that was followed by an answer, in
  the last `window` seconds at least. So fast links and devices get a short one, and a host whose processes
  lose their cores now and then a longer one. It is between both `floors`, or it is `floor` where that is set.
- Slow servers: a server that really needs longer must not be given up again and again, since each time its
  work is lost. So the ceiling is never below twice the longest silence after which this server answered. The
  silence of a false failover counts too. Quick answers let this value decay.
- A late server is masked only if other servers hold all of its experts. Without a replica nothing is gained:
  the rows wait for this server or for the one that replaces it.
- A server that the supervisor suspects, because its host is silent, is masked at once. That also takes effect
  while nothing is outstanding, so no request has to find it out.
- If the same process of a masked server answers again, it had not died. That is counted as a false failover.

Question: When does an expert server count as gone, and which replica is asked then?
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moesaic.core.tokens import IntArray
from moesaic.core.topology import Way

NO_SERVER = -1
"""The server id that stands for "no server"."""
ROUNDING = 1e-6
"""Seconds that are more than the rounding errors of a time."""


@dataclass(frozen=True)
class ReplicaTimeout:
    """When a silent server is given up."""

    factor: float = 20.0
    """Timeout as a multiple of the expected duration of the outstanding work."""
    floor: float | None = None
    """Minimum timeout in seconds. None: it is measured."""
    floors: tuple[float, float] = (0.05, 0.3)
    """The smallest and the largest measured minimum, in seconds."""
    round_trips: float = 10.0
    """The measured minimum as a multiple of the longest silence before an answer."""
    window: float = 30.0
    """Seconds for which such a silence counts at least; it counts for less than twice as long."""
    ceiling: float = 0.6
    """Maximum timeout in seconds, for a server that never answered after a long silence."""
    unmeasured_seconds: float = 0.8
    """Timeout in seconds of a server that never answered. It may have to read its weights first."""
    relayed_share: float = 0.75
    """Share of the timeout after which pairs that go through a relay are sent directly."""
    memory: float = 0.9
    """Factor by which each answer decays the longest known silence."""

    @property
    def shortest(self) -> float:
        """Seconds below which no timeout is."""
        return self.floors[0] if self.floor is None else self.floor


class LongestSilence:
    """The longest silence in seconds that an answer ended, in this window or in the one before."""

    def __init__(self, window: float) -> None:
        """window: seconds."""
        self._window = window
        self._begin = -math.inf
        self._longest = self._longest_before = 0.0

    def record(self, silence: float, now: float) -> None:
        """An answer came after this many seconds."""
        if now >= self._begin + self._window:
            is_next = now < self._begin + 2 * self._window
            self._longest_before, self._longest = self._longest if is_next else 0.0, 0.0
            self._begin = now
        self._longest = max(self._longest, silence)

    def raise_to(self, silence: float) -> None:
        """A server that was given up after this many seconds was not gone."""
        self._longest = max(self._longest, silence)

    @property
    def seconds(self) -> float:
        """The length of that silence, which is 0 before the first answer."""
        return max(self._longest, self._longest_before)


@dataclass(frozen=True)
class ReplicaStats:
    """Counters of one client. They only grow."""

    failovers: int = 0
    """Servers that were lost or given up while pairs were outstanding."""
    silent_failovers: int = 0
    """Failovers because of a timeout. The others were broken connections."""
    false_failovers: int = 0
    """Servers that were given up because of a timeout and came back, so they had not died."""
    resent_pairs: int = 0
    """(row, expert) pairs that were sent again."""


@dataclass
class _Server:
    """The state of a connected server."""

    outstanding: int = 0
    """Pairs that were sent and are not answered."""
    last_progress: float = 0.0
    """Time of the last progress, or of the first request after it had no work."""
    pace: float | None = None
    """Smoothed seconds per pair. None before the first answer."""


class Replicas:
    """A client's table of servers. It does no I/O: its owner makes and closes the connections.

    The owner calls `remove_server` whenever a connection closes, `mask` before it closes one because of a
    timeout, and `record_replacement` before it closes one because another process has the server's id. See
    RemoteExperts.
    """

    def __init__(
        self, patience: ReplicaTimeout | None = None, own_server: int | None = None, pair_bytes: int = 0
    ) -> None:
        """pair_bytes: what a pair sends over a link, there and back."""
        self._patience = patience or ReplicaTimeout()
        self._pair_bytes = pair_bytes
        self.own_server = own_server
        """Id of the server of this client's own rank, or None."""
        self._ways: Mapping[int, Way] = {}
        self._servers: dict[int, _Server] = {}
        self._holders: dict[int, IntArray] = {}
        self._single_holder: dict[int, int] = {}
        """Layer -> server, for layers whose experts are all on one server."""
        self._mask_timeouts: dict[int, float] = {}
        """Servers given up because of a timeout -> that timeout in seconds."""
        self._longest_silence = LongestSilence(self._patience.window)
        self._silence: dict[int, float] = {}
        """Server -> the longest silence in seconds that it survived, decayed with each answer."""
        self._suspected_servers: frozenset[int] = frozenset()
        self._due: set[int] = set()
        """Suspected servers that are still connected, since no others hold all of their experts."""
        self._spare: dict[int, bool] = {}
        """Server -> whether other servers hold all of its experts.

        It is a cache, valid for the current placement and connections.
        """
        self._none_spare = False
        """Whether all connected servers are known to be no spare ones."""
        self._calm_until = -math.inf
        """Time up to which no server has been silent for longer than the shortest timeout."""
        self.stats = ReplicaStats()

    def place(
        self,
        experts: Mapping[int, Mapping[int, Iterable[int]]],
        num_experts: int,
        suspected_servers: Collection[int] = (),
        ways: Mapping[int, Way] | None = None,
    ) -> None:
        """Set a new placement. experts: server -> layer -> experts.

        suspected_servers: the servers of it that the supervisor suspects. `late` names each of them once.
        A suspected server that the next placement leaves out was given up.
        ways: server -> the link from this client to it. Servers that it does not have count as near.
        """
        new = set(suspected_servers) - self._suspected_servers
        self._due = {one for one in self._due if one in suspected_servers or one not in experts} | new
        self._suspected_servers = frozenset(suspected_servers)
        self._ways = ways or {}
        holders: dict[int, list[list[int]]] = {}
        for server in sorted(experts):
            for layer, ids in experts[server].items():
                if layer not in holders:
                    holders[layer] = [[] for _ in range(num_experts)]
                rows = holders[layer]
                for expert in ids:
                    rows[expert].append(server)
        self._holders = {layer: _pad_rows(rows) for layer, rows in holders.items()}
        self._single_holder = {
            layer: int(table[0, 0])
            for layer, table in self._holders.items()
            if table.shape[1] == 1 and (table == table[0, 0]).all()
        }
        self._forget_spares()

    def _forget_spares(self) -> None:
        """Other servers are connected, or hold other experts."""
        self._spare.clear()
        self._none_spare = False

    def far(self, server: int) -> bool:
        """Whether the server is on another host than this client, as far as that is known."""
        return server in self._ways and not self._ways[server].on_one_host

    @property
    def ways(self) -> Mapping[int, Way]:
        """Server -> the link from this client to it, where links are known."""
        return self._ways

    @property
    def connected_servers(self) -> frozenset[int]:
        """Ids of the servers that can be asked."""
        return frozenset(self._servers)

    def add_server(self, server: int) -> None:
        """Record that a connection to `server` was made."""
        if server in self._mask_timeouts:
            self._silence[server] = self._mask_timeouts.pop(server)
            self._longest_silence.raise_to(self._silence[server])
            self._count(false_failovers=1)
        self._due.discard(server)
        self._servers[server] = _Server()
        self._forget_spares()

    def remove_server(self, server: int, pairs: int = 0) -> None:
        """Record that the connection to `server` broke with `pairs` outstanding.

        Its process or the network failed.
        """
        if self._servers.pop(server, None) is not None and pairs:
            self._count(failovers=1)
        self._forget_spares()

    def mask(self, server: int) -> None:
        """Give up `server` because of a timeout, although its connection is open."""
        state = self._servers.pop(server, None)
        if state is not None:
            self._mask_timeouts[server] = self._timeout_seconds(server, state)
            self._count(failovers=1, silent_failovers=1)
        self._forget_spares()

    def record_replacement(self, server: int) -> None:
        """Record that another process has this id now. So the process that was masked really died."""
        self._mask_timeouts.pop(server, None)
        self._silence.pop(server, None)

    def shares(
        self, layer: int, experts: npt.NDArray[np.integer]
    ) -> list[tuple[int, npt.NDArray[np.bool_] | None]]:
        """The result of `route`, grouped: [(server, mask), ...], with NO_SERVER among the servers.

        mask: [p] which pairs go to the server, or None for all of them. The list is empty when there are no
        pairs.
        """
        if layer in self._single_holder:
            return [(self._find_single_holder(layer), None)] if len(experts) else []
        servers = self.route(layer, experts)
        asked_servers = np.flatnonzero(np.bincount(servers - NO_SERVER)) + NO_SERVER
        return [(server, servers == server) for server in asked_servers.tolist()]

    def route(self, layer: int, experts: npt.NDArray[np.integer]) -> IntArray:
        """[p] the server for each pair of `experts` [p] of a layer. NO_SERVER: none that has it is connected.

        All pairs of an expert go to one server, so that its weights are read once. Example: servers 0 and 1
        hold expert 3, and server 0 has more pairs outstanding. Then every pair of expert 3 goes to server 1.
        If server 1 is on another host than this client and server 0 is not, they go to server 0.
        """
        table = self._holders.get(layer)
        if table is None or layer in self._single_holder:
            return np.full(len(experts), self._find_single_holder(layer), dtype=np.int64)
        if table.shape[1] == 1:
            return self._only_holder(table[experts, 0])
        num_pairs = np.bincount(experts, minlength=len(table))
        asked_experts = np.flatnonzero(num_pairs)
        counts = num_pairs[asked_experts]
        server_of_expert = np.full(len(table), NO_SERVER, dtype=np.int64)
        load = {server: float(state.outstanding) for server, state in self._servers.items()}
        for index in np.argsort(-counts, kind="stable").tolist():
            holders = [server for server in table[asked_experts[index]].tolist() if server in load]
            if holders:
                added_pairs = int(counts[index])
                best = min(holders, key=lambda server: self._rank(server, load[server], added_pairs))
                load[best] += added_pairs
                server_of_expert[asked_experts[index]] = best
        servers: IntArray = server_of_expert[experts]
        return servers

    def _rank(self, server: int, load: float, pairs: int) -> tuple[bool, bool, float, int]:
        """The holder with the least of these is asked. load: pairs it has. pairs: those that it would get."""
        if not self.far(server):
            return server != self.own_server, False, load, server
        way = self._ways[server]
        seconds = way.link.latency + (load + pairs) * self._pair_bytes / way.link.bandwidth
        return server != self.own_server, True, seconds, server

    def _find_single_holder(self, layer: int) -> int:
        """The server that holds all experts of the layer if it is connected, otherwise NO_SERVER."""
        server = self._single_holder.get(layer, NO_SERVER)
        return server if server in self._servers else NO_SERVER

    def _only_holder(self, servers: IntArray) -> IntArray:
        """Route without replicas: each expert has one server.

        Servers that are not connected become NO_SERVER.
        """
        absent = [server for server in set(servers.tolist()) if server not in self._servers]
        return np.where(np.isin(servers, absent), NO_SERVER, servers) if absent else servers

    def record_sent(self, server: int, pairs: int, now: float, is_resend: bool = False) -> None:
        """Record that `pairs` were sent to `server`. is_resend: they had been sent before."""
        state = self._servers[server]
        if not state.outstanding:
            state.last_progress = now
            self._calm_until = min(self._calm_until, now + self._patience.shortest - ROUNDING)
        state.outstanding += pairs
        if is_resend:
            self._count(resent_pairs=pairs)

    def record_answer(self, server: int, pairs: int, now: float) -> None:
        """Record that `server` answered `pairs`."""
        state = self._servers.get(server)
        if state is None or not pairs:
            return
        silence = now - state.last_progress
        self._longest_silence.record(silence, now)
        self._silence[server] = max(silence, self._patience.memory * self._silence.get(server, 0.0))
        pace = silence / pairs
        # Adapt at once to a slower pace and slowly to a faster one, so that the timeout is rather too long.
        state.pace = pace if state.pace is None else max(pace, 0.9 * state.pace + 0.1 * pace)
        state.outstanding -= pairs
        state.last_progress = now

    def record_taken_back(self, server: int, pairs: int) -> None:
        """Record that `server` need not answer these pairs any more. The clock of its others goes on.

        If they are sent to it again, call `record_sent` before: then its clock goes on for them, too.
        """
        if server in self._servers:
            self._servers[server].outstanding -= pairs

    def slow(self, servers: Collection[int], now: float) -> list[int]:
        """The servers that will soon be late, and that others could replace."""
        return [server for server, end in self._soon_late(servers) if now > end]

    def next_slow(self, servers: Collection[int]) -> float | None:
        """The time at which `slow` may name the next of these servers."""
        return min((end for _, end in self._soon_late(servers)), default=None)

    def _soon_late(self, servers: Collection[int]) -> list[tuple[int, float]]:
        states = [(server, self._servers[server]) for server in servers if server in self._servers]
        return [
            (
                server,
                state.last_progress + self._patience.relayed_share * self._timeout_seconds(server, state),
            )
            for server, state in states
            if state.outstanding and self._is_spare(server)
        ]

    def late(self, now: float) -> list[int]:
        """Servers that were silent for too long, or that are suspected.

        The servers that are not named hold all experts of the named ones.
        """
        late_servers: list[int] = []
        if now <= self._calm_until and not self._due:
            return late_servers
        soonest = now - self._patience.shortest
        for server, state in self._servers.items():
            pending = state.outstanding and state.last_progress < soonest
            overdue = pending and now > state.last_progress + self._timeout_seconds(server, state)
            if (overdue or server in self._due) and self._is_replaceable(server, late_servers):
                late_servers.append(server)
        self._due.difference_update(late_servers)
        oldest = min(
            (state.last_progress for state in self._servers.values() if state.outstanding), default=now
        )
        self._calm_until = min(now, oldest) + self._patience.shortest - ROUNDING
        return late_servers

    def next_deadline(self) -> float | None:
        """The time at which `late` may name the next server. None until something else happens."""
        if self._none_spare:
            return None
        ends = [
            state.last_progress + self._timeout_seconds(server, state)
            for server, state in self._servers.items()
            if state.outstanding and self._is_spare(server)
        ]
        self._none_spare = len(self._spare) == len(self._servers) and not any(self._spare.values())
        return min(ends, default=None)

    def _timeout_seconds(self, server: int, state: _Server) -> float:
        """Timeout of the server in seconds."""
        rule, survived_seconds = self._patience, 2 * self._silence.get(server, 0.0)
        if state.pace is None:
            return max(rule.unmeasured_seconds, survived_seconds)
        expected_seconds = rule.factor * state.pace * state.outstanding
        return max(self._floor(), min(expected_seconds, max(rule.ceiling, survived_seconds)))

    def _floor(self) -> float:
        """Minimum timeout in seconds."""
        rule = self._patience
        if rule.floor is not None:
            return rule.floor
        return min(max(rule.floors[0], rule.round_trips * self._longest_silence.seconds), rule.floors[1])

    def _is_spare(self, server: int) -> bool:
        """Whether all other servers together could replace `server`.

        Cached, because it is asked before every wait.
        """
        if server not in self._spare:
            self._spare[server] = self._is_replaceable(server)
        return self._spare[server]

    def _is_replaceable(self, server: int, excluded_servers: Collection[int] = ()) -> bool:
        """Whether every expert of `server` is on another connected server that is not in
        `excluded_servers`."""
        other_servers = [
            other for other in self._servers if other != server and other not in excluded_servers
        ]
        for table in self._holders.values():
            is_holder = (table == server).any(axis=1)
            if (is_holder & ~np.isin(table, other_servers).any(axis=1)).any():
                return False
        return True

    def _count(self, **increments: int) -> None:
        counts = {name: getattr(self.stats, name) + number for name, number in increments.items()}
        self.stats = ReplicaStats(**{**self.stats.__dict__, **counts})


def _pad_rows(rows: list[list[int]]) -> IntArray:
    """[E, most] the servers that hold each expert, padded with NO_SERVER."""
    table = np.full((len(rows), max(1, max(map(len, rows)))), NO_SERVER, dtype=np.int64)
    for row, servers in zip(table, rows, strict=True):
        row[: len(servers)] = servers
    return table
