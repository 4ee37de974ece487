"""Stands between an agent and a server: forces a call where the prompt asks for one, and keeps what was sent.

Made weights call no tool by themselves. So where the last message of a request has the words CALL, the relay
sets `tool_choice`. Everything else passes as it is.
"""

from __future__ import annotations

import http.client
import http.server
import json
import threading
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

CALL = "Call a tool"
"""The words by which a prompt asks for a call."""
HOP_HEADERS = {"host", "connection", "content-length", "transfer-encoding", "accept-encoding"}


@dataclass
class Exchange:
    """A request with a JSON body, and its answer."""

    path: str
    body: dict[str, Any]
    is_forced: bool
    status: int = 0
    answer: str = ""


class Relay(http.server.ThreadingHTTPServer):
    """Passes requests on to the server at `url`. tool: the name of the function that is called, or any."""

    daemon_threads = True

    def __init__(self, url: str, tool: str | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = urlsplit(url).netloc
        self.tool = tool
        self.exchanges: list[Exchange] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    @property
    def refused(self) -> list[Exchange]:
        """Exchanges whose status is not 200."""
        return [exchange for exchange in self.exchanges if exchange.status != 200]

    def check_calls(self, count: int) -> None:
        """Raises AssertionError unless `count` calls were forced and the result of each came back."""
        forced = [exchange for exchange in self.exchanges if exchange.is_forced]
        results = max((count_results(exchange.body) for exchange in self.exchanges), default=0)
        summary = [(exchange.path, exchange.status, exchange.answer[-500:]) for exchange in self.exchanges]
        assert len(forced) >= count and results >= count, (len(forced), results, summary)
        assert not self.refused, [(exchange.path, exchange.answer) for exchange in self.refused]

    def force_each_tool(self) -> None:
        """Repeats the first forced request for a call of any tool, then of each tool by its name.

        Raises AssertionError where the server refuses one.
        """
        sent = next(exchange for exchange in self.exchanges if exchange.is_forced)
        for name in (None, *list_functions(sent.body)):
            body = {key: value for key, value in sent.body.items() if key != "stream_options"}
            body |= {"tool_choice": make_choice(sent.path, name), "stream": False}
            connection = http.client.HTTPConnection(self.target)
            headers = {"Content-Type": "application/json", "anthropic-version": "2023-06-01"}
            connection.request("POST", sent.path, json.dumps(body), headers)
            answer = connection.getresponse()
            text = answer.read().decode()
            connection.close()
            assert answer.status == 200 and (name or "") in text, (name, answer.status, text)


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Relay

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = json.loads(data) if data else {}
        is_forced = bool(body.get("tools")) and CALL in find_last_text(body)
        exchange = Exchange(self.path, body, is_forced)
        if is_forced:
            body["tool_choice"] = make_choice(self.path, self.server.tool)
        self.server.exchanges.append(exchange)
        self._pass_on(json.dumps(body).encode() if data else None, exchange)

    def do_GET(self) -> None:
        self._pass_on(None, Exchange(self.path, {}, is_forced=False))

    do_HEAD = do_GET  # noqa: N815

    def _pass_on(self, data: bytes | None, exchange: Exchange) -> None:
        """Sends a request to the server, and its answer to the agent piece by piece."""
        headers = {name: text for name, text in self.headers.items() if name.lower() not in HOP_HEADERS}
        connection = http.client.HTTPConnection(self.server.target)
        try:
            connection.request(self.command, self.path, data, headers)
            answer = connection.getresponse()
            exchange.status = answer.status
            self.send_response(answer.status)
            for name, text in answer.getheaders():
                if name.lower() not in HOP_HEADERS:
                    self.send_header(name, text)
            self.send_header("Connection", "close")
            self.end_headers()
            while piece := answer.read1(65536):
                exchange.answer += piece.decode(errors="replace")
                self.wfile.write(piece)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the agent left
        finally:
            connection.close()
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


def make_choice(path: str, tool: str | None) -> Any:
    """Returns the `tool_choice` of an API that forces a function, or any where `tool` is None."""
    if path.partition("?")[0].endswith("/messages"):
        return {"type": "tool", "name": tool} if tool else {"type": "any"}
    if tool is None:
        return "required"
    if path.endswith("/responses"):
        return {"type": "function", "name": tool}
    return {"type": "function", "function": {"name": tool}}


def list_functions(body: dict[str, Any]) -> list[str]:
    """Returns the names of the functions of a request of any API, those of namespaces joined to theirs."""
    names = []
    for tool in body["tools"]:
        if tool.get("type") == "namespace":
            names += [f"{tool['name']}__{function['name']}" for function in tool["tools"]]
        elif tool.get("type", "function") in ("function", "custom"):
            names.append(tool.get("function", tool)["name"])
    return names


def list_messages(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the messages or items of a request of any API."""
    messages = body.get("messages", body.get("input", ()))
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    return [message for message in messages if isinstance(message, dict)]


def find_last_text(body: dict[str, Any]) -> str:
    """Returns the text of the last message that is no instruction; "" where that is not the user's."""
    for message in reversed(list_messages(body)):
        if message.get("role") not in ("system", "developer"):
            content = message.get("content") if message.get("role") == "user" else ""
            parts = [{"text": content}] if isinstance(content, str) else content or ()
            if any(part.get("type") == "tool_result" for part in parts):
                return ""
            return "\n".join(part.get("text") or "" for part in parts)
    return ""


def count_results(body: dict[str, Any]) -> int:
    """Returns how many results of calls a request has."""
    count = 0
    for message in list_messages(body):
        content = message.get("content")
        parts = content if isinstance(content, list) else ()
        count += message.get("role") == "tool" or str(message.get("type")).endswith("_call_output")
        count += sum(part.get("type") == "tool_result" for part in parts)
    return count
