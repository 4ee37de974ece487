"""A conversation with a model: its messages, and one answer at a time.

Question: Who holds a conversation of `moesaic chat`?
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from moesaic.server.client import Chunk, Client, Usage


@dataclass
class Answer:
    """An answer while it arrives."""

    content: str = ""
    """The text without reasoning."""
    first: float | None = None
    """Arrival of the first text, in seconds on the client's clock."""
    last: float = 0.0
    """Arrival of the last text."""
    usage: Usage | None = None
    finish_reason: str | None = None

    def add(self, chunk: Chunk) -> None:
        self.content += chunk.content
        self.usage = chunk.usage or self.usage
        self.finish_reason = chunk.finish_reason or self.finish_reason
        if chunk.text:
            self.first, self.last = self.first or chunk.arrival_time, chunk.arrival_time

    def describe_speed(self, question_time: float) -> str:
        """Describe it in a line: tokens, tokens per second, seconds to the first one.

        question_time: when the question was asked, in seconds on the client's clock.

        Example: "38 tokens, 21.3 tokens/s, first after 0.12 s". A server that sends no counts has no tokens.
        """
        parts = []
        if self.usage is not None:
            tokens = self.usage.completion_tokens
            parts.append(f"{tokens} tokens")
            if self.first is not None and self.last > self.first and tokens > 1:
                parts.append(f"{(tokens - 1) / (self.last - self.first):.1f} tokens/s")
        if self.first is not None:
            parts.append(f"first after {self.first - question_time:.2f} s")
        if self.finish_reason == "length":
            parts.append("cut off at the maximum number of tokens")
        return ", ".join(parts)


@dataclass
class Conversation:
    """The messages of a conversation. fields: further fields of each request, such as temperature."""

    client: Client
    model: str
    system_prompt: str | None = None
    fields: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.messages: list[dict[str, str]] = []
        self.clear()

    def clear(self) -> None:
        """Forget everything but the system prompt."""
        self.messages.clear()
        if self.system_prompt is not None:
            self.messages.append({"role": "system", "content": self.system_prompt})

    async def ask(self, question: str, answer: Answer, show: Callable[[Chunk], None]) -> None:
        """Send a question and fill in `answer`. show: called with each chunk.

        Cancelling it stops the answer; what has arrived stays in the conversation. A question without an
        answer, after ApiError or ConnectionLost, leaves the conversation as it was.
        """
        messages = [*self.messages, {"role": "user", "content": question}]
        body = {
            "model": self.model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.fields,
        }
        try:
            async with aclosing(self.client.stream("/v1/chat/completions", body)) as chunks:
                async for chunk in chunks:
                    answer.add(chunk)
                    show(chunk)
        finally:
            # Also after a cancellation, so that the next question can refer to what was shown.
            if answer.first is not None:
                self.messages = [*messages, {"role": "assistant", "content": answer.content}]
