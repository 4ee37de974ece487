"""POST /v1/completions"""

from __future__ import annotations

import asyncio
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from moesaic.core.request import RequestOutput
from moesaic.server.answer_form import require_grammar
from moesaic.server.async_engine import Stream
from moesaic.server.documentation import GENERATION_ERRORS, describe_stream
from moesaic.server.events import EventStream, answer
from moesaic.server.json_body import StrictJsonRoute
from moesaic.server.logprobs import CompletionLogprobsWriter, prompt_logprobs
from moesaic.server.prompts import Prompt, completion_prompts, require_few_scores
from moesaic.server.requests import CompletionRequest
from moesaic.server.responses import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    FinishReasonName,
    Usage,
)
from moesaic.server.sampling import completion_params
from moesaic.server.service import Service, Serving
from moesaic.server.token_routes import set_routes
from moesaic.server.usage import Tally

router = APIRouter(route_class=StrictJsonRoute)

_MAX_LOOP_TOKENS = 1 << 12
"""Maximum number of tokens that are looked up in the event loop, which takes some ms."""


@router.post(
    "/v1/completions", response_model=Completion, responses=GENERATION_ERRORS | describe_stream(Completion)
)
async def create_completion(body: CompletionRequest, request: Request, service: Serving) -> Response:
    """Continue one or many prompts."""
    service.engine.require_serving()
    service.require_model(body.model)
    service.fields.check(body, request)
    prompts = await completion_prompts(body, service)
    _require_few_scores(body, prompts)
    jobs = [(p.token_ids, completion_params(body, len(p.token_ids), service)) for p in prompts]
    # All prompts of a call share the form of their answers, so one check is enough.
    await require_grammar(jobs[0][1], body, service)
    reply = _Reply(body, prompts, service)
    source = service.engine.open(jobs)
    if body.stream:
        return EventStream(reply.chunks(source), source)
    return await answer(request.receive, source, reply.build_answer(source))


def _require_few_scores(body: CompletionRequest, prompts: Sequence[Prompt]) -> None:
    """Raise RequestError if the answer would have too many log-probabilities of its prompts."""
    tokens = sum(len(prompt.token_ids) for prompt in prompts)
    if body.echo:
        require_few_scores("logprobs", body.logprobs, tokens, body, "with echo ")
    require_few_scores("prompt_logprobs", body.prompt_logprobs, tokens, body)


