"""What a worker knows of one request: its tokens, and how many of them are computed.

There are no separate phases for prefill and decode. A step only lets `num_computed` catch up with
`num_tokens`, which is the idea of vLLM's v1 scheduler. A new prompt, the next token, and everything that a
preempted request computes again are all rows `num_computed : num_tokens`.
"""

from __future__ import annotations

import enum

import numpy as np

from moesaic.core.request import NO_ALLOWED_TOKEN, NO_TOKEN, FinishReason, Request
from moesaic.core.tokens import IntArray
from moesaic.policy.scheduling.acceptance import Acceptance
from moesaic.policy.scheduling.intvector import IntVector


class Stage(enum.Enum):
    """The stage of a request. Preemption moves it from RUNNING back to WAITING. FINISHED is final."""

    WAITING = "waiting"
    """The request has no blocks."""
    RUNNING = "running"
    """The request has blocks for all of its known tokens."""
    FINISHED = "finished"
    """The request ended or was cancelled. It keeps blocks only while a step computes its rows."""


class Sequence:
    """The state of one request. While it runs, 0 <= num_computed < num_tokens <= max_len."""

    __slots__ = (
        "acceptance",
        "disk_tokens",
        "draft_tokens",
        "epoch",
        "has_nonfinite_logits",
        "max_len",
        "num_computed",
        "num_prompt",
        "num_scored",
        "proposed_tokens",
        "received_tokens",
        "request",
        "request_id",
        "restored_positions",
        "stage",
        "stop_ids",
        "tokens",
        "waiting_since",
    )

    def __init__(self, request: Request, max_model_len: int, now: float) -> None:
        self.request = request
        self.request_id = request.request_id
        self.tokens = IntVector(request.prompt_token_ids)
        """The prompt tokens, then the generated tokens."""
        self.num_prompt = len(self.tokens)
        max_tokens = request.params.max_tokens
        self.max_len = (
            max_model_len if max_tokens is None else min(self.num_prompt + max_tokens, max_model_len)
        )
        """Number of tokens, prompt included, at which the request ends with FinishReason.LENGTH."""
        self.stop_ids = request.stop_ids
        self.stage = Stage.WAITING
        self.has_nonfinite_logits = False
        """The logits of its last row were not finite, so its KV may not be either."""
        self.epoch = 0
        """How often the request was preempted."""
        self.num_computed = 0
        """Tokens whose KV is in the request's blocks."""
        self.num_scored = 0
        """Prompt rows whose logits were returned for prompt log-probabilities, over all epochs."""
        self.received_tokens = 0
        """Tokens whose KV another worker sent for its next admission. 0: none."""
        self.disk_tokens = 0
        """First tokens whose KV seems to be on the disk."""
        self.restored_positions = range(0)
        """Tokens whose KV its last admission put into its blocks, as it was received."""
        self.waiting_since = now
        self.draft_tokens: list[int] = []
        """Tokens that may follow, which the step under way checks. They belong to `tokens` once accepted."""
        self.proposed_tokens: list[int] = []
        """Tokens that may follow by the model's own prediction. They are of the last step that sampled."""
        self.acceptance: Acceptance | None = None
        """The acceptance of this request's drafted tokens. None before its first draft."""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_pending(self) -> int:
        """Rows to compute before the next token can be sampled."""
        return len(self.tokens) - self.num_computed

    def next_rows(self, count: int) -> IntArray:
        """[count] the tokens of the next rows: those to compute, and then those drafted."""
        start = self.num_computed
        known_tokens = self.tokens.array[start : start + count]
        draft_tokens = self.draft_tokens[: count - len(known_tokens)]
        return (
            np.concatenate([known_tokens, np.array(draft_tokens, dtype=np.int64)])
            if draft_tokens
            else known_tokens
        )

    def token_at(self, position: int) -> int:
        """The token at a position; NO_TOKEN behind the newest one."""
        return int(self.tokens.array[position]) if position < len(self.tokens) else NO_TOKEN

    @property
    def generated_ids(self) -> list[int]:
        generated_ids: list[int] = self.tokens.array[self.num_prompt :].tolist()
        return generated_ids

    @property
    def needs_scores(self) -> bool:
        """Whether the logits of some prompt row are wanted and were not returned yet.

        Row p scores token p + 1, so the last row of the prompt scores nothing.
        """
        return self.request.params.prompt_logprobs is not None and self.num_scored < self.num_prompt - 1

    @property
    def next_rows_need_scores(self) -> bool:
        """Whether the next rows are prompt rows whose logits are still to be returned."""
        return self.needs_scores and self.num_computed >= self.num_scored

    @property
    def reusable(self) -> int:
        """Maximum number of tokens whose KV may come from the prefix cache.

        A row that still needs a score must run.
        """
        return self.num_scored if self.needs_scores else self.num_tokens - 1

    @property
    def chunk_end(self) -> int:
        """The position at which the next chunk must end at the latest.

        While scores are missing, no chunk mixes rows that were scored in an earlier epoch with rows that were
        not. So either all rows of a chunk are scored or none. (Generated rows cannot be mixed in: the first
        token is sampled after all prompt rows.)
        """
        redo_scored = self.needs_scores and self.num_computed < self.num_scored
        return self.num_scored if redo_scored else self.num_tokens

    def admit(self, num_cached: int) -> None:
        """Start running. num_cached: tokens whose KV came from the prefix cache.

        What was received counts as computed where it goes further. It is used once.
        """
        num_usable = self.received_tokens if self.received_tokens <= self.reusable else 0
        self.restored_positions = range(num_cached, num_usable)
        self.received_tokens = 0
        self.stage = Stage.RUNNING
        self.num_computed = max(num_cached, num_usable)

    def preempt(self, now: float) -> None:
        """Go back to the queue. The tokens are kept and the KV is lost, so rows of the old epoch are void."""
        self.stage = Stage.WAITING
        self.epoch += 1
        self.num_computed = 0
        self.waiting_since = now

    def advance(self, rows: int) -> None:
        """Record that the next `rows` rows were computed."""
        if self.next_rows_need_scores:
            self.num_scored = self.num_computed + rows
        self.num_computed += rows

    def append(self, token: int) -> FinishReason | None:
        """Add a sampled token. Returns the reason when the request ends with it, otherwise None.

        A stop token ends the request only from the `min_tokens`-th token on, as long as the sampler masks it.
        NO_TOKEN and NO_ALLOWED_TOKEN end it without a token.
        """
        # These two are no token ids. The request ends, and nothing is added to its tokens.
        if token == NO_TOKEN:
            self.has_nonfinite_logits = True
            return FinishReason.ERROR
        if token == NO_ALLOWED_TOKEN:
            return FinishReason.NO_ALLOWED_TOKEN
        may_stop = self.num_generated >= self.request.params.min_tokens
        self.tokens.append(token)
        if may_stop and token in self.stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.tokens) >= self.max_len else None
