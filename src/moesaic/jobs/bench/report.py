"""The report of a benchmark: tables for people, vLLM's field names for machines."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from moesaic.jobs.bench.conversations import Turn
from moesaic.jobs.bench.load import Outcome
from moesaic.jobs.bench.measure import TITLES, Spread, Summary, TurnKind, summarise_turns

MEDIAN = 50
"""The percentile that the table calls median."""


@dataclass(frozen=True)
class WorkerRuns:
    """Runs of a server's attention workers."""

    total: int
    partial: int
    """Runs that computed only some of the rows in flight, with --schedule async and auto."""

    def subtract(self, start: WorkerRuns) -> WorkerRuns:
        """The runs that came after `start`."""
        return WorkerRuns(self.total - start.total, self.partial - start.partial)


@dataclass(frozen=True)
class Report:
    """The result of `moesaic bench serve`."""

    model: str
    base_url: str
    endpoint: str
    date: str
    """When the benchmark ended."""
    num_prompts: int
    request_rate: float
    burstiness: float
    max_concurrency: int | None
    seed: int
    summary: Summary
    max_concurrent_requests: int
    """Maximum number of requests in flight at once."""
    objectives: Mapping[str, float]
    """Metric -> maximum milliseconds of a good request."""
    light: Summary | None
    """The light load from which the objectives were derived."""
    outcomes: Sequence[Outcome]
    runs: WorkerRuns | None = None
    """The runs of the server's attention workers. None: the server does not count them."""
    turns: Sequence[Turn] = ()
    """The turns of agents, with the same outcomes. Empty without --num-clients."""

    def to_dict(self, with_details: bool = False) -> dict[str, Any]:
        """The report with vLLM's names. with_details: include the measurements of each request."""
        summary = self.summary
        fields: dict[str, Any] = {
            "date": self.date,
            "backend": "openai-chat" if "chat" in self.endpoint else "openai",
            "endpoint": self.endpoint,
            "base_url": self.base_url,
            "model_id": self.model,
            "num_prompts": self.num_prompts,
            "request_rate": "inf" if math.isinf(self.request_rate) else self.request_rate,
            "burstiness": self.burstiness,
            "max_concurrency": self.max_concurrency,
            "seed": self.seed,
            "duration": summary.duration,
            "completed": summary.num_completed,
            "failed": summary.num_failed,
            "total_input_tokens": summary.total_input,
            "total_output_tokens": summary.total_output,
            "request_throughput": summary.request_throughput,
            "request_goodput": summary.request_goodput,
            "output_throughput": summary.output_throughput,
            "total_token_throughput": summary.total_token_throughput,
            "max_concurrent_requests": self.max_concurrent_requests,
            "runs": None if self.runs is None else self.runs.total,
            "partial_runs": None if self.runs is None else self.runs.partial,
            "slo_ms": dict(self.objectives) or None,
            "light_load": None if self.light is None else dict(_flat(self.light)),
            "errors": dict(self.errors()),
        }
        fields |= dict(_flat(summary))
        if self.turns:
            fields["turns"] = {kind.name: kind.to_dict() for kind in self.turn_kinds()}
        return fields | (self._details() if with_details else {})

    def to_json(self, with_details: bool = False) -> str:
        return json.dumps(self.to_dict(with_details))

    def turn_kinds(self) -> list[TurnKind]:
        """The figures of the turns of each kind."""
        points = next((list(spread.percentiles) for spread in self.summary.spreads.values()), [])
        return summarise_turns([(turn.kind, turn.outcome) for turn in self.turns], points)

    def errors(self) -> list[tuple[str, int]]:
        """The most frequent errors, each with its count."""
        error_counts = Counter(outcome.error for outcome in self.outcomes if outcome.error is not None)
        return [(message, count) for message, count in error_counts.most_common(5)]

    def _details(self) -> dict[str, Any]:
        """Parallel lists with one entry for each request in order of arrival; times in seconds.

        With agents they are in order of agent and turn.
        """
        places = {
            "agents": [turn.agent for turn in self.turns],
            "turn_numbers": [turn.number for turn in self.turns],
        }
        return (places if self.turns else {}) | {
            "start_times": [outcome.send_time for outcome in self.outcomes],
            "input_lens": [outcome.prompt_tokens for outcome in self.outcomes],
            "cached_lens": [outcome.cached_tokens for outcome in self.outcomes],
            "output_lens": [outcome.output_tokens for outcome in self.outcomes],
            "ttfts": [outcome.ttft for outcome in self.outcomes],
            "itls": [outcome.gaps for outcome in self.outcomes],
            "latencies": [outcome.latency for outcome in self.outcomes],
            "request_errors": [outcome.error for outcome in self.outcomes],
        }


