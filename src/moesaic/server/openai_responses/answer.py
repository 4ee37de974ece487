"""Writes an answer as an OpenAI response."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

from moesaic.core.request import SamplingParams
from moesaic.server.blocks import Block, BlockEnd, BlockEvent, BlockStart, Finish, Piece, collect
from moesaic.server.errors import Problem
from moesaic.server.events import NamedEvent
from moesaic.server.openai_responses.body import ResponsesRequest, Tool
from moesaic.server.openai_responses.objects import (
    CallItem,
    CustomCallItem,
    IncompleteDetails,
    InputTokensDetails,
    MessageItem,
    NamespacedCallItem,
    NamespacedCustomCallItem,
    OutputItem,
    OutputText,
    OutputTokensDetails,
    ReasoningItem,
    ReasoningText,
    ResponseAnswer,
    ResponseError,
    ResponseUsage,
    Status,
)
from moesaic.server.openai_responses.tools import FUNCTION, Toolbox, read_input
from moesaic.server.responses import ChatLogprob

_PREFIX = {"reasoning": "rs", "text": "msg", "call": "fc"}
_DELTA = {
    "reasoning": "response.reasoning_text",
    "text": "response.output_text",
    "call": "response.function_call_arguments",
}
"""Kind of a block -> name of the events of its pieces, without .delta and .done."""


_CUSTOM_DELTA = "response.custom_tool_call_input"


class ResponseWriter:
    """Writes one answer.

    params: those that the engine uses. now: returns the time on the wall clock, in seconds.
    """

    def __init__(
        self,
        body: ResponsesRequest,
        toolbox: Toolbox,
        model: str,
        params: SamplingParams,
        now: Callable[[], float],
    ) -> None:
        self._toolbox = toolbox
        self._model = model
        self._now = now
        self._key = uuid.uuid4().hex
        self._created_time = int(now())
        self._request_fields = _describe_request(body, params)
        self._output: list[OutputItem] = []
        """Items that have ended."""
        self._num_events = 0
        """Number of events so far."""

    async def events(self, blocks: AsyncIterator[BlockEvent]) -> AsyncIterator[NamedEvent]:
        """The stream."""
        for name in ("response.created", "response.in_progress"):
            yield self._event(name, response=self._response("in_progress"))
        async for event in blocks:
            match event:
                case BlockStart(block):
                    for named_event in self._begin(block):
                        yield named_event
                case Piece(block) if self._is_custom(block):
                    pass  # its input is known when its arguments are complete
                case Piece(block, text, logprobs):
                    yield self._piece(block, f"{_DELTA[block.kind]}.delta", logprobs, delta=text)
                case BlockEnd(block):
                    for named_event in self._end(block):
                        yield named_event
                case Finish():
                    response = self._finish_response(event)
                    yield self._event(f"response.{response.status}", response=response)

    async def build_answer(self, blocks: AsyncIterator[BlockEvent]) -> ResponseAnswer:
        """The complete answer."""
        answer_blocks, finish = await collect(blocks)
        self._output = [self._item(block, _status(block)) for block in answer_blocks]
        return self._finish_response(finish)

    ping = None

    def make_error_event(self, problem: Problem) -> NamedEvent:
        """The event of an error, with what the answer had before."""
        code = "invalid_prompt" if problem.status_code == 400 else "server_error"
        error = ResponseError(code=code, message=problem.body.error.message)
        return self._event("response.failed", response=self._response("failed", error=error))

    def _begin(self, block: Block) -> Iterator[NamedEvent]:
        item = self._item(block, "in_progress")
        yield self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind != "call":
            yield self._piece(block, "response.content_part.added", part=_part(block))

    def _end(self, block: Block) -> Iterator[NamedEvent]:
        event_name = f"{_DELTA[block.kind]}.done"
        if self._is_custom(block):
            text = read_input(block.text)
            yield self._piece(block, f"{_CUSTOM_DELTA}.delta", delta=text)
            yield self._piece(block, f"{_CUSTOM_DELTA}.done", input=text)
        elif block.kind == "call":
            name = self._describe_call(block)["name"]
            yield self._piece(block, event_name, name=name, arguments=block.text)
        else:
            yield self._piece(block, event_name, block.logprobs, text=block.text)
            yield self._piece(block, "response.content_part.done", part=_part(block))
        self._output.append(self._item(block, _status(block)))
        yield self._event("response.output_item.done", output_index=block.index, item=self._output[-1])

    def _piece(
        self, block: Block, name: str, logprobs: Sequence[ChatLogprob] = (), /, **fields: Any
    ) -> NamedEvent:
        """An event inside of an item. logprobs: of the tokens of a text."""
        place: dict[str, Any] = {"item_id": self._item_id(block), "output_index": block.index}
        if block.kind != "call":
            place["content_index"] = 0  # an item has a single part here
        if name.startswith("response.output_text"):
            place["logprobs"] = [logprob.model_dump() for logprob in logprobs]
        return self._event(name, **place, **fields)

    def _event(self, name: str, /, **fields: Any) -> NamedEvent:
        number, self._num_events = self._num_events, self._num_events + 1
        plain = {
            key: value.model_dump() if hasattr(value, "model_dump") else value
            for key, value in fields.items()
        }
        return NamedEvent(name, {"sequence_number": number, **plain})

    def _item_id(self, block: Block) -> str:
        prefix = "ctc" if self._is_custom(block) else _PREFIX[block.kind]
        return f"{prefix}_{self._key}{block.index:04d}"

    def _item(self, block: Block, status: Status) -> OutputItem:
        """The item of a block. One that has just begun has no content."""
        item_id, is_empty = self._item_id(block), status == "in_progress"
        match block.kind:
            case "reasoning":
                reasoning_parts = [] if is_empty else [_part(block)]
                return ReasoningItem(
                    id=item_id, type="reasoning", status=status, summary=[], content=reasoning_parts
                )
            case "text":
                text_parts = [] if is_empty else [_part(block)]
                return MessageItem(
                    id=item_id, type="message", status=status, role="assistant", content=text_parts
                )
            case "call":
                return self._call_item(block, {"id": item_id, "status": status, "call_id": block.id})

    def _call_item(self, block: Block, fields: dict[str, Any]) -> OutputItem:
        fields |= self._describe_call(block)
        if self._is_custom(block):
            custom_call = NamespacedCustomCallItem if "namespace" in fields else CustomCallItem
            text = read_input(block.text) if block.text else ""
            return custom_call(type="custom_tool_call", input=text, **fields)
        call = NamespacedCallItem if "namespace" in fields else CallItem
        return call(type="function_call", arguments=block.text, **fields)

    def _is_custom(self, block: Block) -> bool:
        tool = self._toolbox.find(block.name) if block.kind == "call" else None
        return tool is not None and tool.is_custom

    def _describe_call(self, block: Block) -> dict[str, str]:
        """The name of the called tool, and its namespace if it has one, as the client knows them."""
        tool = self._toolbox.find(block.name)
        if tool is None or tool.namespace is None:
            return {"name": block.name}
        return {"name": tool.tool.name or "", "namespace": tool.namespace}

    def _finish_response(self, finish: Finish) -> ResponseAnswer:
        usage = finish.usage
        details = usage.completion_tokens_details
        reasoning = 0 if details is None else details.reasoning_tokens
        cut = finish.reason == "length"
        return self._response(
            "incomplete" if cut else "completed",
            completed_at=None if cut else int(self._now()),
            incomplete_details=IncompleteDetails(reason="max_output_tokens") if cut else None,
            usage=ResponseUsage(
                input_tokens=usage.prompt_tokens,
                input_tokens_details=InputTokensDetails(
                    cached_tokens=usage.prompt_tokens_details.cached_tokens, cache_write_tokens=0
                ),
                output_tokens=usage.completion_tokens,
                output_tokens_details=OutputTokensDetails(reasoning_tokens=reasoning),
                total_tokens=usage.total_tokens,
            ),
        )

    def _response(self, status: str, **fields: Any) -> ResponseAnswer:
        """The response with the items so far."""
        absent = dict.fromkeys(("completed_at", "error", "incomplete_details", "usage"))
        return ResponseAnswer.model_validate(
            {
                "id": f"resp_{self._key}",
                "object": "response",
                "created_at": self._created_time,
                "status": status,
                "model": self._model,
                "output": self._output,
                **self._request_fields,
                **absent,
                **fields,
            }
        )


def _status(block: Block) -> Status:
    return "completed" if block.complete else "incomplete"


def _part(block: Block) -> Any:
    if block.kind == "reasoning":
        return ReasoningText(type="reasoning_text", text=block.text)
    return OutputText(type="output_text", text=block.text, annotations=[], logprobs=block.logprobs)


def _describe_tool(tool: Tool) -> dict[str, Any]:
    """A tool as the answer repeats it."""
    fields = tool.model_dump(exclude_none=True)
    return (
        fields if tool.type != FUNCTION else dict.fromkeys(("description", "parameters", "strict")) | fields
    )


def _describe_request(body: ResponsesRequest, params: SamplingParams) -> dict[str, Any]:
    """What the answer says about its request."""
    choice, form = body.tool_choice or "auto", None if body.text is None else body.text.format
    reasoning = None if body.reasoning is None else body.reasoning.effort
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_logprobs": body.top_logprobs or 0,
        "tools": [_describe_tool(tool) for tool in body.tools or ()],
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(exclude_none=True),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "text": {
            "format": {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)
        },
        "reasoning": {"effort": reasoning, "summary": None},
        "metadata": body.metadata or {},
        "user": body.user,
        "truncation": "disabled",
        "store": False,
        "background": False,
        "previous_response_id": None,
        "service_tier": "default",
    }
