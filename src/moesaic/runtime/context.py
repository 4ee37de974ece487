"""What a worker is built from: its context, and the parts in which workers differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch

from moesaic.config import WorkerConfig
from moesaic.core.experts import ExpertLayout
from moesaic.core.metrics import ExpertStats
from moesaic.core.offload import Division
from moesaic.core.routing import RowSink
from moesaic.experts.client import ExpertServers
from moesaic.models.checkpoint import Progress
from moesaic.models.kvcache.images import CopiedMemory
from moesaic.models.kvcache.memory import CacheSize, LayerMemory
from moesaic.policy.scheduling.batching import BatchLimits
from moesaic.policy.scheduling.schedulers.actions import Scheduler
from moesaic.policy.scheduling.speculation import Speculation
from moesaic.runtime.keeping import KeptModel
from moesaic.runtime.model_loading import LoadedModel, context_length
from moesaic.runtime.observer import IGNORING_OBSERVER, WorkerObserver
from moesaic.runtime.predicting import Predictor
from moesaic.runtime.prefix_cache.part import OwnPart, PrefixPart
from moesaic.runtime.routing_recorder import RoutingRecorder
from moesaic.runtime.step.layerwise import LayerwiseRunner
from moesaic.runtime.step.running_step import StepRunner
from moesaic.runtime.token_routes import TokenRoutes
from moesaic.runtime.worker import Journal
from moesaic.transport.base import Connection
from moesaic.transport.wakeup import Wakeup


@dataclass(frozen=True)
class WorkerContext:
    """The settings of a worker and the process around it."""

    config: WorkerConfig
    connection: Connection
    """The connection to the engine."""
    clock: Callable[[], float]
    """Seconds, monotonic; the engine's clock."""
    progress: Progress | None = None
    """Is called while weights are read."""
    journal: Journal | None = None
    wakeup: Wakeup | None = None
    """Rings when a message arrives. Needed where the experts are on servers."""
    routing: RowSink | None = None
    """Gets the expert ids of all rows."""
    on_rank_lost: Callable[[str], None] | None = None
    """Called from a thread when another rank of the group ends. None: the next step finds out."""
    kept_model: KeptModel = field(default_factory=KeptModel)
    """The model that this process has loaded before, if all of it is in memory."""

    @cached_property
    def limits(self) -> BatchLimits:
        """Raises ConfigError if --max-model-len is more than the model's context length."""
        scheduler = self.config.scheduler
        longest = context_length(self.config.model)
        return BatchLimits(scheduler.max_num_seqs, scheduler.max_num_batched_tokens, longest)


@dataclass(frozen=True)
class AskingParts:
    """The parts of a worker that ask the expert servers."""

    runner: StepRunner
    servers: ExpertServers
    stats: Callable[[], ExpertStats]


@dataclass(frozen=True)
class WorkerParts:
    """The parts in which workers differ."""

    loaded_model: LoadedModel
    kv_dtype: torch.dtype
    size: CacheSize
    runner: StepRunner
    scheduler: Scheduler
    memory: LayerMemory
    """What all layers keep of sequences. In a group it is that of the first rank's heads."""
    images: CopiedMemory | None = None
    """The memory of all ranks, to copy from and to. None: `memory`, or what nobody copies."""
    stored_root: bytes | None = None
    """The digest before the first blocks of prefixes on a disk. None: none are stored."""
    share_prefixes: Callable[[OwnPart], PrefixPart] | None = None
    """Makes the part of all ranks from that of the first one. None: this process has all of a block."""
    expert_stats: Callable[[], ExpertStats] = ExpertStats
    """Takes a snapshot of what the experts counted."""
    servers: ExpertServers | None = None
    """The expert servers. None: this worker computes all experts itself."""
    layerwise: LayerwiseRunner | None = None
    """Runs the model segment by segment. None with a scheduler that does not."""
    recorder: RoutingRecorder | None = None
    routes: TokenRoutes | None = None
    """Finds who computed a token. None: the experts of a token cannot be returned."""
    observer: WorkerObserver = IGNORING_OBSERVER
    logit_rows: int | None = None
    """Maximum number of rows whose logits are computed at once. None: all rows of a step."""
    linger: float = 0.0
    """Seconds that an idle worker waits for a further message after each one."""
    expert_layout: ExpertLayout | None = None
    """Where the checkpoint has the routed experts. None: `loaded_model` has them."""
    ranks: int = 1
    """Number of processes that are this worker."""
    collectives: str = ""
    """Name of their collective layout, for display."""
    speculation: Speculation = field(default_factory=Speculation)
    """Drafts tokens for the scheduler."""
    least_rows: int = 0
    """Rows in flight of which some part may run alone, at least. 0: none ever does by its schedule."""
    predictor: Predictor | None = None
    """Drafts tokens with a layer of the model after each step. None: it has no such layer, or need not."""
    divide: Callable[[Division], None] | None = None
    """Divides memory between experts and KV blocks. None: it stays as it is."""
