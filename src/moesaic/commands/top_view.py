"""What `moesaic top` shows: computed from two samples of a server, and drawn as tables.

Question: What does `moesaic top` compute and draw?
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from rich.cells import cell_len
from rich.console import Group
from rich.table import Table
from rich.text import Text

from moesaic.commands.processes import host_name, links_table
from moesaic.commands.units import in_bytes

LATEST = 4
"""Number of failures that are shown, the latest ones."""
MOST_LINKS = 6
"""Number of links between hosts that are shown."""
COLUMNS = ("process", "pid", "stage", "deaths", "experts", "pairs/s", "load", "busy", "waiting")
NARROW_STAGE = 10
"""Characters of a process's stage on a narrow terminal."""
SPARE = ("pid", "waiting", "experts", "pairs/s", "load")
"""Columns that a narrow terminal leaves out, the first one first."""
COLOURS = {"serving": "green", "starting": "yellow", "draining": "yellow", "suspected": "yellow"}
"""Stage of a process -> its colour. The others are red."""
COUNTERS = ("process_deaths", "failovers", "silent_failovers", "moved_requests", "resent_pairs", "rebalances")
"""Counters of the cluster that are shown."""


@dataclass(frozen=True)
class Sample:
    """A server at one moment."""

    now: float
    """Seconds on any clock."""
    metrics: Mapping[str, float]
    """Sums over all labels, by name without the prefix. Example: "prompt_tokens_total" -> 57."""
    status: Mapping[str, Any] | None = None
    """The answer of /v1/fault_tolerance/status. None if the server has one process, or does not say."""


@dataclass(frozen=True)
class ProcessView:
    """A process. Rates and shares are those of the time between two samples."""

    name: str
    pid: int | None
    stage: str
    deaths: int
    silent_seconds: float
    experts: int | None = None
    """(layer, expert) copies on an expert server. The fields below are of expert servers, too."""
    pairs_per_second: float | None = None
    """(row, expert) pairs computed."""
    load: float | None = None
    """Share of all servers' pairs, 0 to 1."""
    busy: float | None = None
    """Share of the time in which it computed, 0 to 1."""
    waiting_pairs: int | None = None
    host: str = ""
    """The name of its host, as in `hosts` of the status. Empty: the host of `moesaic serve`."""
    suspected: bool = False
    """Whether nothing was heard of it for a second or more, on another host."""
    waiting: str = ""
    """Why it has no host yet. Empty: it has one."""


@dataclass(frozen=True)
class View:
    """A server between two samples. None: the server does not say."""

    url: str
    seconds: float
    """Seconds between the two samples."""
    prompt_tokens_per_second: float | None
    generation_tokens_per_second: float | None
    running: int | None
    waiting: int | None
    kv_cache_usage: float | None
    """Share of KV blocks in use, 0 to 1."""
    prefix_cache_hit_rate: float | None
    """Share of the prompt tokens looked up in this time that were found. None if there were none."""
    time_to_first_token: float | None
    """Mean seconds of the requests that got their first token in this time."""
    inter_token_latency: float | None
    """Mean seconds between two tokens in this time."""
    kv_transfer_rate: float | None = None
    """Bytes of KV that prefill workers sent, per second of this time. None without prefill workers."""
    kv_transfer_speed: float | None = None
    """The same bytes per second on the way. None if none were sent."""
    partial_runs: float | None = None
    """Share of the workers' runs in this time that computed only some of the rows in flight."""
    processes: list[ProcessView] = field(default_factory=list)
    """Empty for a server with one process."""
    counters: dict[str, int] = field(default_factory=dict)
    change: str | None = None
    """The change of the cluster that is in progress."""
    failures: list[str] = field(default_factory=list)
    """The latest failures, oldest first."""
    hosts: list[str] = field(default_factory=list)
    """The names of the hosts. The first one is that of `moesaic serve`."""
    links: list[dict[str, Any]] = field(default_factory=list)
    """The links between any two of them, as in the status."""
    watched: bool = True
    """False: dead processes are not restarted any more."""


