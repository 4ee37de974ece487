"""Made-up routing with the statistics of a real model's: what the placement solvers are compared on.

    python benchmarks/routings.py --experts 64 --top-k 6 -o profile.npz     # 8 layers, 100,000 tokens
    python benchmarks/routings.py --experts 64 --top-k 6 --uniform -o uniform.npz
    python benchmarks/routings.py --layers 27 --vocabulary 102400 --requests 8000 -o large.npz

Token ids, topics and noise are normal vectors of one space; coordinate i has variance (i + 1)^-decay there.
A layer's gates are random directions. For a token of id v in a request of topic z, in layer l,

    state = id_v + noise_l * steadiness_v * (TOPIC * topic_z + context)
    its experts = the top k of (gates . state + bias)

where half of the context's variance is one draw for all layers and half is drawn anew in each. Biases, as
training with a balancing loss finds them, bring the experts' loads to log-normal shares (spread SPREAD). Ids
are Zipfian, tilted towards those near the request's topic. There are no planted clusters: which experts go
together follows from the directions alone, and a steeper spectrum (`decay`) leaves fewer of them.

Two constants are calibrated, neither against a solver of ours (calibration.py):

    noise    so that at each of six depths the nine numbers of Table 1 of Semantic Parallelism
             (DeepSeek-V2-Lite, ShareGPT) come nearest, in the sum of absolute differences. The same targets
             serve 128 experts.
    decay    so that of METIS and balanced k-means the better one has a local activation rate of 0.47 on
             8 ranks: token level, 20 % of the requests as profile, measured on the other 80 %.

With --uniform every choice is drawn evenly and alone: nothing can be predicted, and no solver gains.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moesaic.core.profile import Profile, Routes

FloatArray = npt.NDArray[np.float32]

WIDTH = 16
"""Number of coordinates of the space."""
TOPICS = 16
TOPIC = 0.5
"""Length of a topic's vector beside a context's, which is 1."""
TILT = 1.0
"""How much a topic prefers the ids near it: weight times exp(TILT * id . topic)."""
UNSTEADY = 0.5
"""Log-normal spread of the ids' steadiness."""
RARE = 0.3
"""Steadiness falls with the id's rank in frequency to this power. Table 1 asks for it: its F1, which frequent
ids decide, is higher beside its hotness, which counts every id once, than without."""
SPREAD = 0.35
"""Log-normal spread of the experts' loads."""
SHORTEST, LONGEST = 32, 224
"""Minimum and maximum number of tokens of a request, evenly distributed. The first three quarters are its
prompt.
"""
AT_ONCE = 2_000
"""Number of ids whose nearest known id is searched at once."""

DEPTHS = (1, 6, 11, 16, 21, 26)
"""Layers of Table 1 of Semantic Parallelism, of 26."""


@dataclass(frozen=True)
class Shape:
    """A model's sizes and what was calibrated for them."""

    experts: int
    top_k: int
    decay: float
    noise: tuple[float, ...]
    """The noise at the depths DEPTHS. Between them it is interpolated."""
    vocabulary: int = 16_000


SHAPES = (
    Shape(64, 6, decay=1.68, noise=(0.045, 0.159, 0.159, 0.318, 0.357, 0.357)),
    Shape(128, 8, decay=1.09, noise=(0.028, 0.09, 0.09, 0.253, 0.253, 0.253)),
)
"""Found by `calibration.py --experts 64 --find` and `... --experts 128 --find`. Of
METIS and k-means the better one then reaches, with seeds 0, 1, 2: 0.470 0.465 0.457 and 0.468 0.471 0.472."""


def generate(shape: Shape, layers: int = 8, requests: int = 800, seed: int = 0) -> Profile:
    """A profile with all its routes. Layers are spread evenly over the depth of the model."""
    depth = np.linspace(DEPTHS[0], DEPTHS[-1], layers) if layers > 1 else np.mean(DEPTHS)
    noise = np.interp(np.atleast_1d(depth), DEPTHS, shape.noise)
    return Generator(shape, requests, seed).profile(noise.tolist())


def uniform(experts: int, top_k: int, layers: int = 8, requests: int = 800, seed: int = 0) -> Profile:
    """The same requests, every choice drawn evenly and alone."""
    shape = Shape(experts, top_k, 0.0, (0.0,) * len(DEPTHS))
    made = Generator(shape, requests, seed)
    draws = [made.rng.random((len(made.tokens), experts), dtype=np.float32) for _ in range(layers)]
    return made.finished([_top(draw, top_k) for draw in draws])


