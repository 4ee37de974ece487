"""Makes the requests of a benchmark from its options. Pure functions, except for reading the named files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moesaic.core.errors import ConfigError
from moesaic.jobs.bench.arrivals import arrival_times
from moesaic.jobs.bench.lengths import MIXES, Range, range_around, read_trace
from moesaic.jobs.bench.options import ServeBench
from moesaic.jobs.bench.workload import Item, cycle_rows, random_prompts, read_prompts


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
    load, extra_items = items[: len(items) - spare], items[len(items) - spare :]
    return Plan(extra_items[: options.num_warmups], extra_items[options.num_warmups :], load)


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
    rows = cycle_rows(
        read_prompts(options.dataset_path), options.num_prompts + spare, options.custom_output_len
    )
    times = _times(options, options.num_prompts, rng) + [0.0] * spare
    return [Item(text, length, time) for (text, length), time in zip(rows, times, strict=True)]


def _from_trace(
    options: ServeBench, spare: int, pool: Sequence[int] | range, rng: np.random.Generator
) -> list[Item]:
    assert options.trace is not None
    rows = read_trace(options.trace, options.num_prompts, options.trace_scale, options.trace_length_scale)
    all_rows = rows + [rows[index % len(rows)] for index in range(spare)]
    prompts = random_prompts([row.input_tokens for row in all_rows], pool, rng)
    return [
        Item(prompt, row.output_tokens, row.arrival) for prompt, row in zip(prompts, all_rows, strict=True)
    ]


def _random(
    options: ServeBench, spare: int, pool: Sequence[int] | range, rng: np.random.Generator
) -> list[Item]:
    ratio = options.random_range_ratio
    input_lengths, output_lengths = (
        MIXES[options.mix]
        if options.mix is not None
        else (range_around(options.random_input_len, ratio), range_around(options.random_output_len, ratio))
    )
    items = random_items(
        *(options.num_prompts + spare, input_lengths, output_lengths, pool, rng),
        prefix_len=options.prefix_len,
    )
    times = _times(options, options.num_prompts, rng) + [0.0] * spare
    return [Item(item.prompt, item.output_len, time) for item, time in zip(items, times, strict=True)]


def random_items(
    count: int,
    input_lengths: Range,
    output_lengths: Range,
    pool: Sequence[int] | range,
    rng: np.random.Generator,
    token_rng: np.random.Generator | None = None,
    prefix_len: int = 0,
) -> list[Item]:
    """Random prompts with lengths from `input_lengths`, and answers with lengths from `output_lengths`.

    token_rng: draws the tokens in place of `rng`, so that other tokens can have the same lengths.
    prefix_len: tokens that all prompts begin with, beside those.
    """
    prompts = random_prompts(input_lengths.draw(count, rng).tolist(), pool, token_rng or rng, prefix_len)
    return [Item(p, int(n)) for p, n in zip(prompts, output_lengths.draw(count, rng), strict=True)]


def _times(options: ServeBench, count: int, rng: np.random.Generator) -> list[float]:
    times = arrival_times(count, options.request_rate, rng, options.arrivals, options.burstiness)
    return [float(time) for time in times]
