"""A request, its sampling parameters, and its output."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from moesaic.core.errors import RequestError
from moesaic.core.reasoning import ReasoningBudget
from moesaic.core.structured_outputs import StructuredOutputsParams

MAX_LOGPROBS = 20
MAX_LOGPROB_TOKENS = 128
"""Maximum number of logprob_token_ids. Each gives a number for each token of the answer."""
MAX_BAD_WORDS = 1000
MAX_BAD_WORD_CHARACTERS = 1 << 16
"""Maximum number of characters of all bad words of a request."""
SEED_LIMIT = 2**63
NO_TOKEN = -1
"""Stands for a token id where the model's logits were not finite, so there was none to sample."""
NO_ALLOWED_TOKEN = -2
"""Stands for a token id where a request's structured output and its other parameters allow no token."""


class FinishReason(enum.Enum):
    """Why a request ended."""

    STOP = "stop"
    """The request generated an end-of-sequence token, a stop token or a stop string."""
    LENGTH = "length"
    """The request reached max_tokens or the model's context length."""
    ABORT = "abort"
    """The client or a shutdown cancelled the request."""
    ERROR = "error"
    """The model's logits were not finite. What the request generated before is valid."""
    NO_ALLOWED_TOKEN = "not_allowed"
    """The structured output and the other parameters of the request allowed no token."""


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled. Names, meanings and defaults are those of vLLM.

    Raises RequestError, naming the field, when a value is out of its range.
    """

    n: int = 1
    """Number of completions of the prompt, each with its own seed."""
    max_tokens: int | None = 16
    """Maximum number of tokens to generate. None means as many as the context length allows."""
    min_tokens: int = 0
    """Number of generated tokens before which no end-of-sequence or stop token is sampled."""
    temperature: float = 1.0
    """0 is greedy: the most likely token, with ties to the lowest id."""
    top_p: float = 1.0
    """Keep the most likely tokens whose probabilities sum to this value, (0, 1]."""
    top_k: int = 0
    """Keep this many most likely tokens. 0 or -1 keeps all."""
    min_p: float = 0.0
    """Drop tokens that are less likely than this share of the most likely token's probability, [0, 1]."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token that was generated already, [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time that it was generated, [-2, 2]."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens in the prompt or output and multiplies their negative logits, >
    0.
    """
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Token id -> number that is added to its logit, [-100, 100]."""
    seed: int | None = None
    """Seed of the sampling noise. With None the engine draws one at arrival."""
    stop: Sequence[str] = ()
    """Texts that end the answer. They are not part of it."""
    stop_token_ids: Sequence[int] = ()
    """Token ids that end the answer, in addition to the model's end-of-sequence ids."""
    include_stop_str_in_output: bool = False
    """Keep the stop string at the end of the text."""
    ignore_eos: bool = False
    """Continue after the model's end-of-sequence tokens."""
    logprobs: int | None = None
    """Return the log-probability of each token and of this many most likely tokens, 0 to 20."""
    logprob_token_ids: Sequence[int] = ()
    """The tokens whose log-probabilities `logprobs` returns in place of those of the most likely ones."""
    prompt_logprobs: int | None = None
    """Return the same as `logprobs` for the tokens of the prompt. Such a request uses no cached prefix."""
    return_routed_experts: bool = False
    """Return the experts of each token, and the expert servers that computed them."""
    cache_salt: str = ""
    """Only requests of the same salt share cached prefixes."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    allowed_token_ids: Sequence[int] | None = None
    """The only tokens that may be generated. None allows all."""
    bad_words: Sequence[str] = ()
    """Texts that are not generated: the last token of their token sequences never follows the others."""
    bad_word_ids: Sequence[Sequence[int]] = ()
    """The token sequences of `bad_words`, which the engine fills in for the worker."""
    structured_outputs: StructuredOutputsParams | None = None
    """The form that the answer must have. A mapping of its fields is accepted too."""
    reasoning: ReasoningBudget | None = None
    """How long the answer's reasoning may be. The server fills it in. None: no limit of its own."""

    def __post_init__(self) -> None:
        # Lists and None are accepted. Tuples are stored, so that equal parameters compare equal.
        stop = (self.stop,) if isinstance(self.stop, str) else _tuple("stop", self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", _tuple("stop_token_ids", self.stop_token_ids))
        object.__setattr__(self, "logprob_token_ids", _tuple("logprob_token_ids", self.logprob_token_ids))
        object.__setattr__(self, "logit_bias", _mapping("logit_bias", self.logit_bias))
        object.__setattr__(self, "bad_words", _tuple("bad_words", self.bad_words))
        object.__setattr__(self, "bad_word_ids", tuple(map(tuple, self.bad_word_ids)))
        if self.allowed_token_ids is not None:
            ids = tuple(dict.fromkeys(_tuple("allowed_token_ids", self.allowed_token_ids)))
            object.__setattr__(self, "allowed_token_ids", ids)
        for name in (
            *("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"),
            "return_routed_experts",
        ):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name}: got {getattr(self, name)!r}; allowed: True, False", name)
        object.__setattr__(self, "structured_outputs", _form(self.structured_outputs))
        _integer("n", self.n, 1, 128)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, None)
        _integer("min_tokens", self.min_tokens, 0, self.max_tokens)
        _number("temperature", self.temperature, 0.0, 1e6)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _integer("top_k", self.top_k, -1, None)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 1e6, open_low=True)
        if self.seed is not None:
            _integer("seed", self.seed, -SEED_LIMIT, SEED_LIMIT - 1)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _integer(name, value, 0, MAX_LOGPROBS)
        for token, bias in self.logit_bias.items():
            _integer("logit_bias", token, 0, None)
            _number("logit_bias", bias, -100.0, 100.0)
        for name in ("stop_token_ids", "logprob_token_ids"):
            for token in getattr(self, name):
                _integer(name, token, 0, None)
        if self.logprob_token_ids and self.logprobs is None:
            raise RequestError("logprob_token_ids: allowed only with logprobs", "logprob_token_ids")
        if len(self.logprob_token_ids) > MAX_LOGPROB_TOKENS:
            got = f"{len(self.logprob_token_ids)} token ids; allowed: at most {MAX_LOGPROB_TOKENS}"
            raise RequestError(f"logprob_token_ids: got {got}", "logprob_token_ids")
        if any(not isinstance(text, str) or not text for text in self.stop):
            raise RequestError(f"stop: got {list(self.stop)!r}; allowed: texts that are not empty", "stop")
        self._check_bans()

    def _check_bans(self) -> None:
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise RequestError("allowed_token_ids: got []; allowed: at least one id", "allowed_token_ids")
            for token in self.allowed_token_ids:
                _integer("allowed_token_ids", token, 0, None)
        if any(not isinstance(word, str) or not word for word in self.bad_words):
            problem = f"got {list(self.bad_words)!r}; allowed: texts that are not empty"
            raise RequestError(f"bad_words: {problem}", "bad_words")
        if len(self.bad_words) > MAX_BAD_WORDS:
            problem = f"got {len(self.bad_words)} texts; allowed: at most {MAX_BAD_WORDS}"
            raise RequestError(f"bad_words: {problem}", "bad_words")
        if (size := sum(map(len, self.bad_words))) > MAX_BAD_WORD_CHARACTERS:
            problem = f"got {size} characters in all; allowed: at most {MAX_BAD_WORD_CHARACTERS}"
            raise RequestError(f"bad_words: {problem}", "bad_words")

    @property
    def greedy(self) -> bool:
        """Whether no noise is drawn. Below this temperature the most likely token has probability 1."""
        return self.temperature < 1e-5

    @property
    def penalised(self) -> bool:
        """Whether earlier tokens change the logits."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    def fan_out(self, seed: int) -> list[SamplingParams]:
        """The `n` single-completion forms of these parameters, with seeds `seed`, `seed` + 1, ..."""
        return [replace(self, n=1, seed=_wrap(seed + index)) for index in range(self.n)]


def _tuple(name: str, values: Any) -> tuple[Any, ...]:
    """`values` as a tuple, empty for None."""
    if not isinstance(values or (), Iterable):
        raise RequestError(f"{name}: got {values!r}; allowed: a list", name)
    return tuple(values or ())


def _mapping(name: str, values: Any) -> Mapping[Any, Any]:
    """`values`, or an empty mapping for None."""
    if not isinstance(values or {}, Mapping):
        raise RequestError(f"{name}: got {values!r}; allowed: numbers by token id", name)
    return values or {}


def _form(value: object) -> StructuredOutputsParams | None:
    if isinstance(value, Mapping):
        return StructuredOutputsParams.from_mapping(value)
    if isinstance(value, StructuredOutputsParams | None):
        return value
    name = "structured_outputs"
    raise RequestError(f"{name}: got {value!r}; allowed: StructuredOutputsParams", name)


def _wrap(seed: int) -> int:
    """`seed` wrapped into the signed 64-bit range."""
    return (seed + SEED_LIMIT) % (2 * SEED_LIMIT) - SEED_LIMIT


def _integer(name: str, value: object, low: int, high: int | None) -> None:
    """Raise RequestError unless `value` is an integer within the limits.

    Without `high` the limit is 64 bits.
    """
    good = isinstance(value, int) and not isinstance(value, bool)
    maximum = SEED_LIMIT - 1 if high is None else high
    if not good or not low <= value <= maximum:  # type: ignore[operator]
        top = f" and at most {maximum}" if high is not None or good else ""
        raise RequestError(f"{name}: got {value!r}; allowed: an integer of at least {low}{top}", name)


def _number(name: str, value: object, low: float, high: float, open_low: bool = False) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool)
    # NaN is refused too, because every comparison with it is false.
    in_range = good and (low < value if open_low else low <= value) and value <= high  # type: ignore[operator]
    if not in_range:
        bound = "above" if open_low else "at least"
        raise RequestError(
            f"{name}: got {value!r}; allowed: a number {bound} {low:g} and at most {high:g}", name
        )


@dataclass(frozen=True)
class Request:
    """A prompt to continue once. The engine owns the request from its arrival to its end."""

    request_id: int
    """Unique within an engine, in order of arrival."""
    prompt_token_ids: list[int]
    """At least one token, shorter than the context length."""
    params: SamplingParams
    """Parameters with n = 1 and with seed and max_tokens set."""
    eos_token_ids: tuple[int, ...] = ()
    """The model's end-of-sequence ids."""
    arrival: float = 0.0
    """Seconds on the engine's monotonic clock."""
    grammar: str = ""
    """llguidance's grammar of the whole answer. Empty: any text is allowed."""
    name: str = ""
    """Name in log lines: the id of the HTTP request. Empty for a request that did not come over HTTP."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Every token id that ends this request."""
        eos = () if self.params.ignore_eos else self.eos_token_ids
        return frozenset(eos) | frozenset(self.params.stop_token_ids)


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probabilities at one position, before temperature and penalties."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]
    """The most likely tokens with their log-probabilities, best first."""


@dataclass(frozen=True)
class TokenRoute:
    """Who computed the row from which a token was sampled: the row of the token before it."""

    experts: list[list[int]]
    """[layers][k] its experts in each layer with routed experts, best first."""
    servers: list[list[int]]
    """[layers][k] the expert server that answered for each of them. Empty without expert servers."""


@dataclass(frozen=True)
class RequestOutput:
    """The output of a request since the last output (a stream) or in total (a result)."""

    request_id: int
    index: int = 0
    """Index among the n completions of the prompt."""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """An entry per prompt token, None for the first. Only set on the one output that contains them."""
    routes: list[TokenRoute] | None = None
    """The route of each token. None where the request did not ask for routes."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended the request, if one did."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None
