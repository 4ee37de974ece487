"""The messages between engine, workers and expert servers. The processes share nothing else.

Every message is a frozen record of plain values, so any transport can carry it. A message covers many
requests at once: there is one message per step, not one per token.

Question: Which messages do engine, workers and expert servers exchange?
"""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass, field

from moesaic.core.endpoint import Endpoint
from moesaic.core.experts import Directory, ExpertLayout, ServerEntry
from moesaic.core.metrics import ExpertServerStats, TransferStats, WorkerStats
from moesaic.core.request import FinishReason, Request, TokenLogprob, TokenRoute
from moesaic.core.worker_info import WorkerInfo


def _check_parallel(*lists: Sized) -> None:
    """Raises ValueError for parallel lists of several lengths."""
    lengths = [len(one) for one in lists]
    if min(lengths) != max(lengths):
        raise ValueError(f"parallel lists have {lengths} entries")


# ---- engine -> worker


@dataclass(frozen=True)
class KVTarget:
    """Where a prefill worker sends the KV of a request."""

    transfer: int
    """Number of the transfer, never used for another one."""
    endpoint: Endpoint
    """The endpoint of the worker that goes on with the request."""
    secret: bytes
    """What this worker requires."""


@dataclass(frozen=True)
class Submit:
    """New requests, in order of arrival."""

    requests: list[Request]
    generated_ids: list[list[int]] = field(default_factory=list)
    """Tokens that each request already got from another worker. Empty when none did."""
    targets: dict[int, KVTarget] = field(default_factory=dict)
    """Request -> where its KV goes. Only a prefill worker gets any."""
    received_transfers: dict[int, int] = field(default_factory=dict)
    """Request -> the transfer that brought its KV to this worker. Not listed: none did."""


@dataclass(frozen=True)
class Cancel:
    """Drop these requests and free their memory. Unknown ids are ignored, since those requests just ended."""

    request_ids: list[int]


@dataclass(frozen=True)
class DropKV:
    """Forget what these transfers brought or still bring. Unknown numbers are remembered."""

    transfers: list[int]


@dataclass(frozen=True)
class Shutdown:
    """Stop now. The engine drains before: it stops sending requests and waits."""


@dataclass(frozen=True)
class Serving:
    """Which servers serve the routed experts from now on, and the cluster's secret, which they require."""

    directory: Directory
    secret: bytes


# ---- worker -> engine


@dataclass(frozen=True)
class Loading:
    """How much of the checkpoint is read, for a progress line."""

    bytes_read: int
    """Bytes read."""
    total_bytes: int
    """Bytes in the checkpoint."""


@dataclass(frozen=True)
class Ready:
    """The worker is loaded and accepts requests."""

    info: WorkerInfo
    weights: str = ""
    """The fingerprint of the checkpoint of a worker that joined. Empty for other workers."""
    nvshmem: bytes = b""
    """The name of an NVSHMEM job that this worker can be PE 0 of. Empty: it can join none."""


@dataclass(frozen=True)
class RequestsAdmitted:
    """Requests that left the waiting queue for the first time. Parallel lists."""

    request_ids: list[int]
    queue_seconds: list[float]
    cached_tokens: list[int]
    """Prompt tokens found in the prefix cache."""

    def __post_init__(self) -> None:
        """Raises ValueError, which `transport.stream` reports as damage."""
        _check_parallel(self.request_ids, self.queue_seconds, self.cached_tokens)


@dataclass(frozen=True)
class RequestsMoved:
    """The worker of these requests has died or left. Other workers go on with them.

    The router sends it, which keeps the requests of all workers.
    """

    request_ids: list[int]


@dataclass(frozen=True)
class Outage:
    """Nobody computes requests, and no replacement is expected soon. The supervisor sends it.

    Requests without a token should end with an error, and clients should try again later.
    """

    reason: str
    """Why, in words for people. Empty: requests are computed again, or will be soon."""
    ends_begun_answers: bool = False
    """Whether answers that have begun should end with an error too."""


@dataclass(frozen=True)
class Tokens:
    """The new tokens of one step. Parallel lists, with one entry per request that got a token or ended."""

    request_ids: list[int]
    token_ids: list[int]
    """NO_TOKEN for a request that ends with FinishReason.ERROR."""
    finish: list[FinishReason | None]
    logprobs: list[TokenLogprob | None] = field(default_factory=list)
    """Empty when no request of the step wants them."""
    routes: list[TokenRoute | None] = field(default_factory=list)
    """The routes of the sampled tokens. Empty when no request of the step wants them."""

    def __post_init__(self) -> None:
        """Raises ValueError, which `transport.stream` reports as damage."""
        optional = [one for one in (self.logprobs, self.routes) if one]
        _check_parallel(self.request_ids, self.token_ids, self.finish, *optional)


@dataclass(frozen=True)
class PromptLogprobs:
    """Log-probabilities of the prompt tokens start, start + 1, ... of one request, chunk by chunk."""

    request_id: int
    start: int
    entries: list[TokenLogprob]


@dataclass(frozen=True)
class Stats:
    """A snapshot of counters, sent after each step and when the worker becomes idle."""

    stats: WorkerStats


@dataclass(frozen=True)
class WorkerFailed:
    """The worker failed, with one line for the user. The process ends after sending it."""

    error: str
    user_error: bool
    """True when a setting or the checkpoint is at fault, not moesaic."""


@dataclass(frozen=True)
class Layout:
    """The first message of a worker whose experts are on expert servers: where the checkpoint has them."""

    layout: ExpertLayout


@dataclass(frozen=True)
class ReceivesKV:
    """Sent before Ready by a worker that goes on with requests of prefill workers."""

    endpoint: Endpoint
    secret: bytes
    """What prefill workers must prove to know."""


