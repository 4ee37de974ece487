"""Devices that compute one run after another, and the streams by which they send rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from moesaic.core.paced import LinkModel
from moesaic.sim.timeline import Timeline

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
        self, process: str, what: str, seconds: float, **numbers: int
    ) -> Generator[float, None, None]:
        """Compute for `seconds`, once the device is free. Yields the seconds until the end."""
        now = self.timeline.now
        begin = max(now, self._free)
        self._free = begin + seconds
        self.busy += seconds
        self.runs += 1
        if self.span is not None:
            self.span(process, what, begin, self._free, numbers)
        if self._free > now:
            yield self._free - now

    def busy_until(self, now: float) -> float:
        """Seconds that it has computed up to `now`."""
        return self.busy - max(0.0, self._free - now)


@dataclass(eq=False)
class Stream:
    """What a device sends passes one after another. Each message then travels for the link's latency."""

    name: str
    timeline: Timeline
    link: LinkModel
    sent: Counter[str] = field(default_factory=Counter)
    """Bytes by receiver."""
    busy: float = 0.0
    """Seconds that it has sent so far."""
    _free: float = 0.0

    def send(self, to: str, size: float, arrive: Callable[[], None]) -> float:
        """Send `size` bytes; `arrive` is called when all of them have arrived. Returns that time.

        A message to the own device takes no time and uses no link.
        """
        now = self.timeline.now
        if to == self.name:
            self.timeline.at(now, arrive)
            return now
        passing = size / self.link.bandwidth
        self._free = max(now, self._free) + passing
        self.busy += passing
        self.sent[to] += round(size)
        arrival = self._free + self.link.latency
        self.timeline.at(arrival, arrive)
        return arrival
