"""What the other forms of a chat share: OpenAI's responses and Anthropic's messages.

Question: How do Anthropic's messages and OpenAI's responses become chats?
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Generator, Sequence
from contextlib import contextmanager
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive

from moesaic.core.errors import ContextLengthError, RequestError
from moesaic.server.blocks import BlockEvent, block_events
from moesaic.server.chat import Chat
from moesaic.server.errors import Problem
from moesaic.server.events import NamedEvent, NamedEventStream, answer
from moesaic.server.responses import Payload


class Writer(Protocol):
    """Writes one answer in the form of an API, from its blocks."""

    def events(self, blocks: AsyncIterator[BlockEvent]) -> AsyncIterator[NamedEvent]:
        """The events of a stream."""
        ...

    async def build_answer(self, blocks: AsyncIterator[BlockEvent]) -> Payload:
        """The complete answer."""
        ...

    @property
    def ping(self) -> NamedEvent | None:
        """The event that a stream sends in a long silence. None: a comment."""
        ...

    def make_error_event(self, problem: Problem) -> NamedEvent:
        """The last event of a stream that an error ends."""
        ...


async def deliver(writer: Writer, chat: Chat, stream: bool, receive: Receive) -> Response:
    """The answer to a chat as a stream or as a whole."""
    blocks = block_events(chat.chunks())
    if stream:
        return NamedEventStream(writer.events(blocks), chat.source, writer.make_error_event, writer.ping)
    return await answer(receive, chat.source, writer.build_answer(blocks))


@contextmanager
def translate_fields(names: Sequence[tuple[str, str]]) -> Generator[None]:
    """Errors about fields of a chat name the fields that the client sent.

    names: a pattern at the start of a field's path, and what stands there for this client.
    """
    try:
        yield
    except RequestError as error:
        # Both the message and the field name what the chat's checks saw, so both are translated.
        text, field = str(error), error.field
        for pattern, name in names:
            text = re.sub(f"^{pattern}", name, text)
            field = field and re.sub(f"^{pattern}", name, field)
        if isinstance(error, ContextLengthError) and field is not None:
            raise error.in_field(field) from error
        raise RequestError(text, field, error.code) from error
