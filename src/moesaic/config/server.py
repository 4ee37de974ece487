"""The HTTP side, and what is written down of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from moesaic.config.environment import api_key
from moesaic.config.values import at_least, check_key
from moesaic.core.errors import ConfigError


@dataclass(frozen=True)
class TraceConfig:
    """What is written down of a run."""

    trace: str | None = None
    """File for a trace of all processes: steps, layers, batch sizes and waits, with a row for each process.
    It is written when the run ends. Open it at https://ui.perfetto.dev."""


@dataclass(frozen=True)
class ServerConfig:
    """The HTTP side of `moesaic serve`."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8000
    """Port to listen on. 0 takes a free one and prints it."""
    api_key: str | None = None
    """Key that clients must send as `Authorization: Bearer KEY`. The environment variable MOESAIC_API_KEY is
    safer: other users of this machine can read a command line."""
    served_model_name: str | None = None
    """Name of the model in the API. None: MODEL as given."""
    chat_template: str | None = None
    """File with a Jinja chat template, used in place of the checkpoint's own."""
    max_queue: int = 256
    """Maximum number of requests that wait beyond max_num_seqs. Further requests get status 429."""
    access_log: bool = False
    """Write a log line for each HTTP request."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError.field("--port", self.port, "0 to 65535")
        at_least("--max-queue", self.max_queue, 0)
        if self.api_key is not None:
            check_key("--api-key", self.api_key)
        if self.served_model_name is not None and not self.served_model_name.strip():
            raise ConfigError.field("--served-model-name", self.served_model_name, "a name that is not empty")


def resolve_server(config: ServerConfig, environment: Mapping[str, str] | None = None) -> ServerConfig:
    """`config` with what it leaves open taken from the environment."""
    return replace(config, api_key=config.api_key or api_key(environment))
