"""The routed experts of steps that are one CUDA graph, though they are on servers.

The graph holds launches that write requests into mailboxes, wait for the answers and collect them
(`gpu.exchange.exchange_launches`). So the host has nothing to do in a layer. Between steps it writes the
table from experts to servers, and during a step it watches the servers. `RemoteExperts` decides who is asked
and who is given up, and this follows it: a server has a mailbox as long as it has a connection there.

A step whose server is gone or late is ended by the host, and then computed once more by `RemoteExperts`. So
is a step with answers that are NaN or infinite: only `RemoteExperts` can tell whether they should be. The
mailbox of that server gets no further request. Its memory is kept until the server has noticed, so that what
it still writes hits nothing that is used.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from moesaic.core.experts import Directory, ExpertLayout, ServerEntry
from moesaic.core.messages import FaultyServer, JoinJob
from moesaic.core.metrics import ExpertStats
from moesaic.core.tokens import IntArray
from moesaic.experts import wire
from moesaic.experts.client import ExpertRequest, RequestHandle
from moesaic.experts.connector import Connecting
from moesaic.experts.remote import RemoteExperts
from moesaic.gpu.exchange.exchange_launches import ADDRESSES, Exchange, ExchangeOperations
from moesaic.gpu.exchange.exchange_memory import DeviceMemory
from moesaic.gpu.exchange.server_mailbox import MailboxDialer, ServerMailbox
from moesaic.gpu.ipc.device_sharing import DeviceSharing
from moesaic.kernels.table import OperationRecorder, Recording
from moesaic.policy.fleet.replicas import Replicas

LOG = logging.getLogger(__name__)
POLLS = 1 << 28
"""How often a program looks for answers before it gives the step up itself. The host does that much
earlier."""
LOOK_SECONDS = 1e-3
"""While a graph is under way, the host looks at the servers at least this often."""
NAP_SECONDS = 2e-5
CLOSE_SECONDS = 1.0
"""How long a worker that ends waits for servers to let its memory go."""
WHOLE_GRAPH = "decode steps are one CUDA graph each from now on"
IN_PARTS = "decode steps are computed in parts until every expert has a server with a mailbox"
Result = TypeVar("Result")
ChosenIds = Sequence[torch.Tensor | IntArray]
"""[n, k] for each layer with routed experts."""


class RecordedExperts:
    """`RoutedExperts` for a step that is recorded: a call is launches, and the answer is there at once."""

    def __init__(self, exchange: Exchange, operations: ExchangeOperations, layers: Sequence[int]) -> None:
        """layers: with routed experts, in the order of the exchange's tables."""
        self._exchange, self._operations = exchange, operations
        self._index = {layer: index for index, layer in enumerate(layers)}
        self._num_submitted = 0
        self._open: tuple[RequestHandle, ExpertRequest, torch.Tensor] | None = None

    def submit(self, request: ExpertRequest) -> RequestHandle:
        """Raises ValueError for a request of partial sums."""
        if request.weights is not None:
            raise ValueError("a mailbox takes no request of partial sums")
        handle, self._num_submitted = RequestHandle(self._num_submitted), self._num_submitted + 1
        index = self._index[request.layer]
        sources = self._operations.dispatch(self._exchange, index, request.hidden, request.expert_ids)
        self._operations.post(self._exchange, index)
        self._open = handle, request, sources
        return handle

    def poll(self, handle: RequestHandle) -> torch.Tensor | None:
        assert self._open is not None and self._open[0] == handle
        _, request, sources = self._open
        self._operations.wait(self._exchange, self._index[request.layer], POLLS)
        return self._operations.collect(sources, request.expert_ids.shape[1], request.hidden.shape[1])

    def release(self, handle: RequestHandle) -> None:
        self._open = None


class _Recording(Generic[Result]):
    """A recorded step that asks servers when it is replayed. While it is recorded it asks nobody."""

    def __init__(self, inner: Recording[Result], launch: Callable[[Callable[[], Result]], Result]) -> None:
        self._inner, self._launch = inner, launch
        self.result = inner.result

    def run(self, expert_rows: torch.Tensor | None = None) -> Result:
        """Launch the graph. Its result is valid once the graph has ended."""
        return self._launch(partial(self._inner.run, expert_rows))

    def free(self) -> None:
        """Free the recording."""
        self._inner.free()


