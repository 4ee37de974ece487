"""A worker without a model: a thread that answers every prompt with a known text.

A prompt that ends in `say:TEXT` is answered with TEXT and an end-of-sequence token; any other is
answered with the alphabet, over and over. One token is one byte.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from moesaic.core import messages
from moesaic.core.errors import ConnectionLost
from moesaic.core.metrics import BlockStats, WorkerStats
from moesaic.core.request import FinishReason, Request, TokenLogprob
from moesaic.core.worker_info import WorkerInfo
from moesaic.engine import Engine
from moesaic.server.async_engine import AsyncEngine
from moesaic.testing import byte_tokenizer
from moesaic.text.tokenizer import Tokenizer
from moesaic.transport.local import LocalConnection, local_pair

BOS, EOS, VOCAB = 256, 257, 258
ALPHABET = b"abcdefghijklmnopqrstuvwxyz"
TEMPLATE = (
    "{% if messages[0]['role'] == 'system' and not allow_system | default(true) %}"
    "{{ raise_exception('no system message') }}{% endif %}"
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]say:{{ reply | default('hello') }}{% endif %}"
)


def info(**changes: int) -> WorkerInfo:
    """Of a worker with `changes` of its limits, its vocabulary or its number of blocks."""
    sizes = {
        "max_model_len": 256,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 256,
        "vocab_size": VOCAB,
        "num_blocks": 64,
    } | changes
    return WorkerInfo(
        model_type="fake",
        device="cpu",
        kernels="none",
        dtype="float32",
        threads=1,
        num_parameters=1,
        weight_bytes=4,
        num_layers=1,
        num_experts=2,
        top_k=1,
        block_size=16,
        kv_bytes=1,
        kv_dtype="float32",
        **sizes,
    )


def make_tokenizer(path: Path) -> Tokenizer:
    byte_tokenizer(path, ["<s>", "</s>"], chat_template=TEMPLATE, eos_token="</s>", bos_token="<s>")
    return Tokenizer(path)


def byte_ids(text: str, tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


@dataclass
class _Running:
    request: Request
    tokens: Iterator[int]
    made: int = 0


class FakeWorker(threading.Thread):
    """connection: its end. pace: seconds between steps."""

    def __init__(self, connection: LocalConnection, tokenizer: Tokenizer, pace: float = 0.0) -> None:
        super().__init__(name="fake-worker", daemon=True)
        self.connection = connection
        self.tokenizer = tokenizer
        self.pace = pace
        self.open = threading.Event()
        """Cleared: no token is made."""
        self.open.set()
        self.running: dict[int, _Running] = {}
        self.cancelled: list[int] = []
        self.seen: list[Request] = []

    def run(self) -> None:
        while True:
            try:
                message = self.connection.receive(self._patience())
                while message is not None:
                    self._take(message)
                    message = self.connection.receive(0.0)
                if self.open.is_set():
                    self._step()
            except ConnectionLost:
                return
            time.sleep(self.pace)

    def _patience(self) -> float | None:
        """How long to wait for a message: not at all while there are tokens to make."""
        if not self.running:
            return None
        return 0.0 if self.open.is_set() else 0.005

    def ready(self, **changes: int) -> None:
        self.connection.send(messages.Ready(info(**changes)))

    def die(self) -> None:
        self.connection.close()

    def _take(self, message: messages.Message) -> None:
        match message:
            case messages.Submit():
                for request in message.requests:
                    self.seen.append(request)
                    self.running[request.request_id] = _Running(request, self._answer(request))
                    self.connection.send(messages.RequestsAdmitted([request.request_id], [0.25], [0]))
                    self._score_prompt(request)
            case messages.Cancel():
                for request_id in message.request_ids:
                    self.cancelled.append(request_id)
                    self.running.pop(request_id, None)

    def _answer(self, request: Request) -> Iterator[int]:
        prompt = self.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
        if "say:" not in prompt:
            return itertools.cycle(byte_ids(ALPHABET.decode(), self.tokenizer))
        told = [*byte_ids(prompt.rpartition("say:")[2], self.tokenizer), EOS]
        return itertools.chain(told, itertools.repeat(EOS))  # for those who ignore the end

    def _score_prompt(self, request: Request) -> None:
        if request.params.prompt_logprobs is not None:
            top = request.params.prompt_logprobs
            entries = [score(token, top) for token in request.prompt_token_ids[1:]]
            self.connection.send(messages.PromptLogprobs(request.request_id, 1, entries))

    def _step(self) -> None:
        tokens: list[int] = []
        finish: list[FinishReason | None] = []
        logprobs: list[TokenLogprob | None] = []
        ids = list(self.running)
        for request_id in ids:
            run = self.running[request_id]
            token = next(run.tokens)
            run.made += 1
            tokens.append(token)
            finish.append(_finish(run, token))
            top = run.request.params.logprobs
            logprobs.append(None if top is None else score(token, top))
            if finish[-1] is not None:
                del self.running[request_id]
        if ids:
            self.connection.send(messages.Tokens(ids, tokens, finish, logprobs))
            blocks = BlockStats(
                num_total=64, num_free=64 - len(ids), num_used=len(ids), prefix_queries=10, prefix_hits=4
            )
            self.connection.send(messages.Stats(WorkerStats(running=len(self.running), blocks=blocks)))


def score(token: int, top: int) -> TokenLogprob:
    """The token itself has -0.5, its successors less; with top 3 the last one is impossible."""
    others = [((token + rank) % VOCAB, float("-inf") if rank == 2 else -0.5 - rank) for rank in range(top)]
    return TokenLogprob(token, -0.5, others)


def _finish(run: _Running, token: int) -> FinishReason | None:
    params = run.request.params
    if token in run.request.stop_ids and run.made > params.min_tokens:
        return FinishReason.STOP
    return FinishReason.LENGTH if run.made == params.max_tokens else None


def engine_and_worker(
    tokenizer: Tokenizer, *, max_waiting: int = 4, pace: float = 0.0
) -> tuple[AsyncEngine, FakeWorker]:
    """A front with everything behind it; the worker still has to be started and to say ready."""
    ours, theirs = local_pair()
    engine = Engine(
        ours,
        tokenizer,
        clock=time.monotonic,
        rng=random.Random(0),
        eos_token_ids=(EOS,),
        max_waiting=max_waiting,
    )
    return AsyncEngine(engine, ours), FakeWorker(theirs, tokenizer, pace)
