"""Carries out the actions of a scheduler: admits requests, computes steps, samples, reports to the engine.

Question: What happens when logits are NaN?
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from moesaic.core import messages
from moesaic.core.offload import Division
from moesaic.core.request import NO_TOKEN, Request, TokenLogprob, TokenRoute
from moesaic.experts.client import ExpertServers
from moesaic.models.kvcache.memory import LayerMemory
from moesaic.models.model import Model
from moesaic.policy.scheduling.schedulers.actions import (
    Action,
    Admit,
    BarrierPassed,
    Divide,
    Emit,
    EnterBarrier,
    Event,
    Forget,
    KeepPrefixes,
    ReadPrefix,
    Release,
    Restore,
    RunSegment,
    RunStep,
    SegmentDone,
    StepDone,
    StepPlan,
)
from moesaic.runtime.observer import IGNORING_OBSERVER, WorkerObserver
from moesaic.runtime.predicting import Predictor
from moesaic.runtime.prefix_cache.prefixes import StoredPrefixes
from moesaic.runtime.routing_recorder import RoutingRecorder
from moesaic.runtime.sampling.checking import SampledTokens, join_samples, sample_step
from moesaic.runtime.sampling.sampler import Sampler, find_nonfinite_rows, token_logprobs
from moesaic.runtime.step.layerwise import LayerwiseRunner
from moesaic.runtime.step.running_step import Step, StepResult, StepRunner
from moesaic.runtime.token_routes import TokenRoutes
from moesaic.runtime.transfer.pieces import Transfers
from moesaic.text.structured.constraints import Constraints
from moesaic.trace.logs import of_request
from moesaic.transport.base import Connection

LOG = logging.getLogger(__name__)
SCORED_SLICE = 128
"""Prompt rows whose logits [rows, vocab] are in memory at one time."""


def describe_origin(layer: int | None, num_layers: int) -> str:
    """Where numbers that are not finite began, in words. layer: the first one whose cached rows have some.

    A layer behind the others goes on from their hidden states, and only drafts tokens.
    """
    if layer is None or layer >= num_layers:
        return f"which began after the attention of layer {num_layers - 1}: in its experts, or in the LM head"
    if layer == 0:
        return "which began in layer 0: in the embedding, its norm, or its keys and values"
    return f"which began between the experts of layer {layer - 1} and the keys and values of layer {layer}"


@dataclass(frozen=True)
class _OpenStep:
    """A step of the model, or the drafting after one."""

    plan: StepPlan
    step: Step
    sampled_step: StepDone | None = None
    """What the model's step has sampled, if this drafts the tokens after it."""


