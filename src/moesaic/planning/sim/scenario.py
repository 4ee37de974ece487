"""What is simulated: the records of a scenario file (TOML), one for each of its tables."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

from moesaic.cluster.autoscaling import autoscale_rules
from moesaic.config import ClusterConfig, QueueConfig
from moesaic.core.errors import ConfigError
from moesaic.core.home import expand_home
from moesaic.core.topology import FLAG, Topology
from moesaic.core.topology import read as read_topology
from moesaic.planning.sim.fields import (
    choice,
    flag,
    length,
    number,
    override,
    read,
    setting,
    text,
    whole_number,
)
from moesaic.policy.fleet.autoscale import EXPERT_SERVERS

LINKS = ("latency_us", "gb_per_s")
ROUTINGS = ("uniform", "exponential", "zipf", "profile")


@dataclass(frozen=True, kw_only=True)
class Links:
    """What carries rows between workers and servers. Each device sends one message after another."""

    latency_us: float | None = setting(None, number())
    """Microseconds of one way. Without it: of the devices' file."""
    gb_per_s: float | None = setting(None, number(is_exclusive=True))
    """10^9 bytes/s that a device sends. Without it: of the devices' file."""
    topology: str | None = setting(None, text("the path of a topology"))
    """Hosts and links, as of --topology, in place of `latency_us` and `gb_per_s`. The devices of a host share
    its links to other hosts. A device that no host names is on the first one."""
    number_bytes: int = setting(4, whole_number(1, 4))
    """Bytes of one number of a row. moesaic sends float32."""


@dataclass(frozen=True, kw_only=True)
class Workers:
    """The attention workers. All are alike."""

    count: int = setting(1, whole_number(1))
    max_num_seqs: int = setting(256, whole_number(1))
    """Maximum number of requests that a worker runs at once."""
    max_num_batched_tokens: int = setting(2048, whole_number(1))
    """Maximum rows of a step, or of all units in flight with the schedule async."""
    max_model_len: int = setting(8192, whole_number(2))
    """Maximum tokens of a request."""
    block_size: int = setting(16, whole_number(1))
    kv_tokens: int | None = setting(None, whole_number(1))
    """Tokens in a worker's KV cache. Without it: enough for `max_num_seqs` of the longest requests."""
    dispatch: str = setting("least-loaded", choice("least-loaded", "round-robin"))
    """Which worker gets a request."""
    sampler_ms: float | None = setting(None, number())
    """Milliseconds of a run from the last experts to the sampled tokens. Without it: as other segments."""
    event_us: float = setting(0.0, number())
    """Microseconds that a worker's process needs for each event, beside its device."""


@dataclass(frozen=True, kw_only=True)
class Servers:
    """The expert servers. All are alike."""

    count: int = setting(1, whole_number(1))
    beside_workers: bool = setting(False, flag())
    """Server i shares the device of worker i. They take turns, and rows between them use no link."""
    batch_pairs: int | None = setting(None, whole_number(1))
    """Minimum pairs of a run; 1: a server computes whatever is there. Without it: as --expert-batch-pairs."""
    batch_wait_ms: float = setting(0.0, number())
    """Milliseconds after which a server computes fewer pairs."""
    queue_history: int = setting(0, whole_number(0))
    """Past choices whose queues count in the look-ahead of the queue policy."""
    by_expert: bool = setting(False, flag())
    """A queue for each expert of a layer, as in Asynchronous Expert Parallelism. false: one a layer."""


@dataclass(frozen=True, kw_only=True)
class PlacementTable:
    """Which server holds which experts."""

    kind: str = setting("even", choice("even", "round-robin", "file", "solver"))
    """even: consecutive experts, as `serve` begins. round-robin: expert i on server i modulo their number.
    file: what `moesaic place` wrote. solver: solved here, from the profile of `routing`."""
    file: str | None = setting(None, text("the path of a placement"))
    solver: str = setting("ours", text("the name of a solver of moesaic place"))
    redundant_experts: int = setting(0, whole_number(0))
    """Further copies of experts in each layer."""
    min_replicas: int = setting(1, whole_number(1))
    """Minimum number of servers that hold each expert."""
    rebalance_interval: float = setting(0.0, number())
    """Seconds between two checks whether experts should move; 0: they stay."""
    autoscale: str | None = setting(None, text("MIN:MAX, such as 2:6"))
    """The number of servers follows the load."""
    read_gb_per_s: float = setting(1.073741824, number(is_exclusive=True))
    """10^9 bytes/s at which a server reads experts that move to it."""
    start_seconds: float = setting(5.0, number())
    """Seconds until a server's new process serves, beside reading its experts."""


