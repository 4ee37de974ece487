"""POST /v1/chat/completions

Question: What answers /v1/chat/completions?
"""

from __future__ import annotations

import asyncio
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass, field, replace

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Receive

from moesaic.core.errors import ContextLengthError, RequestError
from moesaic.core.reasoning import ReasoningBudget
from moesaic.core.request import RequestOutput, SamplingParams, TokenLogprob, TokenRoute
from moesaic.server.answer_form import require_grammar
from moesaic.server.answers import Answer, Reading
from moesaic.server.async_engine import Stream
from moesaic.server.documentation import GENERATION_ERRORS, describe_stream
from moesaic.server.events import CLIENT_GONE, EventStream, answer, run_until_disconnect
from moesaic.server.json_body import StrictJsonRoute
from moesaic.server.logprobs import chat_logprobs, prompt_logprobs
from moesaic.server.prompts import (
    Truncation,
    chat_prompt,
    opens_reasoning,
    require_few_entries,
    require_few_scores,
)
from moesaic.server.requests import ChatRequest, ToolChoice
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
from moesaic.server.token_routes import set_routes
from moesaic.server.tools import callable_tools, list_forced_names, restrict_tools, with_grammar
from moesaic.server.usage import Tally

router = APIRouter(route_class=StrictJsonRoute)
FIELD = "thinking_token_budget"


@router.post(
    "/v1/chat/completions",
    response_model=ChatCompletion,
    responses=GENERATION_ERRORS | describe_stream(ChatChunk),
)
async def create_chat_completion(body: ChatRequest, request: Request, service: Serving) -> Response:
    """Answer a conversation."""
    service.fields.check(body, request)
    service.fields.note(["store"] if body.store else [], request, may_refuse=False)  # nothing is kept
    chat = await open_chat(body, request.receive, service)
    if chat is None:
        return Response(status_code=CLIENT_GONE)
    if body.stream:
        return EventStream(chat.chunks(), chat.source)
    return await answer(request.receive, chat.source, chat.reply.build_answer(chat.source))


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
    body = restrict_tools(body)
    tools = callable_tools(body, service.formats)
    params = chat_params(body, service)
    await require_grammar(params, body, service)
    max_new_tokens = body.max_completion_tokens or body.max_tokens
    cut = Truncation.from_body(body, max_new_tokens, service)
    rendering = chat_prompt(
        body.messages,
        body,
        service,
        any_length=cut.tokens is not None,
        max_new_tokens=1 if fit else max_new_tokens,
        special=body.add_special_tokens is True,  # a chat template writes special tokens itself
    )
    full_prompt = await run_until_disconnect(receive, rendering)
    if full_prompt is None:
        return None
    prompt = cut.apply(full_prompt)
    require_few_scores("prompt_logprobs", body.prompt_logprobs, len(prompt), body)
    reading = Reading(
        formats=service.formats,
        tools=tools,
        in_reasoning=opens_reasoning(prompt, body, service),
        parallel=body.parallel_tool_calls is not False,
        include_reasoning=body.include_reasoning is not False,
        has_named_function=isinstance(body.tool_choice, ToolChoice),
        forced_names=list_forced_names(body),
    )
    params = with_budget(await with_grammar(params, body, reading, service), body, reading, service)
    if fit:  # after the prompt is known, since the rest of the context is the limit
        params = _fit_to_context(params, len(prompt), service)
    reply = Reply(body, prompt, service, reading)
    source = _open(service, prompt, params, not body.continue_final_message, service.formats.marks(tools))
    return Chat(reply, source, len(prompt), params)


def _fit_to_context(params: SamplingParams, prompt_tokens: int, service: Service) -> SamplingParams:
    """`params` whose max_tokens is at most what the context leaves, and at least 1."""
    room = service.engine.require_serving().max_model_len - prompt_tokens
    limit = room if params.max_tokens is None else min(params.max_tokens, room)
    return replace(params, max_tokens=max(1, limit))


