"""`moesaic serve --otlp-traces-endpoint`: spans of real processes, one of which is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from itertools import islice

import httpx
import pytest

from tests.server.conftest import NO_TLS
from tests.test_serve import COMMAND

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra moesaic[otel] is missing")
pytest.importorskip("opentelemetry.sdk", reason="the extra moesaic[otel] is missing")

from tests.support.fake_collector import collecting

pytestmark = pytest.mark.slow
TOKENS = 200


def test_the_spans_of_a_server_arrive_also_those_of_its_last_requests() -> None:
    flags = ["--attention-workers", "2", "--expert-servers", "1", "--log-level", "debug", "--json"]
    with collecting() as collector:
        process = subprocess.Popen(
            [*COMMAND, *flags, "--otlp-traces-endpoint", collector.url.removesuffix("/v1/traces")],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            assert process.stdout is not None
            info = json.loads(process.stdout.readline())
            workers = [
                one["pid"] for one in info["cluster"]["processes"] if one["role"] == "attention worker"
            ]
            body = {"prompt": "Hello", "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
            with httpx.Client(base_url=info["url"], trust_env=False, verify=NO_TLS, timeout=60) as client:
                expected = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
                headers = {"X-Request-Id": "chat-17"}
                # two requests, one for each worker: the death of a worker moves one of them
                with (
                    client.stream("POST", "/v1/completions", json=body | {"stream": True}) as first,
                    client.stream("POST", "/v1/completions", json=body | {"stream": True}, headers=headers)
                    as second,
                ):  # fmt: skip
                    lines = [answer.iter_lines() for answer in (first, second)]
                    heads = [list(islice(one, 8)) for one in lines]
                    os.kill(workers[0], signal.SIGKILL)
                    texts = [_text([*head, *rest]) for head, rest in zip(heads, lines, strict=True)]
            process.send_signal(signal.SIGTERM)
            _, log = process.communicate(timeout=60)
        finally:
            process.kill()
            process.communicate()
    assert texts == [expected, expected] and process.returncode == 0, log
    assert len(collector.requests) == 3
    assert {span.attributes["gen_ai.usage.completion_tokens"] for span in collector.requests} == {TOKENS}
    moved = [span for span in collector.requests if span.events]
    assert [name for span in moved for name, _ in span.events] == ["moved to another worker"]
    assert "chat-17" in [span.attributes["gen_ai.request.id"] for span in collector.requests]
    assert "[chat-17]" in log and "opentelemetry" not in log


def _text(lines: list[str]) -> str:
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
    return "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])
