"""What a worker decides by the prices of its steps: drafts, and the size of chunks of prompts."""

from __future__ import annotations

from dataclasses import replace

from moesaic.config import WorkerConfig
from moesaic.core.speculation import MAX_CHECKED_ROWS, SpeculativeConfig
from moesaic.models.model import Model
from moesaic.policy.scheduling.drafters import Drafter, NgramDrafter, NoDrafter
from moesaic.policy.scheduling.prompt_rows import AllPromptRows, PricedPromptRows, PromptRows
from moesaic.policy.scheduling.speculation import Speculation
from moesaic.policy.scheduling.step_prices import StepPrices, Work, work_by_rows
from moesaic.runtime.model_loading import LoadedModel


def make_drafter(config: SpeculativeConfig) -> Drafter:
    """The drafter that a method names. With mtp steps draft tokens, so that no drafter is asked."""
    return NoDrafter() if config.method == "mtp" else NgramDrafter(*config.lookup)


def most_checked_rows(config: WorkerConfig) -> int:
    """The most rows of a step with drafted tokens. Where experts are streamed, memory is planned for rows."""
    offload = config.offload
    if offload is None:
        return MAX_CHECKED_ROWS
    planned_rows = max(offload.prefill_rows, offload.micro_batch)
    return min(MAX_CHECKED_ROWS, planned_rows, offload.logit_rows or MAX_CHECKED_ROWS)


def uses_mtp(config: WorkerConfig) -> bool:
    """Whether the model's own layer for the token after the next one drafts tokens."""
    speculative_config = config.scheduler.speculative_config
    return speculative_config is not None and SpeculativeConfig.parse(speculative_config).method == "mtp"


def add_room_for_drafts(loaded_model: LoadedModel, config: WorkerConfig) -> LoadedModel:
    """The model, whose states of linear attention have room for rows that turn out not to count."""
    speculative_config, spec = config.scheduler.speculative_config, loaded_model.model.spec
    if speculative_config is None or spec.states is None:
        return loaded_model
    states = replace(
        spec.states, max_draft_tokens=SpeculativeConfig.parse(speculative_config).num_speculative_tokens
    )
    return replace(loaded_model, model=replace(loaded_model.model, spec=replace(spec, states=states)))


def make_speculation(config: WorkerConfig, model: Model, expert_bytes: int = 0) -> Speculation:
    """What drafts tokens for this worker: nothing without --speculative-config.

    expert_bytes: bytes of the routed experts that are not in this process.
    """
    speculative_config = config.scheduler.speculative_config
    if speculative_config is None:
        return Speculation()
    parsed_config = SpeculativeConfig.parse(speculative_config)
    prices = StepPrices(_work(model, expert_bytes))
    num_tokens, max_rows = parsed_config.num_speculative_tokens, most_checked_rows(config)
    return Speculation(make_drafter(parsed_config), num_tokens, prices, max_rows)


def make_prompt_rows(config: WorkerConfig, model: Model, expert_bytes: int = 0) -> PromptRows:
    """What limits the chunks of prompts of this worker. expert_bytes: see `make_speculation`."""
    scheduler = config.scheduler
    if not scheduler.prefill_step_ms:
        return AllPromptRows()
    aim = scheduler.prefill_step_ms / 1000
    return PricedPromptRows(aim, _work(model, expert_bytes), scheduler.max_num_batched_tokens)


def _work(model: Model, expert_bytes: int) -> Work:
    """The work of a step by its rows, see `work_by_rows`."""
    other_bytes = replace(model, experts={}).num_bytes
    experts = model.num_bytes - other_bytes + expert_bytes
    return work_by_rows(other_bytes, experts, model.spec.num_experts, model.spec.top_k)
