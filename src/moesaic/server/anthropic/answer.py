"""Writes an answer as one of Anthropic's messages."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any, Literal

from pydantic import BaseModel

from moesaic.core.errors import RequestError
from moesaic.server.anthropic.errors import make_anthropic_error
from moesaic.server.blocks import Block, BlockEnd, BlockEvent, BlockStart, Finish, Piece, collect
from moesaic.server.errors import Problem
from moesaic.server.events import NamedEvent
from moesaic.server.responses import Payload
from moesaic.server.tools import INVALID, require_shallow

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TextBlock(BaseModel):
    """What the model says."""

    type: Literal["text"]
    text: str


class ThinkingBlock(BaseModel):
    """What the model reasoned."""

    type: Literal["thinking"]
    thinking: str
    signature: Literal[""]
    """Nothing is signed here."""


class ToolUseBlock(BaseModel):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    """The arguments. {"INVALID_JSON": text} where they are no JSON object."""


class MessageUsage(BaseModel):
    """Token counts of one call."""

    input_tokens: int
    """Tokens of the prompt, without those of a cached prefix."""
    cache_creation_input_tokens: Literal[0]
    cache_read_input_tokens: int
    output_tokens: int


class MessageAnswer(Payload):
    """The answer of /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(Payload):
    """The answer of /v1/messages/count_tokens."""

    input_tokens: int


class MessageWriter:
    """Writes one answer. prompt_tokens: of its prompt, with cached ones."""

    def __init__(self, model: str, prompt_tokens: int) -> None:
        self._model = model
        self._prompt_tokens = prompt_tokens
        self._id = f"msg_{uuid.uuid4().hex}"

    async def events(self, blocks: AsyncIterator[BlockEvent]) -> AsyncIterator[NamedEvent]:
        """The stream. Its first event cannot know yet which tokens of the prompt were cached."""
        usage = _usage(self._prompt_tokens, 0, 0)
        message = self._message([], None, None, usage)
        yield NamedEvent("message_start", {"message": message.model_dump()})
        async for event in blocks:
            match event:
                case BlockStart(block):
                    content = _empty(block).model_dump()
                    yield NamedEvent("content_block_start", {"index": block.index, "content_block": content})
                case Piece(block, text):
                    yield _delta(block.index, *_NAMES[block.kind], text)
                case BlockEnd(block):
                    if block.kind == "reasoning":
                        yield _delta(block.index, "signature_delta", "signature", "")
                    yield NamedEvent("content_block_stop", {"index": block.index})
                case Finish():
                    reason, sequence = _stop(event)
                    delta = {"stop_reason": reason, "stop_sequence": sequence}
                    usage = _make_usage(event)
                    yield NamedEvent("message_delta", {"delta": delta, "usage": usage.model_dump()})
        yield NamedEvent("message_stop", {})

    async def build_answer(self, blocks: AsyncIterator[BlockEvent]) -> MessageAnswer:
        """The complete answer."""
        answer_blocks, finish = await collect(blocks)
        return self._message(
            [_complete_block(block) for block in answer_blocks], *_stop(finish), _make_usage(finish)
        )

    ping = NamedEvent("ping", {})

    def make_error_event(self, problem: Problem) -> NamedEvent:
        """The event of an error."""
        return NamedEvent("error", make_anthropic_error(problem.status_code, problem.detail))

    def _message(
        self,
        content: list[TextBlock | ThinkingBlock | ToolUseBlock],
        reason: StopReason | None,
        sequence: str | None,
        usage: MessageUsage,
    ) -> MessageAnswer:
        return MessageAnswer(
            id=self._id,
            type="message",
            role="assistant",
            model=self._model,
            content=content,
            stop_reason=reason,
            stop_sequence=sequence,
            usage=usage,
        )


_NAMES = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}
"""Kind of a block -> type of the delta of a piece, and the field that has the piece."""


def _delta(index: int, kind: str, field: str, text: str) -> NamedEvent:
    return NamedEvent("content_block_delta", {"index": index, "delta": {"type": kind, field: text}})


def _empty(block: Block) -> TextBlock | ThinkingBlock | ToolUseBlock:
    return _block(block, "", {})


def _complete_block(block: Block) -> TextBlock | ThinkingBlock | ToolUseBlock:
    return _block(block, block.text, _input(block.text) if block.kind == "call" else {})


def _block(block: Block, text: str, arguments: Mapping[str, Any]) -> TextBlock | ThinkingBlock | ToolUseBlock:
    match block.kind:
        case "text":
            return TextBlock(type="text", text=text)
        case "reasoning":
            return ThinkingBlock(type="thinking", thinking=text, signature="")
        case "call":
            return ToolUseBlock(type="tool_use", id=block.id, name=block.name, input=dict(arguments))


def _input(arguments: str) -> dict[str, Any]:
    """The object that `arguments` are the JSON of. Anthropic's documents name the form for all else."""
    try:
        value = json.loads(arguments or "{}")
        require_shallow(value, "arguments", "arguments")
    except (ValueError, RecursionError, RequestError):
        value = None
    return value if isinstance(value, dict) else {INVALID: arguments}


def _stop(finish: Finish) -> tuple[StopReason, str | None]:
    """Why the answer ended, and the stop sequence that ended it."""
    match finish:
        case Finish(reason="length"):
            return "max_tokens", None
        case Finish(reason="tool_calls"):
            return "tool_use", None
        case Finish(stop_reason=str(sequence)):
            return "stop_sequence", sequence
    return "end_turn", None


def _make_usage(finish: Finish) -> MessageUsage:
    usage = finish.usage
    return _usage(usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens, usage.completion_tokens)


def _usage(prompt: int, cached_tokens: int, output: int) -> MessageUsage:
    return MessageUsage(
        input_tokens=prompt - cached_tokens,
        cache_creation_input_tokens=0,
        cache_read_input_tokens=cached_tokens,
        output_tokens=output,
    )
