"""The settings of `scale`, `join`, `cluster init`, `place`, `profile show`, `hardware measure`,
`bench kernels`, `compress` and `trace`.

The command lines of these commands are generated from them.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

from cyclopts import Parameter

from moesaic.config import Device, KernelName, LogLevel, check_threads
from moesaic.core.errors import ConfigError
from moesaic.core.home import expand_home
from moesaic.core.weight_types import NATIVE_DTYPES, is_native


@dataclass(frozen=True)
class Scale:
    """Change the number of processes of a running server."""

    base_url: str = "http://127.0.0.1:8000"
    """URL of the server."""
    admin_key: str | None = None
    """The server's admin key, which it prints at its start, sent as `Authorization: Bearer KEY`. None: the
    value of MOESAIC_ADMIN_KEY, else the API key."""
    api_key: str | None = None
    """The server's API key, for a server without an admin key of its own. None: the value of
    MOESAIC_API_KEY."""
    expert_servers: int | None = None
    """New number of expert servers. None: unchanged."""
    attention_workers: int | None = None
    """New number of attention workers. None: unchanged."""
    prefill_workers: int | None = None
    """New number of prefill workers. None: unchanged."""
    cancel: bool = False
    """End the change that an earlier call began, and undo what it did."""

    def __post_init__(self) -> None:
        for flag, number, least in (
            ("--expert-servers", self.expert_servers, 1),
            ("--attention-workers", self.attention_workers, 1),
            ("--prefill-workers", self.prefill_workers, 0),
        ):
            if number is not None and number < least:
                raise ConfigError.field(flag, number, f"an integer of at least {least}")


@dataclass(frozen=True)
class Join:
    """Run a process that joins a running cluster, from this or another host."""

    address: str
    """HOST:PORT, the --cluster-address of the cluster. Several with commas between are tried in turn: first
    that of `moesaic serve`, then those of its standbys."""
    _: KW_ONLY
    secret_file: str
    """A copy of the cluster's --cluster-secret-file, with mode 600."""
    role: Literal["expert-server", "attention-worker", "prefill-worker", "ranks"] = "expert-server"
    """Role of this process in the cluster. ranks: this host's share of the ranks of a worker, with --nnodes
    of the cluster."""
    listen: str | None = None
    """HOST:PORT at which processes of other hosts reach this one. None: a free port of the address from
    which it connects to the cluster."""
    model: str | None = None
    """Directory of the checkpoint on this host. None: the same path as on the host of `moesaic serve`."""
    hf_overrides: str | None = None
    """Changes of config.json of --model, the same as `moesaic serve` of the cluster has."""
    threads: int | None = None
    """Number of compute threads. None: one per core."""
    capacity: float | None = None
    """Relative share of the experts and of the load that an expert server gets. The cluster's own servers
    have their --expert-capacities, or else their number of threads. None: --threads."""
    kernels: KernelName | None = None
    """Kernels for a CPU. None: those of the cluster. Answers have the same bits only if all processes use the
    native kernels of one instruction set."""
    device: Device | None = None
    """Where it computes: auto, cpu or cuda. None: as the cluster's own processes of this role."""
    log_level: LogLevel = "info"
    """Least level of the log lines, on stderr: debug, info, warning or error."""

    def __post_init__(self) -> None:
        check_threads(self.threads)
        if self.capacity is not None and not 0 < self.capacity < math.inf:
            raise ConfigError.field("--capacity", self.capacity, "a positive number")
        if self.hf_overrides is not None and self.model is None:
            raise ConfigError.field("--hf-overrides", self.hf_overrides, "nothing without --model")


@dataclass(frozen=True)
class InitCluster:
    """Make the secret of a cluster."""

    file: Path = Path("cluster.secret")
    """New file for the secret. It gets mode 600, so that only this user can read it."""


SolverName = Literal["ours", "sem-moe", "speculative", "eplb", "moetuner", "metis", "kmeans", "vanilla"]
TABLES = ".tables.npz"
"""Suffix of the file of tables, in place of .json."""


