"""Which replica serves an expert now, and when a server counts as gone: decided by each client alone.

Expert-as-a-Service (section 3): a client that waits too long masks the server in its own table and sends the
same rows to another holder. Nothing is agreed with anybody, because servers keep nothing. What the paper
leaves open is settled here:

- Choice: the own rank's server first, then the one with the fewest pairs outstanding.
- Patience: a server is late when it has shown no progress for `factor` times what its outstanding work should
  take at the pace it showed so far, at least `floor` and at most `ceiling` seconds: a freeze is to cost less
  than a second whatever is outstanding. A server whose pace nobody knows yet gets `unknown` seconds.
- Progress: a server that honestly needs longer would be given up again and again, each time with its work
  undone. So the ceiling is never below twice the longest silence that this server broke; one that ended in a
  false failover counts too. It wears off with its quick answers.
- A late server is masked only if others hold all that it holds: without a replica there is nothing to gain,
  the rows wait for it or for its successor.
- A masked server whose same process answers again was not dead: a false failover, counted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moesaic.core.tokens import IntArray

NOBODY = -1


@dataclass(frozen=True)
class ReplicaTimeout:
    """When a silent server is given up."""

    factor: float = 20.0
    """Times the time that its work should take."""
    floor: float = 0.3
    """Seconds, at least."""
    ceiling: float = 0.6
    """Seconds, at most, for a server that never broke a long silence."""
    unknown: float = 0.8
    """Seconds, for a server that never answered: it may have to read its weights first."""
    memory: float = 0.9
    """What an answer leaves of the longest silence."""


@dataclass(frozen=True)
class ReplicaStats:
    """Counters of one client; they only grow."""

    failovers: int = 0
    """Servers that were lost or given up with rows outstanding."""
    silent_failovers: int = 0
    """Of those, servers given up for their silence; the others' connections broke."""
    false_failovers: int = 0
    """Of those, servers that came back: they had not died."""
    resent_pairs: int = 0
    """(row, expert) pairs that were sent again."""


@dataclass
class _Server:
    """What a client knows of a server it is connected to."""

    outstanding: int = 0
    """Pairs sent and not answered."""
    since: float = 0.0
    """Last sign of progress, or when it was given work after having none."""
    pace: float | None = None
    """Seconds a pair, smoothed; None before the first answer."""


