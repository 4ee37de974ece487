"""Spans of requests, sent to an OpenTelemetry collector with OTLP over HTTP (the extra `moesaic[otel]`).

Names of spans and attributes are those of vLLM and of OpenTelemetry's conventions for generative AI
(https://opentelemetry.io/docs/specs/semconv/gen-ai). No span contains text of a prompt or of an answer.

Question: What is in the OpenTelemetry span of a request, and who sends it?
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from moesaic.server.meter import Times
from moesaic.server.request_trace import RequestTrace

LOG = logging.getLogger(__name__)

CLOSE_SECONDS = 2.0
"""Maximum time at the end of the server to send the last spans."""
MOST_CHILDREN = 16
"""Maximum number of completions of a request that get child spans."""
EXPORTER_LOG = "opentelemetry.exporter"
"""Logger of the library, which complains about every batch that could not be sent."""
QUEUE_LOG = "opentelemetry.sdk._shared_internal"
"""Logger of the library, which complains about a full queue."""


class RequestSpans:
    """Makes spans of traces. A thread of the library sends them in batches; full queues drop spans."""

    def __init__(self, endpoint: str, model: str, version: str) -> None:
        """endpoint: a URL; without a path it gets /v1/traces. model: the served model's name."""
        parts = urlsplit(endpoint)
        url = endpoint if parts.path.strip("/") else parts._replace(path="/v1/traces").geturl()
        self._model = model
        # `close` shuts the provider down, within a limit of time, so it must not happen at exit too.
        own_resource = Resource({"service.name": "moesaic", "service.version": version})
        self._provider = TracerProvider(
            resource=own_resource.merge(OTELResourceDetector().detect()), shutdown_on_exit=False
        )
        self._complaints = _Complaints()
        host = parts.hostname if parts.port is None else f"{parts.hostname}:{parts.port}"
        self._exporter = _Exporter(OTLPSpanExporter(endpoint=url), str(host), self._complaints)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("moesaic", version)

    def write(self, trace: RequestTrace) -> None:
        """Make the spans of a request that has ended, and give them to the thread that sends them."""
        span = self._tracer.start_span(
            "llm_request",
            TraceContextTextMapPropagator().extract(trace.parent, Context()),
            SpanKind.SERVER,
            start_time=trace.wall(trace.start),
        )
        if span.is_recording():
            span.set_attributes(dict(list_attributes(trace, self._model)))
            status = trace.error_status or trace.status or 0
            if status >= 500:
                span.set_status(Status(StatusCode.ERROR, trace.error))
            for moment in sorted(moment for times in trace.completions for moment in times.move_times):
                span.add_event("moved to another worker", timestamp=trace.wall(moment))
            if len(trace.completions) <= MOST_CHILDREN:
                self._write_parts(trace, span)
        span.end(trace.wall(trace.end))

    def _write_parts(self, trace: RequestTrace, span: Span) -> None:
        """The children of `span`: queue, prefill and decode of each completion, as far as it came."""
        context = set_span_in_context(span, Context())
        for number, times in enumerate(trace.completions):
            for name, begin, end in list_parts(times):
                child = self._tracer.start_span(
                    name,
                    context,
                    attributes={"moesaic.completion": number},
                    start_time=trace.wall(begin),
                )
                child.end(trace.wall(end))

    def close(self) -> None:
        """Send the last spans. Gives up after CLOSE_SECONDS, when the collector does not answer."""
        # The library's own shutdown would try again for longer than a server may take to end.
        ending = threading.Thread(target=self._end, name="last-spans", daemon=True)
        ending.start()
        ending.join(CLOSE_SECONDS)
        if ending.is_alive():
            self._exporter.shutdown()  # no batch is tried again

    def _end(self) -> None:
        self._provider.shutdown()
        self._complaints.close()


def list_parts(times: Times) -> Iterator[tuple[str, float, float]]:
    """(name, begin, end) of each part of a completion, on the monotonic clock."""
    if times.queue_seconds is None:
        return  # it was never admitted, so none of its parts began
    admission_time = times.arrival + times.queue_seconds
    yield "queue", times.arrival, admission_time
    if times.first is not None:
        yield "prefill", min(admission_time, times.first), times.first
        yield "decode", times.first, times.last


