"""What every route needs to know."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol

from fastapi import Depends, Request

from moesaic.core.cluster_status import ClusterLoad, ClusterStatus
from moesaic.core.errors import ConfigError, RequestError
from moesaic.core.request import SamplingParams
from moesaic.server.async_engine import AsyncEngine
from moesaic.server.errors import UnknownModelError


class Tokenizer(Protocol):
    """What the server asks of the engine's tokenizer."""

    vocab_size: int

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
        **variables: Any,
    ) -> list[int]: ...


class Cluster(Protocol):
    """What the server asks of the supervisor of several processes. From any thread."""

    def report(self) -> ClusterStatus: ...

    def load(self) -> ClusterLoad | None:
        """None where no expert server computes."""
        ...

    def scale(self, expert_servers: int | None = None, attention_workers: int | None = None) -> Future[None]:
        """Ends when there are so many; raises ConfigError or ScalingError when nothing was changed."""
        ...


@dataclass(frozen=True)
class Service:
    """One served model."""

    engine: AsyncEngine
    model_name: str
    """Its name in the API."""
    default_sampling: Mapping[str, float] = field(default_factory=dict)
    """The checkpoint's own defaults (temperature, top_p, top_k, min_p, repetition_penalty)."""
    version: str = "unknown"
    """moesaic's."""
    now: Callable[[], float] = time.time
    """Wall clock, for `created`."""
    started: float = field(default_factory=time.time)
    """When the model began to be served."""
    cluster: Cluster | None = None
    """The processes behind the engine; None: there is one."""
    may_change: bool = True
    """Whether clients (with the key, where one is needed) may change the cluster, and see who is in it."""

    def __post_init__(self) -> None:
        try:
            SamplingParams(**dict(self.default_sampling))  # type: ignore[arg-type]
        except (RequestError, TypeError) as error:
            raise ConfigError(f"the checkpoint's generation_config.json: {error}") from error

    @property
    def tokenizer(self) -> Tokenizer:
        return self.engine.engine.tokenizer

    def require_model(self, name: str | None) -> None:
        """UnknownModelError unless `name` is the served model or left out."""
        if name is not None and name != self.model_name:
            raise UnknownModelError(f"model: got {name!r}; this server serves {self.model_name!r}")


def _service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


Serving = Annotated[Service, Depends(_service_of)]
"""A route's parameter."""
