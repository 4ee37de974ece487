"""`LLM`: an engine and its worker in this process, for scripts and notebooks."""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Integral
from typing import Any

from moesaic.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig, WorkerConfig
from moesaic.core.errors import CheckpointError, ConfigError, EngineDeadError, RequestError
from moesaic.core.messages import Ready
from moesaic.core.metrics import WorkerStats
from moesaic.core.request import RequestOutput, SamplingParams
from moesaic.core.routing import RowSink
from moesaic.core.speculation import SpeculativeConfig
from moesaic.engine import Engine
from moesaic.models import files, fingerprint
from moesaic.models.served_files import LOOK_SECONDS, ServedFiles
from moesaic.runtime.build import build_worker
from moesaic.runtime.context import WorkerContext
from moesaic.runtime.fitting import fit
from moesaic.runtime.model_loading import maps_files
from moesaic.runtime.worker import Journal
from moesaic.text.structured.grammar import check
from moesaic.text.tokenizer import Tokenizer
from moesaic.transport.local import local_pair

LOG = logging.getLogger(__name__)
Prompt = str | list[int] | Mapping[str, Any]
"""A text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}."""
Message = Mapping[str, Any]
"""A chat message: {"role": ..., "content": ...}."""


@dataclass(frozen=True)
class Completion:
    """The result of one prompt."""

    prompt_token_ids: list[int]
    outputs: list[RequestOutput]
    """The n completions. Each holds the whole text."""

    @property
    def text(self) -> str:
        """The first completion's text."""
        return self.outputs[0].text


@dataclass
class _Batch:
    """The unfinished prompts of one call."""

    prompts: dict[int, list[int]] = field(default_factory=dict)
    """Request id -> token ids, in the order of the call."""
    num_unfinished: int = 0
    """Number of unfinished completions."""
    outputs: deque[RequestOutput] = field(default_factory=deque)
    """Outputs that the caller has not read yet. Another call's iterator may have produced them."""


