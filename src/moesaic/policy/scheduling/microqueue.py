"""Which micro-queue runs next: the schedulers of Asynchronous Expert Parallelism (section 3.4, Algorithm 1).

Queues stand in a grid of B layers by E experts. An attention worker has one queue a layer (E = 1) and the
sampler as layer B - 1, so that the next layer after it is layer 0; an expert server has one queue for each
expert of each layer. The rows of the chosen queue run as one batch.

Example: five layers, E = 1, with 1, 6, 0, 5 and 5 rows waiting. `flfs` takes layer 0, `mtfs` layer 1.
`defrag` with lookahead 2 and decay 0.5 scores

    layer 0:  1 + 0.5 * 6 + 0.25 * 0 = 4          layer 3:  5 + 0.5 * 5 + 0.25 * 1 = 7.75
    layer 1:  6 + 0.5 * 0 + 0.25 * 5 = 7.25       layer 4:  5 + 0.5 * 1 + 0.25 * 6 = 7

and takes layer 3: its rows catch up with the five of layer 4, and ten go on as one batch.

The paper gives no numbers for lookahead and decay and has neither urgency nor history; the defaults 7 and 0.8
are those of its public code (DisagMoE), which also has urgency 0.1 on attention workers and history 10 on
expert workers. `cap` is ours.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from moesaic.core.errors import ConfigError
from moesaic.core.tokens import IntArray

FloatArray = npt.NDArray[np.float64]
Queue = tuple[int, int]
"""(layer, expert)"""


class QueuePolicy(Protocol):
    """A rule of choice. One that remembers (DefragWithHistory) belongs to a single worker."""

    @property
    def remembers(self) -> bool:
        """Whether a choice depends on those before. Else it need not be asked of one queue alone."""
        ...

    def choose(self, tokens: IntArray, waited: FloatArray) -> Queue | None:
        """The queue to run next; None when all are empty. The first one wins a tie.

        tokens: [B, E] rows waiting. waited: [B, E] seconds that each queue's oldest row has been ready; what
        it says of empty queues is ignored.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class _Switches:
    """What any policy may have beside its own rule; off by default."""

    urgency: float | None = None
    """Seconds: once a queue waited longer, the one that waited longest runs, whatever the rule says."""
    cap: int | None = None
    """Most rows that count of one queue, so that a large chunk of a prompt weighs no more than decodes."""

    @property
    def remembers(self) -> bool:
        return False

    def __post_init__(self) -> None:
        if self.urgency is not None and not self.urgency >= 0:
            raise ConfigError.field("urgency", self.urgency, "at least 0 seconds")
        if self.cap is not None and self.cap < 1:
            raise ConfigError.field("cap", self.cap, "at least 1")

    def counted(self, tokens: IntArray) -> IntArray:
        """[B, E] the rows that count."""
        return tokens if self.cap is None else np.minimum(tokens, self.cap)

    def urgent(self, tokens: IntArray, waited: FloatArray) -> Queue | None:
        """The queue that waited longest, if that is longer than `urgency`."""
        if self.urgency is None:
            return None
        ages = np.where(tokens > 0, waited, -math.inf)
        index = int(ages.argmax())
        return divmod(index, ages.shape[1]) if ages.flat[index] > self.urgency else None


@dataclass(frozen=True)
class Defrag(_Switches):
    """Algorithm 1: the fullest queue, where rows that wait in the next layers count too.

    score(b, e) = own_weight * Q[b][e] + sum over k = 1..K of decay^k * mean over e' of Q[(b + k) mod B][e']

    A layer in front of a dense wave is run first, so that its rows join the wave.
    """

    lookahead: int = 7
    """K: how many of the next layers count. From B on, they wrap around to the layer itself."""
    decay: float = 0.8
    """What a layer counts, relative to the one before it."""
    own_weight: float = 1.0
    """What the queue's own rows count."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lookahead < 0:
            raise ConfigError.field("lookahead", self.lookahead, "at least 0")
        if not 0 < self.decay <= 1:
            raise ConfigError.field("decay", self.decay, "above 0 and at most 1")
        if not 0 <= self.own_weight < math.inf:
            raise ConfigError.field("own_weight", self.own_weight, "at least 0 and finite")

    def choose(self, tokens: IntArray, waited: FloatArray, past: FloatArray | None = None) -> Queue | None:
        """As QueuePolicy. past: [B] rows to add to each layer's total in the lookahead."""
        if np.count_nonzero(tokens) == 1:  # mostly so, and scores take a while
            return _best(tokens, tokens)
        return self.urgent(tokens, waited) or _best(tokens, self.scores(tokens, past))

    def scores(self, tokens: IntArray, past: FloatArray | None = None) -> FloatArray:
        """[B, E], empty queues included; to the last bit the scores of `defrag_plain`."""
        rows = self.counted(tokens)
        layers, experts = rows.shape
        totals = rows.sum(axis=1) if past is None else rows.sum(axis=1) + past
        means = np.tile(totals / experts, 2)
        ahead = np.zeros(layers)
        for k in range(1, self.lookahead + 1):
            start = k % layers
            ahead += means[start : start + layers] * self.decay**k
        scores: FloatArray = self.own_weight * rows + ahead[:, None]
        return scores


