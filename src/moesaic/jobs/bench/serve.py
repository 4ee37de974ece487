"""`moesaic bench serve`: makes the requests, sends them, and reports."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from moesaic.core.errors import ConfigError, ConnectionLost, MoesaicError
from moesaic.jobs.bench.agents import Json
from moesaic.jobs.bench.conversations import ENDPOINT, Agents, check_conversation
from moesaic.jobs.bench.load import Clock, Load, Outcome
from moesaic.jobs.bench.measure import (
    METRICS,
    Summary,
    parse_goodput,
    parse_metrics,
    parse_percentiles,
    parse_slo,
    summarise,
)
from moesaic.jobs.bench.options import ServeBench
from moesaic.jobs.bench.plan import Plan, check_lengths, plan_serve
from moesaic.jobs.bench.report import Report, WorkerRuns, describe_light
from moesaic.jobs.bench.workload import POOL_TEXT, Item, token_pool
from moesaic.server.client import Client

LIGHT_METRICS = ("ttft", "tpot")
"""Metrics that a multiple of the light load's latency bounds."""

_SHOWN = 200
"""Maximum number of characters of an unexpected answer that an error repeats."""


class BenchError(MoesaicError):
    """The benchmark cannot measure this server."""


@dataclass(frozen=True)
class _ParsedOptions:
    """The options that are texts, parsed before anything is sent."""

    metrics: tuple[str, ...]
    percentiles: tuple[float, ...]
    goodput: dict[str, float]
    slo: float | None
    extra: dict[str, object]


def run(options: ServeBench, console: Console | None = None, clock: Clock = time.perf_counter) -> Report:
    """Measure the server. Progress goes to `console` (stderr). Saves the report if the options say so.

    Raises ConfigError for bad options; ConnectionLost, ApiError or BenchError if the server does not
    answer.
    """
    report = asyncio.run(_run(options, console or Console(stderr=True), clock))
    if options.save_result or options.result_filename is not None:
        _save(report, options)
    return report


async def _run(options: ServeBench, console: Console, clock: Clock) -> Report:
    parsed_options = _parse_options(options)
    async with Client(
        options.base_url, api_key=options.api_key, timeout=options.request_timeout, clock=clock
    ) as client:
        model, limit = await _choose_model(client, options.model)
        if options.num_clients is not None:
            return await _run_agents(options, client, parsed_options, (model, limit), console)
        plan = plan_serve(options, await _alphabet(client, model, options))
        if limit is not None:
            check_lengths([*plan.warmup, *plan.light, *plan.load], limit)
        body = _make_body(options, model, parsed_options.extra)
        bench = _Bench(options, client, body, clock, console, parsed_options)
        await bench.warm_up(plan.warmup)
        light, objectives = await bench.objectives(plan.light)
        return await bench.measure(model, plan, light, objectives)


async def _run_agents(
    options: ServeBench,
    client: Client,
    parsed_options: _ParsedOptions,
    model_and_limit: tuple[str, int | None],
    console: Console,
) -> Report:
    """Measure conversations in place of single requests."""
    model, limit = model_and_limit
    if limit is not None:
        check_conversation(options, limit)
    body = _make_chat_body(options, model, parsed_options.extra)
    agents = Agents(client, options, body, client.clock, asyncio.sleep)
    outcomes, scale = await agents.warm_up()
    _require_success("warm-up", outcomes)
    agents.peak = 0
    assert options.num_clients is not None
    num_turns = options.num_clients * options.max_turns
    with _progress(console, num_turns, client.clock) as show:
        agents.on_outcome = show
        runs_before = await _count_runs(client)
        start = client.clock()
        turns = await agents.run(scale)
        duration = client.clock() - start
        runs = _subtract_runs(await _count_runs(client), runs_before)
    measured_load = _MeasuredLoad([turn.outcome for turn in turns], duration, agents.peak, runs)
    report = _make_report(options, parsed_options, (model, client.base_url), measured_load)
    return replace(report, endpoint=ENDPOINT, turns=turns)


@dataclass(frozen=True)
class _MeasuredLoad:
    """What became of the measured requests."""

    outcomes: list[Outcome]
    duration: float
    peak: int
    """Maximum number of requests in flight at once."""
    runs: WorkerRuns | None