def _open(
    service: Service,
    prompt: list[int],
    params: SamplingParams,
    own_text: bool,
    kept_special_tokens: Collection[str],
) -> Stream:
    """Submit the prompt. Errors about the engine's field "prompt" name the chat's field "messages"."""
    try:
        return service.engine.open(
            [(prompt, params)], own_text=own_text, kept_special_tokens=kept_special_tokens
        )
    except ContextLengthError as error:
        raise error.in_field("messages") from error
    except RequestError as error:
        field = "messages" if error.field == "prompt" else error.field
        raise RequestError(str(error), field, error.code) from error


@dataclass
class _Outputs:
    """The outputs of one choice so far."""

    logprobs: list[TokenLogprob] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    routes: list[TokenRoute] = field(default_factory=list)
    last: RequestOutput | None = None


class Reply:
    """The answer to one call."""

    def __init__(self, body: ChatRequest, prompt: list[int], service: Service, reading: Reading) -> None:
        self._body = body
        self._prompt = prompt
        self._scores: list[TokenLogprob | None] | None = None
        """The log-probabilities of the prompt's tokens."""
        self._service = service
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created_time = int(service.now())
        self._tally = Tally([len(prompt)])
        self._answers: defaultdict[int, Answer] = defaultdict(reading.answer)
        """Choice index -> its answer, once it has begun."""
        if reading.formats.reasoning is not None:
            self._tally.reasoning_tokens = 0

    async def chunks(self, source: Stream) -> AsyncIterator[ChatChunk]:
        """The streamed answer: for each choice its role, its text in pieces and its end; then the usage."""
        async for number, output in source:
            if output.index not in self._answers:
                yield self._first_chunk(output.index)
            deltas = self._take(number, output)
            logprobs = self._logprobs(output.logprobs or [])
            needs_chunk = (self._body.return_token_ids or output.routes) and output.finish_reason is None
            if not deltas and ((logprobs and logprobs.content) or needs_chunk):
                deltas = [ChatDelta(content="")]
            for delta in deltas:
                yield self._chunk(output.index, delta, logprobs, output)
                # Several pieces of one output: only the first has its tokens and their log-probabilities.
                logprobs, output = None, replace(output, token_ids=[], routes=[])
            if output.finish_reason is not None:
                yield self._last_chunk(output)
        if self._body.streams_usage:
            yield self._envelope([], self._tally.usage())

    async def build_answer(self, source: Stream) -> ChatCompletion:
        """The complete answer."""
        outputs: defaultdict[int, _Outputs] = defaultdict(_Outputs)
        async for number, output in source:
            self._take(number, output)
            choice_outputs = outputs[output.index]
            choice_outputs.logprobs.extend(output.logprobs or [])
            choice_outputs.token_ids.extend(output.token_ids)
            choice_outputs.routes.extend(output.routes or [])
            self._scores = self._scores or output.prompt_logprobs
            choice_outputs.last = output
        completion = ChatCompletion(
            id=self._id,
            object="chat.completion",
            created=self._created_time,
            model=self._service.model_name,
            choices=[self._choice(index, outputs[index]) for index in sorted(outputs)],
            usage=self._tally.usage(),
            system_fingerprint=None,
            prompt_logprobs=None,
        )
        if self._body.return_token_ids:
            completion.prompt_token_ids = self._prompt
        if self._body.prompt_logprobs is not None:
            scores, top = self._scores or [None] * len(self._prompt), self._body.prompt_logprobs
            completion.prompt_logprobs = await asyncio.to_thread(
                prompt_logprobs, scores, top, self._service.tokenizer
            )
        return completion

    def _take(self, number: int, output: RequestOutput) -> list[ChatDelta]:
        """Count an output. Returns the pieces of its message."""
        deltas = self._answers[output.index].take(output)
        self._tally.add(number, output)
        if self._tally.reasoning_tokens is not None:
            self._tally.reasoning_tokens = sum(answer.reasoning_tokens for answer in self._answers.values())
        return deltas

    def _choice(self, index: int, outputs: _Outputs) -> ChatChoice:
        last, answer = outputs.last, self._answers[index]
        assert last is not None and last.finish_reason is not None
        choice = ChatChoice(
            index=index,
            message=answer.message(),
            logprobs=self._logprobs(outputs.logprobs),
            finish_reason=answer.finish_reason(last.finish_reason),
            stop_reason=last.stop_reason,
        )
        if self._body.return_token_ids:
            choice.token_ids = outputs.token_ids
        if self._body.return_routed_experts:
            set_routes(choice, outputs.routes)
        return choice

    def _logprobs(self, entries: list[TokenLogprob]) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        as_ids = bool(self._body.return_tokens_as_token_ids)
        num_candidates = self._body.count_candidates(self._body.top_logprobs or 0)
        return chat_logprobs(entries, num_candidates, self._service.tokenizer, as_ids)

    def _chunk(
        self,
        index: int,
        delta: ChatDelta,
        logprobs: ChatLogprobs | None = None,
        output: RequestOutput | None = None,
    ) -> ChatChunk:
        choice = ChatChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=None)
        if output is not None:
            self._add_tokens(choice, output)
        return self._envelope([choice])

    def _first_chunk(self, index: int) -> ChatChunk:
        """The chunk with the role, which is sent before the first token is counted."""
        chunk = self._chunk(index, ChatDelta(role="assistant", content=""))
        if self._body.return_token_ids and not self._answers:
            chunk.prompt_token_ids = self._prompt
        return chunk

    def _last_chunk(self, output: RequestOutput) -> ChatChunk:
        assert output.finish_reason is not None
        choice = ChatChunkChoice(
            index=output.index,
            delta=ChatDelta(),
            logprobs=None,
            finish_reason=self._answers[output.index].finish_reason(output.finish_reason),
            stop_reason=output.stop_reason,
        )
        self._add_tokens(choice, output)
        return self._envelope([choice])

    def _add_tokens(self, choice: ChatChunkChoice, output: RequestOutput) -> None:
        """Add the ids and the experts of the tokens if they are wanted."""
        if self._body.return_token_ids and output.token_ids:
            choice.token_ids = output.token_ids
        if self._body.return_routed_experts and output.routes:
            set_routes(choice, output.routes)

    def _envelope(self, choices: list[ChatChunkChoice], usage: Usage | None = None) -> ChatChunk:
        """A chunk of the stream. As in OpenAI's API, a stream with usage sends `usage: null` before the
        last."""
        if usage is None and self._body.streams_running_usage:
            usage = self._tally.usage()
        chunk = ChatChunk(
            id=self._id,
            object="chat.completion.chunk",
            created=self._created_time,
            model=self._service.model_name,
            choices=choices,
        )
        if self._body.streams_usage:
            chunk.usage = usage
        return chunk


def with_budget(
    params: SamplingParams, body: ChatRequest, reading: Reading, service: Service
) -> SamplingParams:
    """`params` with the budget of the reasoning, if the request has one.

    Raises RequestError for a model whose reasoning is not told apart, and for one that may not end it.
    """
    num_tokens = body.thinking_token_budget
    if num_tokens is None or num_tokens < 0:
        return params
    span = reading.formats.span(reading.tools, reading.in_reasoning)
    if span is None:
        reason = "reasoning is not told apart in the answers of this model"
        choices = "a server with --reasoning-parser NAME, or -1"
        raise RequestError(f"{FIELD}: got {num_tokens}, but {reason}; allowed: {choices}", FIELD)
    end = tuple(service.tokenizer.encode(span.endings[0], add_special_tokens=False))
    if params.allowed_token_ids is not None and not set(end) <= set(params.allowed_token_ids):
        reason = f"with {FIELD} they need the tokens {list(end)}, which end the reasoning"
        raise RequestError(f"allowed_token_ids: {reason}", "allowed_token_ids")
    budget = ReasoningBudget(num_tokens, span.opening, span.endings, end, span.in_reasoning, span.can_repeat)
    return replace(params, reasoning=budget)