class DefragWithHistory:
    """Defrag in whose lookahead a layer counts for what lately waited there, beside what waits there now.

    A layer's total grows by its mean total over the last `history` choices. Of the first choice there is no
    past; calls that find every queue empty choose nothing and leave none.

    Example: B = 3, lookahead 1, decay 0.5. Queues [4, 0, 5] run layer 2: 5 + 0.5 * 4 = 7, against 4. Had
    [0, 8, 0] come before, it would be layer 0: 4 + 0.5 * (0 + 8) = 8, against 5 + 0.5 * (4 + 0) = 7.
    """

    def __init__(self, settings: Defrag, history: int) -> None:
        if history < 1:
            raise ConfigError.field("history", history, "at least 1")
        self.settings = settings
        self._totals: deque[IntArray] = deque(maxlen=history)
        """[B] each: the rows that counted in each layer, of the last choices."""

    @property
    def remembers(self) -> bool:
        return True

    def choose(self, tokens: IntArray, waited: FloatArray) -> Queue | None:
        past = np.mean(self._totals, axis=0) if self._totals else None
        queue = self.settings.choose(tokens, waited, past)
        if queue is not None:
            self._totals.append(self.settings.counted(tokens).sum(axis=1))
        return queue


@dataclass(frozen=True)
class MostTokensFirst(_Switches):
    """MTFS: the fullest queue. It leaves the last rows of a layer behind, layer after layer."""

    def choose(self, tokens: IntArray, waited: FloatArray) -> Queue | None:
        return self.urgent(tokens, waited) or _best(tokens, self.counted(tokens))


@dataclass(frozen=True)
class FirstLayerFirst(_Switches):
    """FLFS: the lowest layer with rows, and in it the fullest queue. New requests interrupt all others."""

    def choose(self, tokens: IntArray, waited: FloatArray) -> Queue | None:
        queue = self.urgent(tokens, waited)
        if queue is not None:
            return queue
        first = int(tokens.any(axis=1).argmax())
        fullest = int(self.counted(tokens)[first].argmax())
        return (first, fullest) if tokens[first, fullest] else None


POLICIES: dict[str, type[Defrag] | type[MostTokensFirst] | type[FirstLayerFirst]] = {
    "defrag": Defrag,
    "mtfs": MostTokensFirst,
    "flfs": FirstLayerFirst,
}
"""The values of --queue-policy."""


def policy_named(
    name: str, urgency: float | None = None, cap: int | None = None, history: int = 0
) -> QueuePolicy:
    """The policy of that name, its other settings at their defaults. history: see DefragWithHistory; 0: none.

    Raises ConfigError for another name, and for one that has no history.
    """
    if name not in POLICIES:
        raise ConfigError.field("--queue-policy", name, ", ".join(POLICIES))
    if not history:
        return POLICIES[name](urgency=urgency, cap=cap)
    if name != "defrag":
        raise ConfigError.field("--queue-policy", name, "defrag with --queue-history")
    return DefragWithHistory(Defrag(urgency=urgency, cap=cap), history)


def _best(tokens: IntArray, scores: FloatArray | IntArray) -> Queue | None:
    """The first queue with the highest score among those that are not empty."""
    index = int(np.where(tokens > 0, scores, -math.inf).argmax())
    return divmod(index, tokens.shape[1]) if tokens.flat[index] else None


def defrag_plain(settings: Defrag, tokens: IntArray, past: FloatArray | None = None) -> Queue | None:
    """Algorithm 1 line by line: slow, and what Defrag (without urgency) is tested against."""
    rows = settings.counted(tokens).tolist()
    added = [0.0] * len(rows) if past is None else past.tolist()
    best, choice = -math.inf, None
    for b in range(len(rows)):
        ahead = 0.0
        for k in range(1, settings.lookahead + 1):
            layer = (b + k) % len(rows)
            total = sum(rows[layer]) + added[layer]
            ahead += total / len(rows[layer]) * settings.decay**k
        for e, own in enumerate(rows[b]):
            score = settings.own_weight * own + ahead
            if own > 0 and score > best:
                best, choice = score, (b, e)
    return choice
