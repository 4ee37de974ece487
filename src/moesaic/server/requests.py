"""The bodies of requests: OpenAI's fields with vLLM's extensions.

Values are not coerced, and null equals absent. `unknown_fields` ignores fields that are not defined here and
names them in the answer. A field that would change the answer and is not supported is refused, unless its
value asks for nothing. The ranges repeat those of SamplingParams, so that the published schema contains them.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    WithJsonSchema,
)

from moesaic.core.request import MAX_BAD_WORDS, MAX_LOGPROB_TOKENS, MAX_LOGPROBS, SEED_LIMIT


def _null_if_empty(value: Any) -> Any:
    """Null for a value that asks for nothing, such as `tools: []`."""
    return None if value in ("", [], {}) else value


_EMPTY = {
    "anyOf": [
        {"type": "null"},
        {"type": "string", "maxLength": 0},
        {"type": "array", "maxItems": 0},
        {"type": "object", "maxProperties": 0},
    ],
    "description": "Not supported: only null or an empty value is accepted.",
}
Unsupported = Annotated[None, BeforeValidator(_null_if_empty), WithJsonSchema(_EMPTY)]
Ignored = "Accepted and ignored."
MAX_SALT = 256
"""Maximum number of characters of cache_salt."""
Text = Annotated[str, Field(min_length=1)]
TokenId = Annotated[int, Field(ge=0)]
FIRST = Field(fail_fast=True)
"""Report only the first wrong item of a list. A list of millions of errors would delay other requests."""


def other_type_than(*read_types: str) -> WithJsonSchema:
    """The published schema of a type whose object is accepted, while none of its other fields is read."""
    return WithJsonSchema({"type": "string", "not": {"enum": list(read_types)}})


TokenIds = Annotated[list[TokenId], FIRST]


def write_name_pattern(max_length: int) -> str:
    """The pattern of a tool's name."""
    return f"^[a-zA-Z0-9_.:/-]{{1,{max_length}}}$"


def check_name(name: str, max_length: int) -> str:
    """`name`. Raises ValueError unless it may name a tool."""
    if re.fullmatch(write_name_pattern(max_length), name) is None:
        raise ValueError(
            f"allowed: 1 to {max_length} characters: letters, digits, '_', '-', '.', ':' and '/'"
        )
    return name


