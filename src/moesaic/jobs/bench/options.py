"""The settings of `moesaic bench`, from which its command line is generated. Names are vLLM's."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moesaic.core.errors import ConfigError
from moesaic.jobs.bench.arrivals import Arrivals
from moesaic.jobs.bench.lengths import Mix

AGENT_PREFIX = 8000
"""Tokens of system prompt and tool schemas, unless given."""
Endpoint = Literal["/v1/completions", "/v1/chat/completions"]


@dataclass(frozen=True)
class ServeBench:
    """Load an OpenAI-compatible server and measure it."""

    base_url: str = "http://127.0.0.1:8000"
    """URL of the server."""
    model: str | None = None
    """Name of the model in the API. None: the first model that the server lists."""
    api_key: str | None = None
    """Key that is sent as `Authorization: Bearer KEY`."""
    endpoint: Endpoint = "/v1/completions"
    """Endpoint that is called. Random prompts are token ids, which only /v1/completions takes. Agents
    (--num-clients) call /v1/chat/completions."""
    num_prompts: int = 100
    """Number of requests that are measured. A trace gives its first ones."""
    request_rate: float = math.inf
    """Requests per second; inf sends all at once. With --num-clients each agent waits for the answer of its
    last turn, and then 1 / rate seconds on average."""
    arrivals: Arrivals = "poisson"
    """Gaps between requests: random (see burstiness) or all equal."""
    burstiness: float = 1.0
    """Shape of the gamma distribution of the gaps: 1 is Poisson, less is burstier."""
    max_concurrency: int | None = None
    """Maximum number of requests in flight; further requests wait."""
    random_input_len: int = 128
    """Tokens of a random prompt; of each task and tool result with --num-clients."""
    random_output_len: int = 128
    """Tokens requested for a random prompt."""
    random_range_ratio: float = 0.0
    """Draw both lengths uniformly from the length plus or minus this share of it, 0 to 1."""
    random_prefix_len: int | None = None
    """Tokens that all random prompts begin with, beside --random-input-len. With --num-clients they are about
    so many tokens of system prompt and tool schemas. None: 0, and 8000 with --num-clients."""
    num_clients: int | None = None
    """Run so many agents in place of single requests. Each holds a conversation with tools, whose prompts
    begin with those of its last turn. All have the same system prompt and tools."""
    max_turns: int = 20
    """Turns of each agent."""
    mix: Mix | None = None
    """Draw both lengths as the papers do: short 30-70 in and 70-130 out, medium 50-150 and 50-250,
    reasonable 100-300 and 100-500."""
    trace: Path | None = None
    """CSV with arrival_s, input_tokens and output_tokens, or .jsonl with Mooncake's timestamp, input_length
    and output_length. Arrivals and lengths are replayed. With --num-clients only its gaps are used: as pauses
    of the agents, in a random order."""
    trace_scale: float = 1.0
    """Replay the arrivals this many times as fast."""
    trace_length_scale: float = 1.0
    """Multiply the lengths of the trace."""
    dataset_path: Path | None = None
    """JSONL file of prompts. The prompt is the field prompt, question, text or turns; output_tokens is
    optional."""
    custom_output_len: int = 128
    """Tokens requested for a prompt of --dataset-path without output_tokens."""
    vocab_size: int | None = None
    """Draw random tokens from all ids below this number. None: from the ids that the server's /tokenize
    returns for a text of many words."""
    num_warmups: int = 1
    """Number of requests before the measurement, one at a time. A failure ends the benchmark."""
    ignore_eos: bool = False
    """Request answers of exactly the wanted length (an extension of vLLM and moesaic)."""
    temperature: float | None = None
    """Sampling temperature. None: the server's default."""
    extra_body: str | None = None
    """JSON object with further fields for every request."""
    goodput: tuple[str, ...] = ()
    """Objectives in milliseconds, such as ttft:500 tpot:50, for the share of good requests."""
    slo: str | None = None
    """Objectives for ttft and tpot as a multiple of the latency at light load, which is measured first. The
    papers use 5x-light."""
    light_requests: int = 8
    """Number of requests of the light load."""
    percentile_metrics: str = "ttft,tpot,itl,e2el"
    """Metrics to report."""
    metric_percentiles: str = "50,90,99"
    """Percentiles to report."""
    request_timeout: float | None = None
    """Seconds without any data after which a request fails. None: never."""
    save_result: bool = False
    """Write the JSON report into a file as well."""
    save_detailed: bool = False
    """Put the measurements of every request into the JSON report."""
    result_dir: Path = Path()
    """Folder of that file."""
    result_filename: str | None = None
    """Name of that file. None: bench-serve-MODEL-TIME.json."""
    seed: int = 0
    """Seed of prompts, lengths and arrivals."""

    def __post_init__(self) -> None:
        for name in ("num_prompts", "random_input_len", "random_output_len", "custom_output_len"):
            _at_least(name, getattr(self, name), 1)
        for name in ("max_concurrency", "vocab_size", "light_requests", "num_clients", "max_turns"):
            _at_least(name, getattr(self, name), 1)
        _at_least("random_prefix_len", self.random_prefix_len, 0)
        _at_least("num_warmups", self.num_warmups, 0)
        for name in ("request_rate", "burstiness", "trace_scale", "trace_length_scale", "request_timeout"):
            _above_zero(name, getattr(self, name))
        if not 0 <= self.random_range_ratio <= 1:
            raise ConfigError.field("--random-range-ratio", self.random_range_ratio, "0 to 1")
        self._refuse_contradictions()

    @property
    def prefix_len(self) -> int:
        """Tokens that prompts begin with alike."""
        default_length = 0 if self.num_clients is None else AGENT_PREFIX
        return default_length if self.random_prefix_len is None else self.random_prefix_len

    def _refuse_contradictions(self) -> None:
        if self.num_clients is None:
            self._refuse_for_requests()
        else:
            self._refuse_for_agents()
        if self.trace is not None and not math.isinf(self.request_rate):
            raise ConfigError("--request-rate and --trace: the trace has its own arrivals; see --trace-scale")
        if self.arrivals == "fixed" and self.burstiness != 1.0:
            raise ConfigError("--burstiness and --arrivals fixed: equal gaps have no burstiness")
        if self.goodput and self.slo is not None:
            raise ConfigError("--goodput and --slo: give only one of them")

    def _refuse_for_agents(self) -> None:
        """Raises ConfigError for options that only single requests have."""
        for name in (
            *("num_prompts", "max_concurrency", "mix", "trace_length_scale", "dataset_path"),
            *("vocab_size", "slo"),
        ):
            if getattr(self, name) != getattr(ServeBench, name):
                raise ConfigError(f"{_flag(name)} and --num-clients: it is for single requests only")

    def _refuse_for_requests(self) -> None:
        """Raises ConfigError for options that contradict each other or that only agents have."""
        if self.max_turns != ServeBench.max_turns:
            raise ConfigError("--max-turns: needs --num-clients, which says how many agents take turns")
        sources = {"--mix": self.mix, "--trace": self.trace, "--dataset-path": self.dataset_path}
        given_flags = [flag for flag, value in sources.items() if value is not None]
        if len(given_flags) > 1:
            raise ConfigError(f"{given_flags[0]} and {given_flags[1]}: give only one of them")
        lengths = {
            "--random-input-len": self.random_input_len != ServeBench.random_input_len,
            "--random-output-len": self.random_output_len != ServeBench.random_output_len,
            "--random-range-ratio": self.random_range_ratio != ServeBench.random_range_ratio,
            "--random-prefix-len": self.random_prefix_len is not None,
        }
        for flag in (flag for flag, is_changed in lengths.items() if is_changed and given_flags):
            raise ConfigError(f"{flag} and {given_flags[0]}: {given_flags[0]} has its own lengths")
        if self.dataset_path is None and self.endpoint != "/v1/completions":
            allowed_values = "/v1/completions, or a --dataset-path: random prompts are token ids"
            raise ConfigError.field("--endpoint", self.endpoint, allowed_values)


@dataclass(frozen=True)
class ThroughputBench:
    """Complete random prompts in this process, all submitted at once, and measure."""

    num_prompts: int = 64
    """Number of requests that are measured."""
    input_len: int = 128
    """Tokens of a prompt."""
    output_len: int = 64
    """Tokens generated for each prompt."""
    random_range_ratio: float = 0.0
    """Draw both lengths uniformly from the length plus or minus this share of it, 0 to 1."""
    mix: Mix | None = None
    """Draw both lengths as the papers do: short, medium or reasonable."""
    seed: int = 0
    """Seed of prompts and lengths."""

    def __post_init__(self) -> None:
        for name in ("num_prompts", "input_len", "output_len"):
            _at_least(name, getattr(self, name), 1)
        if not 0 <= self.random_range_ratio <= 1:
            raise ConfigError.field("--random-range-ratio", self.random_range_ratio, "0 to 1")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _at_least(name: str, value: int | None, low: int) -> None:
    if value is not None and value < low:
        raise ConfigError.field(_flag(name), value, f"an integer of at least {low}")


def _above_zero(name: str, value: float | None) -> None:
    if value is not None and not value > 0:
        raise ConfigError.field(_flag(name), value, "a number above 0")