@dataclass(frozen=True)
class Place:
    """Place experts on ranks by the experts that tokens of a profile chose."""

    file: Path
    """Profile that `moesaic profile` wrote."""
    _: KW_ONLY
    ranks: int
    """Number of ranks: --data-parallel-size or --tensor-parallel-size of the server."""
    solver: SolverName | None = None
    """Solver of the placement. ours, speculative (cross-entropy) and sem-moe (alternating) cluster tokens
    and experts together. kmeans and metis group experts. moetuner uses load and transitions, eplb only load.
    vanilla gives each rank consecutive experts. None: ours; with --compare no placement is written."""
    output_file: Path | None = None
    """File for the placement (.json). Its tables of tokens are written next to it (.tables.npz)."""
    format: Literal["moesaic", "sglang"] = "moesaic"
    """Form of the written file. moesaic: for --placement of moesaic serve. sglang: for SGLang's
    --init-expert-location, without tables; --ranks is then its --ep-size, and --redundant-experts its
    --ep-num-redundant-experts."""
    engine_map: Annotated[Path | None, Parameter(name="--from")] = None
    """Placement that is measured too: what another engine uses (SGLang's physical_to_logical_map as .json or
    .pt), or a placement of moesaic."""
    redundant_experts: int = 0
    """Number of additional expert copies in each layer, placed where they are needed most."""
    topology: Path | None = None
    """File of hosts and the links between them (.toml or .json), with the hosts of the attention workers and
    of each rank's server. Experts are then placed so that rows take few seconds on the links, and the bytes
    on each link are predicted. None: all links are alike."""
    share: float = 0.2
    """Share of the recorded requests that solvers see for the measurement. They are measured on all others.
    The written placement is then solved on the whole profile."""
    seed: int = 0
    """Seed of the solvers and of the requests that they see."""
    compare: Annotated[bool, Parameter(negative="")] = False
    """Measure all solvers, one row each."""
    model: str | None = None
    """The profile's model: a Hugging Face directory, a hub id, or demo. A token id that the profile never saw
    then uses the nearest known id in the model's embedding. Profiles of `moesaic profile` contain these
    nearest ids; recordings of a server do not."""
    revision: str | None = None
    """Branch, tag or commit of a hub id in --model."""
    hf_overrides: str | None = None
    """Changes of config.json of --model, as JSON: `{"key": null}` drops a key. See `moesaic serve`."""
    plot: Path | None = None
    """Draw a layer's activation map before and after into this SVG file."""
    plot_layer: int | None = None
    """Layer to draw. None: the middle one of the layers with routed experts."""

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ConfigError.field("--ranks", self.ranks, "an integer of at least 1")
        if self.solver is not None and self.solver not in get_args(SolverName):
            raise ConfigError.field("--solver", self.solver, ", ".join(get_args(SolverName)))
        if self.redundant_experts < 0:
            raise ConfigError.field("--redundant-experts", self.redundant_experts, "an integer of at least 0")
        if not 0 < self.share < 1:
            raise ConfigError.field("--share", self.share, "a number between 0 and 1")
        if self.seed < 0:
            raise ConfigError.field("--seed", self.seed, "an integer of at least 0")
        for flag, value in (("--revision", self.revision), ("--hf-overrides", self.hf_overrides)):
            if value is not None and self.model is None:
                raise ConfigError.field(flag, value, "nothing without --model")
        self._check_output()
        self._check_plot()

    def _check_output(self) -> None:
        path = self.output_file
        if path is None:
            if not self.compare:
                raise ConfigError(
                    "--output-file: give a file for the placement, or --compare to write no placement"
                )
            return
        if self.compare and self.solver is None:
            raise ConfigError("--output-file: with --compare, give --solver to choose the written placement")
        if path.suffix != ".json" or not path.absolute().parent.is_dir() or path.is_dir():
            allowed_values = "a file that ends in .json, in an existing directory"
            raise ConfigError.field("--output-file", str(path), allowed_values)

    def _check_plot(self) -> None:
        path = self.plot
        if path is None:
            if self.plot_layer is not None:
                raise ConfigError("--plot-layer: allowed only with --plot")
            return
        if self.output_file is None:
            raise ConfigError("--plot: draws the written placement; give --output-file as well")
        if path.suffix.lower() != ".svg" or not path.absolute().parent.is_dir() or path.is_dir():
            raise ConfigError.field("--plot", str(path), "a file that ends in .svg, in an existing directory")

    @property
    def solver_to_write(self) -> SolverName | None:
        """The solver whose placement is written. None if no placement is written."""
        return None if self.output_file is None else self.solver or "ours"

    @property
    def solvers_to_measure(self) -> tuple[str, ...]:
        """The solvers that are measured, in the order of the table."""
        if self.compare:
            return tuple(reversed(get_args(SolverName)))
        return tuple(dict.fromkeys(("vanilla", self.solver or "ours")))


@dataclass(frozen=True)
class ExportProfile:
    """Write a profile's hot experts for engines that keep some experts in faster memory."""

    file: Path
    """Profile that `moesaic profile` wrote."""
    _: KW_ONLY
    form: Annotated[Literal["llama-moe-trace", "hot-experts"], Parameter(name="--to")]
    """llama-moe-trace: routes as CSV, for --moe-cache-profile of a fork of llama.cpp. hot-experts: counts of
    each expert, for --hot-experts of moesaic serve."""
    output_file: Path
    """File to write."""
    model: str | None = None
    """The profile's model, for hot-experts: a Hugging Face directory, a hub id, or demo."""

    def __post_init__(self) -> None:
        if self.form == "hot-experts" and self.model is None:
            raise ConfigError.field("--model", None, "the profile's model, which the list names")
        if self.form != "hot-experts" and self.model is not None:
            raise ConfigError.field("--model", self.model, "nothing without --to hot-experts")


