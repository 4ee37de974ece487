"""What the engine and a worker say to each other. They meet nowhere else.

Every message is a frozen record of plain values, so that any transport can carry it. A message is
about many requests at once: there is one a step, not one a token.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from moesaic.core.experts import Directory, ExpertLayout
from moesaic.core.metrics import ExpertServerStats, WorkerStats
from moesaic.core.request import FinishReason, Request, TokenLogprob

# ---- engine -> worker


@dataclass(frozen=True)
class Submit:
    """New requests, in order of arrival."""

    requests: list[Request]
    generated: list[list[int]] = field(default_factory=list)
    """Tokens that each got from a worker that died; empty when none did."""


@dataclass(frozen=True)
class Cancel:
    """Forget these requests and free what they hold. Unknown ids are ignored: they just ended."""

    request_ids: list[int]


@dataclass(frozen=True)
class Shutdown:
    """Stop now. Draining is the engine's business: it stops sending and waits."""


@dataclass(frozen=True)
class Serving:
    """Who serves the routed experts from now on, and the cluster's secret that they ask for."""

    directory: Directory
    secret: bytes


# ---- worker -> engine


@dataclass(frozen=True)
class Loading:
    """How far reading the checkpoint is, for a progress line."""

    done: int
    """Bytes read."""
    total: int
    """Bytes in the checkpoint."""


@dataclass(frozen=True)
class WorkerInfo:
    """What a worker loaded and chose."""

    model_type: str
    device: str
    kernels: str
    dtype: str
    threads: int
    num_parameters: int
    """Of a group of processes: what its first rank holds."""
    weight_bytes: int
    """The same."""
    num_layers: int
    num_experts: int
    top_k: int
    vocab_size: int
    max_model_len: int
    """Most tokens, prompt and answer together, of one request."""
    block_size: int
    num_blocks: int
    kv_bytes: int
    kv_dtype: str
    max_num_seqs: int
    max_num_batched_tokens: int
    ranks: int = 1
    """Processes that are this worker together."""
    collectives: str = ""
    """How they meet between attention and experts."""

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return self.block_size * self.num_blocks


@dataclass(frozen=True)
class Ready:
    """The worker is loaded and waits for requests."""

    info: WorkerInfo


@dataclass(frozen=True)
class Admitted:
    """Requests that left the waiting queue for the first time. Three parallel lists."""

    request_ids: list[int]
    queue_seconds: list[float]
    cached_tokens: list[int]
    """Prompt tokens found in the prefix cache."""


@dataclass(frozen=True)
class Tokens:
    """One step's new tokens. Parallel lists, one entry per request that got a token or ended."""

    request_ids: list[int]
    token_ids: list[int]
    finish: list[FinishReason | None]
    logprobs: list[TokenLogprob | None] = field(default_factory=list)
    """Empty when no request of the step asked for them."""


@dataclass(frozen=True)
class PromptLogprobs:
    """Log-probabilities of prompt tokens start, start + 1, ... of one request (chunk by chunk)."""

    request_id: int
    start: int
    entries: list[TokenLogprob]


@dataclass(frozen=True)
class Stats:
    """A snapshot, sent after each step and when the worker falls idle."""

    stats: WorkerStats


@dataclass(frozen=True)
class Failed:
    """The worker cannot go on: one line for a person. The process ends after it."""

    error: str
    user_error: bool
    """True when a setting or the checkpoint is to blame, not moesaic."""


@dataclass(frozen=True)
class Layout:
    """A worker's first word when its experts are elsewhere: where in the checkpoint they lie."""

    layout: ExpertLayout


@dataclass(frozen=True)
class Alive:
    """Sent several times a second from outside the computing loop. Silence means a frozen process."""


@dataclass(frozen=True)
class Settled:
    """Nothing under way was routed by a directory older than `version`: what only older ones name may go."""

    version: int


# ---- supervisor <-> expert server


@dataclass(frozen=True)
class Enlist:
    """The first word of a server that joins by hand."""

    capacity: float
    """Its capacity weight: share of experts and of load, beside those of the other servers."""


@dataclass(frozen=True)
class Enlisted:
    """To a server that joined by hand: what it is to serve."""

    layout: ExpertLayout
    model: str
    """The directory of the checkpoint on the supervisor's machine."""
    kernels: str
    mmap: bool
    schedule: str
    queue_policy: str
    queue_urgency: float | None = None
    queue_history: int = 0
    expert_batch_pairs: int | None = None
    expert_batch_wait: float = 0.0
    """Milliseconds."""


@dataclass(frozen=True)
class Hold:
    """Hold exactly these experts, layer -> ids. The first one carries the cluster's secret."""

    version: int
    """Counts these messages; the answer repeats it."""
    experts: dict[int, list[int]]
    secret: bytes = b""


@dataclass(frozen=True)
class Holds:
    """The server's answer: it holds what that Hold asked for, clients can ask for it."""

    version: int
    address: str
    kernels: str
    threads: int = 1


@dataclass(frozen=True)
class ServerReport:
    """What an expert server did so far; a sign of life as well."""

    stats: ExpertServerStats
    load: list[list[int]]
    """Pairs of each layer and expert so far; empty when nothing changed."""


ToWorker = Submit | Cancel | Shutdown | Serving
ToEngine = Loading | Ready | Admitted | Tokens | PromptLogprobs | Stats | Failed | Layout | Alive | Settled
ToServer = Hold | Enlisted
FromServer = Enlist | Holds | ServerReport
Message = ToWorker | ToEngine | ToServer | FromServer