@dataclass(frozen=True, kw_only=True)
class ScheduleTable:
    """How workers and servers work together."""

    kind: str = setting("lockstep", choice("barrier", "lockstep", "async", "auto"))
    inflight_batches: int = setting(1, whole_number(1, 2))
    """Steps of a worker that run at once, with lockstep."""
    queue_policy: str = setting("defrag", choice("defrag", "mtfs", "flfs"))
    """The rule that says which rows run next, with async."""
    queue_urgency: float = setting(0.1, number())
    """Seconds after which the oldest rows of a worker run next, with async; 0: never."""
    queue_history: int = setting(0, whole_number(0))
    run_rows: int | None = setting(None, whole_number(0))
    """Rows from which a run may begin while others are with the experts, and from which answers are used part
    by part, with async. 0: always, as in the paper. Without it: as the devices' curves say."""
    combine: str = setting("exact", choice("exact", "partial"))
    """Whether a server answers each (row, expert) pair, or a sum for each row."""
    relay: str = setting("auto", choice("auto", "always", "off"))
    """Whether a row goes to another host once, also if several servers there need it, with a topology."""
    replica_timeout: float | None = setting(None, number(is_exclusive=True))
    """Seconds, as --replica-timeout."""


@dataclass(frozen=True, kw_only=True)
class WorkloadTable:
    """The requests."""

    kind: str = setting("poisson", choice("poisson", "trace", "closed"))
    """poisson: at a rate. trace: as recorded. closed: clients that send a request once theirs is answered."""
    rate: float | None = setting(None, number(is_exclusive=True))
    """Requests per second, with poisson."""
    clients: int | None = setting(None, whole_number(1))
    """Number of clients, with closed."""
    file: str | None = setting(None, text("the path of a CSV file"))
    """File with the columns arrival_s, input_tokens, output_tokens, with trace."""
    speed: float = setting(1.0, number(is_exclusive=True))
    """Factor of the arrivals' rate, with trace."""
    prompt: tuple[int, int] = setting((100, 100), length())
    """Tokens of a prompt."""
    answer: tuple[int, int] = setting((100, 100), length())
    """Tokens of an answer."""
    requests: int | None = setting(None, whole_number(1))
    """Number of requests. Without it: as many as come in the time."""
    prefill: bool = setting(True, flag())
    """false: the keys and values of prompts come from elsewhere and take no time, but memory."""


@dataclass(frozen=True, kw_only=True)
class RoutingTable:
    """Which experts tokens choose."""

    kind: str = setting("uniform", choice(*ROUTINGS))
    """exponential: the experts' shares have an exponential distribution, as in Asynchronous Expert
    Parallelism. zipf: see `exponent`. profile: as recorded."""
    exponent: float = setting(1.0, number())
    """Exponent of zipf: share i is proportional to (i + 1) ** -exponent."""
    shuffled: bool = setting(True, flag())
    """Whether other experts are popular in each layer. false: expert 0 is the most popular one everywhere."""
    moves_every: float | None = setting(None, number(is_exclusive=True))
    """Seconds after which other experts are popular."""
    file: str | None = setting(None, text("the path of a profile"))
    """File that `moesaic profile` wrote, with profile."""
    experts: int | None = setting(None, whole_number(1))
    """Experts of a layer. Without it: the model's."""
    top_k: int | None = setting(None, whole_number(1))
    """Experts that a token chooses. Without it: the model's."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens to a server, or to an attention worker."""

    at: float = setting(MISSING, number())
    """Seconds from the start."""
    server: int | None = setting(None, whole_number(0))
    """The server's number."""
    worker: int | None = setting(None, whole_number(0))
    """The attention worker's number, in place of a server's. It can only die. Its requests go on at others at
    once, and those compute the keys and values again, unless workload.prefill is false."""
    kind: str = setting("dies", choice("dies", "vanishes", "freezes"))
    """dies: its process ends, and its connections break. vanishes: its host is gone, and nobody is told.
    freezes: it does nothing for a time."""
    back: float | None = setting(None, number(is_exclusive=True))
    """Seconds until its new process serves, or until it goes on. Without it: it stays away."""


@dataclass(frozen=True, kw_only=True)
class ObjectivesTable:
    """The latencies of a good request."""

    ttft_ms: float | None = setting(None, number(is_exclusive=True))
    """Maximum milliseconds from its arrival to its first token."""
    itl_ms: float | None = setting(None, number(is_exclusive=True))
    """Maximum mean milliseconds between its tokens."""