class _Recorder:
    """An `OperationRecorder` of such steps."""

    def __init__(self, inner: OperationRecorder, launch: Callable[[Callable[[], Any]], Any]) -> None:
        self._inner, self._launch = inner, launch

    def __call__(
        self, step: Callable[[], Result], expert_rows: torch.Tensor | None = None
    ) -> Recording[Result]:
        return _Recording(self._inner(step, expert_rows), self._launch)


@dataclass
class _Server:
    """A server with a mailbox."""

    entry: ServerEntry
    mailbox: ServerMailbox
    slot: int
    has_given_up: bool = False
    """Whether the worker has given up the connection beside it. A new connection gets a new mailbox."""


class DeviceExchange:
    """The mailboxes of a worker, and the `ExpertServers` of its loop. Used by one thread.

    `ready` says whether a graph may begin. Then come `begin` and the graph's launch. The step is over when
    `poll_end` returns true, and `has_failed` says how.
    """

    def __init__(
        self,
        remote: RemoteExperts,
        replicas: Replicas,
        layout: ExpertLayout,
        sharing: DeviceSharing,
        operations: ExchangeOperations,
        dialer: MailboxDialer,
        device: torch.device,
        rows: int,
        clock: Callable[[], float],
    ) -> None:
        """replicas: those of `remote`. dialer: makes mailboxes of the kind that `operations` write into.
        rows: most rows of a recorded step."""
        self._remote, self._replicas, self._layout, self._clock = remote, replicas, layout, clock
        self._memory = DeviceMemory(layout, sharing, device, rows, remote.worker, dialer.rows)
        self.experts = RecordedExperts(self._memory.exchange, operations, layout.layers)
        self._dialer, self._connecting = dialer, Connecting(dialer.dial, remote.wakeup)
        self._directory, self._secret = Directory(-1, [], {}), b""
        self._servers: dict[int, _Server] = {}
        self._target_servers: dict[int, ServerEntry] = {}
        """Servers that get a mailbox, or have one."""
        self._leaving: list[ServerMailbox] = []
        """Mailboxes of servers that were given up and may still write."""
        self._table_sources: tuple[object, ...] = ()
        """What the table was made from."""
        self._routes: IntArray | None = None
        """[layers, E] the server of each expert. None: some expert has no server with a mailbox."""
        self._is_whole_graph: bool | None = None
        """Whether the last step could be one graph."""
        self._version = -1
        """Version of the directory that the table was made from."""
        self._live, self._under_way = 0, False
        remote.report_other_calls = self._progress
        self._layer_pairs = np.zeros(len(layout.layers), dtype=np.int64)
        self._calls = 0
        self.has_failed = False
        """Whether the last step has to be computed once more."""

    # ---- a step

    def ready(self) -> bool:
        """Whether a graph may begin: each expert has a server with a mailbox that owes no answer."""
        self._follow()
        self._route_anew()
        has_routes = self._routes is not None
        begins = has_routes and all(state.mailbox.is_quiet for state in self._servers.values())
        if begins != self._is_whole_graph and (begins or not has_routes):
            self._is_whole_graph = begins
            LOG.info(WHOLE_GRAPH if begins else IN_PARTS)
        return begins

    def begin(self, live: int) -> None:
        """A graph will be launched now, by a recording of `recorder`. live: rows that are not padded."""
        self._live, self._under_way, self.has_failed = live, True, False
        self._hold(True)

    def recorder(self, make: Callable[[], OperationRecorder]) -> Callable[[], OperationRecorder]:
        """Makes recorders of steps that ask `experts`. make: makes recorders of any steps."""
        return lambda: _Recorder(make(), self._launch)

    def _launch(self, replay: Callable[[], Result]) -> Result:
        for state in self._servers.values():
            state.mailbox.wake()  # only now: to record a graph may take long
        return self._memory.launch(self._live, replay)

    def poll_end(self) -> bool:
        """Whether the graph has ended. Ends a step whose server is gone."""
        if self._under_way and self._memory.has_ended:
            self._under_way = False
            self._hold(False)
            self._end()
        elif self._under_way:
            self._watch()
        return not self._under_way

    def report_routes(self, expert_ids: ChosenIds) -> None:
        """Tell who wants to know which server computed what. expert_ids: [n, k] of the model's layers."""
        if self._remote.routes is None or self._routes is None:
            return
        for index, layer in enumerate(self._layout.model_layers):
            ids = torch.as_tensor(expert_ids[index]).cpu().numpy().reshape(-1)
            self._remote.routes.on_rows_sent(layer, ids, self._routes[self._layout.layers.index(layer)][ids])

    def _hold(self, is_frozen: bool) -> None:
        """Whether memory of connections that are gone is kept: freeing some waits for what is under way."""
        self._remote.memory.is_frozen = is_frozen

    def _end(self) -> None:
        has_failed, pair_counts = self._memory.result()
        doubts = [server for server, state in self._servers.items() if state.mailbox.doubts()]
        self.has_failed = has_failed or bool(doubts)
        self._layer_pairs += pair_counts.sum(axis=1)
        self._calls += int(np.count_nonzero(pair_counts))
        self._progress()
        for state in self._servers.values():
            state.mailbox.end_graph()
        if has_failed:
            LOG.warning("a step is computed once more: an expert server is gone or late")
        elif doubts:
            LOG.warning("a step is computed once more: expert servers %s did not answer numbers", doubts)

    def _watch(self) -> None:
        """Abort the step if a server of it is gone or was given up.

        One that leaves the directory stays until the step has ended.
        """
        self._progress()
        directory_servers = {entry.server for entry in self._directory.servers}
        connections = self._remote.connected_servers
        for server, state in self._servers.items():
            state.has_given_up |= server in directory_servers and connections.get(server) != state.entry
            if state.has_given_up or not state.mailbox.alive():
                self._memory.abort()

    def _progress(self) -> None:
        """Tell `Replicas`, which decides who is late, what the servers were asked and have answered."""
        now, replica_servers = self._clock(), self._replicas.connected_servers
        for server, state in self._servers.items():
            sent_pairs, answered_pairs = state.mailbox.progress()
            if server not in replica_servers:
                continue
            if sent_pairs:
                self._replicas.record_sent(server, sent_pairs, now)
            if answered_pairs:
                self._replicas.record_answer(server, answered_pairs, now)

    # ---- between steps

    def _follow(self) -> None:
        """Connect to new servers, and drop those that are gone."""
        self._progress()
        for entry, mailbox in self._connecting.take_connections():
            self._join(entry, mailbox)
        connections = self._remote.connected_servers
        connected_entries = {
            entry.server: entry for entry in self._directory.servers if connections.get(entry.server) == entry
        }
        for server, entry in list(self._target_servers.items()):
            server_state = self._servers.get(server)
            is_gone = server_state is not None and (
                server_state.has_given_up or not server_state.mailbox.alive()
            )
            if connected_entries.get(server) != entry or is_gone:
                self._drop(server)
        for server, entry in connected_entries.items():
            if server not in self._target_servers:
                self._target_servers[server] = entry
                self._connecting.start(entry, self._secret)
        self._leaving = [mailbox for mailbox in self._leaving if not mailbox.free()]

    def _join(self, entry: ServerEntry, mailbox: ServerMailbox) -> None:
        occupied_slots = {state.slot for state in self._servers.values()}
        free_slot = next(
            (slot for slot in range(self._memory.exchange.slots) if slot not in occupied_slots), None
        )
        if free_slot is None:
            LOG.warning(
                "expert server %d gets no mailbox: %d servers have one", entry.server, len(occupied_slots)
            )
        is_duplicate = entry.server in self._servers  # an attempt that was stopped may still have succeeded
        if self._target_servers.get(entry.server) != entry or is_duplicate or free_slot is None:
            mailbox.leave()
            self._leaving.append(mailbox)
            return
        self._servers[entry.server] = _Server(entry, mailbox, free_slot)

    def _drop(self, server: int) -> None:
        self._connecting.stop(server)
        del self._target_servers[server]
        dropped_server = self._servers.pop(server, None)
        if dropped_server is not None:
            dropped_server.mailbox.leave()
            self._leaving.append(dropped_server.mailbox)

    def _route_anew(self) -> None:
        """Write the table if anything has changed.

        A step begins, so that servers owe nothing: else it would leave those out that just have work.
        """
        slots = tuple((server, state.slot) for server, state in sorted(self._servers.items()))
        table_sources = self._directory.version, frozenset(self._target_servers), slots
        if table_sources != self._table_sources:
            self._table_sources = table_sources
            self._route()

    def _route(self) -> None:
        """Write the table: for each expert the server that `Replicas` would ask now."""
        expert_ids = np.arange(self._layout.num_experts)
        routes = np.stack([self._replicas.route(layer, expert_ids) for layer in self._layout.layers])
        missing = sorted(set(np.unique(routes).tolist()) - self._servers.keys())
        if missing:
            self._routes = None
            return
        self._routes, self._version = routes, self._directory.version
        slots = np.zeros(1 + max(self._servers), dtype=np.int32)
        addresses = np.zeros((ADDRESSES, self._memory.exchange.slots), dtype=np.int64)
        for server, state in self._servers.items():
            column = state.mailbox.addresses
            slots[server], addresses[: len(column), state.slot] = state.slot, column
        self._memory.place(addresses, slots[routes])

    # ---- ExpertServers

    @property
    def oldest_version_in_use(self) -> int:
        oldest = self._remote.oldest_version_in_use
        return min(oldest, self._version) if self._under_way else oldest

    def update(self, directory: Directory, secret: bytes) -> None:
        self._directory, self._secret = directory, secret
        self._remote.update(directory, secret)
        if not self._under_way:
            self._follow()

    @property
    def job_id(self) -> bytes:
        return self._dialer.job_id

    def meet(self, place: JoinJob) -> None:
        self._dialer.join(place)

    def take_faulty_servers(self) -> list[FaultyServer]:
        return self._remote.take_faulty_servers()

    def wait(self, timeout: float | None, wakeup: int) -> bool:
        """While a graph is under way, sleep until it ends, but not for long: somebody has to watch."""
        if not self._under_way:
            self._follow()
            return self._remote.wait(timeout, wakeup)
        deadline = self._clock() + (LOOK_SECONDS if timeout is None else min(LOOK_SECONDS, timeout))
        while not self._memory.has_ended and self._clock() < deadline:
            time.sleep(NAP_SECONDS)
        return True

    def enter_barrier(self, work: bool) -> None:
        self._remote.enter_barrier(work)

    def poll_barrier(self) -> bool:
        return self._remote.poll_barrier()

    def stats(self) -> ExpertStats:
        """Add what the graphs sent to `RemoteExperts.stats`."""
        parts, sizes = self._remote.stats(), self._layout
        pairs = int(self._layer_pairs.sum())
        layer_pairs = tuple(
            int(first + second) for first, second in zip(parts.layer_pairs, self._layer_pairs, strict=True)
        )
        moved_bytes = wire.size(0, pairs, 0, False) + 2 * 4 * pairs * sizes.hidden if pairs else 0
        return replace(
            parts,
            calls=parts.calls + self._calls,
            pairs=parts.pairs + pairs,
            layer_pairs=layer_pairs,
            remote_bytes=parts.remote_bytes + moved_bytes,
        )

    def close(self) -> None:
        """Close all connections. Memory that a server may still write into is not freed."""
        deadline = self._clock() + CLOSE_SECONDS
        while self._under_way and not self._memory.has_ended and self._clock() < deadline:
            self._memory.abort()
            time.sleep(NAP_SECONDS)
        for server in list(self._target_servers):
            self._drop(server)
        for _, mailbox in self._connecting.take_connections():
            mailbox.leave()
            self._leaving.append(mailbox)
        deadline = self._clock() + CLOSE_SECONDS
        while self._leaving and self._clock() < deadline:
            self._leaving = [
                leaving_mailbox for leaving_mailbox in self._leaving if not leaving_mailbox.free()
            ]
            time.sleep(NAP_SECONDS)
        if not self._leaving:
            self._memory.close()
            self._dialer.close()
        self._remote.close()
