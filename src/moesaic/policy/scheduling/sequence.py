"""What a worker knows of one request: its tokens and how far each counter has come.

There is no prefill phase and no decode phase, only `num_computed` catching up with `num_tokens` (the
idea of vLLM's v1 scheduler): a new prompt, the next token, and everything a preempted request has to
redo are all rows `num_computed : num_tokens`.
"""

from __future__ import annotations

import enum

from moesaic.core.request import FinishReason, Request
from moesaic.policy.scheduling.intvector import IntVector


class Stage(enum.Enum):
    """Where a request is. WAITING and RUNNING alternate under preemption; FINISHED is for ever."""

    WAITING = "waiting"
    """Holds no blocks."""
    RUNNING = "running"
    """Holds blocks for all of its known tokens."""
    FINISHED = "finished"
    """Ended or cancelled; holds blocks only while a step with its rows is under way."""


class Sequence:
    """One request's record. 0 <= num_computed < num_tokens <= max_len while it runs."""

    __slots__ = (
        "epoch",
        "max_len",
        "num_computed",
        "num_prompt",
        "num_scored",
        "request",
        "request_id",
        "stage",
        "stop_ids",
        "tokens",
        "waiting_since",
    )

    def __init__(self, request: Request, max_model_len: int, now: float) -> None:
        self.request = request
        self.request_id = request.request_id
        self.tokens = IntVector(request.prompt_token_ids)
        """The prompt, then the generated tokens."""
        self.num_prompt = len(self.tokens)
        most = request.params.max_tokens
        self.max_len = max_model_len if most is None else min(self.num_prompt + most, max_model_len)
        """Tokens, prompt included, at which it ends for its length."""
        self.stop_ids = request.stop_ids
        self.stage = Stage.WAITING
        self.epoch = 0
        """How often it was preempted."""
        self.num_computed = 0
        """Tokens whose KV is in its blocks."""
        self.num_scored = 0
        """Prompt rows whose logits were handed out for prompt log-probabilities, over all epochs."""
        self.waiting_since = now

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_pending(self) -> int:
        """Rows to compute until the next token can be sampled."""
        return len(self.tokens) - self.num_computed

    @property
    def generated(self) -> list[int]:
        generated: list[int] = self.tokens.array[self.num_prompt :].tolist()
        return generated

    @property
    def owes_scores(self) -> bool:
        """True while some prompt row's logits are wanted and were not handed out.

        Row p scores token p + 1, so the prompt's last row scores nothing.
        """
        return self.request.params.prompt_logprobs is not None and self.num_scored < self.num_prompt - 1

    @property
    def scored_now(self) -> bool:
        """True when the next rows are the ones whose scores are owed."""
        return self.owes_scores and self.num_computed >= self.num_scored

    @property
    def reusable(self) -> int:
        """Most tokens whose KV may come from the prefix cache: a row whose score is owed must run."""
        return self.num_scored if self.owes_scores else self.num_tokens - 1

    @property
    def chunk_end(self) -> int:
        """Where the next chunk must stop at the latest.

        While scores are owed, no chunk mixes rows that were scored in an earlier epoch with rows that
        were not: either all rows of a chunk are scored or none. (Nor are there generated rows to mix
        with: the first token is sampled after all prompt rows.)
        """
        redo_scored = self.owes_scores and self.num_computed < self.num_scored
        return self.num_scored if redo_scored else self.num_tokens

    def admit(self, num_cached: int) -> None:
        self.stage = Stage.RUNNING
        self.num_computed = num_cached

    def preempt(self, now: float) -> None:
        """Back to the queue. Tokens are kept, KV is not: rows of the old epoch are void."""
        self.stage = Stage.WAITING
        self.epoch += 1
        self.num_computed = 0
        self.waiting_since = now

    def advance(self, rows: int) -> None:
        """These rows were computed."""
        if self.scored_now:
            self.num_scored = self.num_computed + rows
        self.num_computed += rows

    def append(self, token: int) -> FinishReason | None:
        """Add a sampled token. Says whether the request ends with it.

        A stop token counts from the `min_tokens`-th token on, exactly as long as the sampler masks it.
        """
        may_stop = self.num_generated >= self.request.params.min_tokens
        self.tokens.append(token)
        if may_stop and token in self.stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.tokens) >= self.max_len else None