class Executor:
    """Owns the model and the sampler of one worker."""

    def __init__(
        self,
        model: Model,
        runner: StepRunner,
        device: torch.device,
        connection: Connection,
        servers: ExpertServers,
        layerwise: LayerwiseRunner | None = None,
        recorder: RoutingRecorder | None = None,
        routes: TokenRoutes | None = None,
        logit_rows: int | None = None,
        observer: WorkerObserver = IGNORING_OBSERVER,
        memory: LayerMemory | None = None,
        constraints: Constraints | None = None,
        predictor: Predictor | None = None,
        transfers: Transfers | None = None,
        prefixes: StoredPrefixes | None = None,
        divide: Callable[[Division], None] | None = None,
    ) -> None:
        """layerwise: for schedulers that run the model segment by segment.

        logit_rows: maximum number of rows whose logits are computed at once; None: all rows of a step.
        memory: in which the layer is looked up where numbers that are not finite began. constraints: of
        structured outputs; None: no request has one. predictor: drafts tokens after each step; None: the
        model drafts none. transfers, prefixes: KV of other workers, and on a disk; None: there is none.
        divide: divides memory between experts and KV blocks; None: it stays as it is.
        """
        self._model, self._runner = model, runner
        self._device = device
        self._connection = connection
        self._constraints = constraints
        self._sampler = Sampler(constraints)
        self._servers = servers
        self._layerwise = layerwise
        self._recorder = recorder
        self._routes = TokenRoutes(()) if routes is None else routes
        self._observer, self._memory = observer, memory
        self._logit_rows = logit_rows
        self._predictor = predictor
        self._transfers, self._prefixes = transfers or Transfers(), prefixes or StoredPrefixes()
        self._divide = divide
        self._scored_rows = min(SCORED_SLICE, logit_rows or SCORED_SLICE)
        self._events: list[Event] = []  # ends of runs that `progress` has not returned yet
        self._steps: dict[int, _OpenStep] = {}
        """Steps under way, by number."""
        self._logprobs: dict[int, list[TokenLogprob | None]] = {}
        """Log-probabilities of steps whose tokens were not sent yet, one per sampled sequence. Without
        any there is no entry."""
        self._step_routes: dict[int, list[TokenRoute | None]] = {}
        """Who computed the tokens of steps that were not sent yet, in the order of `_logprobs`."""

    def execute(self, action: Action) -> None:
        """Carry out one action. A step that RunStep begins is computed in `progress`."""
        match action:
            case Admit():
                self._admit(action)
            case Restore():
                with torch.inference_mode():
                    self._transfers.restore(action)
            case ReadPrefix():
                self._prefixes.read(action)
            case KeepPrefixes():
                self._prefixes.keep(action)
            case Divide(division):
                assert self._divide is not None
                self._divide(division)
            case EnterBarrier():
                self._servers.enter_barrier(action.work)
            case RunSegment():
                self._observer.on_step_started(action.plan, action.segment)
                self._routes.begin(action.plan)
                self._transfers.begin(action.plan)
                try:
                    self._run_segment(action)
                finally:
                    self._observer.on_step_paused()
            case Forget() if self._layerwise is not None:
                self._layerwise.forget(action.runs)
            case RunStep():
                with torch.inference_mode():
                    step = self._runner.begin(action.plan.batch)
                self._steps[action.plan.step] = _OpenStep(action.plan, step)
            case Emit():
                self._emit(action)
            case Release():
                for request_id in action.request_ids:
                    self._sampler.release(request_id, action.is_preemption)
                # A preempted request comes again, and then sends the rest of its KV.
                if not action.is_preemption:
                    self._transfers.forget(action.request_ids)
                    self._prefixes.forget(action.request_ids)
                self._routes.release(action)
                if self._recorder is not None:
                    self._recorder.release(action)

    def find_grammar(self, request: Request) -> Future[Any] | None:
        """The compiled grammar of a request, which may still be under way. None if it has no grammar."""
        return None if self._constraints is None else self._constraints.compile(request)

    def progress(self) -> list[Event]:
        """Go on with every step under way as far as its experts have answered. Returns what happened."""
        events: list[Event] = []
        if (
            self._layerwise is not None
        ):  # before the end of a run, so that the next run can include these rows
            events += self._layerwise.poll_arrivals()
        events, self._events = events + self._events + self._prefixes.take_events(), []
        if self._servers.poll_barrier():
            events.append(BarrierPassed())
        self._advance(events)
        while len(self._steps) > 1 and any(open_step.step.is_ready for open_step in self._steps.values()):
            self._advance(events)  # one step's answer came while another one was computed
        return events

    def _advance(self, events: list[Event]) -> None:
        # A copy, since steps that end are removed.
        for open_step in list(self._steps.values()):
            with torch.inference_mode():
                if open_step.step.is_suspended:
                    self._observer.on_step_resumed(open_step.plan)
                else:
                    self._observer.on_step_started(open_step.plan)
                self._routes.begin(open_step.plan)
                self._transfers.begin(open_step.plan)
                try:
                    result = open_step.step.advance()
                finally:
                    self._observer.on_step_paused()
                if result is None:
                    continue
                step_done: StepDone | None
                if open_step.sampled_step is not None:
                    step_done = self._add_drafts(open_step.plan, open_step.sampled_step, result)
                else:
                    if self._recorder is not None:
                        self._recorder.record_step(open_step.plan, result.expert_ids)
                    step_done = self._finish(open_step.plan, result)
                if step_done is not None:
                    events.append(step_done)
                    del self._steps[open_step.plan.step]

    def abandon(self) -> list[int]:
        """Give up the steps under way, after an error. Returns their numbers."""
        steps = list(self._steps)
        self._steps.clear()
        return steps

    @property
    def is_busy(self) -> bool:
        """True while something is under way that will end in an event."""
        return bool(self._steps or self._events) or (self._layerwise is not None and self._layerwise.is_busy)

    def _run_segment(self, action: RunSegment) -> None:
        assert self._layerwise is not None
        with torch.inference_mode():
            result = self._layerwise.run(action)
            if result is None:
                self._events.append(SegmentDone(action.plan.step))
                if self._recorder is not None:
                    expert_ids = self._layerwise.expert_ids(action.plan.step)
                    self._recorder.record_segment(action.plan, action.segment, expert_ids)
            else:
                if self._recorder is not None:
                    self._recorder.record_last_segment(action.plan)
                step_done = self._finish(action.plan, result)
                self._events += [] if step_done is None else [step_done]

    def _admit(self, action: Admit) -> None:
        for request, generated_tokens in zip(action.requests, action.generated_ids, strict=True):
            self._sampler.admit(request, generated_tokens)
        self._routes.admit(action)
        if self._recorder is not None:
            self._recorder.admit(action)
        # A request that was preempted has been reported when it was admitted first.
        first = [index for index, epoch in enumerate(action.epochs) if epoch == 0]
        if first:
            self._connection.send(
                messages.RequestsAdmitted(
                    [action.requests[index].request_id for index in first],
                    [action.queue_seconds[index] for index in first],
                    [action.cached_tokens[index] for index in first],
                )
            )

    def _finish(self, plan: StepPlan, result: StepResult) -> StepDone | None:
        """Score prompts, sample the next tokens and begin to draft those after them.

        Returns None where drafting waits for experts. It is under way as a step then.
        """
        self._observer.on_sampling_started()
        for sequence in plan.scored_sequences:
            self._score(plan, int(sequence), result.hidden)
        new_tokens = SampledTokens(np.zeros(0, dtype=np.int64), [])
        if len(plan.sampled_sequences):
            new_tokens = self._sample(plan, result)
            self._report_not_finite(plan, new_tokens)
            if new_tokens.logprobs:
                self._logprobs[plan.step] = new_tokens.logprobs
            if routes := self._routes.collect(plan, new_tokens, result.expert_ids):
                self._step_routes[plan.step] = routes
        self._observer.on_tokens_sampled(len(new_tokens.tokens))
        step_done = StepDone(
            plan.step, new_tokens.tokens, new_tokens.counts, expert_reads=result.expert_reads
        )
        if self._predictor is None:
            self._transfers.on_step_computed(plan)
            return step_done
        step = self._predictor.begin(plan, result, new_tokens)
        drafts = step.advance()
        if drafts is None:
            self._steps[plan.step] = _OpenStep(plan, step, step_done)
            return None
        return self._add_drafts(plan, step_done, drafts)

    def _add_drafts(self, plan: StepPlan, step_done: StepDone, drafts: StepResult) -> StepDone:
        """The end of a step, with the tokens that the model's own layer drafts."""
        self._transfers.on_step_computed(plan)
        if not len(plan.sampled_sequences):
            return step_done
        return replace(step_done, proposed_tokens=self._model.predict_token(drafts.hidden).cpu().numpy())

    def _sample(self, plan: StepPlan, result: StepResult) -> SampledTokens:
        """The next tokens of each sampled sequence, and their log-probabilities."""
        if result.logits is not None and len(plan.sampled_sequences) == len(result.logits):
            return sample_step(self._sampler, plan, result.logits)
        hidden = self._select_sampled_rows(plan, result.hidden)
        max_rows = self._logit_rows or len(hidden)
        if len(hidden) <= max_rows:
            return sample_step(self._sampler, plan, self._model.logits(hidden))
        assert not len(plan.num_draft_tokens), "a draft's rows are sampled together"
        parts: list[SampledTokens] = []
        for begin in range(0, len(hidden), max_rows):
            part = slice(begin, begin + max_rows)
            part_of_plan = replace(plan, sampled_sequences=plan.sampled_sequences[part])
            parts.append(sample_step(self._sampler, part_of_plan, self._model.logits(hidden[part])))
        return join_samples(parts)

    def _report_not_finite(self, plan: StepPlan, new_tokens: SampledTokens) -> None:
        """Say of which requests the logits were not finite, and where that began."""
        owners = (
            plan.sampled_sequences
            if new_tokens.counts is None
            else np.repeat(plan.sampled_sequences, new_tokens.counts)
        )
        for sequence in owners[new_tokens.tokens == NO_TOKEN].tolist():
            request_id, layer = int(plan.request_ids[sequence]), None
            if self._memory is not None:
                blocks = plan.batch.block_tables[sequence]
                layer = self._memory.first_not_finite(blocks, int(plan.batch.context_lens[sequence]))
            place = describe_origin(layer, self._model.spec.num_layers)
            extra = of_request(self._sampler.request(request_id).name)
            LOG.warning(
                "request %d ended: the model's logits are not finite, %s", request_id, place, extra=extra
            )
            self._observer.on_logits_not_finite(request_id, place)

    def _select_sampled_rows(self, plan: StepPlan, hidden: torch.Tensor) -> torch.Tensor:
        """The rows of `hidden` that a token is sampled from: in most steps all of them."""
        rows, logit_rows = plan.sample_rows, plan.batch.logit_rows
        if len(rows) == len(logit_rows):
            return hidden
        return hidden[torch.from_numpy(np.searchsorted(logit_rows, rows)).to(self._device)]

    def _emit(self, action: Emit) -> None:
        step_logprobs = self._logprobs.pop(action.step, None)
        logprobs = [step_logprobs[sample] for sample in action.samples] if step_logprobs else []
        step_routes = self._step_routes.pop(action.step, None)
        routes = [step_routes[sample] for sample in action.samples] if step_routes else []
        tokens = messages.Tokens(action.request_ids, action.tokens, action.finish, logprobs, routes)
        self._connection.send(tokens)

    def _score(self, plan: StepPlan, sequence: int, hidden: torch.Tensor) -> None:
        """Send the log-probabilities of the prompt tokens that follow this step's rows of `sequence`."""
        batch = plan.batch
        request = self._sampler.request(int(plan.request_ids[sequence]))
        start, stop = int(batch.query_starts[sequence]), int(batch.query_starts[sequence + 1])
        first = int(batch.positions[start]) + 1
        targets = request.prompt_token_ids[first : first + stop - start]
        line = int(np.searchsorted(batch.logit_rows, start))
        entries = self._prompt_entries(
            hidden[line : line + len(targets)], targets, request.params.prompt_logprobs or 0
        )
        if entries is None:
            self._sampler.give_up(request.request_id)
        else:
            self._connection.send(messages.PromptLogprobs(request.request_id, first, entries))

    def _prompt_entries(
        self, hidden: torch.Tensor, targets: list[int], count: int
    ) -> list[TokenLogprob] | None:
        """The log-probabilities of `targets`; None where logits are not finite."""
        entries: list[TokenLogprob] = []
        for begin in range(0, len(targets), self._scored_rows):
            part = slice(begin, begin + self._scored_rows)
            logits = self._model.logits(hidden[part])
            if find_nonfinite_rows(logits):
                return None
            logprobs = torch.log_softmax(logits, dim=-1)
            entries += token_logprobs(logprobs, targets[part], count)
        return entries
