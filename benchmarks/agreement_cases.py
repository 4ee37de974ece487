"""The scenarios of `simulator_agreement.py`: what both sides get."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moesaic import LLM, SamplingParams
from moesaic.core.placement import Placement
from moesaic.jobs.profiling.options import ProfileOptions
from moesaic.jobs.profiling.run import Gatherer
from moesaic.models import files
from moesaic.models.registry import routed_model
from moesaic.planning.sim.scenario import Scenario, parse

MODEL = "demo"
URGENCY = 0.1
"""Seconds of the devices' time after which the oldest rows run next, with the schedule async."""
SEATS, BATCHED, LONGEST, BLOCK = 64, 256, 64, 16
PROFILED = 64
"""Requests whose routing is recorded."""
DEVICES = {
    "balanced": (1.0, 1.0),
    "slow attention": (2.0, 1.0),
    "slow experts": (1.0, 2.5),
}
"""Name -> factors of the attention's and the experts' durations."""


@dataclass(frozen=True)
class Case:
    """A scenario."""

    schedule: str
    inflight: int
    workers: int
    servers: int
    load: dict[str, Any]
    uneven: bool = False
    """Whether server 0 has two thirds of the experts."""
    devices: str = "balanced"

    def describe(self) -> str:
        kind = self.load["kind"]
        load = f"{self.load['clients']} clients" if kind == "closed" else f"{self.load['rate']:g}/s"
        name = self.schedule + (", two in flight" if self.inflight == 2 else "")
        return f"{name:24} {self.workers}+{self.servers} {load:10} {self.devices:14} " + (
            "uneven" if self.uneven else "even"
        )


LENGTHS = {"prompt": [4, 12], "answer": [8, 16]}


def closed(clients: int) -> dict[str, Any]:
    return {"kind": "closed", "clients": clients, **LENGTHS}


def poisson(rate: float) -> dict[str, Any]:
    return {"kind": "poisson", "rate": rate, **LENGTHS}


SHAPES: tuple[dict[str, Any], ...] = (
    {"workers": 1, "servers": 2, "load": closed(12)},
    {"workers": 2, "servers": 2, "load": closed(40)},
    {"workers": 2, "servers": 2, "load": closed(32), "uneven": True, "devices": "slow experts"},
    {"workers": 2, "servers": 1, "load": poisson(20), "devices": "slow attention"},
    {"workers": 2, "servers": 2, "load": poisson(30), "uneven": True},
)
SCHEDULES = (("lockstep", 1), ("lockstep", 2), ("async", 1), ("barrier", 1))
CASES = [Case(*schedule, **shape) for shape in SHAPES for schedule in SCHEDULES]


@dataclass(frozen=True)
class Setting:
    """What all scenarios share."""

    folder: Path
    seconds: float
    warm_up: float
    dilation: float
    seed: int

    def device_tables(self, case: Case) -> dict[str, Any]:
        attention, experts = DEVICES[case.devices]
        return {
            "source": "made up",
            "attention": {"points_ms": [[4, 2.0 * attention], [32, 4.0 * attention]]},
            "experts": {
                "points_ms": [[16, 1.0 * experts], [128, 4.0 * experts]],
                "per_expert_ms": 0.04 * experts,
            },
            "link": {"latency_us": 50.0, "gb_per_s": 10.0},
        }

    def scenario(self, case: Case, event_us: float = 0.0) -> Scenario:
        """The scenario of the simulation."""
        return parse(
            {
                "model": MODEL,
                "devices": self.device_tables(case),
                "seed": self.seed,
                "duration": self.seconds,
                "warm_up": self.warm_up,
                "workers": {
                    "count": case.workers,
                    "max_num_seqs": SEATS,
                    "max_num_batched_tokens": BATCHED,
                    "max_model_len": LONGEST,
                    "block_size": BLOCK,
                    "dispatch": "round-robin",
                    "event_us": event_us,
                },
                "servers": {"count": case.servers},
                "placement": {"kind": "file", "file": self.placement(case).name},
                "schedule": {
                    "kind": case.schedule,
                    "inflight_batches": case.inflight,
                    "queue_urgency": URGENCY,
                },
                "workload": case.load,
                "routing": {"kind": "profile", "file": "routing.npz"},
            },
            self.folder,
        )

    def placement(self, case: Case) -> Path:
        """The file of the experts' places, which both sides read."""
        model = routed_model(files.resolve(MODEL, None))
        first = 2 * model.num_experts // 3 if case.uneven else model.num_experts // case.servers
        held = {0: range(first)} if case.servers > 1 else {0: range(model.num_experts)}
        if case.servers > 1:
            rest = np.array_split(np.arange(first, model.num_experts), case.servers - 1)
            held |= {number: part.tolist() for number, part in enumerate(rest, 1)}
        found = Placement(0, model.num_experts, dict.fromkeys(model.layers, held), model.model)
        path = self.folder / f"placement-{case.servers}-{case.uneven}.json"
        path.write_text(found.to_json(), encoding="utf-8")
        return path

    def paced(self, case: Case) -> Path:
        """The file of the real processes' devices."""
        tables, path = self.device_tables(case), self.folder / "devices.toml"
        lines = [f'source = "made up"\ndilation = {self.dilation}']
        for name in ("attention", "experts", "link"):
            lines += [f"[{name}]", *(f"{key} = {value}" for key, value in tables[name].items())]
        path.write_text("\n".join(lines), encoding="utf-8")
        return path


def prompts(lengths: Sequence[int], seed: int) -> list[list[int]]:
    """Prompts of random tokens."""
    rng = np.random.default_rng([seed, 9])
    vocabulary = routed_model(files.resolve(MODEL, None)).vocab_size
    return [rng.integers(3, vocabulary, length).tolist() for length in lengths]


def params(tokens: int, seed: int) -> SamplingParams:
    """Tokens are sampled, so that answers do not repeat themselves."""
    return SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=1.0, seed=seed)


def profile(setting: Setting) -> None:
    """Record which experts the tokens of such requests choose."""
    routed = routed_model(files.resolve(MODEL, None))
    options = ProfileOptions([Path(__file__)], setting.folder / "routing.npz")
    gatherer = Gatherer(routed, options, [0] * PROFILED, lambda rows: None)
    llm = LLM(MODEL, seed=0, routing=gatherer, enable_prefix_caching=False)
    given = prompts([8] * PROFILED, setting.seed)
    llm.generate(given, [params(13, number) for number in range(PROFILED)])
    gatherer.fold()
    gatherer.tally.profile(["random"]).save(options.output_file)
