"""What an attention worker reports to an observer, such as a trace.

Question: What can a trace of a worker see?
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from moesaic.experts.observer import ClientObserver, UnobservedClient
from moesaic.policy.offloading.tasks import Task
from moesaic.policy.offloading.timeline import Timeline
from moesaic.policy.scheduling.schedulers.actions import Event, StepPlan


class WorkerObserver(ClientObserver, Protocol):
    """Follows the events, steps and expert requests of one worker.

    Each step calls a few of these methods. Nothing is called between the operations of a step.
    """

    def on_event_handled(self, event: Event, began: float) -> None:
        """The scheduler has handled `event`, which it got at `began`."""
        ...

    def on_step_started(self, plan: StepPlan, segment: int = 0) -> None:
        """The rows of `plan` begin to compute, from a segment of the model on. A whole step has segment 0."""
        ...

    def on_step_resumed(self, plan: StepPlan) -> None:
        """A suspended step looks for the answer of its experts and goes on if it is there."""
        ...

    def on_step_paused(self) -> None:
        """The step that started or resumed last has ended or waits for experts."""
        ...

    def on_sampling_started(self) -> None:
        """Sampling begins."""
        ...

    def on_tokens_sampled(self, rows: int) -> None:
        """The tokens of so many rows were sampled."""
        ...

    def on_logits_not_finite(self, request_id: int, place: str) -> None:
        """The logits of a request were not finite. place: where that began, in words."""
        ...

    def on_pass_ended(self, tasks: Sequence[Task], times: Timeline) -> None:
        """A pass over a model larger than the fast memory has just ended. times: of each task."""
        ...


class UnobservedWorker(UnobservedClient):
    """A WorkerObserver that ignores everything."""

    def on_event_handled(self, event: Event, began: float) -> None: ...

    def on_step_started(self, plan: StepPlan, segment: int = 0) -> None: ...

    def on_step_resumed(self, plan: StepPlan) -> None: ...

    def on_step_paused(self) -> None: ...

    def on_sampling_started(self) -> None: ...

    def on_tokens_sampled(self, rows: int) -> None: ...

    def on_logits_not_finite(self, request_id: int, place: str) -> None: ...

    def on_pass_ended(self, tasks: Sequence[Task], times: Timeline) -> None: ...


IGNORING_OBSERVER = UnobservedWorker()