class Replicas:
    """A client's table of servers. Pure: connections are made and dropped by its owner."""

    def __init__(self, patience: ReplicaTimeout | None = None, own: int | None = None) -> None:
        self._patience = patience or ReplicaTimeout()
        self.own = own
        """The server of this client's own rank."""
        self._servers: dict[int, _Server] = {}
        self._holders: dict[int, IntArray] = {}
        self._only: dict[int, int] = {}
        """Layer -> the one server that holds all of it."""
        self._masked: dict[int, float] = {}
        """Servers given up for their silence -> seconds that they had."""
        self._silence: dict[int, float] = {}
        """Seconds, the longest that a server was silent for without being dead."""
        self._spare: dict[int, bool] = {}
        """Whether others hold all that a server holds, as far as it was asked; for this placement and these
        connections."""
        self.stats = ReplicaStats()

    def place(self, experts: Mapping[int, Mapping[int, Iterable[int]]], num_experts: int) -> None:
        """A new placement: server -> layer -> experts."""
        found: dict[int, list[list[int]]] = {}
        for server in sorted(experts):
            for layer, ids in experts[server].items():
                rows = found.setdefault(layer, [[] for _ in range(num_experts)])
                for expert in ids:
                    rows[expert].append(server)
        self._holders = {layer: _padded(rows) for layer, rows in found.items()}
        self._only = {
            layer: int(table[0, 0])
            for layer, table in self._holders.items()
            if table.shape[1] == 1 and (table == table[0, 0]).all()
        }
        self._spare.clear()

    @property
    def connected(self) -> frozenset[int]:
        """Servers that can be asked."""
        return frozenset(self._servers)

    def joined(self, server: int) -> None:
        """A connection to `server` stands."""
        if server in self._masked:
            self._silence[server] = self._masked.pop(server)
            self._count(false_failovers=1)
        self._servers[server] = _Server()
        self._spare.clear()

    def lost(self, server: int, pairs: int = 0) -> None:
        """The connection to `server` broke with `pairs` outstanding: its process died, or the way to it."""
        if self._servers.pop(server, None) is not None and pairs:
            self._count(failovers=1)
        self._spare.clear()

    def mask(self, server: int) -> None:
        """`server` was given up for its silence, though its connection stood."""
        state = self._servers.pop(server, None)
        if state is not None:
            self._masked[server] = self._allowed(server, state)
            self._count(failovers=1, silent_failovers=1)
        self._spare.clear()

    def replaced(self, server: int) -> None:
        """Another process has this id now: the one that was masked is really gone."""
        self._masked.pop(server, None)
        self._silence.pop(server, None)

    def shares(
        self, layer: int, experts: npt.NDArray[np.integer]
    ) -> list[tuple[int, npt.NDArray[np.bool_] | None]]:
        """As `route`: each server, NOBODY among them, and which of the pairs [p] are its; None: all.
        Of no pairs nobody has a share."""
        if layer in self._only:
            return [(self._only_one(layer), None)] if len(experts) else []
        servers = self.route(layer, experts)
        return [(server, servers == server) for server in set(servers.tolist())]

    def route(self, layer: int, experts: npt.NDArray[np.integer]) -> IntArray:
        """The server for each of the pairs experts [p] of a layer, NOBODY where none of its holders is there.

        All pairs of an expert go to one server, so that its weights are read once. Example: expert 3 is held
        by servers 0 and 1, of which 0 has more pairs outstanding: every pair of expert 3 goes to 1.
        """
        table = self._holders.get(layer)
        if table is None or layer in self._only:
            return np.full(len(experts), self._only_one(layer), dtype=np.int64)
        if table.shape[1] == 1:
            return self._only_holder(table[experts, 0])
        wanted, counts = np.unique(experts, return_counts=True)
        chosen = np.full(len(table), NOBODY, dtype=np.int64)
        load = {server: float(state.outstanding) for server, state in self._servers.items()}
        for at in np.argsort(-counts, kind="stable").tolist():
            holders = [server for server in table[wanted[at]].tolist() if server in load]
            if holders:
                best = min(holders, key=lambda server: (server != self.own, load[server], server))
                load[best] += int(counts[at])
                chosen[wanted[at]] = best
        servers: IntArray = chosen[experts]
        return servers

    def _only_one(self, layer: int) -> int:
        server = self._only.get(layer, NOBODY)
        return server if server in self._servers else NOBODY

    def _only_holder(self, servers: IntArray) -> IntArray:
        """Without replicas there is nothing to choose."""
        absent = [server for server in set(servers.tolist()) if server not in self._servers]
        return np.where(np.isin(servers, absent), NOBODY, servers) if absent else servers

    def sent(self, server: int, pairs: int, now: float, again: bool = False) -> None:
        """`pairs` went to `server`; again: they had been sent before."""
        state = self._servers[server]
        if not state.outstanding:
            state.since = now
        state.outstanding += pairs
        if again:
            self._count(resent_pairs=pairs)

    def answered(self, server: int, pairs: int, now: float) -> None:
        """`pairs` came back from `server`."""
        state = self._servers.get(server)
        if state is None or not pairs:
            return
        silence = now - state.since
        self._silence[server] = max(silence, self._patience.memory * self._silence.get(server, 0.0))
        pace = silence / pairs
        # Quick to learn that a server is slow, slow to learn that it is quick: so patience is rather long.
        state.pace = pace if state.pace is None else max(pace, 0.9 * state.pace + 0.1 * pace)
        state.outstanding -= pairs
        state.since = now

    def late(self, now: float) -> list[int]:
        """Servers that have been silent for too long; those not named could take the rows of all that are."""
        named: list[int] = []
        for server, state in self._servers.items():
            overdue = state.outstanding and now > state.since + self._allowed(server, state)
            if overdue and self._replaceable(server, named):
                named.append(server)
        return named

    def next_deadline(self) -> float | None:
        """When `late` may name the next one, in the clock's seconds; None: not before something happens."""
        ends = [
            state.since + self._allowed(server, state)
            for server, state in self._servers.items()
            if state.outstanding and self._is_spare(server)
        ]
        return min(ends, default=None)

    def _allowed(self, server: int, state: _Server) -> float:
        """Seconds of silence."""
        rule, proven = self._patience, 2 * self._silence.get(server, 0.0)
        if state.pace is None:
            return max(rule.unknown, proven)
        wanted = rule.factor * state.pace * state.outstanding
        return max(rule.floor, min(wanted, max(rule.ceiling, proven)))

    def _is_spare(self, server: int) -> bool:
        """`_replaceable` by all others; asked before every wait, hence remembered."""
        if server not in self._spare:
            self._spare[server] = self._replaceable(server)
        return self._spare[server]

    def _replaceable(self, server: int, without: Collection[int] = ()) -> bool:
        """True when every expert that `server` holds has another holder, connected and not in `without`."""
        others = [other for other in self._servers if other != server and other not in without]
        for table in self._holders.values():
            mine = (table == server).any(axis=1)
            if (mine & ~np.isin(table, others).any(axis=1)).any():
                return False
        return True

    def _count(self, **more: int) -> None:
        now = {name: getattr(self.stats, name) + number for name, number in more.items()}
        self.stats = ReplicaStats(**{**self.stats.__dict__, **now})


def _padded(rows: list[list[int]]) -> IntArray:
    """[E, most] holders of each expert, NOBODY behind the last."""
    table = np.full((len(rows), max(1, max(map(len, rows)))), NOBODY, dtype=np.int64)
    for line, servers in zip(table, rows, strict=True):
        line[: len(servers)] = servers
    return table
