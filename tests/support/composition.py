"""Which features of a served model go together: the table of docs/cluster.md, and what its test starts."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

SERVERS = {"--expert-servers": "2"}
RANKS = {"--tensor-parallel-size": "2"}
Flags = Mapping[str, str]
Pair = frozenset[str]


@dataclass(frozen=True)
class Feature:
    """Something that a user asks for by flags, or by the choice of a model."""

    flags: Flags
    """Flags with their values, and those that it needs. {} in a value is the folder of the model."""
    model: str = "plain"


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
    "`--trace`": Feature({"--trace": "{}/trace.json"}),
    "`--record-routing`": Feature({"--record-routing": "{}/routing.npz"}),
    "`--fast-memory`": Feature({"--fast-memory": "6MiB", "--hardware": "{}/this.toml"}),
    "a model with states": Feature({}, "states"),
    "quantised experts": Feature({}, "quantised"),
}

ON_SERVERS = tuple(name for name, one in FEATURES.items() if "--expert-servers" in one.flags)
"""Features of which each needs expert servers."""
BESIDE = (*ON_SERVERS, "`--rebalance routing`", "`--enable-expert-parallel`")
OBSERVED = ("`--inflight-batches 2`", "`--trace`", "`--record-routing`")
HOLDING = "ranks that exchange rows hold the experts themselves"
STEPS = "the ranks run whole steps together, one at a time"
PASSES = "without expert servers a pass loads one worker's experts, layer by layer"
DRAFTS = "routes of drafted tokens that are not accepted must not be recorded"
IN_STEP = "the two halves of a batch take turns in lockstep"
REASONS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("`--moe-collectives`", BESIDE, HOLDING),
    ("`--moe-collectives`", OBSERVED, STEPS),
    (
        "`--fast-memory`",
        ("`--attention-workers`", "`--prefill-workers`", *OBSERVED[::2], "`--speculative-config`"),
        PASSES,
    ),
    ("`--record-routing`", ("`--speculative-config`",), DRAFTS),
    ("`--inflight-batches 2`", ("`--schedule barrier`", "`--schedule async`", "`--schedule auto`"), IN_STEP),
    ("`--rebalance routing`", ("`--speculative-config`",), DRAFTS),
)
"""(feature, those that are refused with it, why)."""
REFUSED: dict[Pair, str] = {frozenset((one, other)): why for one, others, why in REASONS for other in others}
WITH_SERVERS = {frozenset(("`--tensor-parallel-size`", one)) for one in OBSERVED}
"""Pairs that need expert servers as well, since ranks that hold experts refuse the second feature."""


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
    names = list(names)
    pairs = map(frozenset, itertools.combinations(names, 2))
    return merged(names) is not None and not any(pair in REFUSED for pair in pairs)


def groups() -> list[tuple[str, ...]]:
    """Features that are started together, so that every pair that goes together is in one of the groups.

    Each group takes the feature that meets the most others for the first time, until none can be added.
    """
    left = {frozenset(pair) for pair in itertools.combinations(FEATURES, 2) if allowed(pair)}
    found = []
    while left:
        group: list[str] = sorted(min(left, key=sorted))
        while more := [name for name in FEATURES if name not in group and allowed([*group, name])]:
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
    lines = [f"- {', '.join(FEATURES)}.", "", "| feature | refused with | why |", "|---|---|---|"]
    lines += [f"| {one} | {', '.join(others)} | {why} |" for one, others, why in REASONS]
    return "\n".join(lines) + "\n"
