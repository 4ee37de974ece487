"""Carries out the actions of a scheduler: admits, computes, samples, tells the engine."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from moesaic.core import messages
from moesaic.core.request import TokenLogprob
from moesaic.core.tokens import IntArray
from moesaic.experts.client import RoutedExperts
from moesaic.models.model import Model
from moesaic.policy.scheduling.schedulers.actions import (
    Action,
    Admit,
    BarrierPassed,
    Emit,
    EnterBarrier,
    Event,
    Forget,
    Release,
    RunSegment,
    RunStep,
    SegmentDone,
    StepDone,
    StepPlan,
)
from moesaic.runtime.observer import UNOBSERVED, WorkerObserver
from moesaic.runtime.routing_recorder import RoutingRecorder
from moesaic.runtime.sampling.sampler import Sampler, token_logprobs
from moesaic.runtime.step.layerwise import LayerwiseRunner
from moesaic.runtime.step.running_step import RunningStep, StepRunner
from moesaic.transport.base import Connection

SCORED_SLICE = 128
"""Prompt rows whose logits [rows, vocab] are in memory at one time."""


class Executor:
    """Owns the model and the sampler of one worker."""

    def __init__(
        self,
        model: Model,
        forward: StepRunner,
        device: torch.device,
        connection: Connection,
        experts: RoutedExperts,
        layered: LayerwiseRunner | None = None,
        recorder: RoutingRecorder | None = None,
        logit_rows: int | None = None,
        logits: Callable[[torch.Tensor], torch.Tensor] | None = None,
        observer: WorkerObserver = UNOBSERVED,
    ) -> None:
        """layered: for schedulers that run the model segment by segment. recorder: of the rows' routing.
        logit_rows: whose logits are in memory at one time, at most. logits: of what steps return; None: the
        model's."""
        self._model = model
        self._forward = forward
        self._device = device
        self._connection = connection
        self._logits = logits or model.logits
        self._sampler = Sampler(model.spec.vocab_size)
        self._experts = experts
        self._layered = layered
        self._recorder = recorder
        self._observer = observer
        self._logit_rows = logit_rows
        self._scored_rows = min(SCORED_SLICE, logit_rows or SCORED_SLICE)
        self._done: list[Event] = []
        """Happened and not told."""
        self._walks: dict[int, tuple[StepPlan, RunningStep]] = {}
        """Steps under way."""
        self._logprobs: dict[int, list[TokenLogprob | None]] = {}
        """Of a step whose tokens were not told yet, one per sampled sequence; none when nobody asked."""

    def execute(self, action: Action) -> None:
        """Carry out one action. What RunStep begins goes on in `progress`."""
        match action:
            case Admit():
                self._admit(action)
            case EnterBarrier():
                self._experts.enter(action.work)
            case RunSegment():
                self._observer.started(action.plan, action.segment)
                try:
                    self._run_layer(action)
                finally:
                    self._observer.paused()
            case Forget() if self._layered is not None:
                self._layered.forget(action.runs)
            case RunStep():
                with torch.inference_mode():
                    self._walks[action.plan.step] = action.plan, self._forward.begin(action.plan.batch)
            case Emit():
                self._emit(action)
            case Release():
                for request_id in action.request_ids:
                    self._sampler.release(request_id)
                if self._recorder is not None:
                    self._recorder.release(action)

    def progress(self) -> list[Event]:
        """Go on with every step under way as far as the experts have answered; what happened."""
        done: list[Event] = []
        if self._layered is not None:  # before a run's end: the next one should take them along
            done += self._layered.arrived()
        done, self._done = done + self._done, []
        if self._experts.entered():
            done.append(BarrierPassed())
        self._advance(done)
        while len(self._walks) > 1 and any(walk.ready for _, walk in self._walks.values()):
            self._advance(done)  # its answer came with another's
        return done

    def _advance(self, done: list[Event]) -> None:
        for step, (plan, walk) in list(self._walks.items()):
            with torch.inference_mode():
                if walk.handle is None:  # it has asked no experts yet
                    self._observer.started(plan)
                else:
                    self._observer.resumed(plan)
                try:
                    hidden = walk.advance()
                finally:
                    self._observer.paused()
                if hidden is not None:
                    if self._recorder is not None:
                        self._recorder.step(plan, walk.chosen)
                    done.append(self._finish(plan, hidden))
                    del self._walks[step]

    def abandon(self) -> list[int]:
        """Give up the steps under way, after an error. Returns their numbers."""
        steps = list(self._walks)
        self._walks.clear()
        return steps

    @property
    def busy(self) -> bool:
        """True while something is under way that ends in an event."""
        return bool(self._walks or self._done) or (self._layered is not None and self._experts.busy)

    def _run_layer(self, action: RunSegment) -> None:
        assert self._layered is not None
        with torch.inference_mode():
            hidden = self._layered.run(action)
            if hidden is None:
                self._done.append(SegmentDone(action.plan.step))
                if self._recorder is not None:
                    self._recorder.layer(action.plan, action.segment, self._layered.chosen(action.plan.step))
            else:
                if self._recorder is not None:
                    self._recorder.through(action.plan)
                self._done.append(self._finish(action.plan, hidden))

    def _admit(self, action: Admit) -> None:
        for request, generated in zip(action.requests, action.generated, strict=True):
            self._sampler.admit(request, generated)
        if self._recorder is not None:
            self._recorder.admit(action)
        first = [index for index, epoch in enumerate(action.epochs) if epoch == 0]
        if first:
            self._connection.send(
                messages.Admitted(
                    [action.requests[index].request_id for index in first],
                    [action.queue_seconds[index] for index in first],
                    [action.cached_tokens[index] for index in first],
                )
            )

    def _finish(self, plan: StepPlan, hidden: torch.Tensor) -> StepDone:
        self._observer.sampling()
        for sequence in plan.scored:
            self._score(plan, int(sequence), hidden)
        tokens = np.zeros(0, dtype=np.int64)
        if len(plan.sampled):
            tokens, logprobs = self._sample(plan.request_ids[plan.sampled], self._sampled_rows(plan, hidden))
            if logprobs:
                self._logprobs[plan.step] = logprobs
        self._observer.sampled(len(plan.sampled))
        return StepDone(plan.step, tokens)

    def _sample(self, ids: IntArray, hidden: torch.Tensor) -> tuple[IntArray, list[TokenLogprob | None]]:
        """The next token of each request, and log-probabilities where any of them asked: else none at all."""
        most = self._logit_rows or len(ids)
        if len(ids) <= most:
            return self._sampler.sample(ids, self._logits(hidden))
        tokens: list[IntArray] = []
        logprobs: list[TokenLogprob | None] = []
        for begin in range(0, len(ids), most):
            part = slice(begin, begin + most)
            found, report = self._sampler.sample(ids[part], self._model.logits(hidden[part]))
            tokens.append(found)
            logprobs += report or [None] * len(found)
        return np.concatenate(tokens), logprobs if any(logprobs) else []

    def _sampled_rows(self, plan: StepPlan, hidden: torch.Tensor) -> torch.Tensor:
        """Of the rows whose logits are wanted, those that a token is sampled from: in most steps all."""
        batch = plan.batch
        if len(plan.sampled) == len(batch.logit_rows):
            return hidden
        last = np.searchsorted(batch.logit_rows, batch.query_starts[plan.sampled + 1] - 1)
        return hidden[torch.from_numpy(last).to(self._device)]

    def _emit(self, action: Emit) -> None:
        found = self._logprobs.pop(action.step, None)
        logprobs = [found[sample] for sample in action.samples] if found else []
        self._connection.send(messages.Tokens(action.request_ids, action.tokens, action.finish, logprobs))

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
        self._connection.send(messages.PromptLogprobs(request.request_id, first, entries))

    def _prompt_entries(self, hidden: torch.Tensor, targets: list[int], count: int) -> list[TokenLogprob]:
        entries: list[TokenLogprob] = []
        for begin in range(0, len(targets), self._scored_rows):
            part = slice(begin, begin + self._scored_rows)
            logprobs = torch.log_softmax(self._model.logits(hidden[part]), dim=-1)
            entries += token_logprobs(logprobs, targets[part], count)
        return entries
