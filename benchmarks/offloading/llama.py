"""A contender in a process of its own: llama.cpp, its file mapped. Needs `setup_peer.sh llama`."""

from __future__ import annotations

import llama_cpp.llama_cpp as llama  # type: ignore[import-not-found]
import numpy as np
from numpy.typing import NDArray
from peer_llama import CELLS, Batch, Model

from offloading.telling import Telling

CACHE_NUMBER = 2
"""Bytes of a number of its keys and values, float16."""


class Mapped(Model):
    """A file that is read as it is computed with, and a context of one batch."""

    def context_for(self, sequences: int, length: int, token: int, room: int, rows: int) -> None:
        """An empty cache. length: tokens of the longest sequence. token: bytes of one in the cache.

        llama.cpp gives each sequence a share of whole 256 tokens. Where that takes more than `room` bytes
        they share one cache instead, of which each sees the others' tokens masked: slower and smaller.
        """
        share = -(-length // CELLS) * CELLS
        params = llama.llama_context_default_params()
        params.kv_unified = sequences * share * token > room
        params.n_ctx = sequences * length if params.kv_unified else sequences * share
        params.n_seq_max = sequences
        params.n_batch, params.n_ubatch = sequences * length, rows
        params.n_threads = params.n_threads_batch = self.threads
        self.unified = bool(params.kv_unified)
        self.context = llama.llama_init_from_model(self.model, params)
        if self.context is None:
            raise SystemExit("llama.cpp could not make a context")


def run(model: Mapped, telling: Telling, prompts: list[list[int]], new: int) -> None:
    """Prefill all prompts, then decode one token of each in every pass."""
    count = range(len(prompts))
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    batch = Batch(
        [index for index in count for _ in prompts[index]],
        [place == len(prompt) - 1 for prompt in prompts for place in range(len(prompt))],
    )
    batch.fill(np.concatenate(prompts), np.concatenate([np.arange(length) for length in lengths]))
    tokens: NDArray[np.int32] = model.step(batch)
    telling.step(zip(count, tokens.tolist(), strict=True))
    batch.free()
    decode = Batch(list(count), [True] * len(prompts))
    for step in range(new - 1):
        decode.fill(tokens, lengths + step)
        tokens = model.step(decode)
        telling.step(zip(count, tokens.tolist(), strict=True))


def main() -> None:
    telling = Telling()
    order = telling.order
    model = Mapped(order["file"], order["threads"], wide=False)
    prompts, new = order["prompts"], order["new"]
    length = max(map(len, prompts)) + new
    token = order["cache_numbers"] * CACHE_NUMBER
    model.context_for(len(prompts), length, token, order["cap"], order["rows"])
    telling.begin(shared_cache=model.unified)
    run(model, telling, prompts, new)
    telling.end()


if __name__ == "__main__":
    main()
