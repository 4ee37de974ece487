"""The HTTP side, and what is written down of a run."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import get_args

from moesaic.config.environment import admin_key, api_key
from moesaic.config.values import (
    LogLevel,
    MetricsPrefix,
    at_least,
    check_key,
    check_names,
    check_url,
    require_one_of,
)
from moesaic.core.errors import ConfigError

_HOST = re.compile(r"\*|[A-Za-z0-9._:%-]+")

LONGEST_SOCKET_PATH = 107
"""Bytes of the longest path of a Unix socket (sun_path of unix(7), which ends with a zero byte)."""


@dataclass(frozen=True)
class TraceConfig:
    """What is written down of a run."""

    trace: str | None = None
    """File for a trace of all processes: steps, layers, batch sizes and waits, with a row for each process.
    It is written when the run ends. Open it at https://ui.perfetto.dev."""


@dataclass(frozen=True)
class LogConfig:
    """The log lines of every process."""

    log_level: LogLevel = "info"
    """Least level of the log lines of all processes, on stderr: debug, info, warning or error."""

    def __post_init__(self) -> None:
        require_one_of("--log-level", self.log_level, get_args(LogLevel))


@dataclass(frozen=True)
class ServerConfig:
    """The HTTP side of `moesaic serve`."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8000
    """Port to listen on. 0 takes a free one and prints it."""
    uds: str | None = None
    """Path of a Unix socket to listen on, in place of --host and --port."""
    api_key: str | None = None
    """Key that clients must send as `Authorization: Bearer KEY`. The environment variable MOESAIC_API_KEY is
    safer: other users of this machine can read a command line."""
    admin_key: str | None = None
    """Key for calls that change the server, such as scaling. None: the value of MOESAIC_ADMIN_KEY, else the
    API key, else a new key that is printed at the start."""
    allowed_hosts: str | None = None
    """Names, with commas between, by which clients may call a server without an API key, beside localhost
    and the address of --host. `*` allows every name, also that of a web page that attacks the server."""
    served_model_name: tuple[str, ...] = ()
    """Names of the model in the API, with spaces between. Requests may use any of them, and answers have the
    first. Without a name: MODEL as given."""
    chat_template: str | None = None
    """File with a Jinja chat template, used in place of the checkpoint's own."""
    tool_call_parser: str = "auto"
    """Parser of the model's tool calls, by vLLM's name, such as hermes, qwen3_coder, glm45 or openai. auto:
    chosen by the chat template. none: the server accepts no tools."""
    reasoning_parser: str = "auto"
    """Parser of the model's reasoning, by vLLM's name, such as qwen3, deepseek_r1 or openai_gptoss. auto:
    chosen by the chat template. none: reasoning stays in the content."""
    allow_special_tokens_in_content: bool = False
    """Let special tokens in the content of messages act like those of the chat template. Otherwise they are
    text, so that nobody can begin a turn inside of a message."""
    max_queue: int = 256
    """Maximum number of requests that wait beyond max_num_seqs. Further requests get status 429."""
    strict_fields: bool = False
    """Refuse requests with unknown fields. Otherwise such fields are ignored, and the answer's header
    X-Moesaic-Ignored-Fields names them."""
    enable_tokenizer_info_endpoint: bool = False
    """Answer /tokenizer_info with the tokenizer's settings and the chat template."""
    access_log: bool = False
    """Write a log line for each HTTP request."""
    metrics_prefix: MetricsPrefix = "moesaic:"
    """Prefix of the metrics that vLLM has, too. With `vllm:` dashboards for vLLM show this server. Metrics
    that vLLM does not have keep `moesaic:`."""
    otlp_traces_endpoint: str | None = None
    """URL of an OpenTelemetry collector, such as http://localhost:4318/v1/traces, for a span of each request.
    It is spoken to with OTLP over HTTP. Needs `pip install 'moesaic[otel]'`."""
    disable_log_stats: bool = False
    """Write no line about the throughput every ten seconds while requests run."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError.field("--port", self.port, "0 to 65535")
        if self.uds is not None and not 0 < len(self.uds.encode()) <= LONGEST_SOCKET_PATH:
            raise ConfigError.field("--uds", self.uds, f"a path of 1 to {LONGEST_SOCKET_PATH} bytes")
        at_least("--max-queue", self.max_queue, 0)
        require_one_of("--metrics-prefix", self.metrics_prefix, get_args(MetricsPrefix))
        if self.otlp_traces_endpoint is not None:
            check_url("--otlp-traces-endpoint", self.otlp_traces_endpoint)
        if self.api_key is not None:
            check_key("--api-key", self.api_key)
        if self.admin_key is not None:
            check_key("--admin-key", self.admin_key)
        if not all(map(_HOST.fullmatch, self.more_hosts)):
            allowed = "names with commas between, such as a.example,b.example, or *"
            raise ConfigError.field("--allowed-hosts", self.allowed_hosts, allowed)
        check_names(self.served_model_name)

    @property
    def more_hosts(self) -> tuple[str, ...]:
        """The names in --allowed-hosts."""
        text = self.allowed_hosts
        return () if text is None else tuple(name.strip() for name in text.split(","))


@dataclass(frozen=True)
class ConnectionConfig:
    """How many connections there may be, and how long a client may take to send its request."""

    timeout_header: float = 20.0
    """Maximum seconds until the head of a request has arrived. Slower connections are closed."""
    timeout_body: float = 60.0
    """Maximum seconds until the body of a request has arrived, plus one second for each 500 bytes. It is also
    the longest pause of a body. An answer may take as long as it needs."""
    timeout_keep_alive: float = 5.0
    """Seconds after which a connection without a further request is closed."""
    shutdown_timeout: float = 270.0
    """Maximum seconds after SIGTERM for the requests that run or wait. Then they end with an error."""
    max_connections: int | None = None
    """Maximum number of requests that are answered at the same time. Further ones get status 503, except
    for /health and /metrics. None: what the descriptor limit (ulimit -n) allows, at most 16384."""

    def __post_init__(self) -> None:
        for flag, seconds in (
            ("--timeout-header", self.timeout_header),
            ("--timeout-body", self.timeout_body),
            ("--timeout-keep-alive", self.timeout_keep_alive),
            ("--shutdown-timeout", self.shutdown_timeout),
        ):
            if not 0 < seconds < math.inf:
                raise ConfigError.field(flag, seconds, "a positive number of seconds")
        if self.max_connections is not None:
            at_least("--max-connections", self.max_connections, 1)


def resolve_server(config: ServerConfig, environment: Mapping[str, str] | None = None) -> ServerConfig:
    """`config` with what it leaves open taken from the environment."""
    key = config.api_key or api_key(environment)
    return replace(config, api_key=key, admin_key=config.admin_key or admin_key(environment) or key)
