"""An OpenTelemetry collector on a loopback port. It keeps the spans that it gets by OTLP over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

OF_NEITHER = 0
OF_ERROR = 2
"""Status codes of spans in the protocol."""


@dataclass(frozen=True)
class SeenSpan:
    """A span as it arrived. Ids are in hexadecimal; times are nanoseconds since 1970."""

    name: str
    trace: str
    span: str
    parent: str
    kind: int
    begin: int
    end: int
    status: int
    message: str
    attributes: dict[str, Any]
    events: list[tuple[str, int]]
    resource: dict[str, Any]


class Collector:
    """url: its endpoint. answer: the status of its answers."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}/v1/traces"
        self.answer = 200
        self.open = threading.Event()
        """Cleared: nothing is answered."""
        self.open.set()
        self.paths: list[str] = []
        self.spans: list[SeenSpan] = []

    @property
    def requests(self) -> list[SeenSpan]:
        return [span for span in self.spans if span.name == "llm_request"]

    def children(self, span: SeenSpan) -> list[SeenSpan]:
        found = [one for one in self.spans if one.parent == span.span]
        assert {one.trace for one in found} <= {span.trace}
        return sorted(found, key=lambda one: (one.attributes["moesaic.completion"], one.begin, one.end))


@contextmanager
def collecting() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.open.wait()
            if collector.answer == 200:
                assert self.headers["Content-Type"] == "application/x-protobuf"
                collector.paths.append(self.path)
                collector.spans += _decoded(body)
            self.send_response(collector.answer)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(server.server_address[1])
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), name="collector")
    thread.start()
    try:
        yield collector
    finally:
        collector.open.set()
        server.shutdown()
        thread.join()
        server.server_close()


def _decoded(body: bytes) -> Iterator[SeenSpan]:
    request = ExportTraceServiceRequest()
    request.ParseFromString(body)
    for group in request.resource_spans:
        resource = _values(group.resource.attributes)
        for scope in group.scope_spans:
            for span in scope.spans:
                yield SeenSpan(
                    span.name,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.kind,
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    span.status.code,
                    span.status.message,
                    _values(span.attributes),
                    [(event.name, event.time_unix_nano) for event in span.events],
                    resource,
                )


def _values(attributes: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    found = getattr(value, kind)
    return [_value(one) for one in found.values] if kind == "array_value" else found
