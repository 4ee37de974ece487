"""What a client may ask. Field for field OpenAI's, with vLLM's extensions.

Values are not coerced, null equals absent, and a field that is not here is refused by name: a
parameter that is silently ignored gives answers that nobody asked for. Ranges repeat those of
SamplingParams so that the published schema is honest.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from moesaic.core.request import MAX_LOGPROBS, SEED_LIMIT

Unsupported = Annotated[None, Field(description="Not supported: only null is accepted.")]
Ignored = "Accepted and ignored."
Text = Annotated[str, Field(min_length=1)]
TokenId = Annotated[int, Field(ge=0)]
FIRST = Field(fail_fast=True)
"""One wrong item is told; to note millions of them would hold up everybody else."""
TokenIds = Annotated[list[TokenId], FIRST]
TokenKey = Annotated[str, Field(pattern="^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Share = Annotated[float, Field(ge=0, le=1)]
Logprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


class Body(BaseModel):
    """Strict: no coercion, no unknown fields, no NaN."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(Body):
    """What a stream carries beside the text."""

    include_usage: bool | None = None
    """Send a last chunk with the token counts."""
    continuous_usage_stats: bool | None = None
    """Send the counts so far with each chunk too (vLLM)."""
    include_obfuscation: Literal[False] | None = None


class GenerationRequest(Body):
    """What completions and chat share."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    temperature: Annotated[float, Field(ge=0, le=1e6)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=1e6)] | None = None
    logit_bias: dict[TokenKey, Bias] | None = None
    seed: Annotated[int, Field(ge=-SEED_LIMIT, le=SEED_LIMIT - 1)] | None = None
    stop: Text | Annotated[list[Text], Field(max_length=16, fail_fast=True)] | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description=Ignored)
    metadata: dict[str, Any] | None = Field(None, description=Ignored)
    store: bool | None = Field(None, description=Ignored)
    service_tier: Literal["auto", "default"] | None = Field(None, description=Ignored)
    safety_identifier: str | None = Field(None, description=Ignored)
    prompt_cache_key: str | None = Field(None, description=Ignored)

    @property
    def streams_usage(self) -> bool:
        """Ask for the last chunk with token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def streams_running_usage(self) -> bool:
        """Ask for token counts with every chunk."""
        return self.streams_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


class CompletionRequest(GenerationRequest):
    """POST /v1/completions"""

    prompt: str | Annotated[list[str], FIRST] | TokenIds | Annotated[list[TokenIds], FIRST]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    """0 is allowed with echo: only the prompt is scored."""
    echo: bool | None = None
    logprobs: Logprobs | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    """Only equal to n."""
    add_special_tokens: bool | None = None
    """Let the tokenizer put its own tokens, such as BOS, around a text; True when absent."""
    suffix: Unsupported = None


class TextPart(Body):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class ResponseFormat(Body):
    """Free text is all there is."""

    type: Literal["text"]


class Message(Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], FIRST] | None = None
    name: str | None = None
    refusal: Unsupported = None
    annotations: Unsupported = None
    audio: Unsupported = None
    function_call: Unsupported = None
    tool_calls: Unsupported = None


class TemplateOptions(Body):
    """How messages become a prompt."""

    add_generation_prompt: bool | None = None
    """True when absent; false leaves out the header of the answer."""
    continue_final_message: bool | None = None
    """Go on with the last message instead of answering it."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the checkpoint's chat template, such as enable_thinking."""


class ChatRequest(GenerationRequest, TemplateOptions):
    """POST /v1/chat/completions"""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """The older spelling; max_completion_tokens wins."""
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    response_format: ResponseFormat | None = None
    tool_choice: Literal["none"] | None = None
    modalities: Annotated[list[Literal["text"]], FIRST] | None = None
    tools: Unsupported = None
    parallel_tool_calls: Unsupported = None
    functions: Unsupported = None
    function_call: Unsupported = None
    audio: Unsupported = None
    prediction: Unsupported = None
    reasoning_effort: Unsupported = None
    verbosity: Unsupported = None
    web_search_options: Unsupported = None


class TokenizeRequest(TemplateOptions):
    """POST /tokenize: `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    """For `prompt`; True when absent."""
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """POST /detokenize"""

    model: str | None = None
    tokens: TokenIds


class ScaleRequest(Body):
    """POST /scale_elastic_ep: what is absent stays what it is."""

    expert_servers: Annotated[int, Field(ge=1, le=1024)] | None = None
    attention_workers: Annotated[int, Field(ge=1, le=1024)] | None = None
