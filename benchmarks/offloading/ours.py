"""A contender in a process of its own: moesaic, by the policy that its planner finds for the job."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from offloading.telling import Telling

if TYPE_CHECKING:
    from moesaic.core.metrics import PassStats
    from moesaic.planning import WorkerPlan
    from moesaic.policy.scheduling.schedulers.actions import Action, Event


class Watch:
    """A journal that reports each step's tokens."""

    def __init__(self, telling: Telling) -> None:
        self._telling = telling
        self._numbers: dict[int, int] = {}
        """Request id -> prompt's number. Requests are submitted in the order of the prompts."""

    def __call__(self, event: Event, now: float, actions: list[Action]) -> None:
        from moesaic.policy.scheduling.schedulers.actions import Emit, RequestsArrived

        if isinstance(event, RequestsArrived):
            for request in event.requests:
                self._numbers[request.request_id] = len(self._numbers)
        for action in actions:
            if isinstance(action, Emit):
                numbers = [self._numbers[one] for one in action.request_ids]
                self._telling.step(zip(numbers, action.tokens, strict=True))


def planned(order: dict[str, Any], requests: float) -> WorkerPlan:
    """The policy for the order's prompts and machine. Raises ConfigError."""
    from moesaic.commands.plan import find_hardware
    from moesaic.config import CacheConfig, ModelConfig, OffloadConfig, WorkerConfig
    from moesaic.planning import Job, plan

    lengths = [len(prompt) for prompt in order["prompts"]]
    mean, longest = math.ceil(sum(lengths) / len(lengths)), max(lengths)
    job = Job(requests, mean, order["new"], longest + order["new"], longest if order.get("pad") else None)
    worker = WorkerConfig(
        ModelConfig(order["model"], threads=order["threads"]),
        CacheConfig(kv_cache_dtype=order["kv_cache_dtype"], enable_prefix_caching=False),
    )
    options = OffloadConfig(
        fast_memory=str(order["cap"]),
        offload_schedule=order["schedule"],
        profile=order["profile"],
    )
    return plan(worker, options, job, find_hardware(order["hardware"]))


def phases(found: WorkerPlan, passes: tuple[PassStats, ...], seconds: float) -> dict[str, Any]:
    """The totals of a run's passes. seconds: of the whole run. Time besides passes counts as decode's."""
    from moesaic.commands.offload_report import measure_phases as report

    parts = {one.name: one for one in report(found, passes)}
    prefill, decode = parts.get("prefill"), parts.get("decode")
    measured: dict[str, Any] = {name: part.as_json() for name, part in parts.items()}
    measured["beside_seconds"] = seconds - sum(part.measured_seconds for part in parts.values())
    measured["prefill_seconds"] = prefill.measured_seconds if prefill else 0.0
    if decode and decode.measured_seconds:
        measured["link_busy"] = decode.link_busy_seconds / decode.measured_seconds
    return measured


def settings(found: WorkerPlan) -> dict[str, Any]:
    """The settings of the `LLM`."""
    worker = found.worker
    parts = (worker.model, worker.cache, worker.scheduler)
    named = {name: value for part in parts for name, value in vars(part).items() if name != "model"}
    return named | {"offload": worker.offload}


def main() -> None:
    telling = Telling()
    order = telling.order
    import time
    from dataclasses import asdict

    from moesaic import LLM, SamplingParams
    from moesaic.core.errors import MoesaicError

    try:
        found = planned(order, len(order["prompts"]))
        llm = LLM(order["model"], seed=0, journal=Watch(telling), **settings(found))
    except MoesaicError as error:
        telling.refuse(str(error))
        return
    price = found.price
    telling.begin(
        policy=asdict(price.policy) | {"batch": price.policy.batch},
        predicted_tokens_per_s=price.throughput,
    )
    begun = time.perf_counter()
    llm.generate(order["prompts"], SamplingParams(temperature=0.0, max_tokens=order["new"], ignore_eos=True))
    seconds = time.perf_counter() - begun
    telling.end(**phases(found, llm.stats().experts.passes, seconds))


if __name__ == "__main__":
    main()