def read_metrics(text: str) -> dict[str, float]:
    """The samples of Prometheus' text format, summed over labels, by name without the prefix."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            # Buckets of a histogram are cumulative, so that their sum says nothing.
            if not sample.name.endswith("_bucket"):
                name = sample.name.rpartition(":")[2]
                sums[name] = sums.get(name, 0.0) + sample.value
    return sums


def compare_samples(url: str, previous: Sample, current: Sample) -> View:
    """What happened between two samples of one server."""
    seconds = max(current.now - previous.now, 1e-9)

    def increase(name: str) -> float | None:
        if name not in current.metrics:
            return None
        return max(0.0, current.metrics[name] - previous.metrics.get(name, 0.0))

    def rate(name: str) -> float | None:
        return _divide(increase(name), seconds)

    def mean(name: str) -> float | None:
        return _divide(increase(f"{name}_seconds_sum"), increase(f"{name}_seconds_count"))

    def gauge(name: str) -> int | None:
        return int(current.metrics[name]) if name in current.metrics else None

    status = current.status or {}
    sent_bytes, early_bytes = increase("kv_transfer_bytes_total"), increase("kv_transfer_early_bytes_total")
    late_bytes = None if sent_bytes is None or early_bytes is None else sent_bytes - early_bytes
    prefill = any(entry["role"] == "prefill worker" for entry in status.get("processes", ()))
    return View(
        url=url,
        seconds=round(seconds, 3),
        prompt_tokens_per_second=rate("prompt_tokens_total"),
        generation_tokens_per_second=rate("generation_tokens_total"),
        running=gauge("num_requests_running"),
        waiting=gauge("num_requests_waiting"),
        kv_cache_usage=current.metrics.get("kv_cache_usage_perc"),
        prefix_cache_hit_rate=_divide(
            increase("prefix_cache_hits_total"), increase("prefix_cache_queries_total")
        ),
        time_to_first_token=mean("time_to_first_token"),
        inter_token_latency=mean("inter_token_latency"),
        kv_transfer_rate=rate("kv_transfer_bytes_total") if prefill else None,
        kv_transfer_speed=_divide(late_bytes, increase("kv_transfer_seconds_total")),
        partial_runs=_divide(increase("partial_runs_total"), increase("runs_total")),
        processes=_processes((previous.status or {}).get("processes", ()), status, seconds),
        counters={name: int(status["counters"][name]) for name in COUNTERS} if status else {},
        change=status.get("change"),
        failures=[entry["what"] for entry in status.get("failures", ())][-LATEST:],
        hosts=[host["name"] for host in status.get("hosts", ())],
        links=list(status.get("links", ())),
        watched=bool(status.get("watched", True)),
    )


def _divide(value: float | None, count: float | None) -> float | None:
    return None if value is None or not count else value / count


def _processes(
    previous_processes: Sequence[Mapping[str, Any]], status: Mapping[str, Any], seconds: float
) -> list[ProcessView]:
    """The processes of `status`, with the work of each server since `previous_processes`."""
    current_processes: Sequence[Mapping[str, Any]] = status.get("processes", ())
    hosts = {name: host["name"] for host in status.get("hosts", ()) for name in host["processes"]}
    previous_stats = {
        (process_status["name"], process_status["incarnation"]): process_status["stats"]
        for process_status in previous_processes
    }

    def work_done(process: Mapping[str, Any], counter: str) -> float:
        """The increase of a counter of a server. A new process has counted nothing before."""
        stats = previous_stats.get((process["name"], process["incarnation"]), {})
        return max(0.0, float(process["stats"][counter]) - float(stats.get(counter, 0)))

    servers = [
        process_status for process_status in current_processes if process_status["role"] == "expert server"
    ]
    pairs = sum(work_done(process_status, "pairs") for process_status in servers)
    views = []
    for process_status in current_processes:
        server_fields: dict[str, Any] = {}
        if process_status in servers:
            server_fields = {
                "experts": process_status["experts"],
                "pairs_per_second": work_done(process_status, "pairs") / seconds,
                "load": _divide(work_done(process_status, "pairs"), pairs),
                "busy": min(1.0, work_done(process_status, "busy_seconds") / seconds),
                "waiting_pairs": process_status["stats"]["waiting_pairs"],
            }
        common = (
            process_status["name"],
            process_status["pid"],
            process_status["stage"],
            process_status["deaths"],
            process_status["silent_seconds"],
        )
        server_fields |= {
            name: process_status[name] for name in ("suspected", "waiting") if name in process_status
        }
        server_fields["host"] = hosts.get(process_status["name"], process_status.get("host", ""))
        views.append(ProcessView(*common, **server_fields))
    return views


def draw(view: View, width: int = 80) -> Group:
    """The view for a terminal of so many columns."""
    parts: list[Any] = [Text(f"{view.url}, the last {view.seconds:.1f} s", style="bold"), _numbers(view)]
    if view.processes:
        parts += [Text(), *_tables(view, width), Text()]
        if view.links:
            parts += [*_links(view.links), Text()]
        parts.append(Text(", ".join(f"{name.replace('_', ' ')} {n}" for name, n in view.counters.items())))
    if not view.watched:
        line = "The supervisor has stopped, so processes are not restarted any more."
        parts.append(Text(line, style="red"))
    if view.change is not None:
        parts.append(Text(f"in progress: {view.change}", style="yellow"))
    parts += [
        Text(f"{process.name}: {process.waiting}", style="yellow")
        for process in view.processes
        if process.waiting
    ]
    parts += [Text(f"failure: {line}", style="red") for line in view.failures]
    return Group(*parts)


def _numbers(view: View) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    for _ in range(4):
        table.add_column()
    table.add_row(
        *("prompt tokens/s", _number(view.prompt_tokens_per_second)),
        *("generated tokens/s", _number(view.generation_tokens_per_second)),
    )
    table.add_row("running", _number(view.running, 0), "waiting", _number(view.waiting, 0))
    table.add_row(
        *("KV cache usage", _share(view.kv_cache_usage)),
        *("prefix cache hits", _share(view.prefix_cache_hit_rate)),
    )
    table.add_row(
        *("time to first token", _milliseconds(view.time_to_first_token)),
        *("between two tokens", _milliseconds(view.inter_token_latency)),
    )
    if view.kv_transfer_rate is not None:
        table.add_row(
            *("KV sent", f"{in_bytes(view.kv_transfer_rate)}/s"),
            *(
                "on its way",
                "-" if view.kv_transfer_speed is None else f"{in_bytes(view.kv_transfer_speed)}/s",
            ),
        )
    if view.partial_runs:
        table.add_row("partial runs", _share(view.partial_runs))
    return table


def _tables(view: View, width: int) -> list[Text | Table]:
    """The processes, by host if there are several. All tables have the same widths."""
    rows = [(None if process.waiting else process.host, _row(process)) for process in view.processes]
    widths = _widths([row for _, row in rows], width)
    if len(view.hosts) < 2:
        return [_table([row for _, row in rows], widths)]
    parts: list[Text | Table] = [_table([], widths)]
    for name in [*view.hosts, None]:
        host_rows = [row for host, row in rows if host == name]
        if host_rows or name is not None:
            title = "without a host" if name is None else f"on {host_name(name)}"
            parts += [Text(title, style="bold"), _table(host_rows, widths, header=False)]
    return parts


def _widths(rows: Sequence[Sequence[str | Text]], width: int) -> dict[str, int]:
    """The columns that fit, with their widths in characters. A long stage takes several lines."""
    cells = zip(COLUMNS, *rows, strict=True)
    widths = {name: max(map(cell_len, (name, *map(str, column)))) for name, *column in cells}
    stage = widths["stage"]
    # A stage may take several lines, so it gives way before a whole column does.
    widths["stage"] = min(stage, NARROW_STAGE)
    for name in SPARE:
        if sum(widths.values()) + len(widths) - 1 <= width:
            break
        del widths[name]
    room = width - sum(widths.values()) - len(widths) + 1
    return widths | {"stage": min(stage, widths["stage"] + max(0, room))}


def _table(rows: Sequence[Sequence[str | Text]], widths: Mapping[str, int], header: bool = True) -> Table:
    """The columns of `widths`."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), show_header=header)
    for name, width in widths.items():
        left = name in ("process", "stage")
        table.add_column(name, justify="left" if left else "right", no_wrap=name != "stage", width=width)
    for row in rows:
        table.add_row(*(cell for name, cell in zip(COLUMNS, row, strict=True) if name in widths))
    return table


def _row(process: ProcessView) -> tuple[str | Text, ...]:
    stage = "suspected" if process.suspected else process.stage
    return (
        *(process.name, "" if process.pid is None else str(process.pid)),
        Text(stage, style=COLOURS.get(stage, "red")),
        str(process.deaths),
        *(
            "" if process.experts is None else str(process.experts),
            _number(process.pairs_per_second, absent=""),
        ),
        *(_share(process.load, ""), _share(process.busy, ""), _number(process.waiting_pairs, 0, absent="")),
    )


def _links(links: Sequence[Mapping[str, Any]]) -> list[Text | Table]:
    """The first links, and how many more there are."""
    num_hidden = len(links) - MOST_LINKS
    parts: list[Text | Table] = [links_table(links[:MOST_LINKS])]
    return [*parts, Text(f"and {num_hidden} more links")] if num_hidden > 0 else parts


def _number(value: float | None, digits: int = 1, absent: str = "-") -> str:
    return absent if value is None else f"{value:.{digits}f}"


def _share(value: float | None, absent: str = "-") -> str:
    return absent if value is None else f"{100 * value:.1f}%"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f} ms"
