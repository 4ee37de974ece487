"""POST /v1/chat/completions"""

from __future__ import annotations

import asyncio
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

from fastapi import APIRouter, Request
from starlette.responses import Response

from moesaic.core.errors import RequestError
from moesaic.core.request import RequestOutput, SamplingParams, TokenLogprob
from moesaic.server.async_engine import Stream
from moesaic.server.documentation import GENERATION_ERRORS, streamed
from moesaic.server.events import CLIENT_GONE, EventStream, answer, unless_disconnected
from moesaic.server.json_body import StrictJsonRoute
from moesaic.server.logprobs import chat_logprobs, prompt_logprobs
from moesaic.server.prompts import Cut, chat_prompt, require_few_entries, require_few_scores
from moesaic.server.requests import ChatRequest
from moesaic.server.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    Usage,
)
from moesaic.server.sampling import chat_params
from moesaic.server.service import Service, Serving
from moesaic.server.structured import require_grammar
from moesaic.server.usage import Tally

router = APIRouter(route_class=StrictJsonRoute)


@router.post(
    "/v1/chat/completions",
    response_model=ChatCompletion,
    responses=GENERATION_ERRORS | streamed(ChatChunk),
)
async def create_chat_completion(body: ChatRequest, request: Request, service: Serving) -> Response:
    """Answer a conversation."""
    service.engine.require_serving()
    service.require_model(body.model)
    service.fields.check(body, request)
    require_few_entries(body, body.n or 1)
    params = chat_params(body, service)
    await require_grammar(params, body, service)
    cut = Cut.of(body, body.max_completion_tokens or body.max_tokens, service)
    rendered = chat_prompt(
        body.messages,
        body,
        service,
        any_length=cut.tokens is not None,
        special=body.add_special_tokens is True,
    )
    whole = await unless_disconnected(request.receive, rendered)
    if whole is None:
        return Response(status_code=CLIENT_GONE)
    prompt = cut.apply(whole)
    require_few_scores("prompt_logprobs", body.prompt_logprobs, len(prompt), body)
    reply = _Reply(body, prompt, service)
    source = _open(service, prompt, params, own_text=not body.continue_final_message)
    if body.stream:
        return EventStream(reply.chunks(source), source)
    return await answer(request.receive, source, reply.whole(source))


def _open(service: Service, prompt: list[int], params: SamplingParams, own_text: bool) -> Stream:
    """Submit the prompt. Errors about the engine's field "prompt" name the chat's field "messages"."""
    try:
        return service.engine.open([(prompt, params)], own_text=own_text)
    except RequestError as error:
        renamed = "messages" if error.field == "prompt" else error.field
        raise RequestError(str(error), renamed, error.code) from error


@dataclass
class _Answer:
    """The outputs of one choice so far."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    last: RequestOutput | None = None


class _Reply:
    """The answer to one call."""

    def __init__(self, body: ChatRequest, prompt: list[int], service: Service) -> None:
        self._body = body
        self._prompt = prompt
        self._scores: list[TokenLogprob | None] | None = None
        """The log-probabilities of the prompt's tokens."""
        self._service = service
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(service.now())
        self._tally = Tally([len(prompt)])

    async def chunks(self, source: Stream) -> AsyncIterator[ChatChunk]:
        """The streamed answer: for each choice its role, its text in pieces and its end; then the usage."""
        begun: set[int] = set()
        async for number, output in source:
            self._tally.add(number, output)
            if output.index not in begun:
                begun.add(output.index)
                first = self._chunk(output.index, ChatDelta(role="assistant", content=""))
                if self._body.return_token_ids and len(begun) == 1:
                    first.prompt_token_ids = self._prompt
                yield first
            logprobs = self._logprobs(output.logprobs or [])
            alone = self._body.return_token_ids and output.finish_reason is None
            if output.text or (logprobs and logprobs.content) or alone:
                yield self._chunk(output.index, ChatDelta(content=output.text), logprobs, output.token_ids)
                output = replace(output, token_ids=[])
            if output.finish_reason is not None:
                yield self._last_chunk(output)
        if self._body.streams_usage:
            yield self._envelope([], self._tally.usage())

    async def whole(self, source: Stream) -> ChatCompletion:
        """The complete answer."""
        answers: defaultdict[int, _Answer] = defaultdict(_Answer)
        async for number, output in source:
            self._tally.add(number, output)
            answer = answers[output.index]
            answer.texts.append(output.text)
            answer.logprobs.extend(output.logprobs or [])
            answer.token_ids.extend(output.token_ids)
            self._scores = self._scores or output.prompt_logprobs
            answer.last = output
        completion = ChatCompletion(
            id=self._id,
            object="chat.completion",
            created=self._created,
            model=self._service.model_name,
            choices=[self._choice(index, answers[index]) for index in sorted(answers)],
            usage=self._tally.usage(),
        )
        if self._body.return_token_ids:
            completion.prompt_token_ids = self._prompt
        if self._body.prompt_logprobs is not None:
            scores, top = self._scores or [None] * len(self._prompt), self._body.prompt_logprobs
            completion.prompt_logprobs = await asyncio.to_thread(
                prompt_logprobs, scores, top, self._service.tokenizer
            )
        return completion

    def _choice(self, index: int, answer: _Answer) -> ChatChoice:
        last = answer.last
        assert last is not None and last.finish_reason is not None
        choice = ChatChoice(
            index=index,
            message=ChatMessage(role="assistant", content="".join(answer.texts), refusal=None),
            logprobs=self._logprobs(answer.logprobs),
            finish_reason=last.finish_reason.value,
            stop_reason=last.stop_reason,
        )
        if self._body.return_token_ids:
            choice.token_ids = answer.token_ids
        return choice

    def _logprobs(self, entries: list[TokenLogprob]) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        return chat_logprobs(entries, self._body.top_logprobs or 0, self._service.tokenizer)

    def _chunk(
        self,
        index: int,
        delta: ChatDelta,
        logprobs: ChatLogprobs | None = None,
        token_ids: list[int] | None = None,
    ) -> ChatChunk:
        choice = ChatChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=None)
        if self._body.return_token_ids and token_ids:
            choice.token_ids = token_ids
        return self._envelope([choice])

    def _last_chunk(self, output: RequestOutput) -> ChatChunk:
        assert output.finish_reason is not None
        choice = ChatChunkChoice(
            index=output.index,
            delta=ChatDelta(),
            logprobs=None,
            finish_reason=output.finish_reason.value,
            stop_reason=output.stop_reason,
        )
        if self._body.return_token_ids and output.token_ids:
            choice.token_ids = output.token_ids
        return self._envelope([choice])

    def _envelope(self, choices: list[ChatChunkChoice], usage: Usage | None = None) -> ChatChunk:
        """One chunk. As in OpenAI's API, a stream with usage sends `usage: null` before the last chunk."""
        if usage is None and self._body.streams_running_usage:
            usage = self._tally.usage()
        chunk = ChatChunk(
            id=self._id,
            object="chat.completion.chunk",
            created=self._created,
            model=self._service.model_name,
            choices=choices,
        )
        if self._body.streams_usage:
            chunk.usage = usage
        return chunk