FIELD_OF = {
    "--expert-batch-wait": "servers.batch_wait_ms",
    "--expert-batch-pairs": "servers.batch_pairs",
    "--expert-servers": "servers.count",
    "--attention-workers": "workers.count",
    "--min-replicas": "placement.min_replicas",
    "--redundant-experts": "placement.redundant_experts",
    "--rebalance-interval": "placement.rebalance_interval",
    "--autoscale": "placement.autoscale",
    "--queue-urgency": "schedule.queue_urgency",
    "--queue-history": "schedule.queue_history",
    "--queue-policy": "schedule.queue_policy",
    "--slo-ttft": "objectives.ttft_ms",
    "--slo-itl": "objectives.itl_ms",
}
"""Flag of `serve` -> the field of a scenario that says the same."""
TABLES: dict[str, type[Any]] = {
    "links": Links,
    "workers": Workers,
    "servers": Servers,
    "placement": PlacementTable,
    "schedule": ScheduleTable,
    "workload": WorkloadTable,
    "routing": RoutingTable,
    "objectives": ObjectivesTable,
}


@dataclass(frozen=True, kw_only=True)
class _Plain:
    """The fields outside of tables."""

    model: str = setting(MISSING, text("a model, such as mixtral-8x7b, or a path"))
    seed: int = setting(0, whole_number(0))
    duration: float = setting(10.0, number(is_exclusive=True))
    warm_up: float = setting(0.0, number())


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """All that a simulation is told: the model, the devices, and a record for each table of the file."""

    model: str
    """The model, as for `moesaic plan`: a known name, a config.json, or a checkpoint's directory."""
    devices: str | dict[str, Any]
    """A file of modelled devices, a machine of `moesaic plan`, or the tables of such a file."""
    folder: Path
    """Paths of the file are relative to it."""
    seed: int = 0
    duration: float = 10.0
    """Seconds."""
    warm_up: float = 0.0
    """Seconds at the beginning that are not measured."""
    links: Links = Links()
    workers: Workers = Workers()
    servers: Servers = Servers()
    placement: PlacementTable = PlacementTable()
    schedule: ScheduleTable = ScheduleTable()
    workload: WorkloadTable = WorkloadTable()
    routing: RoutingTable = RoutingTable()
    objectives: ObjectivesTable = ObjectivesTable()
    faults: tuple[Fault, ...] = ()

    def __post_init__(self) -> None:
        """Check what depends on several fields. Raises ConfigError."""
        if self.warm_up >= self.duration:
            raise ConfigError.field("warm_up", self.warm_up, f"less than duration, {self.duration:g}")
        self._check_links()
        self._check_workload()
        self._check_placement()
        self._check_servers()
        self._check_serve_settings()

    def _check_links(self) -> None:
        for name in LINKS:
            if self.links.topology is not None and getattr(self.links, name) is not None:
                raise ConfigError.field(
                    f"links.{name}", getattr(self.links, name), "only without links.topology"
                )

    def _check_workload(self) -> None:
        for kind, name in (("poisson", "rate"), ("closed", "clients"), ("trace", "file")):
            value = getattr(self.workload, name)
            if self.workload.kind == kind and value is None:
                raise ConfigError(f"workload.{name}: it is missing, with workload.kind {kind!r}")
            if self.workload.kind != kind and value is not None:
                raise ConfigError.field(f"workload.{name}", value, f"only with workload.kind {kind!r}")
        longest = self.workload.prompt[1] + self.workload.answer[1]
        if self.workload.kind != "trace" and longest > self.workers.max_model_len:
            allowed_values = f"at least {longest}, the longest prompt and answer"
            raise ConfigError.field("workers.max_model_len", self.workers.max_model_len, allowed_values)

    def _check_placement(self) -> None:
        """Check routing and placement together: a solver places by the routing of a profile."""
        if (self.routing.kind == "profile") != (self.routing.file is not None):
            raise ConfigError.field(
                "routing.file", self.routing.file, "a profile, with routing.kind 'profile'"
            )
        if (self.placement.kind == "file") != (self.placement.file is not None):
            allowed_values = "a placement, with placement.kind 'file'"
            raise ConfigError.field("placement.file", self.placement.file, allowed_values)
        if self.placement.kind == "solver" and self.routing.kind != "profile":
            raise ConfigError.field("routing.kind", self.routing.kind, "profile with placement.kind 'solver'")

    def _check_servers(self) -> None:
        if self.servers.beside_workers and self.servers.count != self.workers.count:
            allowed_values = f"{self.workers.count} as workers.count, with servers.beside_workers"
            raise ConfigError.field("servers.count", self.servers.count, allowed_values)
        for index, fault in enumerate(self.faults):
            self._check_fault(f"faults.{index}.", fault)

    def _check_fault(self, prefix: str, fault: Fault) -> None:
        if (fault.server is None) == (fault.worker is None):
            raise ConfigError.field(f"{prefix}server", fault.server, f"a number, or {prefix}worker has one")
        for name, count in (("server", self.servers.count), ("worker", self.workers.count)):
            number = getattr(fault, name)
            if number is not None and number >= count:
                raise ConfigError.field(f"{prefix}{name}", number, f"0 to {count - 1}")
        if fault.worker is not None and (fault.kind != "dies" or self.workers.count == 1):
            allowed_values = "dies with a worker, of which there are at least 2"
            raise ConfigError.field(f"{prefix}kind", fault.kind, allowed_values)
        if fault.kind == "freezes" and fault.back is None:
            raise ConfigError(f"{prefix}back: it is missing, with kind 'freezes'")

    def _check_serve_settings(self) -> None:
        """Check what `serve` checks in its flags. Messages name the scenario's fields in their place."""
        try:
            self.queues.check("async", self.schedule.queue_policy)  # type: ignore[arg-type]
            if set(autoscale_rules(self.cluster)) - {EXPERT_SERVERS}:
                allowed_values = "MIN:MAX expert servers: here the number of workers stays"
                raise ConfigError.field("--autoscale", self.placement.autoscale, allowed_values)
        except ConfigError as error:
            line = str(error)
            for flag, name in FIELD_OF.items():
                line = line.replace(flag, name)
            raise ConfigError(line) from error

    @property
    def queues(self) -> QueueConfig:
        """The queue settings, as `serve` has them."""
        return QueueConfig(
            queue_urgency=self.schedule.queue_urgency,
            queue_history=self.schedule.queue_history,
            expert_batch_pairs=self.servers.batch_pairs,
            expert_batch_wait=self.servers.batch_wait_ms,
        )

    @property
    def cluster(self) -> ClusterConfig:
        """The cluster's settings, as `serve` has them."""
        from_file = self.placement.kind in ("file", "solver")
        return ClusterConfig(
            attention_workers=self.workers.count,
            expert_servers=self.servers.count,
            redundant_experts=0 if from_file else self.placement.redundant_experts,
            min_replicas=1 if from_file else self.placement.min_replicas,
            rebalance_interval=self.placement.rebalance_interval,
            autoscale=self.placement.autoscale,
            slo_ttft=self.objectives.ttft_ms,
            slo_itl=self.objectives.itl_ms,
        )

    @property
    def topology(self) -> Topology | None:
        """The topology of `links`. Raises ConfigError for a file that is wrong."""
        if self.links.topology is None:
            return None
        try:
            return read_topology(self.path(self.links.topology))
        except ConfigError as error:
            raise ConfigError(str(error).replace(FLAG, "links.topology", 1)) from error

    def path(self, name: str) -> Path:
        """A path of the file."""
        return self.folder / expand_home(name)