FunctionName = Annotated[
    str,
    AfterValidator(partial(check_name, max_length=64)),
    WithJsonSchema({"type": "string", "pattern": write_name_pattern(64)}),
]
"""A name that OpenAI's API allows, or one with `.`, `:` or `/`, which other servers take."""
TokenKey = Annotated[str, Field(pattern="^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Share = Annotated[float, Field(ge=0, le=1)]
Logprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


class Body(BaseModel):
    """A body that is validated strictly: no coercion and no NaN. Unknown fields are kept in `model_extra`."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, use_attribute_docstrings=True)


class StreamOptions(Body):
    """Further contents of a stream."""

    include_usage: bool | None = None
    """Send a last chunk with the token counts."""
    continuous_usage_stats: bool | None = None
    """Also send the token counts so far with each chunk (vLLM)."""
    include_obfuscation: bool | None = None
    """Accepted and ignored."""


class StructuredOutputs(Body):
    """The form of the answer: exactly one of json to structural_tag (vLLM)."""

    json_schema: str | dict[str, Any] | None = Field(None, alias="json")
    """A JSON Schema."""
    regex: str | None = None
    choice: Annotated[list[str], FIRST] | None = None
    grammar: str | None = None
    """Lark with llguidance's additions, or llama.cpp's GBNF."""
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None


class JsonSchemaFormat(Body):
    """The schema of a response_format, with a name."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    """None: any JSON object."""
    strict: bool | None = Field(None, description=Ignored)


class TaggedStructure(Body):
    """What stands between a begin and an end."""

    begin: str
    schema_: dict[str, Any] | bool = Field(alias="schema")
    end: str


class ResponseFormat(Body):
    """The form of the answer, in OpenAI's words."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    """The schema of a json_object (llama.cpp)."""
    structures: Annotated[list[TaggedStructure], FIRST] | None = None
    triggers: Annotated[list[str], FIRST] | None = None


OLD = "The older name of the field in structured_outputs."


class GenerationRequest(Body):
    """Fields that completions and chats share."""

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
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, fail_fast=True)] | None = None
    bad_words: Annotated[list[Text], Field(max_length=MAX_BAD_WORDS, fail_fast=True)] | None = None
    prompt_logprobs: Logprobs | None = None
    """Score the prompt's tokens, with this many candidates for each. Not in a stream."""
    return_token_ids: bool | None = None
    """Send the token ids of prompt and answer too."""
    return_routed_experts: bool | None = None
    """Send the experts of each token, and the expert servers that computed them."""
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    """Keep this many tokens of the prompt. -1 keeps as many as the context has room for."""
    truncation_side: Literal["left", "right"] | None = None
    """Where truncate_prompt_tokens cuts. left when absent."""
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT)] | None = None
    """Only requests of the same salt share cached prefixes (vLLM)."""
    return_tokens_as_token_ids: bool | None = None
    """Name the tokens of log-probabilities by their ids, as in "token_id:12" (vLLM)."""
    logprob_token_ids: (
        Annotated[list[TokenId], Field(max_length=MAX_LOGPROB_TOKENS, fail_fast=True)] | None
    ) = None
    """The candidates that logprobs shows in place of the most likely ones (vLLM)."""
    ebnf: str | None = None
    """A grammar of the answer (SGLang)."""
    priority: int | None = None
    """Accepted if it is 0: requests are scheduled in the order of their arrival."""
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = Field(None, description=OLD)
    guided_regex: str | None = Field(None, description=OLD)
    guided_choice: Annotated[list[str], FIRST] | None = Field(None, description=OLD)
    guided_grammar: str | None = Field(None, description=OLD)
    guided_json_object: bool | None = Field(None, description=OLD)
    guided_whitespace_pattern: str | None = Field(None, description=OLD)
    guided_decoding_backend: str | None = Field(None, description=Ignored)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description=Ignored)
    metadata: dict[str, Any] | None = Field(None, description=Ignored)
    store: bool | None = Field(None, description=Ignored)
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = Field(
        None, description=Ignored
    )
    safety_identifier: str | None = Field(None, description=Ignored)
    prompt_cache_key: str | None = Field(None, description=Ignored)

    def count_candidates(self, num_top: int) -> int:
        """How many candidates the log-probabilities of each token have. num_top: most likely ones."""
        return len(self.logprob_token_ids or ()) or num_top

    @property
    def streams_usage(self) -> bool:
        """True if the client wants a last chunk with the token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def streams_running_usage(self) -> bool:
        """True if the client wants the token counts so far with every chunk."""
        return self.streams_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


class CompletionRequest(GenerationRequest):
    """The body of POST /v1/completions."""

    prompt: str | Annotated[list[str], FIRST] | TokenIds | Annotated[list[TokenIds], FIRST]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    """Maximum number of generated tokens. 0 is allowed with echo: then only the prompt is scored."""
    echo: bool | None = None
    logprobs: Logprobs | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    """Accepted only if it equals n."""
    add_special_tokens: bool | None = None
    """Let the tokenizer add its special tokens, such as BOS, to a text. True when absent."""
    suffix: Unsupported = None


def read_text_part(value: Any) -> Any:
    """A text in place of a part, or a refusal, as the part of text that it is."""
    if isinstance(value, str):
        return {"type": "text", "text": value}
    if isinstance(value, dict) and value.get("type") == "refusal":
        return {"type": "text", "text": value.get("refusal")}
    return value


class TextPart(Body):
    """A part of a message."""

    type: Literal["text"]
    text: str


class RefusalPart(BaseModel):
    """A part that says why an earlier answer refused. It is read as a text. The published schema has it."""

    type: Literal["refusal"]
    refusal: str


TextParts = Annotated[
    list[
        Annotated[
            TextPart, BeforeValidator(read_text_part, json_schema_input_type=TextPart | RefusalPart | str)
        ]
    ],
    FIRST,
]


class Function(Body):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """The JSON schema of its arguments."""
    strict: bool | None = None


class Tool(Body):
    """A tool. Only functions are supported."""

    type: Literal["function"]
    function: Function


class ChosenFunction(Body):
    """The name of a function."""

    name: FunctionName


class ToolChoice(Body):
    """The one function that the answer has to call."""

    type: Literal["function"]
    function: ChosenFunction


class AllowedTools(Body):
    """The functions that the answer may call, and whether it has to call one."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolChoice], Field(min_length=1, fail_fast=True)]


