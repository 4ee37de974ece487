"""The speculation of a worker, from its settings and its model."""

from __future__ import annotations

from dataclasses import replace

from moesaic.config import WorkerConfig
from moesaic.core.speculation import SpeculativeConfig
from moesaic.models.model import Model
from moesaic.policy.scheduling.drafters import Drafter, NgramDrafter
from moesaic.policy.scheduling.speculation import Speculation
from moesaic.policy.scheduling.step_prices import StepPrices, work_by_rows


def drafter_of(config: SpeculativeConfig) -> Drafter:
    """The drafter that a method names."""
    return NgramDrafter(*config.lookup)


def speculation_of(config: WorkerConfig, model: Model, elsewhere: int = 0) -> Speculation:
    """What drafts tokens for this worker: nothing without --speculative-config.

    elsewhere: bytes of the routed experts that are not in this process.
    """
    given = config.scheduler.speculative_config
    if given is None:
        return Speculation()
    chosen, spec = SpeculativeConfig.of(given), model.spec
    others = replace(model, experts={}).num_bytes
    experts = model.num_bytes - others + elsewhere
    prices = StepPrices(work_by_rows(others, experts, spec.num_experts, spec.top_k))
    return Speculation(drafter_of(chosen), chosen.num_speculative_tokens, prices)