class LLM:
    """A model in this process.

    model: a Hugging Face directory, a GGUF file, a hub id, a GGUF file on a hub such as `org/name:Q4_K_M`, or
    `demo`. seed: determines the seeds of requests without one.
    settings: the flags of `moesaic serve` in Python's spelling, such as max_model_len=2048 or
    max_num_seqs=8. Raises ConfigError for an unknown setting or a value that is not allowed.

        >>> from moesaic import LLM, SamplingParams
        >>> LLM("demo").generate(["def add(a, b):"], SamplingParams(max_tokens=8))[0].text  # doctest: +SKIP
    """

    def __init__(
        self,
        model: str,
        *,
        seed: int | None = None,
        journal: Journal | None = None,
        routing: RowSink | None = None,
        trace: str | None = None,
        special_tokens_in_content: bool = False,
        **settings: Any,
    ) -> None:
        """routing: receives the chosen experts of all rows, see `core.routing`. Offloaded weights and tensor
        parallelism are refused with it. trace: a path from `trace.parts.part_path`.
        special_tokens_in_content: let special tokens in chat messages act like those of the template."""
        config = _worker_config(model, settings)
        if routing is not None:
            _check_routing(config)
        path = files.resolve(*config.model.source)
        tokenizer = Tokenizer(path, special_tokens_in_content=special_tokens_in_content)
        config = replace(config, trace=trace or config.trace, checkpoint_stamp=fingerprint.stamp(path))
        config = _fit(config)
        self._defaults = files.generation_defaults(path)
        engine_end, worker_end = local_pair()
        self._connection = engine_end
        context = WorkerContext(config, worker_end, time.monotonic, journal=journal, routing=routing)
        self._worker, self.info = build_worker(context)
        is_mapped = maps_files(config.model)
        self._served_files = ServedFiles(path, config.checkpoint_stamp) if is_mapped else None
        self._next_look = 0.0
        """When the files are looked at again."""
        self._batches: dict[int, _Batch] = {}
        self._engine = Engine(
            engine_end,
            tokenizer,
            clock=time.monotonic,
            rng=random.Random(seed),
            eos_token_ids=self._defaults.join_ends(tokenizer.end_token_ids),
        )
        self._engine.receive(Ready(self.info))

    @property
    def tokenizer(self) -> Tokenizer:
        return self._engine.tokenizer

    @property
    def default_sampling(self) -> SamplingParams:
        """The sampling defaults of the checkpoint's generation_config.json, then those of SamplingParams."""
        return SamplingParams(**self._defaults.sampling)

    def stats(self) -> WorkerStats:
        """The worker's statistics at this moment."""
        return self._worker.stats()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Complete every prompt. Returns the results in the order of the prompts.

        params: one for all prompts, one for each, or None for `default_sampling`. Raises RequestError if a
        prompt cannot be served; then none of them runs.
        """
        return self._complete(self._submit(_as_list(prompts), params))

    def _complete(self, batch: _Batch) -> list[Completion]:
        """Run `batch` until every completion has finished."""
        parts: dict[int, dict[int, RequestOutput]] = {request_id: {} for request_id in batch.prompts}
        for output in self._outputs(batch):
            outputs = parts[output.request_id]
            outputs[output.index] = _append_piece(outputs.get(output.index), output)
        return [
            Completion(prompt, [parts[request_id][index] for index in sorted(parts[request_id])])
            for request_id, prompt in batch.prompts.items()
        ]

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | None = None,
    ) -> list[Completion]:
        """Answer one conversation or several, with the checkpoint's chat template."""
        conversation_list = (
            conversations if not conversations or _is_nested(conversations) else [conversations]
        )
        max_characters = self.info.max_model_len * self.tokenizer.longest_token  # characters
        prompts: list[Prompt] = [
            self.tokenizer.chat(conversation, most_characters=max_characters)  # type: ignore[arg-type]
            for conversation in conversation_list
        ]
        chat_params = replace(self.default_sampling, max_tokens=None) if params is None else params
        return self._complete(self._submit(prompts, chat_params, own_text=True))

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Yield the answer in pieces while it is generated. Closing the iterator cancels the request."""
        yield from self._outputs(self._submit([prompt], params))

    def _submit(
        self,
        prompts: list[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        own_text: bool = False,
    ) -> _Batch:
        params_list = _expand_params(self.default_sampling if params is None else params, len(prompts))
        batch = _Batch()
        for form in {
            prompt_params.structured_outputs
            for prompt_params in params_list
            if prompt_params.structured_outputs is not None
        }:
            check(form, self.tokenizer.special_tokens)
        try:
            for prompt, own_params in zip(prompts, params_list, strict=True):
                plain_prompt = _plain(prompt)
                tokens = (
                    self.tokenizer.encode(plain_prompt)
                    if isinstance(plain_prompt, str)
                    else _token_ids(plain_prompt)
                )
                request_id = self._engine.submit(tokens, own_params, own_text=own_text)
                batch.prompts[request_id] = tokens
                batch.num_unfinished += own_params.n
                self._batches[request_id] = batch
        except BaseException:
            self._end(batch)
            raise
        return batch

    def _outputs(self, batch: _Batch) -> Iterator[RequestOutput]:
        """Run the worker until `batch` is finished, and yield its outputs as they arrive."""
        try:
            while batch.num_unfinished:
                while batch.outputs:
                    output = batch.outputs.popleft()
                    batch.num_unfinished -= output.finished
                    yield output
                if batch.num_unfinished:
                    self._run_worker_once()
        finally:
            self._end(batch)

    def _run_worker_once(self) -> None:
        """Let the worker do one piece of work, and pass each output to the batch that it belongs to.

        Raises CheckpointError if somebody has written to a file that is mapped.
        """
        if self._served_files is not None and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + LOOK_SECONDS
            change = self._served_files.find_change()
            if change is not None:
                raise CheckpointError(change)
        has_worked = self._worker.turn(timeout=0.0)
        message = self._connection.receive(0.0)
        if not has_worked and message is None:
            raise EngineDeadError("the worker has nothing to do although requests are unfinished")
        while message is not None:
            for output in self._engine.receive(message):  # type: ignore[arg-type]
                self._batches[output.request_id].outputs.append(output)
            message = self._connection.receive(0.0)

    def _end(self, batch: _Batch) -> None:
        for request_id in batch.prompts:
            self._batches.pop(request_id, None)
            self._engine.cancel(request_id)


def _worker_config(model: str, settings: Mapping[str, Any]) -> WorkerConfig:
    """The worker's configs. Each setting goes to the config that has a field of its name."""

    def names(kind: type) -> set[str]:
        return {field.name for field in fields(kind)}

    drafting = settings.get("speculative_config")
    if drafting is not None and not isinstance(drafting, str):
        settings = {**settings, "speculative_config": SpeculativeConfig.parse(drafting).to_json()}
    kinds = (ModelConfig, CacheConfig, SchedulerConfig, ParallelConfig)
    setting_names = {"offload"}.union(*map(names, kinds)) - {"model"}
    for name, value in settings.items():
        if name not in setting_names:
            raise ConfigError(
                f"{name}={value!r}: no such setting; allowed: {', '.join(sorted(setting_names))}"
            )

    def select_settings(kind: type) -> dict[str, Any]:
        return {name: value for name, value in settings.items() if name in names(kind)}

    return WorkerConfig(
        ModelConfig(model, **select_settings(ModelConfig)),
        CacheConfig(**select_settings(CacheConfig)),
        SchedulerConfig(**select_settings(SchedulerConfig)),
        ParallelConfig(**select_settings(ParallelConfig)),
        offload=settings.get("offload"),
    )


