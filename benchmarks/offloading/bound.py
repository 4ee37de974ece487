"""How fast any server could answer from a disk: the bytes that a load must read, over the disk's bytes/s.

The bytes are those of a server that knows which experts each step will choose. It reads an expert once for
all rows of a step, and keeps the ones that are chosen again first, as Belady's policy does. Its memory holds
as many experts as moesaic's. Computing takes it no time.

The routes are those of the very prompts and answers of the load. They are recorded before, with the model in
memory, by a process of its own. A server that computes prompts in other steps than those of `replay.merge`
may read a little less or more.
"""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from offloading import routes
from offloading.replay import Step, merge

BLOCKS = 1 << 20, 8 << 20
"""Bytes of a read."""
DEPTHS = 1, 4, 8
"""Reads in flight."""
SECONDS = 1.0
"""For each pair of them."""
NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Routes:
    """What a load chooses, and the size of what it reads."""

    requests: tuple[routes.Request, ...]
    num_experts: int
    read_bytes: float
    """Bytes of an expert on the disk, as a mean of the layers."""

    def least_bytes(self, clients: int, places: int) -> float:
        """Bytes that clients must read who ask all requests. places: experts of each layer in memory."""
        steps = list(merge(self.requests, clients))
        return self.read_bytes * count_least_reads(steps, self.num_experts, places)

    @property
    def num_tokens(self) -> int:
        """Tokens that are generated."""
        return sum(len(request.tokens) - request.prompt + 1 for request in self.requests)


def record(model: Path, prompts: Sequence[str], new_tokens: int, max_model_len: int) -> Routes:
    """The routes of greedy answers, each of which has all its tokens. The model must fit into the memory."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(_record, model, list(prompts), new_tokens, max_model_len).result()


def _record(model: Path, prompts: list[str], new_tokens: int, max_model_len: int) -> Routes:
    from moesaic.kernels import table
    from moesaic.planning.sizes import read_checkpoint_sizes

    recording = routes.record(str(model), prompts, new_tokens, temperature=0.0, max_model_len=max_model_len)
    sizes = read_checkpoint_sizes(model, model.name, table.pick("cpu"))
    return Routes(recording.requests, recording.num_experts, sizes.read_bytes)


def count_least_reads(steps: Sequence[Step], num_experts: int, places: int) -> int:
    """How many experts a cache of `places` a layer reads that knows all steps, and begins with the best ones.

    An expert that a step chose and that is not kept is read without taking the place of another one.
    """
    layers = steps[0].experts.shape[1]
    return sum(
        _count_of_layer([step.experts[:, layer] for step in steps], num_experts, places)
        for layer in range(layers)
    )


def _count_of_layer(choices: Sequence[routes.Experts], num_experts: int, places: int) -> int:
    chosen = [np.unique(rows) for rows in choices]
    next_use = np.full((len(chosen) + 1, num_experts), NEVER)
    for step in range(len(chosen) - 1, -1, -1):
        next_use[step] = next_use[step + 1]
        next_use[step][chosen[step]] = step
    kept = np.argsort(next_use[0], kind="stable")[:places]
    reads = 0
    for step, experts in enumerate(chosen):
        reads += len(np.setdiff1d(experts, kept, assume_unique=True))
        candidates = np.union1d(kept, experts)
        kept = candidates[np.argsort(next_use[step + 1][candidates], kind="stable")[:places]]
    return reads


def measure_disk(file: Path) -> float:
    """Bytes/s of reads at random places of a file, without the page cache, with the best size and depth."""
    from moesaic.offload.arena import Arena
    from moesaic.offload.reading import DirectFile

    best, rng = 0.0, random.Random(0)
    with DirectFile(file) as source, ThreadPoolExecutor(max(DEPTHS)) as threads:
        for block in BLOCKS:
            blocks = max(1, file.stat().st_size // block)
            targets = [Arena(block).take(block).numpy().data for _ in range(max(DEPTHS))]
            for depth in DEPTHS:
                end = (began := time.perf_counter()) + SECONDS

                def read(
                    target: memoryview, seed: int, block: int = block, blocks: int = blocks, end: float = end
                ) -> int:
                    places, total = random.Random(seed), 0
                    while time.perf_counter() < end:
                        total += source.read(places.randrange(blocks) * block, target)
                    return total

                reads = [threads.submit(read, target, rng.getrandbits(32)) for target in targets[:depth]]
                total = sum(running.result() for running in reads)
                best = max(best, total / (time.perf_counter() - began))
    return best
