"""Turns outcomes into figures. Pure functions. Metrics have vLLM's names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from moesaic.core.errors import ConfigError
from moesaic.jobs.bench.load import Outcome

METRICS = ("ttft", "tpot", "itl", "e2el")

TITLES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
}


@dataclass(frozen=True)
class Spread:
    """A metric over all requests, in milliseconds. All values are 0 if there is no request."""

    count: int
    """Number of values: requests, or gaps for itl."""
    mean: float
    median: float
    std: float
    percentiles: dict[float, float]


@dataclass(frozen=True)
class Summary:
    """The figures of a load."""

    duration: float
    """Seconds from the first request to the last answer."""
    num_completed: int
    num_failed: int
    total_input: int
    """Prompt tokens of the completed requests."""
    total_output: int
    """Generated tokens of the completed requests."""
    num_good: int | None
    """Completed requests that met every objective; None without objectives."""
    spreads: dict[str, Spread] = field(default_factory=dict)

    @property
    def request_throughput(self) -> float:
        """Completed requests per second."""
        return self._per_second(self.num_completed)

    @property
    def request_goodput(self) -> float | None:
        """Requests per second that met every objective."""
        return None if self.num_good is None else self._per_second(self.num_good)

    @property
    def output_throughput(self) -> float:
        """Generated tokens per second."""
        return self._per_second(self.total_output)

    @property
    def total_token_throughput(self) -> float:
        """Prompt and generated tokens per second."""
        return self._per_second(self.total_input + self.total_output)

    def _per_second(self, amount: int) -> float:
        return amount / self.duration if self.duration > 0 else 0.0


def summarise(
    outcomes: Sequence[Outcome],
    duration: float,
    metrics: Sequence[str] = METRICS,
    percentiles: Sequence[float] = (50.0, 90.0, 99.0),
    objectives: Mapping[str, float] | None = None,
) -> Summary:
    """The figures of `outcomes`. objectives: metric -> maximum milliseconds of a good request."""
    completed_outcomes = [outcome for outcome in outcomes if outcome.error is None]
    goals = objectives or {}
    return Summary(
        duration=duration,
        num_completed=len(completed_outcomes),
        num_failed=len(outcomes) - len(completed_outcomes),
        total_input=sum(outcome.prompt_tokens for outcome in completed_outcomes),
        total_output=sum(outcome.output_tokens for outcome in completed_outcomes),
        num_good=sum(is_good(outcome, goals) for outcome in completed_outcomes) if goals else None,
        spreads={name: spread(samples(name, completed_outcomes), percentiles) for name in metrics},
    )


@dataclass(frozen=True)
class TurnKind:
    """The figures of the completed turns of one kind."""

    name: str
    num_completed: int
    ttft: Spread
    decode_rate: float
    """Generated tokens per second of one turn, after its first token. 0 if no turn has two tokens."""
    prompt_tokens: int
    cached_tokens: int | None
    """Prompt tokens that were read from a cache. None: the server does not say."""
    output_tokens: int

    @property
    def num_computed_tokens(self) -> int | None:
        """Prompt tokens that were computed. None: the server does not say."""
        return None if self.cached_tokens is None else self.prompt_tokens - self.cached_tokens

    def to_dict(self) -> dict[str, object]:
        """The figures with names like those of the whole report."""
        times = {f"p{point:g}_ttft_ms": value for point, value in self.ttft.percentiles.items()}
        return {
            "completed": self.num_completed,
            "mean_ttft_ms": self.ttft.mean,
            **times,
            "output_tokens_per_second_of_a_turn": self.decode_rate,
            "input_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "computed_tokens": self.num_computed_tokens,
            "output_tokens": self.output_tokens,
        }


def summarise_turns(turns: Sequence[tuple[str, Outcome]], percentiles: Sequence[float]) -> list[TurnKind]:
    """The figures of each kind of turns, given as (kind, outcome), in order of the first turn of a kind."""
    outcomes_by_kind: dict[str, list[Outcome]] = {}
    for name, outcome in turns:
        if outcome.error is None:
            outcomes_by_kind.setdefault(name, []).append(outcome)
    return [_summarise_kind(name, outcomes, percentiles) for name, outcomes in outcomes_by_kind.items()]


def _summarise_kind(name: str, outcomes: Sequence[Outcome], percentiles: Sequence[float]) -> TurnKind:
    seconds = sum(outcome.latency - outcome.ttft for outcome in outcomes)
    later_tokens = sum(max(0, outcome.output_tokens - 1) for outcome in outcomes)
    cached_counts = [outcome.cached_tokens for outcome in outcomes if outcome.cached_tokens is not None]
    return TurnKind(
        name,
        len(outcomes),
        spread(samples("ttft", outcomes), percentiles),
        later_tokens / seconds if seconds > 0 else 0.0,
        sum(outcome.prompt_tokens for outcome in outcomes),
        sum(cached_counts) if len(cached_counts) == len(outcomes) else None,
        sum(outcome.output_tokens for outcome in outcomes),
    )


def samples(metric: str, outcomes: Sequence[Outcome]) -> list[float]:
    """The metric's values in milliseconds: one for each request, or one for each gap for itl."""
    match metric:
        case "ttft":
            values = [outcome.ttft for outcome in outcomes]
        case "tpot":
            # A request of one token has no time between tokens.
            values = [outcome.tpot for outcome in outcomes if outcome.output_tokens > 1]
        case "itl":
            values = [gap for outcome in outcomes for gap in outcome.gaps]
        case _:
            values = [outcome.latency for outcome in outcomes]
    return [value * 1000 for value in values]