class AllowedToolsChoice(Body):
    """The functions that the answer may call. The others are left out of the prompt."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class CalledFunction(Body):
    """A function that an earlier answer called."""

    name: Text
    arguments: str
    """JSON. The template gets an object, or this text if it is none."""


class ToolCall(Body):
    """A call in an earlier answer."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction
    index: int | None = Field(None, description=Ignored)


class Message(Body):
    """A turn of a conversation."""

    role: Annotated[str, Field(pattern="^[a-zA-Z][a-zA-Z0-9_-]{0,31}$")]
    """system, developer, user, assistant, tool, or another role that the chat template knows."""
    content: str | TextParts | None = None
    name: str | None = None
    refusal: str | None = None
    """The text of an assistant's message that refused. It is the content where there is none."""
    annotations: Unsupported = None
    audio: Unsupported = None
    function_call: Unsupported = None
    tool_calls: Annotated[Annotated[list[ToolCall], FIRST] | None, BeforeValidator(_null_if_empty)] = None
    """The calls of an assistant's message."""
    tool_call_id: str | None = None
    """The id of the call whose result a tool's message is."""
    reasoning: str | None = None
    """The reasoning of an assistant's message."""
    reasoning_content: str | None = None
    """Another name of reasoning, which takes precedence."""
    _path: str | None = PrivateAttr(None)

    @property
    def path(self) -> str | None:
        """The part of the client's request that this message was made of. None: a message at its place."""
        return self._path

    def set_path(self, path: str) -> Self:
        """Note the part of the client's request that this message was made of."""
        self._path = path
        return self


class TemplateOptions(Body):
    """How the chat template turns messages into a prompt."""

    add_generation_prompt: bool | None = None
    """End the prompt with the header of the answer. True when absent."""
    continue_final_message: bool | None = None
    """Continue the last message instead of answering it."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the checkpoint's chat template, such as enable_thinking."""
    tools: Annotated[list[Tool], FIRST] | None = None
    """The functions that the model may call."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """A variable of the chat template. "none" also turns off enable_thinking (vLLM) and thinking_mode."""
    verbosity: Literal["low", "medium", "high"] | None = None
    """A variable of the chat template."""


class ChatRequest(GenerationRequest, TemplateOptions):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    add_special_tokens: bool | None = None
    """Let the tokenizer add its special tokens, such as BOS, around what the template wrote. False when
    absent."""
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """The older name of max_completion_tokens, which takes precedence."""
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | AllowedToolsChoice | None = None
    parallel_tool_calls: bool | None = None
    """False: only the first call of an answer is returned."""
    include_reasoning: bool | None = None
    """False: the reasoning is left out of the answer (vLLM)."""
    thinking_token_budget: Annotated[int, Field(ge=-1)] | None = None
    """Maximum number of tokens of the reasoning, which is then ended (vLLM). -1: no limit of its own."""
    modalities: Annotated[list[Literal["text"]], FIRST] | None = None
    functions: Unsupported = None
    function_call: Literal["none", "auto"] | None = None
    audio: Unsupported = None
    prediction: Unsupported = None
    web_search_options: Annotated[None, Field(description="Not supported: only null is accepted.")] = None


class TokenizeRequest(TemplateOptions):
    """The body of POST /tokenize, with either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    """Let the tokenizer add its special tokens, such as BOS, to `prompt`. True when absent."""
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: TokenIds


class ScaleRequest(Body):
    """The body of POST /scale_elastic_ep. An absent number stays unchanged; an unknown field is refused."""

    model_config = ConfigDict(extra="forbid")

    expert_servers: Annotated[int, Field(ge=1, le=1024)] | None = None
    attention_workers: Annotated[int, Field(ge=1, le=1024)] | None = None
    prefill_workers: Annotated[int, Field(ge=0, le=1024)] | None = None


class KillRequest(Body):
    """The body of POST /v1/fault_tolerance/kill. An unknown field is refused."""

    model_config = ConfigDict(extra="forbid")

    name: Text
    """The process, as the status names it, such as "expert server 0"."""
