"""Runs prompts through the engine in this process and makes a profile of their tokens' experts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from moesaic.config import ModelConfig
from moesaic.core.errors import ConfigError, RequestError
from moesaic.core.profile import Profile
from moesaic.core.routing import Assembly, RoutedModel, Rows
from moesaic.core.tally import Tally
from moesaic.jobs.profiling.options import ProfileOptions
from moesaic.jobs.profiling.prompts import Prompt, read
from moesaic.llm import LLM
from moesaic.models import files
from moesaic.models.embedding import nearest_known
from moesaic.models.registry import routed_model
from moesaic.text.tokenizer import Tokenizer

BATCH_PROMPTS = 256
"""Number of prompts that are submitted to the engine together."""
OPEN_SHARE = 0.25
"""Share of the memory for rows of prompts that have not ended."""

Show = Callable[[str, int, int], None]
"""A callback that is called with the activity, the tokens done and their total."""


@dataclass(frozen=True)
class Report:
    """The result of `moesaic profile`."""

    model: str
    output: str
    prompts: int
    topics: int
    layers: int
    num_experts: int
    top_k: int
    prompt_tokens: int
    """Number of prompt tokens that were recorded."""
    generated_tokens: int
    seconds: float
    """Seconds that the engine ran."""
    shortened: int
    """Number of prompts that were cut to the model's context length."""
    routes_kept: int
    """Number of prompts with routes in the file."""
    not_counted: int
    """Number of prompts that were not counted because --max-memory was full."""

    @property
    def tokens_per_second(self) -> float:
        return (self.prompt_tokens + self.generated_tokens) / self.seconds if self.seconds > 0 else 0.0

    def to_json(self) -> str:
        return json.dumps(asdict(self) | {"tokens_per_second": self.tokens_per_second})


class Gatherer:
    """A RowSink that counts the rows of requests once these have ended.

    Request i of the engine is prompt i.
    """

    def __init__(
        self, model: RoutedModel, options: ProfileOptions, topics: Sequence[int], show: Callable[[int], None]
    ) -> None:
        """topics: the topic of each prompt. show: called with the number of rows so far.

        Raises ConfigError if --max-memory is too small.
        """
        waiting = int(OPEN_SHARE * options.most_bytes)
        self.tally = Tally(model, options.most_bytes - waiting, options.seed)
        if self.tally.is_full:
            allowed_values = "more: the empty counts of this model need it"
            raise ConfigError.field("--max-memory", options.max_memory, allowed_values)
        self.assembly = Assembly(model, waiting)
        self.prompt_tokens = 0
        self._topics = np.array(topics, dtype=np.int16)
        self._show = show
        self._rows = 0

    def __call__(self, rows: Rows) -> None:
        self.assembly.add(rows)
        self._rows += int(np.count_nonzero(rows["position"] >= 0))
        self._show(self._rows)
        if self.assembly.is_full:
            self.fold()

    def fold(self) -> None:
        """Count the requests that have ended."""
        prompts, routes = self.assembly.take()
        self.prompt_tokens += int(routes.prompts.sum())
        self.tally.add(replace(routes, topics=self._topics[prompts]))


def run(
    options: ProfileOptions,
    model: ModelConfig,
    show: Show,
    clock: Callable[[], float] = time.perf_counter,
) -> Report:
    """Load the model, run the prompts, and write the profile."""
    prompts = read(options.prompts, options.max_prompts)
    path = files.resolve(*model.source)
    spec = routed_model(path)
    if not spec.layers:
        raise ConfigError.field("model", model.model, "one with routed experts")
    tokenizer = Tokenizer(path)
    encoded_prompts = [_encode(prompt, tokenizer, spec.vocab_size) for prompt in prompts]
    names = list(dict.fromkeys(prompt.topic for prompt in prompts))
    total = 0
    gatherer = Gatherer(
        spec,
        options,
        [names.index(prompt.topic) for prompt in prompts],
        lambda num_done: show("tokens", min(num_done, total), total),
    )
    show("loading", 0, 0)
    llm = LLM(model.model, seed=options.seed, routing=gatherer, **_settings(model))
    tokens, num_shortened = _cut(encoded_prompts, options.max_tokens, llm.info.max_model_len)
    total = sum(map(len, tokens)) + len(tokens) * options.max_tokens
    start = clock()
    _feed(llm, tokens, options.max_tokens, gatherer)
    seconds = clock() - start
    tally = gatherer.tally
    nearest_ids = nearest_known(path, tally.known_tokens, partial(show, "nearest tokens"))
    profile = tally.profile(names, nearest_ids)
    show("writing", 0, 0)
    _save(profile, options)
    return Report(
        model=model.model,
        output=str(options.output_file),
        prompts=len(prompts),
        topics=len(names),
        layers=len(spec.layers),
        num_experts=spec.num_experts,
        top_k=spec.top_k,
        prompt_tokens=gatherer.prompt_tokens,
        generated_tokens=tally.tokens - gatherer.prompt_tokens,
        seconds=seconds,
        shortened=num_shortened,
        routes_kept=profile.routes.requests,
        not_counted=len(prompts) - tally.requests,
    )


def _encode(prompt: Prompt, tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    """The token ids of a prompt.

    Raises ConfigError, with file and line, for a prompt that the engine would refuse.
    """
    try:
        tokens = tokenizer.encode(prompt.text) if isinstance(prompt.text, str) else prompt.text
    except RequestError as error:
        raise ConfigError(f"{prompt.location}: {error}") from error
    if not tokens:
        raise ConfigError(f"{prompt.location}: prompt: got no token; allowed: at least one")
    bad = next((token for token in tokens if not 0 <= token < vocab_size), None)
    if bad is not None:
        raise ConfigError(f"{prompt.location}: prompt: got token id {bad}; allowed: 0 to {vocab_size - 1}")
    return tokens


def _cut(prompts: list[list[int]], max_tokens: int, max_model_len: int) -> tuple[list[list[int]], int]:
    """The prompts' tokens, cut to the context length, and the number of prompts that were cut."""
    max_prompt = max_model_len - max_tokens - 1
    if max_prompt < 1:
        raise ConfigError.field("--max-tokens", max_tokens, f"at most {max_model_len - 2}")
    return [tokens[:max_prompt] for tokens in prompts], sum(len(tokens) > max_prompt for tokens in prompts)


def _feed(llm: LLM, tokens: list[list[int]], max_tokens: int, gatherer: Gatherer) -> None:
    """Run all prompts through the engine."""
    # One more than asked for: the last generated token is not computed.
    params = replace(llm.default_sampling, max_tokens=max_tokens + 1)
    for start in range(0, len(tokens), BATCH_PROMPTS):
        llm.generate(tokens[start : start + BATCH_PROMPTS], params)
        gatherer.fold()


def _settings(model: ModelConfig) -> dict[str, Any]:
    """Keyword arguments for `LLM`.

    They disable the prefix cache, since tokens from the cache are not recorded.
    """
    settings = {name: value for name, value in asdict(model).items() if name != "model"}
    return settings | {"enable_prefix_caching": False}


def _save(profile: Profile, options: ProfileOptions) -> None:
    try:
        profile.save(options.output_file)
    except OSError as error:
        allowed_values = f"a file to write into ({error.strerror})"
        raise ConfigError.field("--output-file", str(options.output_file), allowed_values) from error
