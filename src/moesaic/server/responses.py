"""The bodies of answers, with OpenAI's fields. Fields that are not set are not sent."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict
from starlette.responses import Response

FinishReasonName = Literal["stop", "length", "abort", "error", "not_allowed"]
ChatFinishReason = FinishReasonName | Literal["tool_calls"]


class Payload(BaseModel):
    """A body that is sent as JSON."""

    def json_text(self) -> str:
        return self.model_dump_json(exclude_unset=True)

    def response(self) -> Response:
        return Response(self.json_text(), media_type="application/json")


class PromptTokensDetails(BaseModel):
    """Details of the prompt's tokens."""

    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    """Details of the generated tokens."""

    reasoning_tokens: int


class Usage(BaseModel):
    """Token counts of one call."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None
    """Only of models whose reasoning is told apart."""


class CompletionLogprobs(BaseModel):
    """Log-probabilities of a completion: parallel lists with one entry for each token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(BaseModel):
    """A candidate for a token of a prompt (vLLM)."""

    logprob: float
    rank: int | None
    """1 for the most likely token. None for a token that is not among the listed candidates."""
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]
"""The candidates for each token of a prompt by token id, the token itself first. None for the first token."""


class CompletionChoice(BaseModel):
    """A completion, or a piece of it in a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReasonName | None
    stop_reason: str | int | None
    """The stop string or stop token id that ended the completion, if one did (vLLM)."""
    prompt_logprobs: PromptLogprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    """The tokens of the prompt, with return_token_ids. A stream has them in the first piece only."""
    routed_experts: list[list[list[int]]] | None = None
    """[tokens][layers][k] the experts of each token, best first, with return_routed_experts."""
    routed_servers: list[list[list[int]]] | None = None
    """[tokens][layers][k] the expert server that computed each. Empty lists without expert servers."""


class Completion(Payload):
    """The answer of /v1/completions, or one chunk of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    system_fingerprint: None = None
    """Only in a complete answer."""


class TopLogprob(BaseModel):
    """A candidate for a token."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    """The chosen token and the best candidates."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of an answer."""

    content: list[ChatLogprob]
    refusal: None


class CalledFunction(BaseModel):
    """The function of a call, or the next piece of its arguments."""

    name: str | None = None
    arguments: str


class ToolCall(BaseModel):
    """A call of a tool, or a piece of it in a stream: only the first one has the id and the name."""

    index: int | None = None
    """Number of the call in the answer; only in a stream."""
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class ChatMessage(BaseModel):
    """The message of an answer."""

    role: Literal["assistant"]
    content: str | None
    """None where the answer has only calls or reasoning."""
    refusal: None
    reasoning: str | None = None
    reasoning_content: str | None = None
    """The same as reasoning, by the name that DeepSeek gave it."""
    tool_calls: list[ToolCall] | None = None


class ChatChoice(BaseModel):
    """An answer, of which a request may ask for n."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    stop_reason: str | int | None
    token_ids: list[int] | None = None
    routed_experts: list[list[list[int]]] | None = None
    """[tokens][layers][k] the experts of each token, best first, with return_routed_experts."""
    routed_servers: list[list[list[int]]] | None = None
    """[tokens][layers][k] the expert server that computed each. Empty lists without expert servers."""


class ChatCompletion(Payload):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class ChatDelta(BaseModel):
    """The new part of a message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChunkChoice(BaseModel):
    """A piece of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    routed_experts: list[list[list[int]]] | None = None
    """[tokens][layers][k] the experts of each token, best first, with return_routed_experts."""
    routed_servers: list[list[list[int]]] | None = None
    """[tokens][layers][k] the expert server that computed each. Empty lists without expert servers."""


class ChatChunk(Payload):
    """A chunk of a streamed chat."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    """The tokens of the prompt, with return_token_ids. Only the first chunk has them."""


class ModelPermission(BaseModel):
    """What may be done with a model. Old clients of OpenAI's API read it (vLLM)."""

    id: str
    object: Literal["model_permission"] = "model_permission"
    created: int
    allow_create_engine: Literal[False] = False
    allow_sampling: Literal[True] = True
    allow_logprobs: Literal[True] = True
    allow_search_indices: Literal[False] = False
    allow_view: Literal[True] = True
    allow_fine_tuning: Literal[False] = False
    organization: Literal["*"] = "*"
    group: None = None
    is_blocking: Literal[False] = False


class ModelCard(Payload):
    """A name by which the model is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    """The model behind the name."""
    parent: None
    max_model_len: int
    permission: list[ModelPermission]


class ModelList(Payload):
    """The answer of /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]


class Tokenized(Payload):
    """The answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Payload):
    """The answer of /detokenize."""

    prompt: str


class TokenizerInfo(Payload):
    """The answer of /tokenizer_info: everything in tokenizer_config.json."""

    model_config = ConfigDict(extra="allow")

    tokenizer_class: str


class Health(Payload):
    """The answer of /health and /ping."""

    status: Literal["ok"]


class Version(Payload):
    """The answer of /version."""

    version: str
