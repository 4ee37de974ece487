"""The speculation of a worker, from its settings and its model."""

from __future__ import annotations

from moesaic.config import WorkerConfig
from moesaic.core.speculation import SpeculativeConfig
from moesaic.policy.scheduling.drafters import Drafter, NgramDrafter
from moesaic.policy.scheduling.speculation import Speculation


def drafter_of(config: SpeculativeConfig) -> Drafter:
    """The drafter that a method names."""
    return NgramDrafter(*config.lookup)


def speculation_of(config: WorkerConfig) -> Speculation:
    """What drafts tokens for this worker: nothing without --speculative-config."""
    given = config.scheduler.speculative_config
    if given is None:
        return Speculation()
    chosen = SpeculativeConfig.of(given)
    return Speculation(drafter_of(chosen), chosen.num_speculative_tokens)
