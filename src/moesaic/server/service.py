"""The served model, as every route sees it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Protocol

from fastapi import Depends, Request

from moesaic.core.cluster_status import ClusterLoad, ClusterStatus
from moesaic.core.errors import ConfigError, RequestError
from moesaic.core.metrics import WorkerStats
from moesaic.core.request import SamplingParams
from moesaic.server.async_engine import AsyncEngine
from moesaic.server.chat_threads import IN_TOKENIZER, ChatThreads
from moesaic.server.errors import UnknownModelError
from moesaic.server.request_trace import TRACE
from moesaic.server.unknown_fields import UnknownFields
from moesaic.text.parsers.table import AUTO, Formats, detect_formats

CHATS_AT_ONCE = 4
"""Number of conversations that the chat template is applied to at a time."""
TEXTS_AT_ONCE = 4
"""Number of long texts that are tokenized at a time. Each may need some hundred MiB of memory."""


class Tokenizer(Protocol):
    """The methods of the engine's tokenizer that the server uses."""

    vocab_size: int
    settings: dict[str, Any]
    chat_template: str | None
    special_tokens: dict[str, int]

    @property
    def longest_token(self) -> int: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def token(self, token_id: int) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        most_characters: int | None = None,
        **variables: Any,
    ) -> list[int]: ...


class Cluster(Protocol):
    """The methods of the supervisor that the server uses. Any thread may call them."""

    def report(self) -> ClusterStatus: ...

    def load(self) -> ClusterLoad | None:
        """The load of the experts. None without expert servers."""
        ...

    def worker_stats(self) -> dict[str, WorkerStats]:
        """The statistics of each attention and prefill worker, by the name of its process."""
        ...

    def kill(self, name: str) -> str:
        """Kill one process by its name. Returns what was done and what follows, in words for people.

        Raises ConfigError, or ScalingError if that is not possible now.
        """
        ...

    def scale(
        self,
        expert_servers: int | None = None,
        attention_workers: int | None = None,
        prefill_workers: int | None = None,
    ) -> Future[None]:
        """Change the number of processes. The future ends once the change is done.

        The future raises ConfigError or ScalingError if nothing was changed, or if a later call took over.
        """
        ...

    def cancel_scaling(self) -> Future[None]:
        """End the change of `scale` that is under way. The future ends once what it did is undone.

        The future raises ScalingError if there is none.
        """
        ...


@dataclass(frozen=True)
class Service:
    """The served model, and what the routes need to serve it."""

    engine: AsyncEngine
    model_name: str
    """The model's name in answers and metrics."""
    default_sampling: Mapping[str, float] = field(default_factory=dict)
    """The checkpoint's defaults (temperature, top_p, top_k, min_p, repetition_penalty)."""
    version: str = "unknown"
    """moesaic's version."""
    now: Callable[[], float] = time.time
    """The wall clock, for the field `created`."""
    start_time: float = field(default_factory=time.time)
    """Time at which serving started, on the wall clock."""
    tool_call_parser: str = AUTO
    """Name of the parser of tool calls. Names: see moesaic.text.parsers.table."""
    reasoning_parser: str = AUTO
    """Name of the parser of reasoning."""
    cluster: Cluster | None = None
    """The supervisor of several processes. None if one worker process does everything."""
    chat_threads: ChatThreads = field(default_factory=lambda: ChatThreads(CHATS_AT_ONCE))
    """The threads that apply the chat template."""
    text_threads: ChatThreads = field(default_factory=lambda: ChatThreads(TEXTS_AT_ONCE, busy=IN_TOKENIZER))
    """The threads that encode and decode long texts."""
    fields: UnknownFields = field(default_factory=UnknownFields)
    """What becomes of unknown fields."""
    other_names: tuple[str, ...] = ()
    """Further names that requests may use."""

    def __post_init__(self) -> None:
        # A wrong default is reported at the start, not in the answer to each request.
        try:
            SamplingParams(**dict(self.default_sampling))  # type: ignore[arg-type]
        except (RequestError, TypeError) as error:
            raise ConfigError(f"the checkpoint's generation_config.json: {error}") from error

    @property
    def names(self) -> tuple[str, ...]:
        return (self.model_name, *self.other_names)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.engine.engine.tokenizer

    @cached_property
    def formats(self) -> Formats:
        """How the model's answers are read."""
        return detect_formats(self.tokenizer.chat_template, self.tool_call_parser, self.reasoning_parser)

    def require_model(self, name: str | None) -> None:
        """Raise UnknownModelError unless `name` is one of the served model's names or None."""
        if name is not None and name not in self.names:
            served_names = ", ".join(map(repr, self.names))
            raise UnknownModelError(f"model: got {name!r}; this server serves {served_names}")
        trace = TRACE.get()
        if trace is not None:
            trace.model = name


def _get_service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


Serving = Annotated[Service, Depends(_get_service)]
"""The type of a route's parameter that receives the service."""