@dataclass(frozen=True)
class ShowProfile:
    """Show how skewed and how predictable a model's routing is."""

    file: Path
    """Profile that `moesaic profile` wrote."""
    _: KW_ONLY
    plot: Path | None = None
    """Draw the statistics into this SVG file."""
    html: Path | None = None
    """Write charts and tables as one HTML file, which opens offline."""
    ranks: int = 8
    """Number of ranks for the prediction of a token's rank. Each rank has a consecutive range of experts. A
    model with fewer experts has fewer ranks."""
    profile_share: float = 0.2
    """Share of the requests from which predictions are learned. They are tested on the other requests."""
    tokens: int = 100_000
    """Maximum number of tokens of recorded requests that are examined. Counts include all tokens."""
    seed: int = 0
    """Seed that chooses the requests for learning."""

    def __post_init__(self) -> None:
        if self.plot is not None and self.plot.suffix.lower() != ".svg":
            raise ConfigError.field("--plot", str(self.plot), "a file that ends in .svg")
        if self.ranks < 1:
            raise ConfigError.field("--ranks", self.ranks, "an integer of at least 1")
        if not 0 < self.profile_share < 1:
            raise ConfigError.field("--profile-share", self.profile_share, "a number between 0 and 1")
        if self.tokens < 1:
            raise ConfigError.field("--tokens", self.tokens, "an integer of at least 1")
        if self.seed < 0:
            raise ConfigError.field("--seed", self.seed, "an integer of at least 0")


@dataclass(frozen=True)
class MeasureHardware:
    """Measure this machine for plans."""

    _: KW_ONLY
    output_file: Path | None = None
    """File for the figures (.toml). None: the figures are only printed."""
    path: Path = Path()
    """A large file to read, such as a shard of a checkpoint, or a directory on the disk to measure. In a
    directory the largest *.safetensors is read, or a file of 1 GiB is written and deleted."""
    threads: int | None = None
    """Number of compute threads. None: one per core."""
    device: Device = "auto"
    """Memory levels to measure. cuda: GPU memory and RAM; cpu: RAM and disk; auto: cuda if there is a GPU."""
    name: str | None = None
    """Name of the machine, for people. None: the name of its processor."""

    def __post_init__(self) -> None:
        check_threads(self.threads)


@dataclass(frozen=True)
class Compress:
    """Write a checkpoint whose routed experts take 12 bits per number, without loss."""

    model: str
    """A Hugging Face directory, a hub id, or demo. Its experts must be stored in bf16."""
    directory: Path
    """Directory of the compressed checkpoint. It must not exist yet, or be empty."""
    _: KW_ONLY
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    hf_overrides: str | None = None
    """Changes of config.json, as JSON: `{"key": null}` drops a key. See `moesaic serve`."""

    def __post_init__(self) -> None:
        path = self.target
        is_taken = any(path.iterdir()) if path.is_dir() else path.exists()
        if is_taken or not path.parent.is_dir():
            allowed_values = "a directory that does not exist yet or is empty, in an existing one"
            raise ConfigError.field("DIRECTORY", str(self.directory), allowed_values)

    @property
    def target(self) -> Path:
        """The absolute directory, with ~ and links resolved."""
        return expand_home(self.directory).resolve()


@dataclass(frozen=True)
class KernelsBench:
    """Time each operation of a model's layer, beside the roofs of the machine."""

    model: str = "qwen3-30b-a3b"
    """Model whose sizes are taken: a Hugging Face directory, a config.json, a GGUF file, `demo`, or a name of
    `moesaic plan`. Its weights are not read."""
    _: KW_ONLY
    rows: Annotated[tuple[int, ...], Parameter(consume_multiple=True, negative_iterable=())] = (1, 8, 32, 512)
    """Rows of a step. Up to 64 rows are decode steps of as many requests. More rows are one prompt."""
    types: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative_iterable=())] = ()
    """Types of the experts. None given: bfloat16, int8, int4, and the model's own."""
    context: int = 1024
    """Cached tokens of each request of a decode step."""
    kv_cache_dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    """Type of the KV cache."""
    kernels: KernelName = "auto"
    """Kernels to time, as for `moesaic serve`."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device whose kernels are timed. On a GPU several calls of an operation are one CUDA graph."""
    threads: int | None = None
    """Number of compute threads. None: one per core."""
    seconds: float = 0.2
    """Seconds for each figure."""

    def __post_init__(self) -> None:
        check_threads(self.threads)
        for flag, value in [*(("--rows", rows) for rows in self.rows or (0,)), ("--context", self.context)]:
            if value < 1:
                raise ConfigError.field(flag, value, "an integer of at least 1")
        if not self.seconds > 0:
            raise ConfigError.field("--seconds", self.seconds, "a number above 0")
        for name in self.types:
            if not is_native(name):
                raise ConfigError.field("--types", name, ", ".join(NATIVE_DTYPES))


@dataclass(frozen=True)
class ShowTrace:
    """Sum up a trace, and write it as a page."""

    file: Path
    """File that `--trace` of serve, run-batch, bench throughput or simulate wrote."""
    _: KW_ONLY
    html: Path | None = None
    """Write the trace as one HTML file, which opens offline: rows of spans over time."""
