"""Which rows run alone, and which wait for others: what a device's curves say (`core.curves`).

One run of many rows is cheaper than two of fewer rows, where a run has a price of its own. On CPUs that is
reading the weights of the experts. On GPUs a run of few rows takes as long as one of some hundred. Rows that
run alone go on earlier, and a device that would be idle meanwhile is used.

Let c(n) be the seconds of a run of n rows, and c(0) = 0. A part of n rows then costs

    extra(part, n) = c(part) + c(n - part) - c(n)

more than one run of all. Here is when it runs alone:

    a worker with its own device    extra + f * b * idle <= MAX_IDLE_SHARE * (1 - b) * idle. idle is its mean
                                    idle seconds before a run, b the share of the time that servers compute,
                                    and f the share by which their work grows. See `idle_needed`
    a worker that shares its cores  extra <= MAX_EXTRA_SHARE * c(n) * part / n, since others use the cores
                                    meanwhile
    a call at an expert server      extra(part, 2 * part) <= CALL_DELAY_RUNS * c(part): another such call
                                    will come. A server with its own device begins at once. Others come
                                    meanwhile
    an expert's queue               extra of one run for each expert <= MAX_EXTRA_SHARE * c(all queues), where
                                    the server is not busy and half of the rows would not need much more
                                    reading

Example: the papers' curve has 0.8 up to 128 rows, then it grows in proportion. Half of 256 rows costs nothing
more. Half of 128 rows costs 0.8 more. So it runs alone where the device is idle for 3.2 before each run, if
servers are never busy.

A worker that is idle waits for servers. If these always compute, parts that go on alone gain nothing, and
whatever they add to the servers' work they add to the idle time.

Question: Which rows run alone, and which wait for others?
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from moesaic.core.curves import Curve, DeviceCurves, Thresholds

SHARED_ROWS = 6
"""Rows per expert at which a CPU computes for as long as it reads the weights.

On CPUs this is 5 to 10. It holds for two bytes a weight at 12 to 28 GB/s, and for two flops a weight at 80 to
140 Gflop/s.
"""
CPU_FLOPS = 100e9
"""Flops/s of a CPU whose curve was not measured. With SHARED_ROWS, only ratios of its curves count."""
MAX_EXTRA_SHARE = 1 / 13
"""Share of a part's seconds that running it alone may cost more where cores are shared."""
MAX_IDLE_SHARE = 0.25
"""Share of a device's idle time that separate runs may take. Rows that part seldom join again soon, so the
price is paid at the following layers too. With all of the idle time, runs became so small that they filled it
(`benchmarks/async_runs.py`, 256 rows a worker)."""
CALL_DELAY_RUNS = 0.5
"""Runs by which another client's call comes later than the first one, on average."""
BUSY_SHARE = 0.9
"""Share of the time from which a server that computes counts as busy: its answers only come later then if it
answers expert by expert."""
WAITING_GAIN = 0.97
"""Share of the time without waiting that a server's clients may take if they wait for each other."""
ROUNDING = 1e-9
"""Share of a run that does not count: seconds are sums of floats."""
MAX_THRESHOLD = 1 << 20
"""Thresholds are at most so many rows. Such a threshold means never."""


def cpu_curves(
    expert: float, dense_weights: float, threads: int = 1, measured_rows: float | None = None
) -> DeviceCurves:
    """The curves of a CPU that shares its cores. They are straight lines behind the reading of weights.

    expert: weights of a routed expert. dense_weights: weights of a layer besides. measured_rows: rows at
    which computing takes as long as reading. None: SHARED_ROWS.
    """
    ratio = float(SHARED_ROWS) if measured_rows is None else measured_rows
    rate = CPU_FLOPS * threads
    row, dense = 2 * expert / rate, 2 * max(dense_weights, 1.0) / rate
    how = "assumed" if measured_rows is None else "measured"
    return DeviceCurves(
        f"{how}: reading takes as long as computing {ratio:.1f} rows",
        Curve(((0.0, ratio * dense), (1.0, (ratio + 1) * dense))),
        Curve(((0.0, 0.0), (1.0, row)), per_expert=ratio * row),
        shares_cores=True,
    )


def unevenness(calls: Sequence[float], servers: int) -> float:
    """Pairs of the server with the most of a layer, over the mean server's: as one server sees it.

    calls: mean pairs of a call, by layer, 0 where no call came. A server does not know what others get. So it
    takes its own mean over all layers for that of each server, and takes the others to share the rest of a
    layer evenly.

    >>> unevenness([48, 16, 48, 16], servers=2)
    1.5
    >>> unevenness([48, 48, 0], servers=2)
    1.0
    """
    called = [pairs for pairs in calls if pairs]
    mean = sum(called) / max(1, len(called))
    if servers < 2 or not mean:
        return 1.0
    return sum(max(pairs, (servers * mean - pairs) / (servers - 1)) for pairs in called) / (
        len(called) * mean
    )


@dataclass(frozen=True)
class Load:
    """What a worker has in flight, and what it has seen lately."""

    rows: int
    """Rows in flight."""
    decodes: int
    """Units of them that are not chunks of prompts."""
    idle: float = 0.0
    """Mean seconds for which it had nothing to compute before a run."""


