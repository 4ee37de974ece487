"""POST /v1/chat/completions"""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass, replace

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Receive

from moesaic.core.errors import RequestError
from moesaic.core.request import RequestOutput, SamplingParams, TokenLogprob
from moesaic.server.answers import Answer, Reading
from moesaic.server.async_engine import Stream
from moesaic.server.documentation import GENERATION_ERRORS, streamed
from moesaic.server.events import CLIENT_GONE, EventStream, answer, unless_disconnected
from moesaic.server.json_body import StrictJsonRoute
from moesaic.server.logprobs import chat_logprobs
from moesaic.server.prompts import chat_prompt, opens_reasoning, require_few_entries
from moesaic.server.requests import ChatRequest
from moesaic.server.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    Usage,
)
from moesaic.server.sampling import chat_params
from moesaic.server.service import Service, Serving
from moesaic.server.structured import require_grammar
from moesaic.server.tools import callable_tools, with_grammar
from moesaic.server.usage import Tally

router = APIRouter(route_class=StrictJsonRoute)


@router.post(
    "/v1/chat/completions",
    response_model=ChatCompletion,
    responses=GENERATION_ERRORS | streamed(ChatChunk),
)
async def create_chat_completion(body: ChatRequest, request: Request, service: Serving) -> Response:
    """Answer a conversation."""
    chat = await open_chat(body, request.receive, service)
    if chat is None:
        return Response(status_code=CLIENT_GONE)
    if body.stream:
        return EventStream(chat.chunks(), chat.source)
    return await answer(request.receive, chat.source, chat.reply.whole(chat.source))


@dataclass(frozen=True)
class Chat:
    """A chat that the engine is answering."""

    reply: Reply
    source: Stream
    """The engine's outputs, which `reply` reads once."""
    prompt_tokens: int
    params: SamplingParams

    def chunks(self) -> AsyncIterator[ChatChunk]:
        """The streamed answer."""
        return self.reply.chunks(self.source)


async def open_chat(body: ChatRequest, receive: Receive, service: Service, fit: bool = False) -> Chat | None:
    """Check and submit a conversation. None: the client has left.

    fit: reduce the answer's maximum length to what the context leaves.
    Raises RequestError, or another MoesaicError if the conversation cannot be served now.
    """
    service.engine.require_serving()
    service.require_model(body.model)
    require_few_entries(body, body.n or 1)
    tools = callable_tools(body, service.formats)
    params = chat_params(body, service)
    await require_grammar(params, body, service)
    prompt = await unless_disconnected(receive, chat_prompt(body.messages, body, service))
    if prompt is None:
        return None
    reading = Reading(
        formats=service.formats,
        tools=tools,
        inside=opens_reasoning(prompt, body, service),
        parallel=body.parallel_tool_calls is not False,
        include_reasoning=body.include_reasoning is not False,
    )
    params = await with_grammar(params, body, reading, service)
    if fit:
        params = _fitted(params, len(prompt), service)
    reply = Reply(body, len(prompt), service, reading)
    source = _open(service, prompt, params, not body.continue_final_message, service.formats.marks(tools))
    return Chat(reply, source, len(prompt), params)


def _fitted(params: SamplingParams, prompt_tokens: int, service: Service) -> SamplingParams:
    """`params` whose max_tokens is at most what the context leaves, and at least 1."""
    room = service.engine.require_serving().max_model_len - prompt_tokens
    limit = room if params.max_tokens is None else min(params.max_tokens, room)
    return replace(params, max_tokens=max(1, limit))


def _open(
    service: Service, prompt: list[int], params: SamplingParams, own_text: bool, kept: Collection[str]
) -> Stream:
    """Submit the prompt. Errors about the engine's field "prompt" name the chat's field "messages"."""
    try:
        return service.engine.open([(prompt, params)], own_text=own_text, kept=kept)
    except RequestError as error:
        renamed = "messages" if error.field == "prompt" else error.field
        raise RequestError(str(error), renamed, error.code) from error


class Reply:
    """The answer to one call."""

    def __init__(self, body: ChatRequest, prompt_tokens: int, service: Service, reading: Reading) -> None:
        self._body = body
        self._service = service
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(service.now())
        self._tally = Tally([prompt_tokens])
        self._answers: defaultdict[int, Answer] = defaultdict(reading.answer)
        """Choice index -> its answer, once it has begun."""
        if reading.formats.reasoning is not None:
            self._tally.reasoning_tokens = 0

    async def chunks(self, source: Stream) -> AsyncIterator[ChatChunk]:
        """The streamed answer: for each choice its role, its text in pieces and its end; then the usage."""
        async for number, output in source:
            begun = output.index in self._answers
            deltas = self._take(number, output)
            if not begun:
                yield self._chunk(output.index, ChatDelta(role="assistant", content=""))
            logprobs = self._logprobs(output.logprobs or [])
            if not deltas and logprobs and logprobs.content:
                deltas = [ChatDelta(content="")]
            for delta in deltas:
                yield self._chunk(output.index, delta, logprobs)
                logprobs = None
            if output.finish_reason is not None:
                yield self._last_chunk(output)
        if self._body.streams_usage:
            yield self._envelope([], self._tally.usage())

    async def whole(self, source: Stream) -> ChatCompletion:
        """The complete answer."""
        logprobs: defaultdict[int, list[TokenLogprob]] = defaultdict(list)
        ends: dict[int, RequestOutput] = {}
        async for number, output in source:
            self._take(number, output)
            logprobs[output.index].extend(output.logprobs or [])
            ends[output.index] = output
        return ChatCompletion(
            id=self._id,
            object="chat.completion",
            created=self._created,
            model=self._service.model_name,
            choices=[self._choice(ends[index], logprobs[index]) for index in sorted(ends)],
            usage=self._tally.usage(),
        )

    def _take(self, number: int, output: RequestOutput) -> list[ChatDelta]:
        """Count an output. Returns the pieces of its message."""
        answer = self._answers[output.index]
        deltas = answer.take(output)
        self._tally.add(number, output)
        if self._tally.reasoning_tokens is not None:
            self._tally.reasoning_tokens = sum(each.reasoning_tokens for each in self._answers.values())
        return deltas

    def _choice(self, last: RequestOutput, logprobs: list[TokenLogprob]) -> ChatChoice:
        """A complete answer. last: its last output."""
        assert last.finish_reason is not None
        answer = self._answers[last.index]
        return ChatChoice(
            index=last.index,
            message=answer.message(),
            logprobs=self._logprobs(logprobs),
            finish_reason=answer.finish_reason(last.finish_reason),
            stop_reason=last.stop_reason,
        )

    def _logprobs(self, entries: list[TokenLogprob]) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        return chat_logprobs(entries, self._body.top_logprobs or 0, self._service.tokenizer)

    def _chunk(self, index: int, delta: ChatDelta, logprobs: ChatLogprobs | None = None) -> ChatChunk:
        choice = ChatChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=None)
        return self._envelope([choice])

    def _last_chunk(self, output: RequestOutput) -> ChatChunk:
        assert output.finish_reason is not None
        choice = ChatChunkChoice(
            index=output.index,
            delta=ChatDelta(),
            logprobs=None,
            finish_reason=self._answers[output.index].finish_reason(output.finish_reason),
            stop_reason=output.stop_reason,
        )
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
