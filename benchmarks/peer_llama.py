"""One engine of `peers.py` in a process of its own: llama.cpp through its C API. Speaks JSON lines.

Runs in the environment that `setup_peer.sh llama` makes, with a file that `convert_gguf.py` wrote.
"""

from __future__ import annotations

import sys
import time

import llama_cpp.llama_cpp as llama  # type: ignore[import-not-found]
import numpy as np
from numpy.typing import NDArray
from protocol import Answer, Order, private_stdout, serve, timed

UBATCH = 2048
"""Maximum number of tokens of one pass. llama.cpp's default of 512 is slower, since an expert gets fewer rows
at once.
"""
CELLS = 256
"""llama.cpp rounds each sequence's share of the KV cache up to a multiple of this number of tokens."""
ERROR, FLOAT32 = 4, 0
"""As ggml numbers them: a level of its log, and a type of its tensors."""


@llama.llama_log_callback  # type: ignore[untyped-decorator]
def log(level: int, text: bytes, _: object) -> None:
    """Errors only: the rest is thousands of lines."""
    if level == ERROR:
        sys.stderr.write(text.decode(errors="replace"))


class Batch:
    """Tokens of several sequences for one pass, in memory that llama.cpp owns."""

    def __init__(self, sequences: list[int], wanted: list[bool]) -> None:
        """sequences, wanted: of each token, the sequence it belongs to and whether logits are asked for."""
        self.size, self.outputs = len(sequences), sum(wanted)
        self.memory = llama.llama_batch_init(self.size, 0, 1)
        self.memory.n_tokens = self.size
        for index, (sequence, asked) in enumerate(zip(sequences, wanted, strict=True)):
            self.memory.n_seq_id[index] = 1
            self.memory.seq_id[index][0] = sequence
            self.memory.logits[index] = asked

    def fill(self, tokens: NDArray[np.int32], positions: NDArray[np.int32]) -> None:
        np.ctypeslib.as_array(self.memory.token, (self.size,))[:] = tokens
        np.ctypeslib.as_array(self.memory.pos, (self.size,))[:] = positions

    def free(self) -> None:
        llama.llama_batch_free(self.memory)


class Model:
    """A loaded file, and a context that fits the last order."""

    def __init__(self, path: str, threads: int, wide: bool, repacks: bool) -> None:
        """wide: attention in float32 too. llama.cpp's usual one computes with f16 keys and values. repacks:
        copy quantised weights into an order that is faster; else they stay in the mapped file."""
        llama.llama_log_set(log, None)
        llama.llama_backend_init()
        params = llama.llama_model_default_params()
        params.use_extra_bufts = repacks
        self.model = llama.llama_model_load_from_file(path.encode(), params)
        if not self.model:
            raise SystemExit(f"llama.cpp could not load {path}")
        self.vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))
        self.threads, self.wide = threads, wide
        self.shape = (0, 0)
        self.context: llama.llama_context_p | None = None

    def fit(self, sequences: int, length: int) -> None:
        """An empty KV cache for so many sequences; made anew only when the numbers change."""
        length = -(-length // CELLS) * CELLS
        if self.context is None or self.shape != (sequences, length):
            if self.context is not None:
                llama.llama_free(self.context)
            params = llama.llama_context_default_params()
            params.n_ctx, params.n_seq_max = sequences * length, sequences
            params.n_batch, params.n_ubatch = sequences * length, UBATCH
            params.n_threads = params.n_threads_batch = self.threads
            if self.wide:
                params.type_k = params.type_v = FLOAT32
                params.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_DISABLED
            self.context = llama.llama_init_from_model(self.model, params)
            if self.context is None:
                raise SystemExit("llama.cpp could not make a context")
            self.shape = (sequences, length)
        llama.llama_memory_clear(llama.llama_get_memory(self.context), True)

    def logits(self, batch: Batch) -> NDArray[np.float32]:
        """The logits [tokens, vocabulary] of the tokens that they were asked for, in llama.cpp's memory."""
        status = llama.llama_decode(self.context, batch.memory)
        if status:
            raise SystemExit(f"llama_decode: {status}")
        pointer = llama.llama_get_logits(self.context)
        logits: NDArray[np.float32] = np.ctypeslib.as_array(pointer, (batch.outputs, self.vocab))
        return logits

    def step(self, batch: Batch) -> NDArray[np.int32]:
        """The greedy token after each token whose logits were asked for, in the order of the batch."""
        greedy: NDArray[np.int32] = self.logits(batch).argmax(axis=1).astype(np.int32)
        return greedy

    def score(self, pieces: list[list[int]]) -> Answer:
        """The mean negative log-likelihood, in nats, of the tokens of pieces but for their first ones."""
        total = 0.0
        for piece in pieces:
            self.fit(1, len(piece))
            batch = Batch([0] * len(piece), [True] * len(piece))
            batch.fill(np.array(piece, np.int32), np.arange(len(piece), dtype=np.int32))
            logits = self.logits(batch)[:-1].astype(np.float64)
            batch.free()
            wanted = np.take_along_axis(logits, np.array(piece[1:])[:, None], axis=1)[:, 0]
            largest = logits.max(axis=1)
            sums = np.exp(logits - largest[:, None]).sum(axis=1)
            total += float((largest + np.log(sums) - wanted).sum())
        return {"loss": total / sum(len(piece) - 1 for piece in pieces)}

    def run(self, prompts: list[list[int]], new: int) -> Answer:
        """Prefill all prompts, then decode one token of each in every pass."""
        count = len(prompts)
        lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        self.fit(count, int(lengths.max()) + new)
        started = time.perf_counter()
        prefill = Batch(
            [index for index, prompt in enumerate(prompts) for _ in prompt],
            [place == len(prompt) - 1 for prompt in prompts for place in range(len(prompt))],
        )
        prefill.fill(np.concatenate(prompts), np.concatenate([np.arange(length) for length in lengths]))
        tokens = [self.step(prefill)]
        first = time.perf_counter()
        decode = Batch(list(range(count)), [True] * count)
        for step in range(new - 1):
            decode.fill(tokens[-1], lengths + step)
            tokens.append(self.step(decode))
        ended = time.perf_counter()
        prefill.free()
        decode.free()
        return timed(started, first, ended, np.stack(tokens, axis=1).tolist())


def main() -> None:
    answers = private_stdout()
    kind = sys.argv[3]
    model = Model(sys.argv[1], int(sys.argv[2]), wide=kind == "f32", repacks=kind != "mapped")

    def obey(order: Order) -> Answer:
        if order["do"] == "score":
            return model.score(order["pieces"])
        return model.run(order["prompts"], order["new"])

    serve(answers, obey)


if __name__ == "__main__":
    main()
