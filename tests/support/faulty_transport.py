"""A Caller whose network is bad: requests get lost, rows come late, twice, in another order or never.

What happens to a call depends on the seed and the call's number alone, and time is counted in polls, so a run
that makes the same calls and polls has the same faults.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from moesaic.core.errors import ConfigError, ConnectionLost
from moesaic.core.tokens import IntArray
from moesaic.transport.calls import Call, Caller


@dataclass(frozen=True)
class Faults:
    """How bad. All 0: not at all."""

    drop_request: float = 0.0
    """Share of the calls that never reach the server."""
    drop: float = 0.0
    """Share of the rows that are never reported."""
    duplicate: float = 0.0
    """Share of the rows that are reported twice."""
    delay: float = 0.0
    """Share of the reports that are held back, each for 1 to max_delay polls."""
    max_delay: int = 8
    """Polls."""
    reorder: bool = False
    """Report the rows of one poll in a random order, one by one, calls mixed."""
    cut_after: int | None = None
    """Posts after which the connection is lost."""

    def __post_init__(self) -> None:
        for field in fields(self)[:4]:
            share = getattr(self, field.name)
            if not 0.0 <= share <= 1.0:
                raise ConfigError.field(field.name, share, "0.0 to 1.0")
        if self.max_delay < 1:
            raise ConfigError.field("max_delay", self.max_delay, "at least 1")
        if self.cut_after is not None and self.cut_after < 0:
            raise ConfigError.field("cut_after", self.cut_after, "at least 0")


@dataclass(frozen=True)
class Fate:
    """What happens to one call."""

    reaches: bool
    """Whether the server hears of it."""
    polls: IntArray
    """[2, rows] polls by which the first and the second report of each row are late, -1 for no report."""


def fate(faults: Faults, seed: int, number: int, rows: int) -> Fate:
    """The fate of call `number`.

    >>> fate(Faults(drop=1.0), seed=0, number=1, rows=2).polls.tolist()
    [[-1, -1], [-1, -1]]
    """
    rng = np.random.default_rng([seed, number])
    reaches = bool(rng.random() >= faults.drop_request)
    late = (rng.random((2, rows)) < faults.delay) * rng.integers(1, faults.max_delay + 1, (2, rows))
    first = rng.random(rows) >= faults.drop
    second = first & (rng.random(rows) < faults.duplicate)
    return Fate(reaches, np.where([first, second], late, -1))


class FaultyCaller:
    """`caller` with `faults`. A row that is held back keeps `ready` true, so that waiting goes on polling."""

    def __init__(self, caller: Caller, faults: Faults, seed: int) -> None:
        self._caller, self._faults, self._seed = caller, faults, seed
        self._order = np.random.default_rng([seed, 0])
        self._fates: dict[int, Fate] = {}
        """Call number -> its fate, from post to release."""
        self._due: dict[int, list[tuple[Call, IntArray]]] = {}
        """Poll -> what is reported then."""
        self._polls = 0
        self._posts = 0
        self._cut = False

    def open(self, request_bytes: int, rows: int, row_bytes: int) -> Call | None:
        self._check()
        return self._caller.open(request_bytes, rows, row_bytes)

    def post(self, call: Call) -> None:
        if self._posts == self._faults.cut_after:
            self._cut = True
            self._caller.close()
        self._check()
        self._posts += 1
        one = fate(self._faults, self._seed, call.number, call.rows)
        if one.reaches:
            self._caller.post(call)
        self._fates[call.number] = one

    def poll(self) -> list[tuple[Call, IntArray]]:
        self._check()
        self._polls += 1
        try:
            for call, rows in self._caller.poll():
                self._plan(call, rows)
        except ConnectionLost:
            if not self._due:
                raise
        news = self._due.pop(self._polls, [])
        return self._shuffled(news) if self._faults.reorder else news

    def release(self, call: Call) -> None:
        self._caller.release(call)
        self._fates.pop(call.number, None)
        self._due = {
            poll: left
            for poll, news in self._due.items()
            if (left := [one for one in news if one[0] is not call])
        }

    def ready(self) -> bool:
        return self._cut or bool(self._due) or self._caller.ready()

    def arm(self) -> bool:
        return self._caller.arm() or self.ready()

    def disarm(self) -> None:
        self._caller.disarm()

    @property
    def events(self) -> int:
        return self._caller.events

    def fileno(self) -> int:
        return self._caller.fileno()

    def close(self) -> None:
        self._caller.close()

    def _check(self) -> None:
        if self._cut:
            raise ConnectionLost("the connection was cut")

    def _plan(self, call: Call, rows: IntArray) -> None:
        """When the rows that have just come are reported, each perhaps twice or never."""
        for polls in self._fates[call.number].polls[:, rows]:
            for late in np.unique(polls[polls >= 0]).tolist():
                self._due.setdefault(self._polls + late, []).append((call, rows[polls == late]))

    def _shuffled(self, news: list[tuple[Call, IntArray]]) -> list[tuple[Call, IntArray]]:
        single = [(call, rows[i : i + 1]) for call, rows in news for i in range(len(rows))]
        return [single[i] for i in self._order.permutation(len(single))]