@dataclass(frozen=True)
class Decisions:
    """What the curves of a device say about a model's rows."""

    curves: DeviceCurves
    num_experts: int
    """Experts of a layer."""
    top_k: int
    servers: int = 1
    """Servers that share the experts of a layer."""
    workers: int = 1
    """Workers that share these servers."""
    _seconds: dict[int, float] = field(default_factory=lambda: {0: 0.0}, repr=False, compare=False)
    """What `worker_seconds` has found."""

    _server_seconds: dict[int, float] = field(default_factory=dict, repr=False, compare=False)
    """What `server_seconds` has found."""
    _cheapest: dict[int, float] = field(default_factory=dict, repr=False, compare=False)
    """Idle seconds from which some part of so many rows runs alone."""

    @property
    def thresholds(self) -> Thresholds:
        """What is given in place of the curves."""
        return self.curves.thresholds

    def worker_seconds(self, rows: int) -> float:
        """Seconds of a worker's run. Where cores are shared, the experts of all its rows count as well.

        They are taken to be all experts of the layer.
        """
        seconds = self._seconds.get(rows)
        if seconds is None:
            seconds = self.curves.attention.seconds(rows)
            if self.curves.shares_cores:
                seconds += self.curves.experts.seconds(rows * self.top_k, self.num_experts)
            self._seconds[rows] = seconds
        return seconds

    def server_seconds(self, rows: int) -> float:
        """Seconds for which each server computes a layer of a worker's rows, if routing is even."""
        seconds = self._server_seconds.get(rows)
        if seconds is None:
            read = self.num_experts * (1 - (1 - self.top_k / self.num_experts) ** rows)
            pairs = rows * self.top_k / self.servers
            seconds = self._server_seconds[rows] = self.curves.experts.seconds(pairs, read / self.servers)
        return seconds

    def server_growth(self, part: int, rows: int) -> float:
        """The share by which the servers' work for `rows` rows grows if parts of this size run alone.

        The rows of a worker are cut into parts again and again. So a small part stands for many of them.

        >>> flat = Curve(((128, 0.8), (256, 1.6)))
        >>> Decisions(DeviceCurves("x", flat, flat), 8, 2).server_growth(32, 64)
        1.0
        """
        s, whole_seconds = self.server_seconds, self.server_seconds(rows)
        extra_seconds = s(part) + s(rows - part) - whole_seconds
        return extra_seconds / whole_seconds * rows / (2 * min(part, rows - part)) if whole_seconds else 0.0

    def runs_alone(self, part: int, load: Load) -> bool:
        """Whether `part` rows run although other rows of the worker are with the experts."""
        rows = load.rows
        # All rows in flight wait for nothing.
        if part >= rows:
            return True
        if self.thresholds.separate_rows is not None:
            return part >= min(self.thresholds.separate_rows, load.decodes)
        return load.idle >= self.idle_needed(part, rows)

    def idle_needed(self, part: int, rows: int) -> float:
        """Mean idle seconds of a worker from which a part of its rows runs alone.

        Where cores are shared it is 0 or infinite. Otherwise b = workers * s / (idle + c(rows)), where s is
        `server_seconds`. So the rule in the text above is a quadratic inequality. It holds from the larger
        root on.
        """
        c = self.worker_seconds
        whole_seconds = c(rows)
        extra = c(part) + c(rows - part) - whole_seconds - ROUNDING * whole_seconds
        if self.curves.shares_cores:
            return 0.0 if extra <= MAX_EXTRA_SHARE * part / rows * whole_seconds else math.inf
        extra, server_seconds = max(0.0, extra), self.workers * self.server_seconds(rows)
        linear = (
            extra
            + (self.server_growth(part, rows) + MAX_IDLE_SHARE) * server_seconds
            - MAX_IDLE_SHARE * whole_seconds
        )
        return max(0.0, linear + math.sqrt(linear**2 + 4 * MAX_IDLE_SHARE * extra * whole_seconds)) / (
            2 * MAX_IDLE_SHARE
        )

    def begins(self, requests: int, load: Load) -> bool:
        """Whether so many requests begin while other rows are under way. Each brings one row at least."""
        if self.thresholds.separate_rows is not None:
            return True
        return self.runs_alone(requests, Load(load.rows + requests, load.decodes + requests, load.idle))

    def any_part_runs_alone(self, load: Load) -> bool:
        """Whether any part of the rows would run alone."""
        if self.thresholds.separate_rows is not None:
            return load.decodes > max(self.thresholds.separate_rows, 1)
        rows, parts = load.rows, range(1, load.rows)
        if rows not in self._cheapest:
            self._cheapest[rows] = min((self.idle_needed(part, rows) for part in parts), default=math.inf)
        return load.idle >= self._cheapest[rows]

    @property
    def partial_answer_rows(self) -> int:
        """Rows of a request above which each part of its answer is told. No part of fewer rows runs alone.

        Where workers have devices of their own, parts of more rows run alone if these are idle for long.
        """
        if self.thresholds.told_rows is not None:
            return self.thresholds.told_rows
        if self.thresholds.separate_rows is not None:
            return self.thresholds.separate_rows
        if not self.curves.shares_cores:
            return _first(self._halves) - 1
        return _first(lambda rows: rows > 1 and self.runs_alone(rows - 1, Load(rows, rows))) - 1

    @property
    def least_rows(self) -> int:
        """Rows in flight of which some part may run alone, at least. MAX_THRESHOLD: there is no such number.

        >>> Decisions(cpu_curves(1e6, 0.0), num_experts=24, top_k=4).least_rows > 16
        True
        """
        if self.thresholds.separate_rows is not None:
            return max(self.thresholds.separate_rows, 1) + 1
        if not self.curves.shares_cores:
            return 2  # any part does, where the device is idle for long enough
        return _first(lambda rows: rows > 1 and self.runs_alone(rows - 1, Load(rows, rows)))

    def _halves(self, rows: int) -> bool:
        """Whether the servers' work allows that the half of a worker's rows run alone."""
        return rows > 1 and self.server_growth(rows // 2, rows) < MAX_IDLE_SHARE

    @property
    def separate_rows(self) -> int:
        """Rows of which a half runs alone, halved: a summary of `runs_alone` for people.

        Where workers have devices of their own, these are never idle.
        """
        return _first(lambda part: self.runs_alone(part, Load(2 * part, 2 * part)))

    def min_call_pairs(self, experts: int) -> int:
        """Mean pairs of a call from which it begins at once. experts: those of a layer on this server."""
        if self.thresholds.waited_pairs is not None:
            return self.thresholds.waited_pairs
        if not self.curves.shares_cores:
            return 0

        def begins(pairs: int) -> bool:
            single_seconds, double_seconds = (self.curves.experts.seconds(n * pairs, experts) for n in (1, 2))
            return 2 * single_seconds - double_seconds <= (CALL_DELAY_RUNS + ROUNDING) * single_seconds

        return _first(begins)

    def should_wait(
        self,
        pairs: float,
        clients: int,
        away_seconds: float,
        experts: int,
        in_step: bool,
        unevenness_factor: float = 1.0,
    ) -> bool:
        """Whether a server should let its clients wait for each other, so that a run has all their calls.

        pairs: mean of a call. clients: those that ask again and again. experts: of a layer on this server.
        away_seconds: seconds from an answer to the next call of the same client, at least those of a worker's
        run. unevenness_factor: pairs of the server with the most of a layer, over the mean server's
        (`unevenness`).

        If they wait, all are answered in `away_seconds` and one run of the server with the most pairs. If
        not, a client is answered in `away_seconds` and one run at best. A server with its own device has no
        time for that with many clients. Then half of them wait meanwhile, some in the queue of the same
        layer. Clients that are in step already (in_step) stay so while waiting is no loss.
        """
        if clients < 2:
            return False

        def run(calls: float) -> float:
            read = experts * (1 - (1 - 1 / experts) ** (calls * pairs)) if experts else 0.0
            return self.curves.experts.seconds(calls * pairs, read)

        calls_per_run = max(1.0, clients / 2)
        """Calls of a run if they do not wait."""
        away_seconds = max(away_seconds, self.curves.attention.seconds(pairs * self.servers / self.top_k))
        seconds_waiting, seconds_alone = (
            away_seconds + run(unevenness_factor * clients),
            clients / calls_per_run * run(calls_per_run),
        )
        seconds_alone = (
            away_seconds + seconds_alone
            if self.curves.shares_cores
            else max(away_seconds + run(1), seconds_alone)
        )
        return seconds_waiting <= (1.0 if in_step else WAITING_GAIN) * seconds_alone

    def queue_runs_alone(self, pairs: Sequence[int], busy: float) -> bool:
        """Whether an expert's queue runs alone. pairs: those that wait for each expert of a layer.

        busy: share of the time that the server computed lately. Where cores are shared, no row comes earlier
        through it.
        """
        if self.thresholds.queue_pairs is not None:
            return max(pairs) >= self.thresholds.queue_pairs
        if self.curves.shares_cores:
            return False
        if busy > BUSY_SHARE or not self._halves(sum(pairs) * self.servers // self.top_k):
            return False
        seconds = self.curves.experts.seconds
        seconds_alone, seconds_joined = sum(seconds(one, 1) for one in pairs), seconds(sum(pairs), len(pairs))
        return seconds_alone - seconds_joined <= (MAX_EXTRA_SHARE + ROUNDING) * seconds_joined

    @property
    def has_expert_queues(self) -> bool:
        """Whether any number of pairs makes a queue for each expert pay."""
        return self.queue_runs_alone([MAX_THRESHOLD, MAX_THRESHOLD], busy=0.0)


def _first(condition: Callable[[int], bool]) -> int:
    """The first number from which on `condition` holds, 1 to MOST. It holds for all numbers behind it."""
    low, high = 0, 1
    while high < MAX_THRESHOLD and not condition(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if condition(middle) else (middle, high)
    return high
