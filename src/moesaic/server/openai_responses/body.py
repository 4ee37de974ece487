"""The body of POST /v1/responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from moesaic.core.request import MAX_LOGPROBS
from moesaic.server.requests import FIRST, Body, FunctionName, Ignored, Text, Unsupported

Unread = Annotated[Any, Field(description=Ignored)]
Stateless = Annotated[Any, Field(description="Not supported: the server keeps no state.")]


class Part(Body):
    """A part of an item."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str
    annotations: Unread = None
    logprobs: Unread = None
    parsed: Unread = None
    prompt_cache_breakpoint: Unread = None


Parts = Annotated[list[Part], FIRST]


class Item(Body):
    """A message, a call, the result of a call, or reasoning. Which fields it needs depends on its type."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] | None = None
    """None: a message."""
    role: Literal["user", "system", "developer", "assistant"] | None = None
    content: str | Parts | None = None
    call_id: Text | None = None
    name: Text | None = None
    arguments: str | None = None
    output: str | Parts | None = None
    """The result of a call."""
    summary: Parts | None = None
    """The summary of reasoning. It is used if the reasoning has no content."""
    id: Unread = None
    status: Unread = None
    phase: Unread = None
    caller: Unread = None
    encrypted_content: Unread = None
    parsed_arguments: Unread = None


class FunctionTool(Body):
    """A function that the model may call. Tools that a server runs are not supported."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: Unread = None
    output_schema: Unread = None


class ChosenFunction(Body):
    """The one function that the answer has to call."""

    type: Literal["function"]
    name: FunctionName


class TextFormat(Body):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = Field(None, description=Ignored)


class TextOptions(Body):
    """How the answer is written."""

    format: TextFormat | None = None
    verbosity: Unsupported = None


class ReasoningOptions(Body):
    """How hard the model reasons."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Unread = None
    """The answer has the reasoning itself."""
    generate_summary: Unread = None


class StreamOptions(Body):
    """Further contents of a stream."""

    include_obfuscation: Literal[False] | None = None


class ResponsesRequest(Body):
    """The body of POST /v1/responses."""

    model: str | None = None
    input: str | Annotated[list[Item], Field(min_length=1, fail_fast=True)]
    instructions: str | None = None
    """A system message before the input."""
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    """More than the context leaves is reduced to that."""
    temperature: Annotated[float, Field(ge=0, le=1e6)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    tools: Annotated[list[FunctionTool], FIRST] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | None = None
    parallel_tool_calls: bool | None = None
    """False: only the first call of an answer is returned."""
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = Field(None, description="Accepted, and nothing is stored.")
    metadata: dict[str, Any] | None = None
    """Is repeated in the answer."""
    truncation: Literal["auto", "disabled"] | None = Field(None, description=Ignored)
    include: Annotated[list[str], FIRST] | None = None
    """What the answer has besides: "message.output_text.logprobs" adds log-probabilities. All else is
    ignored."""
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Number of candidates for each token, where `include` asks for log-probabilities."""
    user: str | None = None
    safety_identifier: Unread = None
    service_tier: Literal["auto", "default"] | None = Field(None, description=Ignored)
    prompt_cache_key: Unread = None
    prompt_cache_retention: Unread = None
    previous_response_id: Stateless = None
    conversation: Stateless = None
    prompt: Stateless = None
    background: bool | None = None
    """Only false is supported: the server keeps no state."""
    max_tool_calls: Unsupported = None
    context_management: Unsupported = None
    moderation: Unsupported = None
