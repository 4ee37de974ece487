"""The bodies of Anthropic's requests."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, WithJsonSchema

from moesaic.server.requests import (
    FIRST,
    MAX_SALT,
    Body,
    Ignored,
    Text,
    Unsupported,
    check_name,
    other_type_than,
    write_name_pattern,
)

CUSTOM = "custom"
"""The type of a tool that the client runs. It may be absent."""
Unread = Annotated[Any, Field(description=Ignored)]


ToolName = Annotated[
    str,
    AfterValidator(partial(check_name, max_length=128)),
    WithJsonSchema({"type": "string", "pattern": write_name_pattern(128)}),
]
"""A name that Anthropic's API allows, or one with `.`, `:` or `/`, which other servers take."""


def _read_result_part(value: Any) -> Any:
    """A reference to a tool as the text that names it."""
    if isinstance(value, dict) and value.get("type") == "tool_reference":
        return {"type": "text", "text": value.get("tool_name")}
    return value


class TextPart(Body):
    """A text: of the system prompt, or of a tool's result."""

    type: Literal["text"]
    text: str
    cache_control: Unread = None
    citations: Unread = None


class ToolReference(BaseModel):
    """A tool that a search found. It is read as the text of its name. The published schema has it."""

    type: Literal["tool_reference"]
    tool_name: str


ResultPart = Annotated[
    TextPart, BeforeValidator(_read_result_part, json_schema_input_type=TextPart | ToolReference)
]
ResultParts = Annotated[list[ResultPart], FIRST]


class Block(Body):
    """A part of a turn. Which fields it needs depends on its type."""

    type: Literal["text", "tool_use", "tool_result", "thinking", "redacted_thinking"]
    text: str | None = None
    id: Text | None = None
    name: Text | None = None
    input: dict[str, Any] | None = None
    """The arguments of a tool_use."""
    tool_use_id: Text | None = None
    content: str | ResultParts | None = None
    """The result of a tool. A tool_reference in it is the name of the tool."""
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


def _keep_name(value: Any) -> Any:
    """The type and the name alone of a tool that a server runs, since its fields are not known."""
    kind = value.get("type") if isinstance(value, dict) else None
    return {"type": kind, "name": value.get("name")} if isinstance(kind, str) and kind != CUSTOM else value


class Tool(Body):
    """A function that the model may call.

    A tool that Anthropic's servers run has another type. It is left out, and a header names it.
    """

    type: Text | None = None
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    """The JSON schema of its arguments."""
    strict: bool | None = None
    cache_control: Unread = None
    allowed_callers: Unread = None
    defer_loading: bool | None = Field(None, description="The tool is there from the start.")
    eager_input_streaming: Unread = None


class HostedTool(BaseModel):
    """A tool that Anthropic's servers run. Only the published schema has it."""

    type: Annotated[str, other_type_than("", CUSTOM)]
    name: ToolName


Tools = Annotated[
    list[Annotated[Tool, BeforeValidator(_keep_name, json_schema_input_type=Tool | HostedTool)]], FIRST
]


class ToolChoice(Body):
    """Whether the answer has to call a tool, and which one."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
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
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(None, description="An older name of output_config.format.")
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
