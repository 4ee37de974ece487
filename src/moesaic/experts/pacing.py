"""Real processes with the timing of modelled devices (`core.paced_devices`): a test instrument.

A worker or a server computes as always. Then it holds the result until the modelled device would have
finished. The waits need no core, so many processes run on few cores with the timing of many devices. Tokens
are those of any other run.

Question: How do real processes get the timing of hardware that is not here (`--paced`)?
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from moesaic.core.errors import ConnectionLost
from moesaic.core.metrics import PaceStats
from moesaic.core.paced_devices import LinkModel, PacedDevices
from moesaic.core.tokens import IntArray
from moesaic.experts.backend import CallPairs, ExpertBackend
from moesaic.transport.calls import Call, Caller


class Pace:
    """Holds the thread of a process, and acts at times that were set before. Only one thread uses it.

    dilation: factor of every duration. ring: called from another thread when an action is due, so that the
    process wakes up and calls `act`.
    """

    def __init__(
        self,
        dilation: float,
        ring: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._dilation = dilation
        self._clock, self._sleep = clock, sleep
        self._runs = self._late = 0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._condition = threading.Condition()
        if ring is not None:
            threading.Thread(target=self._watch, args=(ring,), name="pacing", daemon=True).start()

    @property
    def stats(self) -> PaceStats:
        """How many runs were held, and how many of them were late."""
        return PaceStats(self._runs, self._late)

    @property
    def now(self) -> float:
        return self._clock()

    def dilate(self, seconds: float) -> float:
        """A modelled duration as seconds of this machine."""
        return self._dilation * seconds

    def hold(self, began: float, seconds: float) -> None:
        """Wait until a run that began then has taken this modelled duration. Acts meanwhile.

        A run that has taken longer already counts as late.
        """
        deadline = began + self.dilate(seconds)
        self._runs += 1
        self._late += self._clock() > deadline
        while (remaining := deadline - self._clock()) > 0:
            self.act()
            self._sleep(min(remaining, max(0.0, self._due[0][0] - self._clock()) if self._due else remaining))

    def schedule(self, due: float, action: Callable[[], None]) -> None:
        """Do this once the clock shows `due`, in the order of times."""
        with self._condition:
            # The number decides between equal times, since actions cannot be compared.
            heapq.heappush(self._due, (due, next(self._numbers), action))
            self._condition.notify()

    def act(self) -> None:
        """Do everything that is due."""
        # Only this thread adds and removes actions, so it may look at the first one without the lock.
        while self._due and self._due[0][0] <= self._clock():
            with self._condition:
                _, _, action = heapq.heappop(self._due)
            action()

    def _watch(self, ring: Callable[[], None]) -> None:
        """Ring when the next action is due, and again every millisecond until it is done."""
        while True:
            with self._condition:
                remaining = self._due[0][0] - self._clock() if self._due else None
                if remaining is None or remaining > 0:
                    self._condition.wait(remaining)
                    continue
            ring()
            time.sleep(1e-3)


@dataclass(frozen=True)
class Pacing:
    """The modelled devices of a worker, and the pace of its process."""

    devices: PacedDevices
    pace: Pace

    @classmethod
    def from_devices(cls, devices: PacedDevices, ring: Callable[[], None]) -> Pacing:
        """Make the pace of a process. ring: called from another thread when an action is due."""
        return cls(devices, Pace(devices.dilation, ring))

    @property
    def stats(self) -> PaceStats:
        """How many runs were held, and how many of them were late."""
        return self.pace.stats

    def caller(self, caller: Caller) -> Caller:
        """A connection over the modelled link."""
        return PacedCaller(caller, self.devices.link, self.pace)


@dataclass(frozen=True)
class PacedBackend:
    """An `ExpertBackend` whose runs take as long as those of a modelled device."""

    backend: ExpertBackend
    devices: PacedDevices
    pace: Pace

    @property
    def name(self) -> str:
        return f"{self.backend.name}, paced"

    @property
    def device_name(self) -> str:
        return self.backend.device_name

    @property
    def resident_experts(self) -> dict[int, list[int]]:
        return self.backend.resident_experts

    def load(self, experts_by_layer: Mapping[int, Iterable[int]]) -> None:
        """Load these experts too, in the time that it takes."""
        self.backend.load(experts_by_layer)

    def keep_only(self, experts_by_layer: Mapping[int, Iterable[int]]) -> None:
        """Drop all other experts."""
        self.backend.keep_only(experts_by_layer)

    def run(self, layer: int, parts: Sequence[CallPairs]) -> None:
        """Compute the pairs, then wait until the modelled device would have finished."""
        began = self.pace.now
        self.backend.run(layer, parts)
        experts = {expert for part in parts for expert in part.experts.tolist()}
        pairs = sum(len(part.experts) for part in parts)
        self.pace.hold(began, self.devices.experts.seconds(pairs, len(experts)))


@dataclass(eq=False)
class PacedCaller:
    """A `Caller` over a modelled link.

    A request leaves once the link has carried it. The time of the answer's way is added here as well, so that
    the server need not hold it. Requests of one connection pass one after another.
    """

    caller: Caller
    link: LinkModel
    pace: Pace
    _link_free_at: float = 0.0
    """When the link has carried all requests so far."""
    _delayed_calls: set[int] = field(default_factory=set)
    """Numbers of the calls that have not left yet."""

    def open(self, request_bytes: int, rows: int, row_bytes: int) -> Call | None:
        """Allocate memory for a call, as the connection inside does."""
        return self.caller.open(request_bytes, rows, row_bytes)

    def post(self, call: Call) -> None:
        """Send the request once the modelled link has carried it."""
        size = len(call.request) + call.rows * call.row_bytes
        self._link_free_at = max(self._link_free_at, self.pace.now) + self.pace.dilate(
            size / self.link.bandwidth
        )
        self._delayed_calls.add(call.number)
        self.pace.schedule(
            self._link_free_at + self.pace.dilate(2 * self.link.latency), lambda: self._send(call)
        )

    def poll(self) -> list[tuple[Call, IntArray]]:
        """Send the requests that are due, and return the rows that came in."""
        self.pace.act()
        return self.caller.poll()

    def release(self, call: Call) -> None:
        """End the call, also before its request was sent."""
        self._delayed_calls.discard(call.number)
        self.caller.release(call)

    def fileno(self) -> int:
        """The descriptor of the connection inside."""
        return self.caller.fileno()

    @property
    def events(self) -> int:
        return self.caller.events

    def ready(self) -> bool:
        """Whether the connection inside has news."""
        return self.caller.ready()

    def arm(self) -> bool:
        """Ask the server for a wakeup. Returns whether there is news already."""
        return self.caller.arm()

    def disarm(self) -> None:
        """Stop asking the server for a wakeup."""
        self.caller.disarm()

    def close(self) -> None:
        """Drop the requests that were not sent, and close the connection."""
        self._delayed_calls.clear()
        self.caller.close()

    def _send(self, call: Call) -> None:
        if call.number not in self._delayed_calls:
            return
        self._delayed_calls.discard(call.number)
        try:
            self.caller.post(call)
        except ConnectionLost:
            pass  # `poll` raises it, and the call is sent again to another server