def _make_report(
    options: ServeBench,
    parsed_options: _ParsedOptions,
    model_and_url: tuple[str, str],
    measured_load: _MeasuredLoad,
    light: Summary | None = None,
    objectives: dict[str, float] | None = None,
) -> Report:
    goals = parsed_options.goodput if objectives is None else objectives
    model, base_url = model_and_url
    outcomes = measured_load.outcomes
    return Report(
        model=model,
        base_url=base_url,
        endpoint=options.endpoint,
        date=datetime.now().astimezone().isoformat(timespec="seconds"),
        num_prompts=len(outcomes),
        request_rate=options.request_rate,
        burstiness=options.burstiness,
        max_concurrency=options.max_concurrency,
        seed=options.seed,
        summary=summarise(
            outcomes, measured_load.duration, parsed_options.metrics, parsed_options.percentiles, goals
        ),
        max_concurrent_requests=measured_load.peak,
        objectives=goals,
        light=light,
        outcomes=outcomes,
        runs=measured_load.runs,
    )


@dataclass
class _Bench:
    """The phases of a benchmark."""

    options: ServeBench
    client: Client
    body: Callable[[Item], dict[str, object]]
    clock: Clock
    console: Console
    parsed_options: _ParsedOptions

    async def warm_up(self, items: Sequence[Item]) -> None:
        outcomes = await self._load().run(items, max_concurrency=1)
        _require_success("warm-up", outcomes)

    async def objectives(self, items: Sequence[Item]) -> tuple[Summary | None, dict[str, float]]:
        """The light load's figures, and the objectives in milliseconds."""
        if self.parsed_options.slo is None:
            return None, self.parsed_options.goodput
        start = self.clock()
        outcomes = await self._load().run(items, max_concurrency=1)
        _require_success("light load", outcomes)
        light = summarise(outcomes, self.clock() - start, METRICS, self.parsed_options.percentiles)
        goals = {name: self.parsed_options.slo * light.spreads[name].mean for name in LIGHT_METRICS}
        # answers of one token have no tpot, so it gets no objective
        goals = {name: limit for name, limit in goals.items() if limit > 0}
        self._say(describe_light(light, goals))
        return light, goals

    async def measure(
        self, model: str, plan: Plan, light: Summary | None, objectives: dict[str, float]
    ) -> Report:
        options = self.options
        with _progress(self.console, len(plan.load), self.clock) as show:
            load = self._load(show)
            runs_before = await _count_runs(self.client)
            start = self.clock()
            outcomes = await load.run(plan.load, options.max_concurrency)
            duration = self.clock() - start
            runs = _subtract_runs(await _count_runs(self.client), runs_before)
        measured_load = _MeasuredLoad(outcomes, duration, load.peak, runs)
        model_and_url = model, self.client.base_url
        return _make_report(options, self.parsed_options, model_and_url, measured_load, light, objectives)

    def _load(self, show: Callable[[Outcome], None] = lambda outcome: None) -> Load:
        return Load(self.client, self.options.endpoint, self.body, self.clock, asyncio.sleep, show)

    def _say(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)


def _parse_options(options: ServeBench) -> _ParsedOptions:
    return _ParsedOptions(
        metrics=parse_metrics(options.percentile_metrics),
        percentiles=parse_percentiles(options.metric_percentiles),
        goodput=parse_goodput(options.goodput),
        slo=None if options.slo is None else parse_slo(options.slo),
        extra=_json_object("--extra-body", options.extra_body),
    )


def _json_object(flag: str, text: str | None) -> dict[str, object]:
    try:
        value = json.loads(text or "{}")
    except ValueError as error:
        raise ConfigError.field(flag, text, f"a JSON object ({error})") from error
    if not isinstance(value, dict):
        raise ConfigError.field(flag, text, "a JSON object")
    return value


async def _choose_model(client: Client, name: str | None) -> tuple[str, int | None]:
    """The model, and the maximum length of a request if the server states one."""
    cards = {str(card.get("id")): card for card in await client.models()}
    if name is None and not cards:
        raise BenchError(f"{client.base_url} serves no model")
    model = next(iter(cards)) if name is None else name
    limit = cards.get(model, {}).get("max_model_len")
    return model, limit if isinstance(limit, int) else None


