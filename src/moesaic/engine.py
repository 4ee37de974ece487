"""The engine: tracks every request from its arrival to its last token, and turns tokens into text.

It talks to a worker only through messages. It has no thread, and the caller passes its clock in, so the
HTTP server and the `LLM` class use the same object.

Question: Where does a request enter the engine?
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace

from moesaic.core import messages
from moesaic.core.errors import (
    ConnectionLost,
    ContextLengthError,
    EngineDeadError,
    OverloadedError,
    RequestError,
)
from moesaic.core.metrics import WorkerStats
from moesaic.core.request import (
    SEED_LIMIT,
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
    TokenLogprob,
    TokenRoute,
)
from moesaic.core.worker_info import WorkerInfo
from moesaic.text.detokenizer import IncrementalDecoder
from moesaic.text.stop_strings import Search, StopStrings
from moesaic.text.structured.grammar import make_grammar
from moesaic.text.tokenizer import BadWords, Tokenizer, check_some_token_is_left
from moesaic.transport.base import Connection

MOST_BYTES = 1 << 27
"""Maximum bytes of the n completions of a request in the message to the worker, where each has its own copy.

That is half of what a connection may have unsent. An id has up to 5 bytes, and an entry of a bias up to 14.
"""


@dataclass(frozen=True)
class EngineStats:
    """Statistics of the engine, and the last ones that its worker sent."""

    num_unfinished: int
    """Unfinished completions. A request with n completions counts n times."""
    worker: WorkerStats
    block_size: int = 0
    """Tokens of a KV block; 0 until the worker is ready."""


@dataclass
class _Stream:
    """An unfinished completion."""

    request: Request
    group: int
    """The id that `submit` returned, which all completions of the request share."""
    index: int
    decoder: IncrementalDecoder
    stops: Search
    tokens: list[int] = field(default_factory=list)
    """Tokens generated so far."""
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)


class Engine:
    """The requests of one worker.

    connection: leads to the worker. clock: returns seconds; the worker uses the same one. rng: draws the
    seeds of requests without one. eos_token_ids: the model's end-of-sequence tokens. max_waiting: completions
    allowed beyond the worker's max_num_seqs; None means any number. on_request_end: called with each request
    that ended, and True if its worker does not know that yet.
    """

    def __init__(
        self,
        connection: Connection,
        tokenizer: Tokenizer,
        *,
        clock: Callable[[], float],
        rng: random.Random,
        eos_token_ids: tuple[int, ...] = (),
        max_waiting: int | None = None,
        on_request_end: Callable[[Request, bool], None] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.info: WorkerInfo | None = None
        self.dead: str | None = None
        self.loading: messages.Loading | None = None
        self.eos_token_ids = eos_token_ids
        self._connection = connection
        self._clock = clock
        self._rng = rng
        self._max_waiting = max_waiting
        self._on_request_end = on_request_end
        self._streams: dict[int, _Stream] = {}
        self._groups: dict[int, set[int]] = {}
        self._next_id = 0
        self._bad_words = BadWords(tokenizer)
        self._worker = WorkerStats()

    @property
    def num_unfinished(self) -> int:
        """Completions that are running or waiting."""
        return len(self._streams)

    @property
    def limit(self) -> int | None:
        """Maximum number of completions that run or wait at once.

        None means any number. It is also None until the worker is ready.
        """
        if self.info is None or self._max_waiting is None:
            return None
        return self.info.max_num_seqs + self._max_waiting

    def stats(self) -> EngineStats:
        block_size = 0 if self.info is None else self.info.block_size
        return EngineStats(len(self._streams), self._worker, block_size)

    def submit(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        own_text: bool = False,
        kept_special_tokens: Collection[str] = (),
        name: str = "",
    ) -> int:
        """Send a prompt to the worker. Returns the id that its outputs carry.

        own_text: the answer is a text of its own, as in a chat, and does not continue the prompt's text.
        kept_special_tokens: special tokens that are part of the text even where others are skipped.
        name: the request's name in log lines.
        Raises RequestError, OverloadedError or EngineDeadError. In these cases nothing was sent.
        """
        info = self._require_worker()
        params = _fit(prompt_token_ids, self._with_word_ids(params, info), info)
        grammar = self._grammar(params)
        self._require_room(params.n)
        seed = self._rng.randrange(SEED_LIMIT) if params.seed is None else params.seed
        group = self._next_id
        requests, streams = [], {}
        stops = StopStrings(params.stop)
        # The worker does not look for stop strings, and it gets the grammar in another form. Each of n copies
        # could have megabytes.
        for index, single in enumerate(
            replace(params, stop=(), bad_words=(), structured_outputs=None).fan_out(seed)
        ):
            request = Request(
                request_id=self._next_id,
                prompt_token_ids=prompt_token_ids,
                params=single,
                eos_token_ids=self.eos_token_ids,
                arrival=self._clock(),
                grammar=grammar,
                name=name,
            )
            self._next_id += 1
            prefix_ids = () if own_text else prompt_token_ids
            decoder = IncrementalDecoder(
                self.tokenizer, params.skip_special_tokens, prefix_ids, kept_special_tokens
            )
            search = stops.search(params.include_stop_str_in_output)
            streams[request.request_id] = _Stream(request, group, index, decoder, search)
            requests.append(request)
        self._send(messages.Submit(requests))
        self._streams |= streams
        self._groups[group] = set(streams)
        return group

    def _require_room(self, completions: int) -> None:
        """Raise OverloadedError unless the queue has room for so many more completions."""
        limit = self.limit
        # An empty queue takes any request. One with many completions could otherwise never run.
        if limit is not None and self._streams and len(self._streams) + completions > limit:
            raise OverloadedError(f"the queue is full: {len(self._streams)} requests of at most {limit}")

    def cancel(self, group: int) -> None:
        """Cancel the unfinished completions of a request. No output of it follows. Ignores unknown ids."""
        left = sorted(self._groups.pop(group, ()))
        for request_id in left:
            self._end(self._streams.pop(request_id), late=True)
        if left and self.dead is None:
            self._send(messages.Cancel(left))

    def receive(self, message: messages.ToEngine) -> list[RequestOutput]:
        """Handle one message of the worker. Returns the new outputs for the callers."""
        match message:
            case messages.Tokens():
                return self._take_tokens(message)
            case messages.RequestsAdmitted():
                for request_id, num_cached in zip(message.request_ids, message.cached_tokens, strict=True):
                    if request_id in self._streams:
                        self._streams[request_id].cached_tokens = num_cached
            case messages.PromptLogprobs():
                self._take_prompt_logprobs(message)
            case messages.Stats():
                self._worker = message.stats
            case messages.Ready():
                self.info = message.info
            case messages.Loading():
                self.loading = message
            case messages.WorkerFailed():
                self.mark_dead(message.error)
        return []

    def mark_dead(self, reason: str) -> None:
        """Record that the worker is gone, and drop all requests: none of them will be answered."""
        if self.dead is None:
            self.dead = reason
        self._streams.clear()
        self._groups.clear()

    def _with_word_ids(self, params: SamplingParams, info: WorkerInfo) -> SamplingParams:
        """`params` with the token sequences of its bad words. Raises RequestError if they forbid all."""
        if not params.bad_words:
            return params
        sequences = self._bad_words.sequences(params.bad_words)
        check_some_token_is_left(sequences, params.allowed_token_ids, info.vocab_size)
        return replace(params, bad_word_ids=sequences)

    def _require_worker(self) -> WorkerInfo:
        if self.dead is not None:
            raise EngineDeadError(f"the worker is gone: {self.dead}")
        if self.info is None:
            raise EngineDeadError("the worker is still loading the model")
        return self.info

    def _grammar(self, params: SamplingParams) -> str:
        """llguidance's grammar of a structured output. Empty for any other request."""
        form = params.structured_outputs
        if form is None:
            return ""
        if not self.eos_token_ids:
            reason = "the model has no end-of-sequence token, with which a structured output ends"
            raise RequestError(f"structured_outputs: {reason}", "structured_outputs")
        grammar = make_grammar(form, self.tokenizer.special_tokens)
        if params.n * len(grammar) > MOST_BYTES:
            got = f"{params.n}, for which the grammars have {params.n * len(grammar)} characters in all"
            raise RequestError(f"n: got {got}; allowed: at most {MOST_BYTES}", "n")
        return grammar

    def _send(self, message: messages.ToWorker) -> None:
        try:
            self._connection.send(message)
        except ConnectionLost as error:
            self.mark_dead(str(error))
            raise EngineDeadError(f"the worker is gone: {error}") from error

    def _take_tokens(self, message: messages.Tokens) -> list[RequestOutput]:
        outputs = []
        stopped_ids = []
        no_values = [None] * len(message.request_ids)
        logprobs: Iterable[TokenLogprob | None] = message.logprobs or no_values
        routes: Iterable[TokenRoute | None] = message.routes or no_values
        for request_id, token, finish, logprob, route in zip(
            message.request_ids, message.token_ids, message.finish, logprobs, routes, strict=True
        ):
            stream = self._streams.get(request_id)
            if stream is None:
                continue  # cancelled while the worker was sending its token
            if finish in (FinishReason.ERROR, FinishReason.NO_ALLOWED_TOKEN):
                output = _finish_without_token(stream, finish)
            else:
                output = _advance(stream, token, finish, logprob)
            if route is not None and output.token_ids:
                output = replace(output, routes=[route])
            if output.finished:
                self._drop(stream)
                self._end(stream, late=finish is None)
                if finish is None:
                    stopped_ids.append(request_id)
            outputs.append(output)
        if stopped_ids:  # the worker looks for no stop strings, so it would go on
            self._send(messages.Cancel(stopped_ids))
        return outputs

    def _take_prompt_logprobs(self, message: messages.PromptLogprobs) -> None:
        stream = self._streams.get(message.request_id)
        if stream is None:
            return
        entries = stream.prompt_logprobs or [None]
        # The worker repeats a failed step: it then sends the same entries for the same positions again.
        stream.prompt_logprobs = entries[: message.start] + list(message.entries)

    def _end(self, stream: _Stream, late: bool) -> None:
        if self._on_request_end is not None:
            self._on_request_end(stream.request, late)

    def _drop(self, stream: _Stream) -> None:
        del self._streams[stream.request.request_id]
        members = self._groups[stream.group]
        members.discard(stream.request.request_id)
        if not members:
            del self._groups[stream.group]


