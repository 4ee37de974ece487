"""The bodies of Anthropic's requests."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from moesaic.server.requests import FIRST, MAX_SALT, Body, FunctionName, Ignored, Text, Unsupported

Unread = Annotated[Any, Field(description=Ignored)]


class TextPart(Body):
    """A text: of the system prompt, or of a tool's result."""

    type: Literal["text"]
    text: str
    cache_control: Unread = None
    citations: Unread = None


class Block(Body):
    """A part of a turn. Which fields it needs depends on its type."""

    type: Literal["text", "tool_use", "tool_result", "thinking", "redacted_thinking"]
    text: str | None = None
    id: Text | None = None
    name: Text | None = None
    input: dict[str, Any] | None = None
    """The arguments of a tool_use."""
    tool_use_id: Text | None = None
    content: str | Annotated[list[TextPart], FIRST] | None = None
    """The result of a tool."""
    is_error: bool | None = None
    """The result is put after "Error: "."""
    thinking: str | None = None
    signature: Unread = None
    data: Unread = None
    cache_control: Unread = None
    citations: Unread = None
    caller: Unread = None


class Turn(Body):
    """A turn of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], FIRST]


class Tool(Body):
    """A function that the model may call. Tools that a server runs are not supported."""

    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]
    """The JSON schema of its arguments."""
    strict: bool | None = None
    cache_control: Unread = None
    allowed_callers: Unread = None
    defer_loading: Literal[False] | None = None
    eager_input_streaming: Unread = None
    input_examples: Unread = None


class ToolChoice(Body):
    """Whether the answer has to call a tool, and which one."""

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool | None = None
    """True: only the first call of an answer is returned."""


class Thinking(Body):
    """Whether the model reasons before it answers."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    """Maximum number of tokens of the reasoning; only with the type "enabled"."""
    display: Literal["summarized", "omitted"] | None = None
    """omitted: the reasoning is left out of the answer."""


class OutputFormat(Body):
    """The form of the answer."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """How hard the model thinks, and the form of its answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountRequest(Body):
    """The body of POST /v1/messages/count_tokens: what a prompt depends on."""

    model: str | None = None
    messages: Annotated[list[Turn], Field(min_length=1, fail_fast=True)]
    system: str | Annotated[list[TextPart], FIRST] | None = None
    tools: Annotated[list[Tool], FIRST] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: Unread = None
    context_management: Unread = None
    mcp_servers: Unsupported = None


class MessagesRequest(CountRequest):
    """The body of POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1)]
    """More than the context leaves is reduced to that."""
    stop_sequences: Annotated[list[Text], Field(max_length=16, fail_fast=True)] | None = None
    temperature: Annotated[float, Field(ge=0, le=1e6)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = Field(None, description=Ignored)
    service_tier: Literal["auto", "standard_only"] | None = Field(None, description=Ignored)
    container: Unsupported = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT)] | None = None
    """Only requests of the same salt share cached prefixes (vLLM)."""