async def _count_runs(client: Client) -> WorkerRuns | None:
    """The counters in the server's metrics. None: it does not have them, or does not show its metrics."""
    try:
        text = str((await client.get("/metrics")).body)
    except ConnectionLost:  # the report says what became of the requests
        return None
    counts = [
        re.search(rf"(?m)^\w+:{name}_total(?:{{.*}})? (\S+)$", text) for name in ("runs", "partial_runs")
    ]
    if counts[0] is None or counts[1] is None:
        return None
    return WorkerRuns(*(int(float(count[1])) for count in counts if count is not None))


def _subtract_runs(end_runs: WorkerRuns | None, start_runs: WorkerRuns | None) -> WorkerRuns | None:
    return None if start_runs is None or end_runs is None else end_runs.subtract(start_runs)


async def _alphabet(client: Client, model: str, options: ServeBench) -> Sequence[int] | range:
    """The token ids that random prompts are drawn from."""
    if options.dataset_path is not None:
        return range(0)
    if options.vocab_size is not None:
        return range(options.vocab_size)
    reply = await client.post("/tokenize", {"model": model, "prompt": POOL_TEXT})
    match reply.body:
        case {"tokens": [int(), *_] as tokens} if reply.status == 200:
            return token_pool(tokens)
    answer = f"{reply.status} {json.dumps(reply.body)[:_SHOWN]}"
    raise ConfigError(
        f"--vocab-size: needed for random prompts, since {client.base_url}/tokenize answers {answer}"
    )


def _common_fields(options: ServeBench, model: str) -> dict[str, object]:
    """The fields of every body. Fields that not every server knows are sent only if they were asked for."""
    common_fields: dict[str, object] = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if options.temperature is not None:
        common_fields["temperature"] = options.temperature
    if options.ignore_eos:
        common_fields["ignore_eos"] = True
    return common_fields


def _make_body(
    options: ServeBench, model: str, extra: dict[str, object]
) -> Callable[[Item], dict[str, object]]:
    """Makes the body of an item."""
    common_fields = _common_fields(options, model)

    def body(item: Item) -> dict[str, object]:
        if options.endpoint == "/v1/completions":
            prompt_fields: dict[str, object] = {"prompt": item.prompt}
        else:
            prompt_fields = {"messages": [{"role": "user", "content": item.prompt}]}
        return {**common_fields, **prompt_fields, "max_tokens": item.output_len, **extra}

    return body


def _make_chat_body(
    options: ServeBench, model: str, extra: dict[str, object]
) -> Callable[[list[Json], list[Json], int], Json]:
    """Makes the body of an agent's turn. The tools are in the prompt. What the model calls stays text, so
    answers are as long as they were asked to be."""
    common_fields = _common_fields(options, model)

    def body(messages: list[Json], tools: list[Json], max_tokens: int) -> Json:
        fields = {"messages": messages, "tools": tools, "tool_choice": "none", "max_tokens": max_tokens}
        return {**common_fields, **fields, **extra}

    return body


def _require_success(phase: str, outcomes: Sequence[Outcome]) -> None:
    for outcome in outcomes:
        if outcome.error is not None:
            raise BenchError(f"{phase}: {outcome.error}")


@contextmanager
def _progress(console: Console, total: int, clock: Clock) -> Iterator[Callable[[Outcome], None]]:
    """A bar with rate and time left. Yields what to call after each request."""
    columns = (
        TextColumn("requests"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:.1f} tok/s  {task.fields[failed]} failed"),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=console, refresh_per_second=4, transient=True) as bar:
        task = bar.add_task("", total=total, rate=0.0, failed=0)
        start, tokens, failed = clock(), 0, 0

        def show(outcome: Outcome) -> None:
            nonlocal tokens, failed
            tokens += outcome.output_tokens
            failed += outcome.error is not None
            bar.update(task, advance=1, rate=tokens / max(clock() - start, 1e-9), failed=failed)

        yield show


def _save(report: Report, options: ServeBench) -> None:
    stamp = report.date.replace(":", "").replace("+", "-")
    name = f"bench-serve-{report.model.replace('/', '-')}-{stamp}.json"
    path: Path = options.result_dir / (options.result_filename or name)
    fields: dict[str, Any] = report.to_dict(options.save_detailed)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(fields) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--result-filename: {path}: {error.strerror}") from error
