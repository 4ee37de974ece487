"""The settings of `plan`. Its command line is generated from them."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, fields
from pathlib import Path
from typing import Literal

from moesaic.config import parse_bytes
from moesaic.core.errors import ConfigError

PolicyName = Literal["moe-lightning", "flexgen"]
CacheType = Literal["float32", "bfloat16", "int8", "int4"]
OF_CLUSTERS = ("workload", "slo", "time_budget", "top", "seed")
"""Settings that only plans for --cluster have."""
THIS = "this"
"""Value of --hardware for the machine that the command runs on."""


@dataclass(frozen=True)
class Plan:
    """Plan how to run a model: on one machine whose fast memory is too small, or on a cluster."""

    model: str | None = None
    """A checkpoint's directory, a config.json, `demo`, or a known name: mixtral-8x7b, mixtral-8x22b, dbrx,
    deepseek-v2, deepseek-v2-lite, deepseek-v3, qwen3-30b-a3b, olmoe-1b-7b,
    qwen1.5-moe-a2.7b, qwen2-57b-a14b."""
    _: KW_ONLY
    hf_overrides: str | None = None
    """Changes of config.json, as JSON: `{"key": null}` drops a key. See `moesaic serve`."""
    hardware: str | None = None
    """A known machine (t4, l4, t4-large-host, t4-measured, l4-measured, a100-40, a100-80, h100, h200), a file
    (.toml) that `moesaic hardware measure` wrote, or `this`: this machine, after a short measurement."""
    host_memory: str | None = None
    """Size of the slow level's memory, such as 192GiB. None: that of the machine."""
    host_bandwidth: str | None = None
    """Bytes that the slow level's memory reads per second, such as 100GiB. None: that of the machine."""
    prompt_len: int | None = None
    """Tokens of a prompt."""
    gen_len: int | None = None
    """Tokens that each request generates."""
    profile: Path | None = None
    """Profile of the model that `moesaic profile` wrote. It says how often each expert is chosen. None: all
    experts are chosen equally often."""
    gpus: int = 1
    """Number of GPUs that work as one fast level, by tensor parallelism. They share one link."""
    kv_cache_dtype: CacheType = "bfloat16"
    """Type of cached keys and values. Integer types have a scale for each token and head."""
    policy: PolicyName = "moe-lightning"
    """Search for the policy. moe-lightning: search all variables of MoE-Lightning, and simulate each policy's
    tasks. flexgen: FlexGen's linear program."""
    plot: Path | None = None
    """Draw rooflines, throughput by memory and the map of policies into this SVG file."""
    cluster: str | None = None
    """Plan how to serve the model on these machines: a .toml file with devices, links and prices, or a short
    form such as 8xh100,2hosts; see docs/planning.md."""
    workload: Path | None = None
    """The requests for --cluster, as a .toml file with the tables [workload] and [routing] of `moesaic
    simulate`, or as a trace (.csv)."""
    slo: str | None = None
    """Latencies of a good request for --cluster, such as ttft=2s,itl=50ms: until the first token, and the
    mean between tokens. None: every request is good."""
    time_budget: float = 60.0
    """Seconds after which the search of --cluster ends."""
    top: int = 5
    """Number of deployments that --cluster shows."""
    seed: int = 0
    """Seed of the requests and the routing of --cluster."""

    def __post_init__(self) -> None:
        if self.cluster is not None:
            self._check_cluster()
            return
        for name in OF_CLUSTERS:
            if getattr(self, name) != getattr(Plan, name):
                raise ConfigError(f"--{name.replace('_', '-')}: allowed only with --cluster")
        if self.plot is not None and self.plot.suffix.lower() != ".svg":
            raise ConfigError.field("--plot", str(self.plot), "a file that ends in .svg")
        if self.gpus < 1:
            raise ConfigError.field("--gpus", self.gpus, "an integer of at least 1")
        self.slow_memory, self.slow_bandwidth  # noqa: B018  raises ConfigError for wrong sizes
        for flag, value, allowed_values in (
            ("MODEL", self.model, "a checkpoint, a config.json or a known name"),
            ("--hardware", self.hardware, "a known machine, this or a .toml file; or --cluster in its place"),
        ):
            if value is None:
                raise ConfigError.field(flag, "nothing", allowed_values)
        for flag, length in (("--prompt-len", self.prompt_len), ("--gen-len", self.gen_len)):
            if length is None or length < 1:
                value_text = "nothing" if length is None else length
                raise ConfigError.field(flag, value_text, "an integer of at least 1")
        if self.gen_len == 1:
            raise ConfigError.field("--gen-len", 1, "an integer of at least 2: prefill gives the first token")

    def _check_cluster(self) -> None:
        for field in fields(self):
            is_cluster_field = field.name in ("model", "cluster", *OF_CLUSTERS)
            if not is_cluster_field and getattr(self, field.name) != field.default:
                flag = "--" + field.name.replace("_", "-")
                raise ConfigError(f"{flag}: not with --cluster, which has its own machines and requests")
        if self.model is None:
            raise ConfigError.field("MODEL", "nothing", "a checkpoint, a config.json or a known name")
        if self.workload is None:
            raise ConfigError.field("--workload", "nothing", "a .toml file or a .csv trace, with --cluster")
        if not 0 < self.time_budget < math.inf:
            raise ConfigError.field("--time-budget", self.time_budget, "seconds, more than 0")
        if self.top < 1:
            raise ConfigError.field("--top", self.top, "an integer of at least 1")
        if self.seed < 0:
            raise ConfigError.field("--seed", self.seed, "an integer of at least 0")

    @property
    def slow_memory(self) -> float | None:
        """--host-memory in bytes; None if it is not given. Raises ConfigError for a wrong size."""
        return None if self.host_memory is None else parse_bytes("--host-memory", self.host_memory)

    @property
    def slow_bandwidth(self) -> float | None:
        """--host-bandwidth in bytes/s; None if it is not given. Raises ConfigError for a wrong size."""
        return None if self.host_bandwidth is None else parse_bytes("--host-bandwidth", self.host_bandwidth)
