"""The speculation of a worker, from its settings and its model."""

from __future__ import annotations

from dataclasses import replace

from moesaic.config import WorkerConfig
from moesaic.core.speculation import SpeculativeConfig
from moesaic.models.model import Model
from moesaic.policy.scheduling.drafters import Drafter, NgramDrafter, NoDrafter
from moesaic.policy.scheduling.speculation import Speculation
from moesaic.policy.scheduling.step_prices import StepPrices, work_by_rows
from moesaic.runtime.model_loading import LoadedModel


def drafter_of(config: SpeculativeConfig) -> Drafter:
    """The drafter that a method names. With mtp steps draft tokens, so that no drafter is asked."""
    return NoDrafter() if config.method == "mtp" else NgramDrafter(*config.lookup)


def predicting(config: WorkerConfig) -> bool:
    """Whether the model's own layer for the token after the next one drafts tokens."""
    given = config.scheduler.speculative_config
    return given is not None and SpeculativeConfig.of(given).method == "mtp"


def with_room_for_drafts(loaded: LoadedModel, config: WorkerConfig) -> LoadedModel:
    """The model, whose states of linear attention have room for rows that turn out not to count."""
    given, spec = config.scheduler.speculative_config, loaded.model.spec
    if given is None or spec.states is None:
        return loaded
    states = replace(spec.states, max_draft_tokens=SpeculativeConfig.of(given).num_speculative_tokens)
    return replace(loaded, model=replace(loaded.model, spec=replace(spec, states=states)))


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
