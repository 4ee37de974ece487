"""Which features of a served model go together: the table of docs/cluster.md, and what its test starts."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

SERVERS = {"--expert-servers": "2"}
RANKS = {"--tensor-parallel-size": "2"}
DOOR = {"--cluster-address": "tcp:127.0.0.1:0", "--cluster-secret-file": "{}/secret"}
NOBODY = "tcp:127.0.0.1:9"
"""A host that a standby watches, which is gone."""
Flags = Mapping[str, str]
Pair = frozenset[str]


@dataclass(frozen=True)
class Feature:
    """Something that a user asks for by flags, or by the choice of a model."""

    flags: Flags
    """Flags with their values, and those that it needs. {} in a value is the folder of the model."""
    model: str = "plain"
    joins: tuple[str, ...] = ()
    """Roles of processes of other hosts that join beside those that the flags ask for."""


FEATURES: dict[str, Feature] = {
    "`--attention-workers`": Feature({"--attention-workers": "2"}),
    "`--prefill-workers`": Feature({"--prefill-workers": "1"}),
    "`--expert-servers`": Feature(SERVERS),
    "`--enable-expert-parallel`": Feature({"--data-parallel-size": "2", "--enable-expert-parallel": ""}),
    "`--tensor-parallel-size`": Feature(RANKS),
    "`--moe-collectives`": Feature({**RANKS, "--moe-collectives": "deepspeed"}),
    "`--min-replicas`": Feature({**SERVERS, "--min-replicas": "2"}),
    "`--redundant-experts`": Feature({**SERVERS, "--redundant-experts": "2"}),
    "`--placement`": Feature({**SERVERS, "--placement": "{}/placement.json"}),
    "`--autoscale`": Feature({**SERVERS, "--autoscale": "2:3"}),
    "`--rebalance load`": Feature({**SERVERS, "--rebalance": "load"}),
    "`--rebalance routing`": Feature(
        {"--data-parallel-size": "2", "--enable-expert-parallel": "", "--rebalance": "routing"}
    ),
    "`--schedule barrier`": Feature({**SERVERS, "--schedule": "barrier"}),
    "`--schedule async`": Feature({**SERVERS, "--schedule": "async"}),
    "`--schedule auto`": Feature({**SERVERS, "--schedule": "auto"}),
    "`--inflight-batches 2`": Feature({"--inflight-batches": "2"}),
    "`--combine partial`": Feature({**SERVERS, "--combine": "partial"}),
    "`--speculative-config`": Feature(
        {"--speculative-config": '{"method": "ngram", "num_speculative_tokens": 3}'}
    ),
    "`--kv-cache-dtype int8`": Feature({"--kv-cache-dtype": "int8"}),
    "`--relay`": Feature({**SERVERS, "--relay": "always", "--topology": "{}/hosts.toml"}),
    "`--trace`": Feature({"--trace": "{}/trace.json"}),
    "`--record-routing`": Feature({"--record-routing": "{}/routing.npz"}),
    "`--fast-memory`": Feature({"--fast-memory": "6MiB", "--hardware": "{}/this.toml"}),
    "`--prefix-cache-dir`": Feature({"--prefix-cache-dir": "{}/prefixes"}),
    "a model with states": Feature({}, "states"),
    "quantised experts": Feature({}, "quantised"),
    "`join --role expert-server`": Feature({**SERVERS, **DOOR}, joins=("expert-server",)),
    "`join --role attention-worker`": Feature(DOOR, joins=("attention-worker",)),
    "`join --role prefill-worker`": Feature({"--prefill-workers": "1", **DOOR}, joins=("prefill-worker",)),
    "`--nnodes`": Feature({**RANKS, **DOOR, "--nnodes": "2"}),
    "`--standby-for`": Feature({**DOOR, "--standby-for": NOBODY}),
    "Ray": Feature({"--distributed-executor-backend": "ray", "--cluster-secret-file": "{}/secret"}),
}

HOSTS = (
    "`join --role expert-server`",
    "`join --role attention-worker`",
    "`join --role prefill-worker`",
    "`--nnodes`",
    "`--standby-for`",
    "Ray",
)
"""Features with processes of several hosts."""
WORKERS_JOIN = HOSTS[1:3]
ON_GPUS = {"--device": "cuda", "--transport": "cuda_ipc", "--kv-cache-memory": "8MiB"}
NOT_ON_GPUS = ("`--moe-collectives`", "`--fast-memory`", "`--relay`", "`--prefix-cache-dir`")
"""Features of one host that --transport cuda_ipc does not go with."""
BY_NVSHMEM = {"--device": "cuda", "--kernels": "triton", "--cudagraph-mode": "full", "--transport": "nvshmem"}
NOT_BY_NVSHMEM = (
    *("`--tensor-parallel-size`", "`--moe-collectives`", "`--nnodes`", "`--fast-memory`", "`--relay`", "Ray"),
    "`--prefix-cache-dir`",
    *("`--schedule barrier`", "`--schedule async`", "`--schedule auto`"),
    *("`--inflight-batches 2`", "`--combine partial`"),
)
"""Features that --transport nvshmem, or the whole graphs that it needs, do not go with."""

ON_SERVERS = tuple(name for name, one in FEATURES.items() if "--expert-servers" in one.flags)
"""Features of which each needs expert servers."""
BESIDE = (*ON_SERVERS, "`--rebalance routing`", "`--enable-expert-parallel`")
OBSERVED = ("`--inflight-batches 2`", "`--trace`", "`--record-routing`")
HOLDING = "ranks that exchange rows hold the experts themselves"
STEPS = "the ranks run whole steps together, one at a time"
PASSES = "without expert servers a pass loads one worker's experts, layer by layer"
DRAFTS = "routes of drafted tokens that are not accepted must not be recorded"
IN_STEP = "the two halves of a batch take turns in lockstep"
FILES = "its files are on the host of `serve`"
PLACES = "the places of a standby are for whole processes that join, in any order"
REASONS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("`--moe-collectives`", BESIDE, HOLDING),
    ("`--moe-collectives`", OBSERVED, STEPS),
    (
        "`--fast-memory`",
        ("`--attention-workers`", "`--prefill-workers`", *OBSERVED[::2]),
        PASSES,
    ),
    ("`--prefix-cache-dir`", ("`--nnodes`",), "the first rank looks for the files of all ranks on its host"),
    ("`--record-routing`", ("`--speculative-config`",), DRAFTS),
    ("`--inflight-batches 2`", ("`--schedule barrier`", "`--schedule async`", "`--schedule auto`"), IN_STEP),
    ("`--rebalance routing`", ("`--speculative-config`",), DRAFTS),
    ("`--nnodes`", ("Ray",), "a group of ranks is on one node"),
    ("`--nnodes`", ("`--autoscale`",), "no host can be added for a group by itself"),
    ("`--standby-for`", ("`--placement`", "`--enable-expert-parallel`", "`--nnodes`", "Ray"), PLACES),
    ("`--standby-for`", ("`--rebalance routing`",), "it needs `--enable-expert-parallel`"),
    ("`--standby-for`", ("`--trace`", "`--record-routing`"), FILES),
    ("Ray", ("`--rebalance routing`", "`--trace`", "`--record-routing`"), FILES),
)
"""(feature, those that are refused with it, why)."""
AT_THE_DOOR: tuple[tuple[str, tuple[str, ...], str], ...] = tuple(
    (one, others, why)
    for one in WORKERS_JOIN
    for others, why in (
        (("`--record-routing`", "`--rebalance routing`"), "workers of other hosts record no routing"),
        (("`--nnodes`",), "each worker of the cluster has ranks on several hosts"),
    )
)
"""The same, where the cluster refuses the process that joins."""
REFUSED: dict[Pair, str] = {
    frozenset((one, other)): why for one, others, why in (*REASONS, *AT_THE_DOOR) for other in others
}
WITH_SERVERS = {
    *(frozenset(("`--tensor-parallel-size`", one)) for one in OBSERVED),
    *(frozenset(("`--nnodes`", one)) for one in OBSERVED),
    *(frozenset(("`--fast-memory`", one)) for one in HOSTS),
}
"""Pairs that need expert servers as well, since what holds the experts itself refuses the second feature."""


NOT_ALL_THREE = {"a model with states", "`--fast-memory`", "`--prefix-cache-dir`"}
"""Features of which two go together, but not all three."""


def merged(names: Iterable[str]) -> tuple[dict[str, str], str] | None:
    """The flags of all features and the model. None where two of them are values of one flag."""
    names = list(names)
    flags: dict[str, str] = {}
    models = {FEATURES[name].model for name in names} - {"plain"}
    for name in names:
        for flag, value in FEATURES[name].flags.items():
            if flags.setdefault(flag, value) != value:
                return None
    if any(frozenset(pair) in WITH_SERVERS for pair in itertools.combinations(names, 2)):
        flags |= SERVERS
    if "--expert-servers" in flags or "--enable-expert-parallel" in flags:
        flags.pop("--hardware", None)  # servers read experts as rows need them, by no plan
    return None if len(models) > 1 else (flags, next(iter(models), "plain"))


def allowed(names: Iterable[str]) -> bool:
    """Whether all of these go together, by the tables above."""
    names, found = list(names), merged(names)
    if found is None or {"--expert-servers", "--moe-collectives"} <= found[0].keys():
        return False
    return not set(names) >= NOT_ALL_THREE and not any(
        frozenset(pair) in REFUSED for pair in itertools.combinations(names, 2)
    )


def groups(several_hosts: bool, but: Iterable[str] = ()) -> list[tuple[str, ...]]:
    """Features that are started together, so that every pair that goes together is in one of the groups.

    several_hosts: the pairs with a feature of several hosts; else those without. but: features to leave out.
    Each group takes the feature that meets the most others for the first time, until none can be added.
    """
    offered = [name for name in FEATURES if (several_hosts or name not in HOSTS) and name not in but]
    pairs = map(frozenset, itertools.combinations(offered, 2))
    left = {pair for pair in pairs if allowed(pair) and any(one in HOSTS for one in pair) == several_hosts}
    found = []
    while left:
        group: list[str] = sorted(min(left, key=sorted))
        while more := [name for name in offered if name not in group and allowed([*group, name])]:
            met = {name: sum(frozenset((name, one)) in left for one in group) for name in more}
            best = max(more, key=lambda name: met[name])
            if not met[best]:
                break
            group.append(best)
        left -= {frozenset(pair) for pair in itertools.combinations(group, 2)}
        found.append(tuple(group))
    return found


def in_words() -> str:
    """The lines of docs/cluster.md."""
    here = ", ".join(name for name in FEATURES if name not in HOSTS)
    lines = [
        f"- {here}.",
        f"- Of [several hosts](hosts.md): {', '.join(HOSTS)}.",
        "",
        "| feature | refused with | why |",
        "|---|---|---|",
    ]
    lines += [f"| {one} | {', '.join(others)} | {why} |" for one, others, why in (*REASONS, *AT_THE_DOOR)]
    return "\n".join(lines) + "\n"