def load(file: Path, changes: Sequence[str] = ()) -> Scenario:
    """Read a scenario file. changes: KEY=VALUE, in place of what the file says.

    Raises ConfigError with one line that names the field, its value, and what is allowed.
    """
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError.field("scenario", str(file), f"a file to read ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not a TOML file: {error}") from error
    for change in changes:
        override(tables, change)
    return parse(tables, file.parent)


def parse(tables: dict[str, Any], folder: Path = Path()) -> Scenario:
    """A scenario from parsed TOML. folder: where its paths begin."""
    plain_fields = dict(tables)
    devices = plain_fields.pop("devices", None)
    if not devices or not isinstance(devices, str | dict):
        allowed_values = "a file of modelled devices, a machine of moesaic plan, or a table"
        raise ConfigError.field("devices", devices, allowed_values)
    records: dict[str, Any] = {
        name: read(kind, plain_fields.pop(name, {}), f"{name}.") for name, kind in TABLES.items()
    }
    faults = plain_fields.pop("faults", [])
    if not isinstance(faults, list):
        raise ConfigError.field("faults", faults, "tables [[faults]]")
    records["faults"] = tuple(read(Fault, fault, f"faults.{index}.") for index, fault in enumerate(faults))
    table_names = {"devices", "faults", *TABLES}
    for name in plain_fields:
        if name not in _Plain.__dataclass_fields__:
            all_names = ", ".join((*_Plain.__dataclass_fields__, *sorted(table_names)))
            raise ConfigError.field(name, plain_fields[name], f"only these fields: {all_names}")
    plain = read(_Plain, plain_fields, "")
    return Scenario(devices=devices, folder=folder, **vars(plain), **records)