@dataclass(frozen=True)
class RanksMeet:
    """The first rank of a group over several hosts waits for the ranks of the others.

    The supervisor sends it on to a process of each of these hosts.
    """

    address: str
    """tcp:HOST:PORT at which rank 0 listens."""
    secret: bytes
    """What all ranks must prove to know."""
    node: int = 0
    """Number of the receiver's host. That of rank 0 is 0."""


@dataclass(frozen=True)
class KVReceived:
    """The KV of all rows of a transfer is here."""

    transfer: int


@dataclass(frozen=True)
class KVSent:
    """All pieces of KV that a prefill worker has sent to some worker have arrived there."""

    stats: TransferStats
    """What it has sent so far, to all workers."""


@dataclass(frozen=True)
class KVNotSent:
    """A prefill worker could not send these transfers: the connection is broken or was refused."""

    transfers: list[int]


@dataclass(frozen=True)
class Alive:
    """Sent several times a second by a thread outside the computing loop.

    Without it the process counts as frozen. Between hosts both ends of a connection send it.
    """


@dataclass(frozen=True)
class DirectorySettled:
    """Every row in flight was routed with directory `version` or a later one.

    So experts that only older directories name may be dropped.
    """

    version: int


@dataclass(frozen=True)
class FaultyServer:
    """An expert server answered NaN or infinities, where the checkpoint gives finite numbers."""

    server: int
    incarnation: int
    reason: str


# ---- supervisor <-> expert server


@dataclass(frozen=True)
class Enlist:
    """The first message of a process that joins the cluster over TCP."""

    role: str
    """"attention-worker", "prefill-worker", "expert-server" or "ranks"."""
    capacity: float = 1.0
    """The weight of a server's share of experts and load, relative to the other servers."""
    host: str = ""
    """The host of the process (`transport.host`)."""
    instruction_sets: list[str] = field(default_factory=list)
    """Instruction sets of the native kernels that it can run."""
    ticket: str = ""
    """Word that a launcher gave it: the cluster expects this process. Empty: it joins on its own."""
    resident_experts: dict[int, list[int]] = field(default_factory=dict)
    """Layer -> the experts that a server still has in memory, from the last cluster. They may be those of
    another checkpoint."""


@dataclass(frozen=True)
class LinkTest:
    """Sent between Enlist and Enlisted, and sent back as it is. How long that takes is measured."""

    payload: bytes


@dataclass(frozen=True)
class EnlistReply:
    """The answer to Enlist: the checkpoint that is served, and the settings of the process."""

    model: str
    """The directory of the checkpoint on the supervisor's machine."""
    weights: str
    """Fingerprint of the checkpoint (`models.fingerprint`)."""
    config: str
    """WorkerConfig or ExpertServerConfig, as JSON. The process replaces what is of its own machine."""


@dataclass(frozen=True)
class RanksWait:
    """The ranks of a host that joined can compute here, and wait for a group."""

    weights: str
    """Fingerprint of their checkpoint."""


@dataclass(frozen=True)
class Hold:
    """Load exactly these experts, layer -> ids, and drop all others. The first Hold contains the secret."""

    version: int
    """Counts these messages. The answer repeats it."""
    experts: dict[int, list[int]]
    secret: bytes = b""


@dataclass(frozen=True)
class JoinJob:
    """Join an NVSHMEM job. Its PEs are the attention workers, then the expert servers."""

    unique_id: bytes
    """The name of the job."""
    pe: int
    """Number of the receiver."""
    workers: int
    servers: int

    def channel(self, pe: int) -> int:
        """The number of a process among the workers, or among the servers."""
        return pe if pe < self.workers else pe - self.workers


@dataclass(frozen=True)
class Neighbours:
    """The other servers of this server's host, to which it may pass on parts of requests."""

    servers: list[ServerEntry]


@dataclass(frozen=True)
class HoldReply:
    """The answer to Hold: the experts are loaded, and clients can use the server."""

    version: int
    endpoint: Endpoint
    kernels: str
    threads: int = 1
    weights: str = ""
    """The fingerprint of the checkpoint of a server that joined, as in the layout that it was sent."""
    nvshmem: bool = False
    """Whether this server can join an NVSHMEM job."""


@dataclass(frozen=True)
class Digests:
    """Which bytes a server that joined holds: layer -> expert -> SHA-256, see `models.fingerprint`.

    They follow Holds, some at a time, until every expert of it was named once.
    """

    experts: dict[int, dict[int, str]]


@dataclass(frozen=True)
class Refuse:
    """A server that joined must leave and not come back: its weights or answers are wrong."""

    reason: str


@dataclass(frozen=True)
class ServerReport:
    """Counters of an expert server. It is also a sign of life."""

    stats: ExpertServerStats
    load: list[list[int]]
    """[layer][expert] pairs computed so far. Empty when nothing changed."""


ToWorker = Submit | Cancel | DropKV | Shutdown | Serving | JoinJob
ToEngine = (
    Loading
    | Ready
    | RequestsAdmitted
    | RequestsMoved
    | Outage
    | Tokens
    | PromptLogprobs
    | Stats
    | WorkerFailed
    | Layout
    | ReceivesKV
    | RanksMeet
    | KVReceived
    | KVSent
    | KVNotSent
    | Alive
    | DirectorySettled
    | FaultyServer
)
ToServer = Hold | JoinJob | Neighbours | EnlistReply | Refuse
FromServer = Enlist | RanksWait | HoldReply | ServerReport | Digests
Message = ToWorker | ToEngine | ToServer | FromServer | LinkTest