def _fit(config: WorkerConfig) -> WorkerConfig:
    """The settings with which the model fits into memory. A lower maximum length is logged as a warning.

    Raises ConfigError for a model that does not fit.
    """
    memory_fit = fit(config)
    if memory_fit.streamed_bytes is not None:
        choices = "a smaller model, or serve and run-batch, which read experts from the disk"
        raise ConfigError(f"model: {memory_fit.notice}; allowed: {choices}")
    if memory_fit.notice:
        LOG.warning("%s", memory_fit.notice)
    return memory_fit.config


def _check_routing(config: WorkerConfig) -> None:
    """Raises ConfigError for a worker that does not report the chosen experts."""
    ranks = config.parallel.tensor_parallel_size
    conflicts = {
        "offload": config.offload is not None,
        f"tensor_parallel_size={ranks}": ranks > 1,
        "speculative_config": config.scheduler.speculative_config is not None,
    }
    for setting, is_given in conflicts.items():
        if is_given:
            raise ConfigError(f"routing: got a function; allowed: None with {setting}")


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """The prompts as a list. A single text, dictionary or list of token ids is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    items = list(getattr(prompts, "tolist", lambda: prompts)())
    if items and all(isinstance(item, Integral) for item in items):
        return [items]
    return items


def _plain(prompt: Prompt) -> object:
    """The text or the token ids of a prompt, which may be a dictionary as in vLLM."""
    if not isinstance(prompt, Mapping):
        return prompt
    if len(prompt) == 1 and isinstance(prompt.get("prompt"), str):
        return prompt["prompt"]
    if len(prompt) == 1 and not isinstance(prompt.get("prompt_token_ids", ""), str):
        return prompt["prompt_token_ids"]
    raise RequestError(f"prompt: got a dictionary of {list(prompt)}; allowed: {_ALLOWED}", "prompt")


def _token_ids(prompt: object) -> list[int]:
    """Token ids as Python integers. The prompt may be a list, an array or a tensor."""
    items: Any = getattr(prompt, "tolist", lambda: prompt)()
    tokens: list[Any] = list(items) if isinstance(items, Iterable) else [items]
    wrong = [token for token in tokens if not isinstance(token, Integral)]
    if wrong:
        raise RequestError(f"prompt: got {wrong[0]!r}; allowed: {_ALLOWED}", "prompt")
    return [int(token) for token in tokens]


_ALLOWED = "text, a list of token ids, {'prompt': text} or {'prompt_token_ids': ids}"


def _expand_params(params: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * count
    is_list = isinstance(params, Sequence) and not isinstance(params, str)
    wrong = [item for item in params if not isinstance(item, SamplingParams)] if is_list else [params]
    if wrong:
        raise ConfigError.field("params", wrong[0], "SamplingParams, or a list of them")
    if len(params) != count:
        raise ConfigError.field("params", f"{len(params)} of them", f"one, or one for each of {count}")
    return list(params)


def _is_nested(conversations: Sequence[Any]) -> bool:
    return bool(conversations) and not isinstance(conversations[0], Mapping)


def _append_piece(completion: RequestOutput | None, piece: RequestOutput) -> RequestOutput:
    """The completion so far together with its next piece."""
    if completion is None:
        return piece
    logprobs = None if piece.logprobs is None else (completion.logprobs or []) + piece.logprobs
    return replace(
        piece,
        text=completion.text + piece.text,
        token_ids=completion.token_ids + piece.token_ids,
        logprobs=logprobs,
        prompt_logprobs=completion.prompt_logprobs,
        routes=None if piece.routes is None else (completion.routes or []) + piece.routes,
    )
