"""The objects of which a response consists."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from moesaic.server.responses import ChatLogprob, Payload

Status = Literal["in_progress", "completed", "incomplete"]


class ReasoningText(BaseModel):
    """What the model reasoned."""

    type: Literal["reasoning_text"]
    text: str


class OutputText(BaseModel):
    """What the model says."""

    type: Literal["output_text"]
    text: str
    annotations: list[None]
    logprobs: list[ChatLogprob]


class ReasoningItem(BaseModel):
    """The reasoning before the rest of an answer."""

    id: str
    type: Literal["reasoning"]
    status: Status
    summary: list[None]
    content: list[ReasoningText]


class MessageItem(BaseModel):
    """A text."""

    id: str
    type: Literal["message"]
    status: Status
    role: Literal["assistant"]
    content: list[OutputText]


class CallItem(BaseModel):
    """A call of a function."""

    id: str
    type: Literal["function_call"]
    status: Status
    call_id: str
    name: str
    arguments: str


class NamespacedCallItem(CallItem):
    """A call of a function of a namespace."""

    namespace: str


class CustomCallItem(BaseModel):
    """A call of a custom tool."""

    id: str
    type: Literal["custom_tool_call"]
    status: Status
    call_id: str
    name: str
    input: str


class NamespacedCustomCallItem(CustomCallItem):
    """A call of a custom tool of a namespace."""

    namespace: str


OutputItem = (
    ReasoningItem | MessageItem | NamespacedCallItem | CallItem | NamespacedCustomCallItem | CustomCallItem
)


class ResponseError(BaseModel):
    """Why an answer failed after it had begun."""

    code: str
    message: str


class IncompleteDetails(BaseModel):
    """Why an answer is not complete."""

    reason: Literal["max_output_tokens"]


class InputTokensDetails(BaseModel):
    """Details of the prompt's tokens."""

    cached_tokens: int
    cache_write_tokens: Literal[0]


class OutputTokensDetails(BaseModel):
    """Details of the generated tokens."""

    reasoning_tokens: int


class ResponseUsage(BaseModel):
    """Token counts of one call."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseAnswer(Payload):
    """The answer of /v1/responses."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None
    instructions: str | None
    max_output_tokens: int | None
    temperature: float
    """The one that was used, also where the request has none."""
    top_p: float
    top_logprobs: int
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    text: dict[str, Any]
    reasoning: dict[str, Any]
    metadata: dict[str, Any]
    user: str | None
    truncation: Literal["disabled"]
    store: Literal[False]
    background: Literal[False]
    previous_response_id: None
    service_tier: Literal["default"]
