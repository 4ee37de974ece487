"""Chooses which micro-queue runs next: Asynchronous Expert Parallelism (section 3.4, Algorithm 1).

The queues form a grid of B layers by E experts. An attention worker has one queue per layer (E = 1). Its
scheduler calls such a layer a segment, since its rows run from the experts of one layer to the gate of the
next (see RunSegment). The last queue, of layer B - 1, is the sampler, and the layer after that is layer 0. An
expert server has one queue for each expert of each layer. The rows of the chosen queue run as one batch.

Example: five layers, E = 1, with 1, 6, 0, 5 and 5 rows waiting. `flfs` takes layer 0, `mtfs` layer 1.
`defrag` with lookahead 2 and decay 0.5 scores

    layer 0:  1 + 0.5 * 6 + 0.25 * 0 = 4          layer 3:  5 + 0.5 * 5 + 0.25 * 1 = 7.75
    layer 1:  6 + 0.5 * 0 + 0.25 * 5 = 7.25       layer 4:  5 + 0.5 * 1 + 0.25 * 6 = 7

and takes layer 3. Its rows then join the five of layer 4, and ten rows run as one batch.

The paper gives no values for lookahead and decay, and it has neither urgency nor history. The defaults 7 and
0.8 come from its public code (DisagMoE). That code also uses urgency 0.1 on attention workers and history 10
on expert workers. `cap` is our addition.

Question: Which layer's waiting rows run next (`--queue-policy`)?
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt

from moesaic.core.errors import ConfigError
from moesaic.core.tokens import IntArray

FloatArray = npt.NDArray[np.float64]
Queue = tuple[int, int]
"""(layer, expert) of a queue."""


class QueuePolicy(Protocol):
    """A rule that chooses a queue. A policy with state (DefragWithHistory) must belong to a single worker."""

    @property
    def remembers(self) -> bool:
        """Whether a choice depends on earlier choices.

        If not, callers may skip it when only one queue has rows.
        """
        ...

    def choose(self, tokens: IntArray, wait_seconds: FloatArray) -> Queue | None:
        """The queue to run next, or None when all are empty. The first queue wins a tie.

        tokens: [B, E] rows waiting. wait_seconds: [B, E] seconds that the oldest row of each queue has
        waited. Values of `wait_seconds` for empty queues are ignored.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class _CommonSettings:
    """Settings that every policy accepts. Both are off by default."""

    urgency: float | None = None
    """Seconds. Once a queue has waited longer, the queue that waited longest runs, whatever the rule says."""
    cap: int | None = None
    """Maximum rows that count for one queue, so that a large prompt chunk weighs no more than decodes."""

    @property
    def remembers(self) -> bool:
        return False

    def __post_init__(self) -> None:
        if self.urgency is not None and not self.urgency >= 0:
            raise ConfigError.field("urgency", self.urgency, "at least 0 seconds")
        if self.cap is not None and self.cap < 1:
            raise ConfigError.field("cap", self.cap, "at least 1")

    def clip_rows(self, tokens: IntArray) -> IntArray:
        """[B, E] the rows that count, at most `cap` for each queue."""
        return tokens if self.cap is None else np.minimum(tokens, self.cap)

    def urgent(self, tokens: IntArray, wait_seconds: FloatArray) -> Queue | None:
        """The queue that waited longest, if it waited longer than `urgency`. Otherwise None."""
        if self.urgency is None:
            return None
        ages = np.where(tokens > 0, wait_seconds, -math.inf)
        index = int(ages.argmax())
        return divmod(index, ages.shape[1]) if ages.flat[index] > self.urgency else None


@dataclass(frozen=True)
class Defrag(_CommonSettings):
    """Algorithm 1: choose the fullest queue, and also count the rows that wait in the next layers.

    score(b, e) = own_weight * Q[b][e] + sum over k = 1..K of decay^k * mean over e' of Q[(b + k) mod B][e']

    A layer just before layers with many waiting rows runs first, so that its rows join theirs.
    """

    lookahead: int = 7
    """K, how many of the next layers count. From B on they wrap around to the layer itself."""
    decay: float = 0.8
    """Weight of a layer, relative to the layer before it."""
    own_weight: float = 1.0
    """Weight of the queue's own rows."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lookahead < 0:
            raise ConfigError.field("lookahead", self.lookahead, "at least 0")
        if not 0 < self.decay <= 1:
            raise ConfigError.field("decay", self.decay, "above 0 and at most 1")
        if not 0 <= self.own_weight < math.inf:
            raise ConfigError.field("own_weight", self.own_weight, "at least 0 and finite")

    def choose(
        self, tokens: IntArray, wait_seconds: FloatArray, past: FloatArray | None = None
    ) -> Queue | None:
        """The queue to run next, as in QueuePolicy. past: [B] rows to add to each layer's total ahead."""
        if np.count_nonzero(tokens) == 1:  # the usual case, and scores are slow to compute
            return _best(tokens, tokens)
        return self.urgent(tokens, wait_seconds) or _best(tokens, self.scores(tokens, past))

    def scores(self, tokens: IntArray, past: FloatArray | None = None) -> FloatArray:
        """[B, E] scores, also of empty queues. They equal those of `defrag_plain` bit for bit."""
        rows = self.clip_rows(tokens)
        layers, experts = rows.shape
        totals = rows.sum(axis=1) if past is None else rows.sum(axis=1) + past
        places, weights = _ahead(layers, self.lookahead, self.decay)
        sums = np.add.accumulate((totals / experts)[places] * weights, axis=0)  # one after another, as of k
        lookahead_rows = sums[-1] if self.lookahead else np.zeros(layers)
        scores: FloatArray = self.own_weight * rows + lookahead_rows[:, None]
        return scores


