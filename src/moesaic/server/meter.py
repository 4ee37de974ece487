"""Counts of tokens and measurements of latencies, of requests of one server."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from moesaic.core import messages
from moesaic.core.request import FinishReason, RequestOutput

TOKEN_SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
)
REQUEST_SECONDS = (
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
    320.0,
    640.0,
)

REQUEST_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
"""1, 2, 5, 10 and so on: vLLM's buckets for tokens of a request."""
STEP_TOKENS = (1.0, *(float(2**power) for power in range(3, 15)))
"""Buckets for the tokens of a step, up to 16,384."""


@dataclass
class Distribution:
    """A histogram: the number of observations in each range between two bounds."""

    bounds: Sequence[float]
    total: float = 0.0
    counts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, number of observations up to it) of each bound. The last bound is infinity."""
        pairs, num_below = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            num_below += count
            pairs.append((bound, float(num_below)))
        return pairs


@dataclass
class Times:
    """Times of one completion, in seconds on the meter's clock."""

    arrival: float
    queue_seconds: float | None = None
    """Seconds until it was admitted. None until then."""
    tokens: int = 0
    """Tokens that it has generated."""
    first: float | None = None
    """Time of its first token."""
    last: float = 0.0
    """Time of its latest token."""
    cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache. Set with the first token."""
    move_times: list[float] = field(default_factory=list)
    """Times at which it was moved to another worker, because its own had died or left."""
    finish: FinishReason | None = None
    """Why it ended. None until then."""


class Meter:
    """Counts tokens and measures latencies. The async engine updates it, and the collector reads it.

    Completion i of the request with id g has the id g + i in the worker.
    """

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.cached_prompt_tokens = 0
        """Tokens of prompt_tokens whose KV was in the prefix cache."""
        self.generation_tokens = 0
        self.finish_counts: Counter[FinishReason] = Counter()
        # As in vLLM: a first token may take minutes, since its request may wait.
        self.time_to_first_token = Distribution(TOKEN_SECONDS + REQUEST_SECONDS[9:])
        self.inter_token_latency = Distribution(TOKEN_SECONDS)
        self.e2e_latency = Distribution(REQUEST_SECONDS)
        self.queue_time = Distribution(REQUEST_SECONDS)
        self.prefill_time = Distribution(REQUEST_SECONDS)
        self.decode_time = Distribution(REQUEST_SECONDS)
        self.inference_time = Distribution(REQUEST_SECONDS)
        self.request_time_per_token = Distribution(TOKEN_SECONDS)
        self.request_prompt_tokens = Distribution(REQUEST_TOKENS)
        self.request_computed_tokens = Distribution(REQUEST_TOKENS)
        self.request_generation_tokens = Distribution(REQUEST_TOKENS)
        self.longest_generation = Distribution(REQUEST_TOKENS)
        self.step_tokens = Distribution(STEP_TOKENS)
        self._times: dict[int, dict[int, Times]] = {}
        self._longest: dict[int, int] = {}
        """Tokens of the longest completion that ended, for each request that has others."""
        self._groups: dict[int, int] = {}

    def record_arrival(self, group: int, completions: int, now: float) -> list[Times]:
        """Begin to measure a request. Returns its completions' times, which change until these have ended."""
        self._times[group] = {index: Times(now) for index in range(completions)}
        self._groups.update((group + index, group) for index in range(completions))
        return list(self._times[group].values())

    def record_message(
        self, message: messages.ToEngine, outputs: Iterable[RequestOutput], now: float
    ) -> None:
        """Count a message of the worker, and the outputs that the engine made from it."""
        if isinstance(message, messages.RequestsAdmitted):
            for request_id, seconds in zip(message.request_ids, message.queue_seconds, strict=True):
                self._record_admission(request_id, seconds)
        elif isinstance(message, messages.RequestsMoved):
            for group, request_id in (
                (self._groups.get(request_id_), request_id_) for request_id_ in message.request_ids
            ):
                if group is not None:
                    self._times[group][request_id - group].move_times.append(now)
        tokens = 0
        for output in outputs:
            times = self._times.get(output.request_id, {}).get(output.index)
            if times is not None:
                tokens += self._record_output(output, times, now)
        if tokens:
            self.step_tokens.observe(tokens)

    def record_abort(self, group: int) -> None:
        """Count the unfinished completions of a request as aborted."""
        left = self._times.pop(group, {})
        self._longest.pop(group, None)
        self.finish_counts[FinishReason.ABORT] += len(left)
        for index, times in left.items():
            times.finish = FinishReason.ABORT
            del self._groups[group + index]

    def _record_admission(self, request_id: int, seconds: float) -> None:
        self.queue_time.observe(seconds)
        group = self._groups.get(request_id)
        if group is not None:
            self._times[group][request_id - group].queue_seconds = seconds

    def _record_output(self, output: RequestOutput, times: Times, now: float) -> int:
        """Count an output. Returns its tokens, with the first one also the computed tokens of the prompt."""
        num_computed = 0
        if times.first is None:
            times.first = now
            times.cached_tokens = output.num_cached_tokens
            self.prompt_tokens += output.num_prompt_tokens
            self.cached_prompt_tokens += output.num_cached_tokens
            num_computed = output.num_prompt_tokens - output.num_cached_tokens
            self.time_to_first_token.observe(now - times.arrival)
            # The worker measures the queue on its own, so the difference may be a little below 0.
            self.prefill_time.observe(max(0.0, now - times.arrival - (times.queue_seconds or 0.0)))
        else:
            self.inter_token_latency.observe(now - times.last)
        times.last = now
        self.generation_tokens += len(output.token_ids)
        times.tokens += len(output.token_ids)
        if output.finish_reason is not None:
            self._record_finish(output, output.finish_reason, times, times.first)
        return num_computed + len(output.token_ids)

    def _record_finish(self, output: RequestOutput, reason: FinishReason, times: Times, first: float) -> None:
        times.finish = reason
        self.finish_counts[reason] += 1
        self.e2e_latency.observe(times.last - times.arrival)
        self.decode_time.observe(times.last - first)
        self.inference_time.observe(max(0.0, times.last - times.arrival - (times.queue_seconds or 0.0)))
        if times.tokens > 1:
            self.request_time_per_token.observe((times.last - first) / (times.tokens - 1))
        self.request_prompt_tokens.observe(output.num_prompt_tokens)
        self.request_computed_tokens.observe(output.num_prompt_tokens - times.cached_tokens)
        self.request_generation_tokens.observe(times.tokens)
        group = self._times[output.request_id]
        del group[output.index]
        del self._groups[output.request_id + output.index]
        longest = max(self._longest.pop(output.request_id, 0), times.tokens)
        if group:
            self._longest[output.request_id] = longest
        else:
            del self._times[output.request_id]
            self.longest_generation.observe(longest)