class _Reply:
    """The answer to one call. Choice i of prompt p has index p * n + i."""

    def __init__(self, body: CompletionRequest, prompts: Sequence[Prompt], service: Service) -> None:
        self._body = body
        self._prompts = prompts
        self._service = service
        self._id = f"cmpl-{uuid.uuid4().hex}"
        self._created_time = int(service.now())
        self._tally = Tally([len(prompt.token_ids) for prompt in prompts])
        self._writers: dict[int, CompletionLogprobsWriter] = {}
        """Choice index -> its writer, once the choice has begun."""

    async def chunks(self, source: Stream) -> AsyncIterator[Completion]:
        """The streamed answer: a chunk for each output, with or without text, then the usage."""
        async for number, output in source:
            choice = await self._build_piece_off_loop(number, output)
            if output.token_ids or choice.text or choice.finish_reason:
                yield self._completion([choice], self._running_usage())
        if self._body.streams_usage:
            yield self._completion([], self._tally.usage())

    async def build_answer(self, source: Stream) -> Completion:
        """The complete answer."""
        pieces: defaultdict[int, list[CompletionChoice]] = defaultdict(list)
        async for number, output in source:
            piece = await self._build_piece_off_loop(number, output)
            pieces[piece.index].append(piece)
        choices = [_join_pieces(pieces[index]) for index in sorted(pieces)]
        completion = self._completion(choices, self._tally.usage())
        completion.system_fingerprint = None  # clients of OpenAI's API read it
        return completion

    async def _build_piece_off_loop(self, number: int, output: RequestOutput) -> CompletionChoice:
        """`_piece`, in a thread if it looks up many tokens. A long scored prompt takes seconds."""
        top = max(self._body.logprobs or 0, self._body.prompt_logprobs or 0)
        if len(output.prompt_logprobs or ()) * (top + 1) <= _MAX_LOOP_TOKENS:
            return self._build_piece(number, output)
        return await asyncio.to_thread(self._build_piece, number, output)

    def _build_piece(self, number: int, output: RequestOutput) -> CompletionChoice:
        """The piece that `output` adds to its choice. The first piece contains the echoed prompt."""
        if self._body.max_tokens == 0:  # the engine generates at least one token, which nobody asked for
            output = replace(output, text="", token_ids=[], logprobs=None, routes=None)
        self._tally.add(number, output)
        index = number * (self._body.n or 1) + output.index
        first = index not in self._writers
        echo = self._echo(self._prompts[number]) if first and self._body.echo else None
        if first:
            skip = self._body.skip_special_tokens is not False
            tokenizer, top = self._service.tokenizer, self._body.count_candidates(self._body.logprobs or 0)
            as_ids = bool(self._body.return_tokens_as_token_ids)
            self._writers[index] = CompletionLogprobsWriter(tokenizer, top, skip, echo, as_ids)
        choice = CompletionChoice(
            index=index,
            text=(echo.text or "" if echo else "") + output.text,
            logprobs=self._logprobs(self._writers[index], echo, output),
            finish_reason=self._finish_reason(output),
            stop_reason=None if self._body.max_tokens == 0 else output.stop_reason,
        )
        self._add_tokens(choice, self._prompts[number] if first else None, output)
        return choice

    def _add_tokens(self, choice: CompletionChoice, prompt: Prompt | None, output: RequestOutput) -> None:
        """Add token ids and scores of the prompt if they are wanted. prompt: None after the first piece."""
        if self._body.return_token_ids:
            choice.token_ids = output.token_ids
        if self._body.return_routed_experts:
            set_routes(choice, output.routes or [])
        if self._body.return_token_ids and prompt is not None:
            choice.prompt_token_ids = prompt.token_ids
        if self._body.prompt_logprobs is not None and prompt is not None:
            scores = output.prompt_logprobs or [None] * len(prompt.token_ids)
            choice.prompt_logprobs = prompt_logprobs(
                scores, self._body.prompt_logprobs, self._service.tokenizer
            )

    def _finish_reason(self, output: RequestOutput) -> FinishReasonName | None:
        if output.finish_reason is None:
            return None
        return "length" if self._body.max_tokens == 0 else output.finish_reason.value

    def _echo(self, prompt: Prompt) -> Prompt:
        """The prompt with its text. Special tokens that the client sent as ids are a part of it."""
        if prompt.text is not None:
            return prompt
        skip = prompt.was_text and self._body.skip_special_tokens is not False
        return replace(prompt, text=self._service.tokenizer.decode(prompt.token_ids, skip))

    def _logprobs(
        self, writer: CompletionLogprobsWriter, echo: Prompt | None, output: RequestOutput
    ) -> CompletionLogprobs | None:
        if self._body.logprobs is None:
            return None
        echoed_ids = [] if echo is None else echo.token_ids
        # The engine sends no scores for a prompt of one token, since the first token has none.
        scores = (output.prompt_logprobs or [None] * len(echoed_ids)) if echoed_ids else []
        return writer.write([*echoed_ids, *output.token_ids], [*scores, *(output.logprobs or [])])

    def _running_usage(self) -> Usage | None:
        return self._tally.usage() if self._body.streams_running_usage else None

    def _completion(self, choices: list[CompletionChoice], usage: Usage | None) -> Completion:
        """The answer or one chunk. As in OpenAI's API, a stream with usage sends `usage: null` at first."""
        completion = Completion(
            id=self._id,
            object="text_completion",
            created=self._created_time,
            model=self._service.model_name,
            choices=choices,
        )
        if usage is not None or self._body.streams_usage:
            completion.usage = usage
        return completion


def _join_pieces(pieces: Sequence[CompletionChoice]) -> CompletionChoice:
    """Join the pieces of one choice."""
    scores = [piece.logprobs for piece in pieces if piece.logprobs is not None]
    update: dict[str, Any] = {
        "prompt_logprobs": None,
        "text": "".join(piece.text for piece in pieces),
        "logprobs": _join_logprobs(scores),
    }
    for name in ("prompt_token_ids", "prompt_logprobs"):
        if name in pieces[0].model_fields_set:
            update[name] = getattr(pieces[0], name)
    if pieces[0].token_ids is not None:
        update["token_ids"] = [token for piece in pieces for token in piece.token_ids or ()]
    for name in ("routed_experts", "routed_servers"):
        if getattr(pieces[0], name) is not None:
            update[name] = [route for piece in pieces for route in getattr(piece, name) or ()]
    return pieces[-1].model_copy(update=update)


def _join_logprobs(scores: Sequence[CompletionLogprobs]) -> CompletionLogprobs | None:
    if not scores:
        return None
    names = CompletionLogprobs.model_fields
    return CompletionLogprobs(**{name: [x for s in scores for x in getattr(s, name)] for name in names})
