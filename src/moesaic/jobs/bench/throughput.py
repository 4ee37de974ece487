"""`moesaic bench throughput`: measures the `LLM` class in this process, with all requests at once."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
from rich.console import Console
from rich.table import Table

from moesaic.config import WorkerConfig
from moesaic.core.errors import ConfigError
from moesaic.core.request import SamplingParams
from moesaic.jobs.bench.lengths import MIXES, Range, range_around
from moesaic.jobs.bench.options import ThroughputBench
from moesaic.jobs.bench.plan import random_items
from moesaic.jobs.bench.workload import Item
from moesaic.llm import LLM, Completion
from moesaic.trace.parts import collecting, part_path


class Generator(Protocol):
    """The method of `LLM` that is measured."""

    def generate(
        self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]
    ) -> list[Completion]: ...


@dataclass(frozen=True)
class Throughput:
    """The result of `moesaic bench throughput`."""

    model: str
    num_prompts: int
    prompt_tokens: int
    output_tokens: int
    prefill_seconds: float
    """Seconds of a separate run that generates one token for each of other prompts of the same lengths."""
    elapsed_time: float
    """Seconds of the measured run, from prefill to the last token."""

    @property
    def requests_per_second(self) -> float:
        return self.num_prompts / self.elapsed_time

    @property
    def tokens_per_second(self) -> float:
        """Prompt and generated tokens per second."""
        return (self.prompt_tokens + self.output_tokens) / self.elapsed_time

    @property
    def output_tokens_per_second(self) -> float:
        return self.output_tokens / self.elapsed_time

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens per second in the prefill run."""
        return self.prompt_tokens / self.prefill_seconds

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Generated tokens per second, without each request's first token and without the prefill time.

        None if no tokens or no time is left.
        """
        seconds = self.elapsed_time - self.prefill_seconds
        tokens = self.output_tokens - self.num_prompts
        return tokens / seconds if seconds > 0 and tokens > 0 else None

    def to_json(self) -> str:
        names = ("requests", "tokens", "output_tokens", "prefill_tokens", "decode_tokens")
        return json.dumps(asdict(self) | {f"{n}_per_second": getattr(self, f"{n}_per_second") for n in names})


def run(
    options: ThroughputBench,
    worker: WorkerConfig,
    console: Console | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Throughput:
    """Load the model and measure. Progress goes to `console` (stderr). A trace contains all runs."""
    terminal, name = console or Console(stderr=True), worker.model.model
    with collecting(worker.trace):
        with terminal.status(f"loading {name}"):
            trace = part_path(worker.trace, "attention worker 0")
            llm = LLM(name, seed=options.seed, trace=trace, **_settings(worker))
        check_fits(options, llm.info.max_model_len)
        return measure(llm, options, name, llm.info.vocab_size, terminal, clock)


def measure(
    llm: Generator,
    options: ThroughputBench,
    model: str,
    vocab_size: int,
    console: Console,
    clock: Callable[[], float],
) -> Throughput:
    """Run a warm-up, then the prefill run, then the measured run."""
    warmup, prefill, items = (_items(options, vocab_size, seed) for seed in (2, 1, 0))
    with console.status("warm-up"):
        _generate(llm, warmup[:8], 2)
    with console.status(f"prefill, {len(prefill)} requests"):
        prefill_start = clock()
        _generate(llm, prefill, 1)
        prefill_end = clock()
    with console.status(f"generating, {len(items)} requests"):
        start = clock()
        completions = _generate(llm, items, None)
        end = clock()
    return Throughput(
        model=model,
        num_prompts=len(completions),
        prompt_tokens=sum(len(completion.prompt_token_ids) for completion in completions),
        output_tokens=sum(
            len(output.token_ids) for completion in completions for output in completion.outputs
        ),
        prefill_seconds=prefill_end - prefill_start,
        elapsed_time=end - start,
    )


def print_report(report: Throughput, console: Console) -> None:
    """Print the result as a table."""
    table = Table(title=f"{report.model}, {report.num_prompts} requests", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("prompt / output tokens", f"{report.prompt_tokens} / {report.output_tokens}")
    table.add_row("duration (s)", f"{report.elapsed_time:.2f}")
    table.add_row("requests/s", f"{report.requests_per_second:.2f}")
    table.add_row("total tokens/s", f"{report.tokens_per_second:.2f}")
    table.add_row("output tokens/s", f"{report.output_tokens_per_second:.2f}")
    table.add_row("prefill tokens/s", f"{report.prefill_tokens_per_second:.2f}")
    decode = report.decode_tokens_per_second
    table.add_row("decode tokens/s", "too short to tell" if decode is None else f"{decode:.2f}")
    console.print(table)


def check_fits(options: ThroughputBench, max_model_len: int) -> None:
    """Raise ConfigError if the longest request would exceed the context."""
    longest = sum(length.high for length in _ranges(options))
    if longest > max_model_len:
        allowed_values = f"{max_model_len} together, the model's context length"
        raise ConfigError.field("--input-len and --output-len", f"up to {longest} tokens", allowed_values)


def _ranges(options: ThroughputBench) -> tuple[Range, Range]:
    if options.mix is not None:
        return MIXES[options.mix]
    ratio = options.random_range_ratio
    return range_around(options.input_len, ratio), range_around(options.output_len, ratio)


def _items(options: ThroughputBench, vocab_size: int, number: int) -> list[Item]:
    """The requests of a run. The lengths depend only on the seed, the tokens also on `number`.

    Different tokens keep the prefix cache of one run from helping the next one.
    """
    input_lengths, output_lengths = _ranges(options)
    return random_items(
        options.num_prompts,
        input_lengths,
        output_lengths,
        range(vocab_size),
        np.random.default_rng(options.seed),
        np.random.default_rng((options.seed, number)),
    )


def _generate(llm: Generator, items: Sequence[Item], max_tokens: int | None) -> list[Completion]:
    """Generate answers of exactly the wanted lengths. max_tokens: one length for all in their place."""
    prompts = [item.prompt for item in items if isinstance(item.prompt, list)]
    lengths = [max_tokens or item.output_len for item in items]
    return llm.generate(prompts, [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths])


def _settings(worker: WorkerConfig) -> dict[str, Any]:
    """The settings of a worker as keyword arguments of `LLM`."""
    parts = asdict(worker.model) | asdict(worker.cache) | asdict(worker.scheduler)
    return {name: value for name, value in parts.items() if name != "model"}
