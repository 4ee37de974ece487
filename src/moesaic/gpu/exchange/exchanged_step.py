"""Decode steps that are one CUDA graph each, though their experts are on servers.

Question: How is a step one CUDA graph though its experts are on servers (`--cudagraph-mode full`)?
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from moesaic.core.tokens import IntArray, TokenBatch
from moesaic.gpu.exchange.exchange import DeviceExchange
from moesaic.gpu.graphs.graphs import GraphRunner
from moesaic.kernels.moving import move_array
from moesaic.runtime.step.running_step import RunningStep, SegmentRunner, Step, StepResult


class ExchangedStep:
    """A `Step` that waits for its graph. If a server is lost meanwhile, it is computed once more in parts.

    Then the same rows write the same keys and values once more, at the same places.
    """

    def __init__(
        self,
        exchange: DeviceExchange,
        graph: RunningStep,
        in_parts: Callable[[], RunningStep],
        rows: int,
        reports_routes: bool = True,
    ) -> None:
        """in_parts: begins the same step in parts. reports_routes: whether the exchange learns the chosen
        experts."""
        self._exchange, self._graph, self._in_parts = exchange, graph, in_parts
        self._rows, self._reports_routes = rows, reports_routes
        self._result: StepResult | None = None
        """The result of the graph, or None before its launch."""
        self._parts: RunningStep | None = None
        """The step in parts, once the graph has failed."""

    @property
    def is_suspended(self) -> bool:
        return self._result is not None if self._parts is None else self._parts.is_suspended

    @property
    def is_ready(self) -> bool:
        if self._parts is not None:
            return self._parts.is_ready
        return self._result is None or self._exchange.poll_end()

    def advance(self) -> StepResult | None:
        """Launch the graph, or take its result, or go on with the step in parts."""
        if self._parts is not None:
            return self._parts.advance()
        if self._result is None:
            self._exchange.begin(self._rows)
            self._result = self._graph.finish()  # it was launched, and nothing is computed yet
            return None
        if not self._exchange.poll_end():
            return None
        if self._exchange.has_failed:
            self._parts = self._in_parts()
            return self._parts.advance()
        if self._reports_routes:
            self._exchange.report_routes(self._result.expert_ids)
        return self._result


class ExchangedRunner:
    """A `StepRunner` that replays a step as one graph where it may, and in parts otherwise."""

    def __init__(self, exchange: DeviceExchange, graphs: GraphRunner, parts: SegmentRunner) -> None:
        """graphs: its steps ask the exchange's experts. parts: its steps ask servers from the host."""
        self._exchange, self._graphs, self._parts = exchange, graphs, parts

    def begin(self, batch: TokenBatch) -> Step:
        """Begin a step as one graph if all servers are ready, and in parts otherwise."""
        if not self._graphs.records(batch) or not self._exchange.ready():
            return self._parts.begin(batch)
        in_parts = partial(self._parts.begin, batch)
        return ExchangedStep(self._exchange, self._graphs.begin(batch), in_parts, batch.num_rows)

    def records(self, batch: TokenBatch) -> bool:
        """Whether a step is one graph where it may be, and recorded parts otherwise."""
        return self._graphs.records(batch)

    def begin_prediction(self, batch: TokenBatch, hidden: torch.Tensor, rows: IntArray) -> Step:
        """Begin a step of the layer that drafts tokens, as one graph if all servers are ready."""
        parts = self._parts
        assert isinstance(parts, GraphRunner)
        if not self._exchange.ready():
            return parts.begin_prediction(batch, hidden, rows)
        kept_hidden = hidden[move_array(rows, hidden.device)]  # also for the parts
        arguments = batch, kept_hidden, np.arange(len(rows))
        graph, in_parts = (
            self._graphs.begin_prediction(*arguments),
            partial(parts.begin_prediction, *arguments),
        )
        return ExchangedStep(self._exchange, graph, in_parts, batch.num_rows, reports_routes=False)
