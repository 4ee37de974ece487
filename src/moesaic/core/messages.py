"""The messages between the engine and a worker, and between a cluster's processes.

Every message is a frozen record of plain values, so that any transport can carry it. A message is about
many requests at once: there is one for each step, not one for each token.
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
    """Tokens that each request got from a worker that died; empty if there are none."""


@dataclass(frozen=True)
class Cancel:
    """Forget these requests and free their memory. Unknown ids are ignored: they have just ended."""

    request_ids: list[int]


@dataclass(frozen=True)
class Shutdown:
    """Stop now. For a graceful stop, the engine first waits until all requests have ended."""


@dataclass(frozen=True)
class Serving:
    """The servers of the routed experts from now on, and the cluster's secret, which the servers ask for."""

    directory: Directory
    secret: bytes


# ---- worker -> engine


@dataclass(frozen=True)
class Loading:
    """Progress of reading the checkpoint."""

    done: int
    """Bytes read."""
    total: int
    """Bytes in the checkpoint."""


@dataclass(frozen=True)
class WorkerInfo:
    """What a worker has loaded and chosen."""

    model_type: str
    device: str
    kernels: str
    dtype: str
    threads: int
    num_parameters: int
    """Number of parameters. For a group of processes: those of its first rank."""
    weight_bytes: int
    """Bytes of weights. For a group of processes: those of its first rank."""
    num_layers: int
    num_experts: int
    top_k: int
    vocab_size: int
    max_model_len: int
    """Maximum number of tokens of one request, prompt and answer together."""
    block_size: int
    num_blocks: int
    kv_bytes: int
    kv_dtype: str
    max_num_seqs: int
    max_num_batched_tokens: int
    ranks: int = 1
    """Number of processes that form this worker."""
    collectives: str = ""
    """Collectives of these processes between attention and experts."""

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
    """Empty if no request of the step asked for them."""


@dataclass(frozen=True)
class PromptLogprobs:
    """Log-probabilities of prompt tokens start, start + 1, ... of one request (chunk by chunk)."""

    request_id: int
    start: int
    entries: list[TokenLogprob]


@dataclass(frozen=True)
class Stats:
    """Statistics, sent after each step and when the worker becomes idle."""

    stats: WorkerStats


@dataclass(frozen=True)
class Failed:
    """The worker cannot continue, with one line for people. Its process ends after this message."""

    error: str
    user_error: bool
    """True if a setting or the checkpoint is the cause, not a bug of moesaic."""


@dataclass(frozen=True)
class Layout:
    """A worker's first message if its experts are on servers: where the experts are in the checkpoint."""

    layout: ExpertLayout


@dataclass(frozen=True)
class Alive:
    """Sent several times a second by a thread that does not compute. Silence means a frozen process."""


@dataclass(frozen=True)
class Settled:
    """No call under way was routed by a directory older than `version`. What only older ones name may be
    dropped."""

    version: int


# ---- supervisor <-> expert server


@dataclass(frozen=True)
class Enlist:
    """The first message of a server that joins from outside."""

    capacity: float
    """Capacity weight, which sets its share of experts and load."""


@dataclass(frozen=True)
class Enlisted:
    """The answer to a server that joined: what it will serve."""

    layout: ExpertLayout
    model: str
    """Directory of the checkpoint on the supervisor's machine."""
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
    """Hold exactly these experts, layer -> ids. The first such message carries the cluster's secret."""

    version: int
    """Number of this message; the answer repeats it."""
    experts: dict[int, list[int]]
    secret: bytes = b""


@dataclass(frozen=True)
class Holds:
    """The server's answer: it holds these experts, and clients may ask for them."""

    version: int
    address: str
    kernels: str
    threads: int = 1


@dataclass(frozen=True)
class ServerReport:
    """What an expert server has done so far. It is a sign of life as well."""

    stats: ExpertServerStats
    load: list[list[int]]
    """Pairs of each layer and expert so far; empty if nothing has changed."""


ToWorker = Submit | Cancel | Shutdown | Serving
ToEngine = Loading | Ready | Admitted | Tokens | PromptLogprobs | Stats | Failed | Layout | Alive | Settled
ToServer = Hold | Enlisted
FromServer = Enlist | Holds | ServerReport
Message = ToWorker | ToEngine | ToServer | FromServer