def list_attributes(trace: RequestTrace, model: str) -> Iterator[tuple[str, Any]]:
    """The attributes of a request's span."""
    yield "gen_ai.operation.name", trace.operation
    yield "gen_ai.provider.name", "moesaic"
    yield "gen_ai.request.id", trace.request_id
    yield "gen_ai.request.model", trace.model or model
    yield "http.request.method", "POST"
    yield "url.path", trace.path
    if trace.status is not None:
        yield "http.response.status_code", trace.status
    if trace.error:
        yield "error.type", trace.error
    params = trace.params
    if params is None:
        return
    yield "gen_ai.response.model", model
    if params.max_tokens is not None:
        yield "gen_ai.request.max_tokens", params.max_tokens
    for name in ("n", "temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty"):
        yield f"gen_ai.request.{name}", getattr(params, name)
    if params.seed is not None:
        yield "gen_ai.request.seed", params.seed
    yield from _usage(trace)
    yield from _latencies(trace.completions)


def _usage(trace: RequestTrace) -> Iterator[tuple[str, Any]]:
    """Tokens by vLLM's names, which are OpenTelemetry's older ones, and by the present ones."""
    num_generated = sum(times.tokens for times in trace.completions)
    yield "gen_ai.usage.prompt_tokens", trace.prompt_tokens
    yield "gen_ai.usage.completion_tokens", num_generated
    yield "gen_ai.usage.input_tokens", trace.prompt_tokens
    yield "gen_ai.usage.output_tokens", num_generated
    yield "gen_ai.usage.cache_read.input_tokens", sum(times.cached_tokens for times in trace.completions)
    yield "gen_ai.usage.num_sequences", len(trace.completions)
    reasons = [times.finish.value for times in trace.completions if times.finish is not None]
    yield "gen_ai.response.finish_reasons", reasons


def _latencies(completions: Sequence[Times]) -> Iterator[tuple[str, float]]:
    """Seconds of the completion that got the first token first; e2e: until the last token of all."""
    first = min(completions, key=lambda times: float("inf") if times.first is None else times.first)
    if first.queue_seconds is not None:
        yield "gen_ai.latency.time_in_queue", first.queue_seconds
    if first.first is None:
        return
    last = max(times.last for times in completions)
    yield "gen_ai.latency.time_to_first_token", first.first - first.arrival
    yield "gen_ai.latency.e2e", last - first.arrival
    prefill = max(0.0, first.first - first.arrival - (first.queue_seconds or 0.0))
    yield "gen_ai.latency.time_in_model_prefill", prefill
    yield "gen_ai.latency.time_in_model_decode", last - first.first
    yield "gen_ai.latency.time_in_model_inference", prefill + last - first.first


class _Complaints(logging.Handler):
    """Keeps the library's log lines out of the server's log, and remembers what they said."""

    def __init__(self) -> None:
        super().__init__()
        self.last = ""
        """Why the last batch could not be sent."""
        self.full = False
        """Whether a span was dropped because the queue was full."""
        loggers = map(logging.getLogger, (EXPORTER_LOG, QUEUE_LOG))
        self._loggers = [(logger, logger.propagate) for logger in loggers]
        for logger, _ in self._loggers:
            logger.propagate = False
            logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith(EXPORTER_LOG):
            self.last = record.getMessage()
        elif "full" in record.getMessage():
            self.full = True

    def close(self) -> None:
        for logger, propagate in self._loggers:
            logger.propagate = propagate
            logger.removeHandler(self)
        super().close()


class _Exporter(SpanExporter):
    """`inner`, with a log line when the collector stops taking spans and when it takes them again.

    The first time that a queue was full is a line, too.
    """

    def __init__(self, inner: SpanExporter, host: str, complaints: _Complaints) -> None:
        self._inner = inner
        self._host = host
        self._complaints = complaints
        self._is_accepting = True
        self._told_full = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._complaints.last = ""
        result = self._inner.export(spans)
        is_accepting = result is SpanExportResult.SUCCESS
        if self._is_accepting and not is_accepting:
            reason = " ".join(self._complaints.last.split()) or "no reason is known"
            message = (
                "traces: %s takes no spans, which are dropped until it does (--otlp-traces-endpoint): %s"
            )
            LOG.warning(message, self._host, reason)
        elif is_accepting and not self._is_accepting:
            LOG.warning("traces: %s takes spans again", self._host)
        elif self._complaints.full and not self._told_full:
            LOG.warning("traces: %s is too slow; spans that find a full queue are dropped", self._host)
            self._told_full = True
        self._is_accepting = is_accepting
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()
