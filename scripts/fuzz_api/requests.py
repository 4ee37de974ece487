"""Requests as bytes: from the published schema, then changed in ways that no schema has."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode

HALF = "half"
"""The client closes its sending side before the request is complete."""
WAIT = "wait"
"""The client waits for an answer to an incomplete request."""
LEAVE = "leave"
"""The client closes the connection without reading."""
ODD_METHODS = (
    "PUT",
    "DELETE",
    "PATCH",
    "HEAD",
    "OPTIONS",
    "TRACE",
    "CONNECT",
    "PROPFIND",
    "get",
    "POST",
    "GET",
)
ODD_TYPES = (
    *(
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "",
        "application/",
    ),
    *("application/json; charset=utf-16", "application/xml", "application/json, text/plain", "a" * 5000),
)
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**400, 0.5, -0.0, 1e308, 5e-324, ""),
    *(
        "\x00",
        "\ud800",
        "\U0001f600" * 50,
        "x" * 3000,
        "NaN",
        [],
        {},
        [[]],
        [None],
        {"": None},
        [1, "a", None],
    ),
    *(float("nan"), float("inf"), float("-inf"), {"type": "text", "text": 5}, [{"role": 1}]),
)
ODD_LINES = (
    *(
        "Content-Length: -1",
        "Content-Length: 99999999999999999999",
        "Content-Length: 1e3",
        "Content-Length: 0",
    ),
    *("Transfer-Encoding: chunked", "Transfer-Encoding: gzip, chunked", "Expect: 100-continue"),
    *("Upgrade: websocket\r\nConnection: Upgrade", "Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings"),
    *(
        "X-Request-Id: \x7f",
        "X-Request-Id: " + "a" * 300,
        "X-Forwarded-For: ::1%\xff, nobody",
        "Range: bytes=0-1",
    ),
    *(
        "X-Forwarded-Proto: \xff",
        "Host: evil.example",
        "Host:",
        "Authorization: Bearer \xe9",
        "Authorization:",
    ),
    *("Accept: text/event-stream;q=x", "Content-Encoding: gzip", "X: " + "y" * 20000, "X : y", " folded"),
    *("Cookie: " + "a=b; " * 500, "Connection: close", "Connection: keep-alive, close", "TE: trailers"),
)
ODD_PATHS = (
    *(
        "/",
        "//",
        "/v1",
        "/v1/",
        "/v1/models/",
        "/v1/models/..%2f..%2fetc",
        "/v1/models/%ff%00",
        "*",
        "/%",
        "/a b",
    ),
    *("/v1/completions/", "//v1/completions", "/V1/Completions", "/v1/completions?" + "a=1&" * 500, "/docs"),
    *(
        "http://evil.example/v1/models",
        "/v1/models/" + "x" * 5000,
        "/openapi.json",
        "/metrics?name[]=x",
        "/ping",
        "/live",
    ),
    *("/v1/completions;x", "/v1/./models", "/v1/models#x", "/scale%5felastic_ep", "/health%00"),
)
GARBAGE = (
    *(
        b"\x16\x03\x01\x02\x00",
        b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/3\r\n\r\n",
        b"\x00" * 100,
        b"x" * 70000,
    ),
    *(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET / HTTP/1.1\nHost: x\n\n", b"POST / HTTP/1.1\r\nHost: x\r\n"),
)


@dataclass(frozen=True)
class Call:
    """One request. endpoint, kind: what it counts as. ending: HALF, WAIT, LEAVE, or "" for a complete one."""

    endpoint: str
    kind: str
    method: str
    data: bytes
    ending: str = ""

    def as_json(self) -> dict[str, str]:
        return {**vars(self), "data": base64.b64encode(self.data).decode()}

    @classmethod
    def from_json(cls, fields: dict[str, str]) -> Call:
        return cls(**{**fields, "data": base64.b64decode(fields["data"])})  # type: ignore[arg-type]


@dataclass(frozen=True)
class Seed:
    """What the schema says of one request. body: a JSON value, or None."""

    endpoint: str
    method: str
    path: str
    body: Any


def _good(path: str, **body: Any) -> Seed:
    return Seed(path, "POST", path, body)


_HELLO = [{"role": "user", "content": "Hi"}]
GOOD = (
    _good("/v1/completions", prompt="Hi"),
    _good("/v1/completions", prompt=["a", "b"], n=2, stream=True, stream_options={"include_usage": True}),
    _good("/v1/completions", prompt=[[1, 2, 3]], echo=True, logprobs=3, temperature=0, stop=["x"]),
    _good("/v1/completions", prompt="Hi", logit_bias={"5": -100}, seed=3, top_k=4, min_p=0.1, top_p=0.5),
    _good("/v1/chat/completions", messages=_HELLO),
    _good("/v1/chat/completions", messages=_HELLO, stream=True, logprobs=True, top_logprobs=2, n=2),
    _good("/tokenize", prompt="Hi", add_special_tokens=True),
    _good("/tokenize", messages=_HELLO),
    _good("/detokenize", tokens=[1, 2, 3]),
    _good("/scale_elastic_ep", expert_servers=1),
)
"""Requests that are answered with 200, which the schema alone seldom gives."""


def seeds(document: dict[str, Any], each: int, number: int) -> list[Seed]:
    """`each` requests for every operation of the OpenAPI document, half of them against its rules.

    number: of the random numbers.
    """
    found: list[Seed] = []
    schema = schemathesis.openapi.from_dict(document)
    for item in schema.get_all_operations():
        operation = item.ok()
        for mode in GenerationMode:

            @seed(number)
            @settings(
                max_examples=each // 2, database=None, deadline=None, phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )  # fmt: skip
            @given(case=operation.as_strategy(generation_mode=mode))
            def draw(case: schemathesis.Case) -> None:
                body = case.body if isinstance(case.body, (dict, list, str, int, float)) else None
                found.append(Seed(case.path, case.method.upper(), case.formatted_path, body))

            try:
                draw()
            except Exception:
                continue
    return found


class Maker:
    """Makes requests from seeds. keys: those that are sent, with None for none."""

    def __init__(
        self, found: Sequence[Seed], model: str, keys: Sequence[str | None], rng: random.Random
    ) -> None:
        self._model, self._keys, self._rng = model, keys, rng
        self._seeds: dict[str, list[Seed]] = {}
        for one in (*found, *(GOOD * 10)):
            self._seeds.setdefault(one.endpoint, []).append(one)
        self._kinds: dict[str, Callable[[Seed], Call]] = {
            "schema": self._plain,
            "value": self._value,
            "bytes": self._bytes,
            "type": self._type,
            "method": self._method,
            "line": self._line,
            "path": self._path,
            "nesting": self._nesting,
            "half": self._half,
            "leave": self._leave,
            "garbage": self._garbage,
        }

    def make(self) -> Call:
        kind = self._rng.choice(list(self._kinds))
        # A POST has more to get wrong.
        weights = [4 if some[0].method == "POST" else 1 for some in self._seeds.values()]
        some = self._rng.choices(list(self._seeds.values()), weights)[0]
        call = self._kinds[kind](self._rng.choice(some))
        return replace(call, kind=kind)

    def _call(
        self, one: Seed, body: bytes | None, *, method: str = "", path: str = "", lines: Sequence[str] = (),
        kind: str = "application/json", length: int | None = None,
    ) -> Call:  # fmt: skip
        key = self._rng.choice(self._keys)
        given = [f"{method or one.method} {path or one.path} HTTP/1.1", "Host: localhost", *lines]
        given += [] if key is None else [f"Authorization: Bearer {key}"]
        if body is not None:
            given += [f"Content-Type: {kind}"]
            if not any(line.startswith(("Content-Length", "Transfer-Encoding")) for line in lines):
                given += [f"Content-Length: {len(body) if length is None else length}"]
        data = "\r\n".join([*given, "", ""]).encode("utf-8", "surrogatepass") + (body or b"")
        return Call(one.endpoint if not path else "(odd path)", "", method or one.method, data)

    def _body(self, one: Seed, value: Any = ...) -> bytes | None:
        value = self._bounded(one, one.body if value is ... else value)
        return None if value is None and one.method == "GET" else json.dumps(value).encode()

    def _bounded(self, one: Seed, value: Any) -> Any:
        """`value` with answers of a few tokens, for this model, and without changes of the cluster's size."""
        if not isinstance(value, dict):
            return value
        value = dict(value)
        if "scale" in one.path:  # the fuzzer shall start no processes
            return {name: 1 if type(old) is int and old > 0 else old for name, old in value.items()}
        if isinstance(value.get("model"), str) and self._rng.random() < 0.95:
            value["model"] = self._model
        if one.path.endswith("completions") and self._rng.random() < 0.98:
            value["max_tokens"] = self._rng.randint(1, 4)
            value.pop("max_completion_tokens", None)
        return value

    def _plain(self, one: Seed) -> Call:
        return self._call(one, self._body(one))

    def _value(self, one: Seed) -> Call:
        """A value somewhere in the body is another one."""
        value = json.loads(json.dumps(one.body))
        for _ in range(self._rng.randint(1, 3)):
            value = self._changed(value)
        return self._call(one, self._body(one, value))

    def _changed(self, value: Any) -> Any:
        odd = self._rng.choice(ODD_VALUES)
        if isinstance(value, dict) and value and self._rng.random() < 0.9:
            name = self._rng.choice(list(value))
            return {**value, name: self._changed(value[name])}
        if isinstance(value, list) and value and self._rng.random() < 0.7:
            place = self._rng.randrange(len(value))
            return [*value[:place], self._changed(value[place]), *value[place + 1 :]]
        return odd

    def _bytes(self, one: Seed) -> Call:
        """Bytes of the body are others, or missing."""
        body = bytearray(self._body(one) or b"{}")
        for _ in range(self._rng.randint(1, 4)):
            place = self._rng.randrange(len(body) + 1)
            how = self._rng.randrange(3)
            if how == 0:
                body[place:place] = self._rng.choice(
                    (b"\xff", b"\xc0\x80", b"\x00", b"\\ud800", b"NaN", b'"')
                )
            elif how == 1:
                del body[place : place + self._rng.randint(1, 20)]
            else:
                body[place : place + 1] = bytes([self._rng.randrange(256)])
        return self._call(one, bytes(body))

    def _type(self, one: Seed) -> Call:
        return self._call(one, self._body(one) or b"{}", kind=self._rng.choice(ODD_TYPES))

    def _method(self, one: Seed) -> Call:
        return self._call(one, self._body(one), method=self._rng.choice(ODD_METHODS))

    def _line(self, one: Seed) -> Call:
        body, line = self._body(one), self._rng.choice(ODD_LINES)
        if "chunked" in line and body is not None:
            size = self._rng.choice(
                (f"{len(body):x}", "0", "zz", "-1", "fffffffffffffffffff", f"{len(body):x};a=b")
            )
            body = size.encode() + b"\r\n" + body + b"\r\n0\r\n\r\n"
        waits = line.startswith(("Content-Length", "Transfer-Encoding", " "))
        return replace(self._call(one, body, lines=[line]), ending=WAIT if waits else "")

    def _path(self, one: Seed) -> Call:
        return self._call(one, self._body(one), path=self._rng.choice(ODD_PATHS))

    def _nesting(self, one: Seed) -> Call:
        deep = self._rng.choice((50, 500, 900, 1100, 20000, 200000))
        opening, closing = self._rng.choice((("[", "]"), ('{"a":', "}")))
        inner = opening * deep + "1" + closing * deep
        name = self._rng.choice(list(one.body) if isinstance(one.body, dict) and one.body else ["prompt"])
        body = inner if self._rng.random() < 0.3 else f"{{{json.dumps(name)}: {inner}}}"
        return self._call(one, body.encode())

    def _half(self, one: Seed) -> Call:
        whole = self._plain(one)
        ending = HALF if self._rng.random() < 0.95 else WAIT
        return replace(whole, data=whole.data[: self._rng.randrange(len(whole.data))], ending=ending)

    def _leave(self, one: Seed) -> Call:
        whole = self._plain(one)
        return replace(whole, ending=LEAVE)

    def _garbage(self, one: Seed) -> Call:
        return Call("(not HTTP)", "", "GET", self._rng.choice(GARBAGE), HALF)
