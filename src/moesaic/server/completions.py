"""POST /v1/completions"""

from __future__ import annotations

import asyncio
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from fastapi import APIRouter, Request
from starlette.responses import Response

from moesaic.core.errors import RequestError
from moesaic.core.request import RequestOutput
from moesaic.server.async_engine import Stream
from moesaic.server.documentation import GENERATION_ERRORS, streamed
from moesaic.server.events import EventStream, answer
from moesaic.server.json_body import StrictJsonRoute
from moesaic.server.logprobs import CompletionLogprobsWriter
from moesaic.server.prompts import Prompt, completion_prompts
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
from moesaic.server.structured import require_grammar
from moesaic.server.usage import Tally

router = APIRouter(route_class=StrictJsonRoute)

_AT_ONCE = 1 << 12
"""Maximum number of tokens that are looked up in the event loop, which takes some ms."""
MOST_SCORES = 1 << 22
"""Maximum number of log-probabilities of echoed prompts in one answer. Each needs some hundred bytes."""


@router.post("/v1/completions", response_model=Completion, responses=GENERATION_ERRORS | streamed(Completion))
async def create_completion(body: CompletionRequest, request: Request, service: Serving) -> Response:
    """Continue one or many prompts."""
    service.engine.require_serving()
    service.require_model(body.model)
    prompts = await completion_prompts(body, service)
    _require_few_scores(body, prompts)
    jobs = [(p.token_ids, completion_params(body, len(p.token_ids), service)) for p in prompts]
    await require_grammar(jobs[0][1], body, service)
    reply = _Reply(body, prompts, service)
    source = service.engine.open(jobs)
    if body.stream:
        return EventStream(reply.chunks(source), source)
    return await answer(request.receive, source, reply.whole(source))


def _require_few_scores(body: CompletionRequest, prompts: Sequence[Prompt]) -> None:
    """Raise RequestError if the answer would have too many log-probabilities of its prompts."""
    if not body.echo or body.logprobs is None:
        return
    found = (body.n or 1) * sum(len(prompt.token_ids) for prompt in prompts) * (body.logprobs + 1)
    if found > MOST_SCORES:
        what = f"{body.logprobs}, with echo {found} log-probabilities of prompts in one answer"
        raise RequestError(f"logprobs: got {what}; allowed: at most {MOST_SCORES}", "logprobs")


class _Reply:
    """The answer to one call. Choice i of prompt p has index p * n + i."""

    def __init__(self, body: CompletionRequest, prompts: Sequence[Prompt], service: Service) -> None:
        self._body = body
        self._prompts = prompts
        self._service = service
        self._id = f"cmpl-{uuid.uuid4().hex}"
        self._created = int(service.now())
        self._tally = Tally([len(prompt.token_ids) for prompt in prompts])
        self._writers: dict[int, CompletionLogprobsWriter] = {}
        """Choice index -> its writer, once the choice has begun."""

    async def chunks(self, source: Stream) -> AsyncIterator[Completion]:
        """The streamed answer: a chunk for each output that is not empty, then the usage."""
        async for number, output in source:
            choice = await self._written(number, output)
            if choice.text or choice.logprobs or choice.finish_reason:
                yield self._completion([choice], self._running_usage())
        if self._body.streams_usage:
            yield self._completion([], self._tally.usage())

    async def whole(self, source: Stream) -> Completion:
        """The complete answer."""
        pieces: defaultdict[int, list[CompletionChoice]] = defaultdict(list)
        async for number, output in source:
            piece = await self._written(number, output)
            pieces[piece.index].append(piece)
        choices = [_joined(pieces[index]) for index in sorted(pieces)]
        return self._completion(choices, self._tally.usage())

    async def _written(self, number: int, output: RequestOutput) -> CompletionChoice:
        """`_piece`, in a thread if it looks up many tokens. A long echoed prompt takes seconds."""
        if len(output.prompt_logprobs or ()) * ((self._body.logprobs or 0) + 1) <= _AT_ONCE:
            return self._piece(number, output)
        return await asyncio.to_thread(self._piece, number, output)

    def _piece(self, number: int, output: RequestOutput) -> CompletionChoice:
        """The piece that `output` adds to its choice. The first piece contains the echoed prompt."""
        if self._body.max_tokens == 0:
            output = replace(output, text="", token_ids=[], logprobs=None)
        self._tally.add(number, output)
        index = number * (self._body.n or 1) + output.index
        first = index not in self._writers
        if first:
            skip = self._body.skip_special_tokens is not False
            echoed = self._prompts[number] if self._body.echo else None
            tokenizer, top = self._service.tokenizer, self._body.logprobs or 0
            self._writers[index] = CompletionLogprobsWriter(tokenizer, top, skip, echoed)
        echo = self._prompts[number] if first and self._body.echo else None
        return CompletionChoice(
            index=index,
            text=(self._prompt_text(echo) if echo else "") + output.text,
            logprobs=self._logprobs(self._writers[index], echo, output),
            finish_reason=self._finish_reason(output),
            stop_reason=None if self._body.max_tokens == 0 else output.stop_reason,
        )

    def _finish_reason(self, output: RequestOutput) -> FinishReasonName | None:
        if output.finish_reason is None:
            return None
        return "length" if self._body.max_tokens == 0 else output.finish_reason.value

    def _prompt_text(self, prompt: Prompt) -> str:
        if prompt.text is not None:
            return prompt.text
        skip = self._body.skip_special_tokens is not False
        return self._service.tokenizer.decode(prompt.token_ids, skip)

    def _logprobs(
        self, writer: CompletionLogprobsWriter, echo: Prompt | None, output: RequestOutput
    ) -> CompletionLogprobs | None:
        if self._body.logprobs is None:
            return None
        echoed = [] if echo is None else echo.token_ids
        # The engine sends no scores for a prompt of one token, since the first token has none.
        scores = (output.prompt_logprobs or [None] * len(echoed)) if echoed else []
        return writer.write([*echoed, *output.token_ids], [*scores, *(output.logprobs or [])])

    def _running_usage(self) -> Usage | None:
        return self._tally.usage() if self._body.streams_running_usage else None

    def _completion(self, choices: list[CompletionChoice], usage: Usage | None) -> Completion:
        """The answer or one chunk. As in OpenAI's API, a stream with usage sends `usage: null` at first."""
        completion = Completion(
            id=self._id,
            object="text_completion",
            created=self._created,
            model=self._service.model_name,
            choices=choices,
        )
        if usage is not None or self._body.streams_usage:
            completion.usage = usage
        return completion


def _joined(pieces: Sequence[CompletionChoice]) -> CompletionChoice:
    """Join the pieces of one choice."""
    scores = [piece.logprobs for piece in pieces if piece.logprobs is not None]
    update = {"text": "".join(piece.text for piece in pieces), "logprobs": _joined_logprobs(scores)}
    return pieces[-1].model_copy(update=update)


def _joined_logprobs(scores: Sequence[CompletionLogprobs]) -> CompletionLogprobs | None:
    if not scores:
        return None
    names = CompletionLogprobs.model_fields
    return CompletionLogprobs(**{name: [x for s in scores for x in getattr(s, name)] for name in names})