def spread(values: Sequence[float], percentiles: Sequence[float]) -> Spread:
    """Mean, deviation and percentiles of the values."""
    numbers = np.asarray(values or [0.0])
    points = np.percentile(numbers, percentiles) if percentiles else []
    return Spread(
        len(values),
        float(numbers.mean()),
        float(np.median(numbers)),
        float(numbers.std()),
        {p: float(value) for p, value in zip(percentiles, points, strict=True)},
    )


def is_good(outcome: Outcome, objectives: Mapping[str, float]) -> bool:
    """True if the request met every objective. A request of one token has no tpot and cannot miss it."""
    latencies = {"ttft": outcome.ttft, "tpot": outcome.tpot, "e2el": outcome.latency}
    return all(latencies[name] * 1000 <= limit for name, limit in objectives.items())


def parse_metrics(text: str) -> tuple[str, ...]:
    """The metrics in the text. Example: 'ttft,tpot' -> ('ttft', 'tpot')."""
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    for name in names:
        if name not in METRICS:
            raise ConfigError.field("--percentile-metrics", name, ", ".join(METRICS))
    return names


def parse_percentiles(text: str) -> tuple[float, ...]:
    """The percentiles in the text. Example: '50,99.9' -> (50.0, 99.9)."""
    allowed_values = "numbers from 0 to 100, separated by commas"
    try:
        values = tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise ConfigError.field("--metric-percentiles", text, allowed_values) from error
    if not all(0 <= value <= 100 for value in values):
        raise ConfigError.field("--metric-percentiles", text, allowed_values)
    return values


def parse_goodput(entries: Sequence[str]) -> dict[str, float]:
    """Metric -> maximum milliseconds.

    Example: ('ttft:500 tpot:50',) or ('ttft:500', 'tpot:50') -> {'ttft': 500.0, 'tpot': 50.0}.
    """
    goals: dict[str, float] = {}
    for entry in re.split(r"[,\s]+", " ".join(entries).strip()):
        if not entry:
            continue
        match = re.fullmatch(r"(ttft|tpot|e2el):(\d+(?:\.\d+)?)", entry)
        if match is None or match[1] in goals:
            allowed_values = "ttft:MS, tpot:MS and e2el:MS, each at most once"
            raise ConfigError.field("--goodput", entry, allowed_values)
        goals[match[1]] = float(match[2])
    return goals


def parse_slo(text: str) -> float:
    """The factor in the text. Each objective is the latency at light load times this factor.

    Example: '5x-light' -> 5.0.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)x-light", text)
    if match is None or float(match[1]) <= 0:
        raise ConfigError.field("--slo", text, "a factor of the light load's latency, such as 5x-light")
    return float(match[1])