class Generator:
    """Ids, topics and requests of one seed; then layer after layer."""

    def __init__(self, shape: Shape, requests: int, seed: int) -> None:
        self.rng = rng = np.random.default_rng(seed)
        self.shape = shape
        spectrum = (1.0 + np.arange(WIDTH)) ** (-shape.decay / 2)
        self.spectrum = (spectrum / np.linalg.norm(spectrum)).astype(np.float32)
        self.ids, topics = self._vectors(shape.vocabulary), self._vectors(TOPICS)
        rank = np.arange(shape.vocabulary) + 2.7
        steadiness = np.exp(UNSTEADY * rng.normal(size=shape.vocabulary)) * (rank / 1000) ** RARE
        lengths = rng.integers(SHORTEST, LONGEST + 1, size=requests)
        self.starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        self.topics = rng.integers(TOPICS, size=requests)
        topic = np.repeat(self.topics, lengths)
        self.tokens = self._drawn(np.exp(TILT * topics @ self.ids.T) / rank, topic)
        self.steadiness = steadiness.astype(np.float32)[self.tokens, None]
        self.shift = np.float32(TOPIC) * topics[topic]
        self.lasting = self._vectors(len(self.tokens))

    def _vectors(self, count: int) -> FloatArray:
        """[count, WIDTH], of length 1 in the mean square."""
        return self.rng.standard_normal((count, WIDTH), dtype=np.float32) * self.spectrum

    def _drawn(self, weights: FloatArray, topic: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
        """[t] ids, each drawn by its topic's row of weights [TOPICS, V]."""
        places = self.rng.random(len(topic))
        found = np.empty(len(topic), dtype=np.int32)
        for one, row in enumerate(np.cumsum(weights, axis=1, dtype=np.float64)):
            mine = topic == one
            found[mine] = np.searchsorted(row, places[mine] * row[-1], side="right")
        return found.clip(max=self.shape.vocabulary - 1)

    def profile(self, noise: list[float]) -> Profile:
        """A profile with one layer for each noise."""
        return self.finished([self._layer(np.float32(one)) for one in noise])

    def _layer(self, noise: np.float32) -> npt.NDArray[np.int16]:
        """[t, k] experts, best first."""
        gates = self.rng.standard_normal((WIDTH, self.shape.experts), dtype=np.float32)
        gates /= np.linalg.norm(gates * self.spectrum[:, None], axis=0)
        context = (self.lasting + self._vectors(len(self.tokens))) * np.float32(0.5**0.5)
        state = self.ids[self.tokens] + noise * self.steadiness * (self.shift + context)
        logits = state @ gates
        return _top(logits + self._biases(logits), self.shape.top_k)

    def _biases(self, logits: FloatArray, rows: int = 8192, rounds: int = 40) -> FloatArray:
        """[E] that bring the loads of some of the tokens to log-normal shares."""
        experts, k = self.shape.experts, self.shape.top_k
        wanted = self.rng.lognormal(0.0, SPREAD, experts)
        wanted *= k / wanted.sum()
        some = logits[:: max(1, len(logits) // rows)]
        biases = np.zeros(experts, dtype=np.float32)
        for step in 0.5 * logits.std() * 0.95 ** np.arange(rounds):
            load = np.bincount(_top(some + biases, k).ravel(), minlength=experts) / len(some)
            biases -= (step * np.log(load.clip(min=1e-3) / wanted)).astype(np.float32)
        return biases

    def finished(self, experts: list[npt.NDArray[np.int16]]) -> Profile:
        """Experts [t, k] of each layer -> the profile."""
        shape, lengths = self.shape, np.diff(self.starts)
        routes = Routes(
            tokens=self.tokens,
            starts=self.starts,
            prompts=(lengths * 3 // 4).astype(np.int32),
            topics=self.topics.astype(np.int16),
            experts=np.stack(experts, axis=1),
        )
        return Profile.from_routes(
            model=f"made-up-{shape.experts}-{shape.top_k}",
            vocab_size=shape.vocabulary,
            num_experts=shape.experts,
            layers=range(1, len(experts) + 1),
            routes=routes,
            topics=[f"topic {topic}" for topic in range(TOPICS)],
            nearest=self._nearest(),
        )

    def _nearest(self) -> npt.NDArray[np.int32]:
        """[V] itself for ids that occur, for others the nearest such one by cosine."""
        known = np.unique(self.tokens)
        found = np.arange(self.shape.vocabulary, dtype=np.int32)
        unit = self.ids / np.linalg.norm(self.ids, axis=1, keepdims=True)
        for some in np.array_split(np.setdiff1d(found, known), -(-len(found) // AT_ONCE)):
            found[some] = known[(unit[some] @ unit[known].T).argmax(axis=1)]
        return found


def _top(logits: FloatArray, k: int) -> npt.NDArray[np.int16]:
    """[t, k] the k largest of each row, in descending order."""
    found = np.argpartition(logits, -k, axis=1)[:, -k:]
    order = np.argsort(-np.take_along_axis(logits, found, axis=1), axis=1)
    return np.take_along_axis(found, order, axis=1).astype(np.int16)


def _main(arguments: argparse.Namespace, stop: Callable[[str], Any]) -> None:
    sizes = {"layers": arguments.layers, "requests": arguments.requests, "seed": arguments.seed}
    if arguments.uniform:
        made = uniform(arguments.experts, arguments.top_k, **sizes)
    else:
        known = {(shape.experts, shape.top_k): shape for shape in SHAPES}
        shape = known.get((arguments.experts, arguments.top_k)) or stop(f"calibrated are {sorted(known)}")
        made = generate(replace(shape, vocabulary=arguments.vocabulary or shape.vocabulary), **sizes)
    made.save(arguments.output)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=6)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--requests", type=int, default=800)
    parser.add_argument("--vocabulary", type=int, help="token ids (default: 16,000, as calibrated)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--uniform", action="store_true")
    parser.add_argument("-o", "--output", type=Path, required=True)
    _main(parser.parse_args(), parser.error)
