"""The settings of `moesaic plan`, from which its command line is generated."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from moesaic.config import parse_bytes
from moesaic.core.errors import ConfigError

PolicyName = Literal["moe-lightning", "flexgen"]
CacheType = Literal["float32", "bfloat16", "int8", "int4"]
THIS = "this"
"""Value of --hardware for the machine that the command runs on."""


@dataclass(frozen=True)
class Plan:
    """Plan how to run a model that is larger than the fast memory, and predict the throughput."""

    model: str | None = None
    """A checkpoint's directory, a config.json, `demo`, or a known name: mixtral-8x7b, mixtral-8x22b, dbrx,
    deepseek-v2, deepseek-v2-lite, deepseek-v3, qwen3-30b-a3b."""
    _: KW_ONLY
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
    paper: Annotated[bool, Parameter(negative="")] = False
    """Reproduce the published policies of MoE-Lightning, and of FlexGen on its machines. Print every
    input."""
    plot: Path | None = None
    """Draw rooflines, throughput by memory and the map of policies into this SVG file."""

    def __post_init__(self) -> None:
        if self.plot is not None and self.plot.suffix.lower() != ".svg":
            raise ConfigError.field("--plot", str(self.plot), "a file that ends in .svg")
        if self.gpus < 1:
            raise ConfigError.field("--gpus", self.gpus, "an integer of at least 1")
        self.slow_memory, self.slow_bandwidth  # noqa: B018  raises ConfigError for wrong sizes
        if self.paper:
            self._check_paper()
            return
        for flag, value, allowed in (
            ("MODEL", self.model, "a checkpoint, a config.json or a known name; --paper takes none"),
            ("--hardware", self.hardware, "a known machine, this or a .toml file"),
        ):
            if value is None:
                raise ConfigError.field(flag, "nothing", allowed)
        for flag, length in (("--prompt-len", self.prompt_len), ("--gen-len", self.gen_len)):
            if length is None or length < 1:
                given = "nothing" if length is None else length
                raise ConfigError.field(flag, given, "an integer of at least 1")
        if self.gen_len == 1:
            raise ConfigError.field("--gen-len", 1, "an integer of at least 2: prefill gives the first token")

    def _check_paper(self) -> None:
        given = (self.model, self.hardware, self.prompt_len, self.gen_len, self.plot)
        if any(value is not None for value in given):
            raise ConfigError("--paper: has its own models, machines and lengths; give no other flag with it")

    @property
    def slow_memory(self) -> float | None:
        """--host-memory in bytes; None if it is not given. Raises ConfigError for a wrong size."""
        return None if self.host_memory is None else parse_bytes("--host-memory", self.host_memory)

    @property
    def slow_bandwidth(self) -> float | None:
        """--host-bandwidth in bytes/s; None if it is not given. Raises ConfigError for a wrong size."""
        return None if self.host_bandwidth is None else parse_bytes("--host-bandwidth", self.host_bandwidth)