def _fit(prompt: list[int], params: SamplingParams, info: WorkerInfo) -> SamplingParams:
    """`params` with max_tokens set: as requested, or else the rest of the context.

    Raises RequestError if the prompt is empty, a token id is not in the vocabulary, or the prompt and
    max_tokens exceed the context.
    """
    if not prompt:
        raise RequestError("prompt: it is empty; at least one token is needed", "prompt")
    bad = next((token for token in prompt if not 0 <= token < info.vocab_size), None)
    if bad is not None:
        raise RequestError(f"prompt: got token id {bad}; allowed: 0 to {info.vocab_size - 1}", "prompt")
    if params.return_routed_experts and not info.routed_layers:
        reason = "this server does not know them (a dense model, --fast-memory, or --moe-collectives)"
        raise RequestError(f"return_routed_experts: got true; {reason}", "return_routed_experts")
    for name in ("logit_bias", "stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
        for token in getattr(params, name) or ():
            if token >= info.vocab_size:
                choices = f"token ids 0 to {info.vocab_size - 1}"
                raise RequestError(f"{name}: got token id {token}; allowed: {choices}", name)
    room = info.max_model_len - len(prompt)
    num_new = 1 if params.max_tokens is None else params.max_tokens
    if room < num_new:
        raise ContextLengthError(len(prompt), num_new, info.max_model_len)
    stop_ids = tuple(dict.fromkeys(params.stop_token_ids))
    ids = len(prompt) + len(stop_ids) + len(params.allowed_token_ids or ())
    ids += sum(map(len, params.bad_word_ids))
    size = params.n * (5 * ids + 14 * len(params.logit_bias))
    if size > MOST_BYTES:
        reason = f"the prompt, token ids, bad_words and logit_bias have {size} bytes in all"
        raise RequestError(f"n: got {params.n}, for which {reason}; allowed: at most {MOST_BYTES}", "n")
    # The first token of a prompt has no log-probability, so a prompt of one token has none at all.
    scores = params.prompt_logprobs if len(prompt) > 1 else None
    return replace(
        params, max_tokens=params.max_tokens or room, prompt_logprobs=scores, stop_token_ids=stop_ids
    )


def _advance(
    stream: _Stream, token: int, finish: FinishReason | None, logprob: TokenLogprob | None
) -> RequestOutput:
    """Add one token to `stream`. Its text stops at a stop string and excludes a possible beginning of one."""
    params = stream.request.params
    stream.tokens.append(token)
    by_token = finish is FinishReason.STOP
    hidden = by_token and not params.include_stop_str_in_output
    fresh = "" if hidden else stream.decoder.push([token])
    if finish is not None:
        fresh += stream.decoder.finish()
    text, stop = fresh, None
    if len(stream.tokens) >= params.min_tokens:  # before that no stop string ends the answer
        text, stop = stream.stops.push(fresh, final=finish is not None)
    reason: str | int | None = stop
    if stop is not None:
        finish = FinishReason.STOP
    elif by_token and token not in stream.request.eos_token_ids:
        reason = token
    first = len(stream.tokens) == 1
    return RequestOutput(
        request_id=stream.group,
        index=stream.index,
        text=text,
        token_ids=[token],
        logprobs=None if logprob is None else [logprob],
        prompt_logprobs=(stream.prompt_logprobs or None) if first else None,
        finish_reason=finish,
        stop_reason=reason,
        num_prompt_tokens=len(stream.request.prompt_token_ids),
        num_cached_tokens=stream.cached_tokens,
    )


def _finish_without_token(stream: _Stream, reason: FinishReason) -> RequestOutput:
    """The end of a completion for which there was no token: the text that was held back."""
    return RequestOutput(
        request_id=stream.group,
        index=stream.index,
        text=stream.stops.held_text + stream.decoder.finish(),
        logprobs=None if stream.request.params.logprobs is None else [],
        finish_reason=reason,
        num_prompt_tokens=len(stream.request.prompt_token_ids),
        num_cached_tokens=stream.cached_tokens,
    )
