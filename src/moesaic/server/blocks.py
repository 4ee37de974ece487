"""Answers of a chat as blocks, one after another: reasoning, text and calls.

OpenAI's responses and Anthropic's messages have this form. They are made of the chunks of a chat here.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Literal

from moesaic.server.responses import (
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatFinishReason,
    ChatLogprob,
    Usage,
)

Kind = Literal["reasoning", "text", "call"]


@dataclass
class Block:
    """A part of an answer. It grows while its pieces arrive."""

    index: int
    """Number in the answer, from 0."""
    kind: Kind
    id: str = ""
    """The id of a call. Empty for reasoning and text."""
    name: str = ""
    """The name of the function that a call calls. Empty for reasoning and text."""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[ChatLogprob] = field(default_factory=list)
    """The log-probabilities of a text's tokens, if the chat has any."""
    complete: bool = False
    """True once it has ended, unless the limit of the answer's length ended it."""

    @property
    def text(self) -> str:
        """The text of the block so far. For a call it is the arguments."""
        return "".join(self.pieces)


@dataclass(frozen=True)
class BlockStart:
    """A block has begun."""

    block: Block


@dataclass(frozen=True)
class Piece:
    """The next piece of a block, which is part of the block already."""

    block: Block
    text: str
    logprobs: list[ChatLogprob] = field(default_factory=list)


@dataclass(frozen=True)
class BlockEnd:
    """A block has ended."""

    block: Block


@dataclass(frozen=True)
class Finish:
    """The answer has ended."""

    reason: ChatFinishReason
    """tool_calls also where a chat says stop, after a call of a named function."""
    stop_reason: str | int | None
    """The stop string or stop token id that ended it, if one did."""
    usage: Usage


BlockEvent = BlockStart | Piece | BlockEnd | Finish


async def block_events(chunks: AsyncIterator[ChatChunk]) -> AsyncGenerator[BlockEvent, None]:
    """The blocks of a chat with a single answer, whose stream ends with the token counts."""
    blocks, last = _Blocks(), None
    async for chunk in chunks:
        for choice in chunk.choices:
            for event in blocks.take(choice):
                yield event
            last = choice if choice.finish_reason else last
        if chunk.usage is not None and last is not None and last.finish_reason is not None:
            ended_with_call = blocks.has_calls and last.finish_reason == "stop"
            yield Finish(
                "tool_calls" if ended_with_call else last.finish_reason, last.stop_reason, chunk.usage
            )


async def collect(events: AsyncIterator[BlockEvent]) -> tuple[list[Block], Finish]:
    """The blocks of a whole answer, and its end."""
    blocks, finish = list[Block](), None
    async for event in events:
        match event:
            case BlockStart(block):
                blocks.append(block)
            case Finish():
                finish = event
    assert finish is not None, "a stream without an end raises"
    return blocks, finish


class _Blocks:
    """Finds where blocks begin and end."""

    def __init__(self) -> None:
        self._open: Block | None = None
        self._count = 0
        self._call = -1
        """Number of the call in the answer, if the open block is a call."""
        self._pending_logprobs: list[ChatLogprob] = []
        """Log-probabilities of tokens that are in no text yet. They may belong to a tag, or to reasoning."""

    @property
    def has_calls(self) -> bool:
        """Some block was a call."""
        return self._call >= 0

    def take(self, choice: ChatChunkChoice) -> Iterator[BlockEvent]:
        """The events of a chunk."""
        if choice.delta.reasoning or choice.delta.tool_calls:
            self._pending_logprobs = []  # these tokens belong to no text
        if choice.logprobs is not None:
            self._pending_logprobs += choice.logprobs.content
        yield from self._delta(choice.delta)
        if choice.finish_reason is not None:
            yield from self._end(choice.finish_reason != "length")

    def _delta(self, delta: ChatDelta) -> Iterator[BlockEvent]:
        if delta.reasoning:
            yield from self._grow("reasoning", delta.reasoning)
        if delta.content:
            yield from self._grow("text", delta.content)
        for call in delta.tool_calls or []:
            if call.index != self._call or self._open is None or self._open.kind != "call":
                self._call = call.index or 0
                yield from self._begin("call", call.id or "", call.function.name or "")
            if call.function.arguments:
                yield from self._grow("call", call.function.arguments)

    def _grow(self, kind: Kind, text: str) -> Iterator[BlockEvent]:
        if self._open is None or self._open.kind != kind:
            yield from self._begin(kind)
        assert self._open is not None
        self._open.pieces.append(text)
        logprobs = self._tokens_of(text) if kind == "text" else []
        self._open.logprobs += logprobs
        yield Piece(self._open, text, logprobs)

    def _tokens_of(self, text: str) -> list[ChatLogprob]:
        """The last tokens, as many as the bytes of `text` need. Those before belong to a tag."""
        num_bytes, start = len(text.encode()), len(self._pending_logprobs)
        while num_bytes > 0 and start > 0:
            start -= 1
            num_bytes -= len(self._pending_logprobs[start].bytes)
        logprobs, self._pending_logprobs = self._pending_logprobs[start:], []
        return logprobs

    def _begin(self, kind: Kind, call_id: str = "", name: str = "") -> Iterator[BlockEvent]:
        yield from self._end(complete=True)
        self._open = Block(self._count, kind, call_id, name)
        self._count += 1
        yield BlockStart(self._open)

    def _end(self, complete: bool) -> Iterator[BlockEvent]:
        if self._open is not None:
            self._open.complete = complete
            yield BlockEnd(self._open)
        self._open = None