class DefragWithHistory:
    """Defrag whose lookahead also counts the rows that recently waited in a layer.

    A layer's total grows by its mean total over the last `history` choices. The first choice has no history.
    A call that finds every queue empty chooses nothing and is not recorded.

    Example: B = 3, lookahead 1, decay 0.5. Queues [4, 0, 5] run layer 2: 5 + 0.5 * 4 = 7, against 4. If the
    choice before saw [0, 8, 0], layer 0 runs: 4 + 0.5 * (0 + 8) = 8, against 5 + 0.5 * (4 + 0) = 7.
    """

    def __init__(self, settings: Defrag, history: int) -> None:
        if history < 1:
            raise ConfigError.field("history", history, "at least 1")
        self.settings = settings
        self._totals: deque[IntArray] = deque(maxlen=history)
        """[B] each: the rows that counted in each layer, for the last choices."""

    @property
    def remembers(self) -> bool:
        return True

    def choose(self, tokens: IntArray, wait_seconds: FloatArray) -> Queue | None:
        past = np.mean(self._totals, axis=0) if self._totals else None
        queue = self.settings.choose(tokens, wait_seconds, past)
        if queue is not None:
            self._totals.append(self.settings.clip_rows(tokens).sum(axis=1))
        return queue


@dataclass(frozen=True)
class MostTokensFirst(_CommonSettings):
    """MTFS: the fullest queue. It tends to leave a few rows behind in each layer."""

    def choose(self, tokens: IntArray, wait_seconds: FloatArray) -> Queue | None:
        return self.urgent(tokens, wait_seconds) or _best(tokens, self.clip_rows(tokens))


@dataclass(frozen=True)
class FirstLayerFirst(_CommonSettings):
    """FLFS: the lowest layer with rows, and in it the fullest queue. New requests interrupt all others."""

    def choose(self, tokens: IntArray, wait_seconds: FloatArray) -> Queue | None:
        queue = self.urgent(tokens, wait_seconds)
        if queue is not None:
            return queue
        first = int(tokens.any(axis=1).argmax())
        fullest = int(self.clip_rows(tokens)[first].argmax())
        return (first, fullest) if tokens[first, fullest] else None


POLICIES: dict[str, type[Defrag] | type[MostTokensFirst] | type[FirstLayerFirst]] = {
    "defrag": Defrag,
    "mtfs": MostTokensFirst,
    "flfs": FirstLayerFirst,
}
"""The values of --queue-policy."""


def make_policy(
    name: str, urgency: float | None = None, cap: int | None = None, history: int = 0
) -> QueuePolicy:
    """The policy with this name. Its other settings keep their defaults.

    history: as in DefragWithHistory; 0 means none. Raises ConfigError for an unknown name, and for a policy
    that has no history when `history` is above 0.
    """
    if name not in POLICIES:
        raise ConfigError.field("--queue-policy", name, ", ".join(POLICIES))
    if not history:
        return POLICIES[name](urgency=urgency, cap=cap)
    if name != "defrag":
        raise ConfigError.field("--queue-policy", name, "defrag with --queue-history")
    return DefragWithHistory(Defrag(urgency=urgency, cap=cap), history)


@lru_cache(maxsize=16)
def _ahead(layers: int, lookahead: int, decay: float) -> tuple[IntArray, FloatArray]:
    """The layers that lie k ahead of each layer [k, B], for k = 1 .. lookahead, and their weights [k, 1]."""
    ks = range(1, lookahead + 1)
    places = (np.arange(layers)[None] + np.array(ks, dtype=np.int64)[:, None]) % layers
    return places, np.array([decay**k for k in ks])[:, None]


def _best(tokens: IntArray, scores: FloatArray | IntArray) -> Queue | None:
    """The first queue with the highest score among the queues that are not empty. None when all are empty."""
    index = int(np.where(tokens > 0, scores, -math.inf).argmax())
    return divmod(index, tokens.shape[1]) if tokens.flat[index] else None


def defrag_plain(settings: Defrag, tokens: IntArray, past: FloatArray | None = None) -> Queue | None:
    """Algorithm 1 line by line. It is slow, and tests compare Defrag (without urgency) with it."""
    rows = settings.clip_rows(tokens).tolist()
    past_rows = [0.0] * len(rows) if past is None else past.tolist()
    best, choice = -math.inf, None
    for b in range(len(rows)):
        lookahead_rows = 0.0
        for k in range(1, settings.lookahead + 1):
            layer = (b + k) % len(rows)
            total = sum(rows[layer]) + past_rows[layer]
            lookahead_rows += total / len(rows[layer]) * settings.decay**k
        for e, own_rows in enumerate(rows[b]):
            score = settings.own_weight * own_rows + lookahead_rows
            if own_rows > 0 and score > best:
                best, choice = score, (b, e)
    return choice
