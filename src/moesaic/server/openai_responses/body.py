"""The body of POST /v1/responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field

from moesaic.core.request import MAX_LOGPROBS
from moesaic.server.requests import (
    FIRST,
    MAX_SALT,
    Body,
    FunctionName,
    Ignored,
    RefusalPart,
    Text,
    Unsupported,
    other_type_than,
)

Unread = Annotated[Any, Field(description=Ignored)]
Stateless = Annotated[Any, Field(description="Not supported: the server keeps no state.")]


def _read_refusal(value: Any) -> Any:
    """A refusal as the text that it is."""
    if isinstance(value, dict) and value.get("type") == "refusal":
        return {"type": "output_text", "text": value.get("refusal")}
    return value


class Part(Body):
    """A part of an item."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str
    annotations: Unread = None
    logprobs: Unread = None
    parsed: Unread = None
    prompt_cache_breakpoint: Unread = None


Parts = Annotated[
    list[Annotated[Part, BeforeValidator(_read_refusal, json_schema_input_type=Part | RefusalPart)]], FIRST
]
READ_ITEMS = (
    "message",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
    "local_shell_call",
    "local_shell_call_output",
    "reasoning",
)
"""Types of items that are read. All others are skipped."""


def _skip_unread(value: Any) -> Any:
    """The type alone of an item that is not read, since its fields are not known."""
    kind = value.get("type") if isinstance(value, dict) else None
    return {"type": kind} if isinstance(kind, str) and kind not in READ_ITEMS else value


class Item(Body):
    """A message, a call, the result of a call, or reasoning. Which fields it needs depends on its type."""

    type: Text | None = None
    """None: a message. An item of another type than these is skipped, and a header names it."""
    role: Literal["user", "system", "developer", "assistant"] | None = None
    content: str | Parts | None = None
    call_id: Text | None = None
    name: Text | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    """The input of a custom tool."""
    action: dict[str, Any] | None = None
    """What a local shell ran."""
    output: str | Parts | None = None
    """The result of a call."""
    summary: Parts | None = None
    """The summary of reasoning. It is used if the reasoning has no content."""
    id: Text | None = None
    status: Unread = None
    phase: Unread = None
    caller: Unread = None
    encrypted_content: Unread = None
    parsed_arguments: Unread = None


class SkippedItem(BaseModel):
    """An item of a type that is not read. Only the published schema has it."""

    type: Annotated[str, other_type_than("", *READ_ITEMS)]


Items = Annotated[
    list[Annotated[Item, BeforeValidator(_skip_unread, json_schema_input_type=Item | SkippedItem)]],
    Field(min_length=1, fail_fast=True),
]


class ToolFormat(Body):
    """The form of a custom tool's input."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class Tool(Body):
    """A function, a custom tool or a namespace of both.

    A tool of any other type, which only OpenAI's servers run, is left out, and a header names it.
    """

    type: Text
    name: FunctionName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: ToolFormat | None = None
    """The form of a custom tool's input."""
    tools: Annotated[list[Tool], FIRST] | None = None
    """The tools of a namespace."""
    defer_loading: bool | None = Field(None, description="The tool is there from the start.")
    allowed_callers: Unread = None
    output_schema: Unread = None


READ_TOOLS = ("function", "custom", "namespace")
"""Types of tools that are read. All others are left out."""


def _keep_type(value: Any) -> Any:
    """The type alone of a tool that is left out, since its fields are not known."""
    kind = value.get("type") if isinstance(value, dict) else None
    return {"type": kind} if isinstance(kind, str) and kind not in READ_TOOLS else value


class HostedTool(BaseModel):
    """A tool that is left out. Only the published schema has it."""

    type: Annotated[str, other_type_than("", *READ_TOOLS)]


Tools = Annotated[
    list[Annotated[Tool, BeforeValidator(_keep_type, json_schema_input_type=Tool | HostedTool)]], FIRST
]


class ChosenTool(Body):
    """The one tool that the answer has to call, or those that it may call."""

    type: Text
    name: Text | None = None
    namespace: str | None = None
    mode: Literal["auto", "required"] | None = None
    """Whether one of the allowed_tools has to be called."""
    tools: Annotated[list[dict[str, Any]], FIRST] | None = None
    """The allowed_tools."""


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
    verbosity: Literal["low", "medium", "high"] | None = None
    """A variable of the chat template."""


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
    input: str | Items
    instructions: str | None = None
    """A system message before the input."""
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    """More than the context leaves is reduced to that."""
    temperature: Annotated[float, Field(ge=0, le=1e6)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
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
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT)] | None = None
    """Only requests of the same salt share cached prefixes (vLLM)."""
    previous_response_id: Stateless = None
    conversation: Stateless = None
    prompt: Stateless = None
    background: bool | None = None
    """Only false is supported: the server keeps no state."""
    max_tool_calls: Unsupported = None
    context_management: Unsupported = None
    moderation: Unsupported = None
