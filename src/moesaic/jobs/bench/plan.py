"""Makes the requests of a benchmark from its options. Pure functions, except for reading the named files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moesaic.core.errors import ConfigError
from moesaic.jobs.bench.arrivals import arrival_times
from moesaic.jobs.bench.lengths import MIXES, Range, around, read_trace
from moesaic.jobs.bench.options import ServeBench
from moesaic.jobs.bench.workload import Item, cycled, random_prompts, read_prompts


@dataclass(frozen=True)
class Plan:
    """The requests of a benchmark."""

    warmup: list[Item]
    light: list[Item]
    """Requests of the light load, from which objectives are derived. They have prompts of their own."""
    load: list[Item]
    """Requests that are measured, in order of arrival."""


def plan_serve(options: ServeBench, pool: Sequence[int] | range) -> Plan:
    """The requests for `options`. pool: the token ids that random prompts are drawn from."""
    rng = np.random.default_rng(options.seed)
    light = options.light_requests if options.slo is not None else 0
    spare = options.num_warmups + light
    if options.dataset_path is not None:
        items = _from_dataset(options, spare, rng)
    elif options.trace is not None:
        items = _from_trace(options, spare, pool, rng)
    else:
        items = _random(options, spare, pool, rng)
    load, rest = items[: len(items) - spare], items[len(items) - spare :]
    return Plan(rest[: options.num_warmups], rest[options.num_warmups :], load)


def check_lengths(items: Sequence[Item], max_model_len: int) -> None:
    """Raises ConfigError if a prompt of token ids and its answer exceed the server's limit."""
    sizes = [(len(item.prompt), item.output_len) for item in items if isinstance(item.prompt, list)]
    longest = max(sizes, key=sum, default=(0, 0))
    if sum(longest) > max_model_len:
        raise ConfigError(
            f"lengths: got a request of {longest[0]} + {longest[1]} tokens; allowed: "
            f"{max_model_len} together, the server's max_model_len"
        )


def _from_dataset(options: ServeBench, spare: int, rng: np.random.Generator) -> list[Item]:
    assert options.dataset_path is not None
    rows = cycled(read_prompts(options.dataset_path), options.num_prompts + spare, options.custom_output_len)
    times = _times(options, options.num_prompts, rng) + [0.0] * spare
    return [Item(text, length, at) for (text, length), at in zip(rows, times, strict=True)]


def _from_trace(
    options: ServeBench, spare: int, pool: Sequence[int] | range, rng: np.random.Generator
) -> list[Item]:
    assert options.trace is not None
    rows = read_trace(options.trace, options.num_prompts, options.trace_scale, options.trace_length_scale)
    both = rows + [rows[index % len(rows)] for index in range(spare)]
    prompts = random_prompts([row.input_tokens for row in both], pool, rng)
    return [Item(prompt, row.output_tokens, row.arrival) for prompt, row in zip(prompts, both, strict=True)]


def _random(
    options: ServeBench, spare: int, pool: Sequence[int] | range, rng: np.random.Generator
) -> list[Item]:
    ratio = options.random_range_ratio
    given, wanted = (
        MIXES[options.mix]
        if options.mix is not None
        else (around(options.random_input_len, ratio), around(options.random_output_len, ratio))
    )
    items = random_items(options.num_prompts + spare, given, wanted, pool, rng)
    times = _times(options, options.num_prompts, rng) + [0.0] * spare
    return [Item(item.prompt, item.output_len, at) for item, at in zip(items, times, strict=True)]


def random_items(
    count: int,
    given: Range,
    wanted: Range,
    pool: Sequence[int] | range,
    rng: np.random.Generator,
    token_rng: np.random.Generator | None = None,
) -> list[Item]:
    """Random prompts with lengths from `given`, and answers with lengths from `wanted`.

    token_rng: draws the tokens in place of `rng`, so that other tokens can have the same lengths.
    """
    prompts = random_prompts(given.draw(count, rng).tolist(), pool, token_rng or rng)
    return [Item(p, int(n)) for p, n in zip(prompts, wanted.draw(count, rng), strict=True)]


def _times(options: ServeBench, count: int, rng: np.random.Generator) -> list[float]:
    times = arrival_times(count, options.request_rate, rng, options.arrivals, options.burstiness)
    return [float(at) for at in times]