def print_report(report: Report, console: Console) -> None:
    """Print two tables: counts and throughput, then latencies."""
    console.print(_totals(report))
    console.print(_latencies(report.summary.spreads))
    if report.turns:
        console.print(_turns(report.turn_kinds()))
    for message, count in report.errors():
        console.print(f"{count} x {message}", style="red", markup=False, highlight=False, soft_wrap=True)


def describe_light(light: Summary, objectives: Mapping[str, float]) -> str:
    """Describe the latencies at light load, and the objectives derived from them, in a line."""
    latencies = ", ".join(f"{name} {light.spreads[name].mean:.2f} ms" for name in objectives)
    goals = ", ".join(f"{name} <= {limit:.2f} ms" for name, limit in objectives.items())
    return f"light load, {light.num_completed} requests one at a time: mean {latencies}; good is {goals}"


def _totals(report: Report) -> Table:
    summary = report.summary
    table = Table(title=f"{report.model} at {report.base_url}{report.endpoint}", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("completed / failed", f"{summary.num_completed} / {summary.num_failed}")
    table.add_row("duration (s)", f"{summary.duration:.2f}")
    table.add_row("input / output tokens", f"{summary.total_input} / {summary.total_output}")
    table.add_row("request throughput (req/s)", f"{summary.request_throughput:.2f}")
    if summary.request_goodput is not None:
        share = summary.num_good or 0
        table.add_row("request goodput (req/s)", f"{summary.request_goodput:.2f}")
        table.add_row(
            "requests within objectives", f"{share} of {summary.num_completed + summary.num_failed}"
        )
    table.add_row("output throughput (tok/s)", f"{summary.output_throughput:.2f}")
    table.add_row("total token throughput (tok/s)", f"{summary.total_token_throughput:.2f}")
    table.add_row("peak concurrent requests", str(report.max_concurrent_requests))
    if report.runs is not None:
        table.add_row("partial runs / runs of workers", f"{report.runs.partial} / {report.runs.total}")
    return table


def _latencies(spreads: Mapping[str, Spread]) -> Table:
    caption = "; ".join(f"{name}: {TITLES[name]}" for name in spreads)
    table = Table(title="milliseconds", caption=caption)
    table.add_column("")
    points = next(iter(spreads.values())).percentiles if spreads else {}
    columns = [point for point in points if point != MEDIAN]
    for heading in ("mean", "median", "std", *(f"p{point:g}" for point in columns)):
        table.add_column(heading, justify="right")
    for name, spread in spreads.items():
        cells = (spread.mean, spread.median, spread.std, *(spread.percentiles[point] for point in columns))
        table.add_row(name, *(f"{cell:.2f}" if spread.count else "-" for cell in cells))
    return table


def _turns(kinds: Sequence[TurnKind]) -> Table:
    caption = "cold: first turn of the first agent; shared: first turns of others; warm: later turns"
    table = Table(title="turns; time to first token in ms", caption=caption)
    table.add_column("")
    points = kinds[0].ttft.percentiles if kinds else {}
    headings = ("turns", "mean", *(f"p{point:g}" for point in points))
    for heading in (*headings, "tok/s of a turn", "prompt tokens", "computed", "cached"):
        table.add_column(heading, justify="right")
    for kind in kinds:
        times = [f"{time:.2f}" for time in (kind.ttft.mean, *kind.ttft.percentiles.values())]
        prompt_counts = (kind.prompt_tokens, kind.num_computed_tokens, kind.cached_tokens)
        counts = ["-" if count is None else str(count) for count in prompt_counts]
        table.add_row(kind.name, str(kind.num_completed), *times, f"{kind.decode_rate:.2f}", *counts)
    return table


def _flat(summary: Summary) -> Iterator[tuple[str, float]]:
    """(name, value) pairs with vLLM's names: mean_ttft_ms, median_ttft_ms, std_ttft_ms, p99_ttft_ms, ..."""
    for name, spread in summary.spreads.items():
        yield f"mean_{name}_ms", spread.mean
        yield f"median_{name}_ms", spread.median
        yield f"std_{name}_ms", spread.std
        for point, value in spread.percentiles.items():
            yield f"p{point:g}_{name}_ms", value
