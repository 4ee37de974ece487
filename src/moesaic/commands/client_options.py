"""The settings of commands that talk to a server, from which their command lines are generated."""

from __future__ import annotations

import math
import re
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from moesaic.config import check_threads
from moesaic.config.values import at_least
from moesaic.core.errors import ConfigError

URLS = ("http://", "https://")
_HOST_PORT = re.compile(r"[\w.-]+:\d+/?")


@dataclass(frozen=True)
class Chat:
    """Talk to a model in the terminal."""

    target: str = "http://127.0.0.1:8000"
    """URL of any OpenAI-compatible server. Anything else is a model, which is then loaded for this chat: a
    directory, a GGUF file, a hub id or `demo`."""
    _: KW_ONLY
    system_prompt: str | None = None
    """Text of the message with the role `system`. None: no such message."""
    model: str | None = None
    """Name of the model on the server. None: the first one that it serves."""
    temperature: float | None = None
    """Sampling temperature. None: the server's default."""
    max_tokens: int | None = None
    """Maximum number of tokens of an answer. None: the server's default."""
    api_key: str | None = None
    """Key of the server, sent as `Authorization: Bearer KEY`. None: the value of MOESAIC_API_KEY."""
    max_model_len: int | None = None
    """Maximum number of tokens of the conversation, for a model that is loaded here. None: the checkpoint's
    own limit."""
    threads: int | None = None
    """Number of compute threads, for a model that is loaded here. None: one for each core."""
    chat_template: Path | None = None
    """File with a Jinja chat template in place of the checkpoint's own, for a model that is loaded here."""
    prefix_cache_dir: str | None = None
    """Directory that keeps the KV of conversations from one chat to the next, for a model that is loaded
    here. None: no KV goes to a disk."""
    prefix_cache_disk: str | None = None
    """Maximum size of all files in --prefix-cache-dir. None: 20GiB."""

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            at_least("--max-tokens", self.max_tokens, 1)
        check_threads(self.threads)
        # Without http:// an address would be taken for the name of a model.
        if _HOST_PORT.fullmatch(self.target):
            suggestion = f"a model, or a URL such as http://{self.target}"
            raise ConfigError.field("--target", self.target, suggestion)
        if self.url is None:
            if self.model is not None:
                raise ConfigError.field("--model", self.model, f"nothing where {self.target} is the model")
            return
        for name in (
            *("max_model_len", "threads", "chat_template", "prefix_cache_dir", "prefix_cache_disk"),
        ):
            if getattr(self, name) is not None:
                flag = "--" + name.replace("_", "-")
                raise ConfigError.field(flag, str(getattr(self, name)), "nothing with a server's URL")

    @property
    def url(self) -> str | None:
        """The server's URL. None for a model that is loaded here."""
        return self.target if self.target.startswith(URLS) else None


@dataclass(frozen=True)
class Top:
    """Watch a running server."""

    url: str = "http://127.0.0.1:8000"
    """URL of the server."""
    _: KW_ONLY
    interval: float = 2.0
    """Seconds between two views. Throughput and load are those of this time."""
    once: Annotated[bool, Parameter(negative="")] = False
    """Print one view after one interval, and end."""
    api_key: str | None = None
    """Key of the server, sent as `Authorization: Bearer KEY`. None: the value of MOESAIC_ADMIN_KEY or of
    MOESAIC_API_KEY. A server without an API key on another address than loopback shows its processes only to
    the admin key."""

    def __post_init__(self) -> None:
        if not 0 < self.interval < math.inf:
            raise ConfigError.field("--interval", self.interval, "a positive number of seconds")
        if not self.url.startswith(URLS):
            raise ConfigError.field("--url", self.url, "an address such as http://127.0.0.1:8000")
