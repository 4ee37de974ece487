"""Which web pages of other origins may call the server (CORS)."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from moesaic.core.errors import ConfigError

ANY_VALUE = "*"
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s?#,*]+")
_TOKEN = re.compile(r"\*|[A-Za-z0-9!#$%&'*+.^_`|~-]+")


@dataclass(frozen=True)
class CorsConfig:
    """Which web pages of other origins may call the server. Lists are JSON or have commas between."""

    allowed_origins: str | None = None
    """Origins whose web pages may call the server, such as https://chat.example,http://localhost:3000, or
    `*`. None: no page of another origin may, and no answer has CORS headers."""
    allowed_methods: str = ANY_VALUE
    """Methods that pages of --allowed-origins may use. `*` allows all."""
    allowed_headers: str = ANY_VALUE
    """Headers that pages of --allowed-origins may send. `*` allows all."""
    allow_credentials: bool = False
    """Pages of --allowed-origins may send cookies and other credentials of the browser. The header
    Authorization needs no such permission."""

    def __post_init__(self) -> None:
        for flag, items, pattern, choices in (
            ("--allowed-origins", self.origins, _ORIGIN, "origins such as https://chat.example, or *"),
            ("--allowed-methods", self.methods, _TOKEN, "methods such as GET,POST, or *"),
            ("--allowed-headers", self.headers, _TOKEN, "names of headers, or *"),
        ):
            for item in items:
                if not pattern.fullmatch(item):
                    raise ConfigError.field(flag, item, f"{choices}; several as JSON or with commas between")
        for name in ("allowed_methods", "allowed_headers", "allow_credentials"):
            if self.allowed_origins is None and getattr(self, name) != getattr(CorsConfig, name):
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag}: needs --allowed-origins, which says who may call the server")
        if self.allow_credentials and ANY_VALUE in self.origins:
            choices = "origins by name with --allow-credentials, since every page could act for its reader"
            raise ConfigError.field("--allowed-origins", ANY_VALUE, choices)

    @property
    def origins(self) -> tuple[str, ...]:
        return () if self.allowed_origins is None else _parse_list("--allowed-origins", self.allowed_origins)

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(name.upper() for name in _parse_list("--allowed-methods", self.allowed_methods))

    @property
    def headers(self) -> tuple[str, ...]:
        return _parse_list("--allowed-headers", self.allowed_headers)


def _parse_list(flag: str, text: str) -> tuple[str, ...]:
    """The items of a list in JSON or with commas between. Example: '["a", "b"]' and 'a,b' are ("a", "b")."""
    if not text.lstrip().startswith("["):
        return tuple(item.strip() for item in text.split(","))
    try:
        items = json.loads(text)
    except (ValueError, RecursionError):
        items = None
    if not isinstance(items, list) or not items or not all(isinstance(item, str) for item in items):
        raise ConfigError.field(flag, text, 'a JSON list of texts such as ["a", "b"], or a,b')
    return tuple(items)
