"""A stream says something while a prompt is read, in every API."""

from __future__ import annotations

from typing import Any

import pytest

from moesaic.server import events
from tests.text.parsers.answers import TOOLS

from .conftest import Launch, Live
from .test_chat import ASK

COMMENT, EVENT = ": ping\n\n", 'event: ping\ndata: {"type":"ping"}\n\n'


@pytest.mark.parametrize(
    ("path", "body", "ping", "end"),
    [
        ("/v1/completions", {"prompt": "say:hi", "max_tokens": 2}, COMMENT, "data: [DONE]"),
        ("/v1/chat/completions", {"messages": ASK, "max_tokens": 2}, COMMENT, "data: [DONE]"),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 2}, COMMENT, "event: response.incomplete"),
        ("/v1/messages", {"messages": ASK, "max_tokens": 2}, EVENT, "event: message_stop"),
    ],
)
def test_a_silent_stream_sends_pings(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], ping: str, end: str
) -> None:
    monkeypatch.setattr(events, "PING_SECONDS", 0.02)
    text = launch(pace=0.2).post(path, **body, stream=True).text
    assert text.count(ping) > 2 and end in text.replace(ping, "")
    assert "ping" not in text.rpartition(end)[2]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_stream_sends_pings_while_the_arguments_of_a_call_are_read(
    agent: Live, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """They are held until they are known to be JSON."""
    monkeypatch.setattr(events, "PING_SECONDS", 0.02)
    monkeypatch.setattr(agent.worker, "pace", 0.01)
    call = f'<tool_call>{{"name": "now", "arguments": {{"a": "{"b" * 60}"}}}}</tool_call>'
    tool = {"name": "now", "input_schema": {}} if path == "/v1/messages" else TOOLS[1]
    body = {"messages": [{"role": "user", "content": f"say:Yes{call}"}], "tools": [tool], "max_tokens": 200}
    text = agent.post(path, **body, stream=True).text
    silence = text.partition('"s"')[2].partition("now")[0]
    ping = EVENT if path == "/v1/messages" else COMMENT
    assert silence.count(ping) > 5 and "b" * 60 in text.partition("now")[2]


def test_a_stream_that_is_not_silent_sends_none(launch: Launch) -> None:
    assert "ping" not in launch().post("/v1/completions", prompt="say:hi", stream=True).text


def test_an_outage_after_a_ping_is_an_error_event(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "PING_SECONDS", 0.02)
    live = launch(pace=30.0)
    with (
        live.http as client,
        client.stream("POST", "/v1/completions", json={"prompt": "say:hi", "stream": True}) as response,
    ):
        lines = response.iter_lines()
        while next(lines) != ": ping":
            pass
        live.worker.die()
        rest = "\n".join(lines)
    assert '"code":"engine_dead"' in rest and rest.rstrip().endswith("data: [DONE]")
