"""The tools of a chat: which ones its answer may call, and the calls and results of earlier turns."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from moesaic.core.errors import RequestError
from moesaic.core.request import SamplingParams
from moesaic.core.structured_outputs import StructuredOutputsParams
from moesaic.server.answer_form import translate_field
from moesaic.server.answers import Reading
from moesaic.server.requests import (
    AllowedToolsChoice,
    ChatRequest,
    Function,
    Message,
    TemplateOptions,
    Tool,
    ToolCall,
    ToolChoice,
)
from moesaic.server.service import Service
from moesaic.text.parsers.table import Formats
from moesaic.text.parsers.values import Tools
from moesaic.text.structured.grammar import check, json_rule

DEEPEST = 100
"""Maximum depth of lists and objects inside of one another, in schemas and in arguments."""
INVALID = "INVALID_JSON"
"""The name under which templates get arguments that are no JSON object. Anthropic's documents name it."""
_NO_THINKING: Mapping[str, Any] = {"enable_thinking": False, "thinking_mode": "disabled"}
"""Variables of templates that turn reasoning off. The second one is MiniMax-M3's."""
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


def restrict_tools(body: ChatRequest) -> ChatRequest:
    """`body` with only those tools that its tool_choice allows.

    Raises RequestError for one that is not there.
    """
    choice = body.tool_choice
    if not isinstance(choice, AllowedToolsChoice):
        return body
    names = [tool.function.name for tool in body.tools or ()]
    allowed_names = [tool.function.name for tool in choice.allowed_tools.tools]
    for number, name in enumerate(allowed_names):
        if name not in names:
            path, choices = f"tool_choice.allowed_tools.tools[{number}]", ", ".join(map(repr, names))
            raise RequestError(f"{path}: got {name!r}; allowed: {choices or 'none'}", "tool_choice")
    tools = [tool for tool in body.tools or () if tool.function.name in allowed_names]
    return body.model_copy(update={"tools": tools, "tool_choice": choice.allowed_tools.mode})


def callable_tools(body: ChatRequest, formats: Formats) -> Tools | None:
    """The tools that the answer may call. None: calls are not looked for.

    Raises RequestError if the model does not take tools, or if it is unknown how it calls them.
    """
    choice = body.tool_choice
    if not body.tools:
        if choice not in (None, "none", "auto"):
            raise RequestError("tool_choice: allowed only with tools", "tool_choice")
        return None
    if not formats.takes_tools:
        reason = "the chat template of this model takes none"
        raise RequestError(f"tools: {reason}; leave them out, or use --chat-template", "tools")
    if choice == "none":
        return None
    if formats.calls is None:
        reason = "it is not known how this model writes calls"
        choices = "a server with --tool-call-parser NAME, or tool_choice 'none'"
        raise RequestError(f"tools: {reason}; allowed: {choices}", "tools")
    names = [tool.function.name for tool in body.tools]
    if isinstance(choice, ToolChoice) and choice.function.name not in names:
        choices = ", ".join(map(repr, names))
        raise RequestError(f"tool_choice: got {choice.function.name!r}; allowed: {choices}", "tool_choice")
    return dump_tools(body.tools)


def list_forced_names(body: ChatRequest) -> tuple[str, ...]:
    """The functions of which the answer has to call one. Empty: it does not have to."""
    if isinstance(body.tool_choice, ToolChoice):
        return (body.tool_choice.function.name,)
    is_required = body.tool_choice == "required"
    return tuple(tool.function.name for tool in body.tools or ()) if is_required else ()


async def with_grammar(
    params: SamplingParams, body: ChatRequest, reading: Reading, service: Service
) -> SamplingParams:
    """`params` with the grammar of a forced call, or with what may stand before or in place of its form.

    That is reasoning, and calls if the answer may have any: these have any arguments, as without a form. A
    forced call has no content, so a response_format says nothing about it.
    Raises RequestError for a schema that cannot be forced, and OverloadedError.
    """
    form, special, formats = params.structured_outputs, service.tokenizer.special_tokens, reading.formats
    is_forced = bool(reading.forced_names)
    if not is_forced and (form is None or not reading.tools):
        grammar_around = "" if form is None else formats.after_reasoning(reading.in_reasoning, special)
        return (
            replace(params, structured_outputs=replace(form, around=grammar_around))
            if form and grammar_around
            else params
        )
    if is_forced and form is not None and body.response_format is None:
        raise RequestError(
            "tool_choice: 'auto' and 'none' are allowed with a structured output", "tool_choice"
        )
    tools = reading.tools or ()
    if reading.has_named_function:
        tools = tuple(tool for tool in tools if tool["function"]["name"] in reading.forced_names)[:1]

    def work() -> StructuredOutputsParams:
        if is_forced:
            _require_schemas(body.tools or (), reading.forced_names, special)
        grammar = formats.write_call_grammar(
            tools,
            in_reasoning=reading.in_reasoning,
            parallel=reading.parallel and not reading.has_named_function,
            special=special,
            json_rule=json_rule if is_forced else _any_json,
            or_form=not is_forced,
        )
        with translate_field("tools"):
            call_form = StructuredOutputsParams(grammar=grammar)
            form_to_check = call_form if is_forced or form is None else replace(form, around=grammar)
            check(form_to_check, special)
        return form_to_check

    return replace(params, structured_outputs=await service.text_threads.run(work))


def _require_schemas(tools: Sequence[Tool], names: Sequence[str], special: Mapping[str, int]) -> None:
    """Raise RequestError, naming tool and place, for a schema that a forced call cannot keep to."""
    for number, tool in enumerate(tools):
        if tool.function.name in names and tool.function.parameters is not None:
            schema = {"type": "object", **tool.function.parameters}
            path = f"tools[{number}].function.parameters"
            try:
                check(StructuredOutputsParams(json=json.dumps(schema)), special)
            except RequestError as error:
                reason = str(error).removeprefix(f"{error.field}: ")
                raise RequestError(f"{path} of {tool.function.name!r}: {reason}", "tools") from error


def _any_json(schema: Mapping[str, Any]) -> str:
    """A JsonRule for calls that no schema binds."""
    return json_rule({"type": "object"} if schema.get("type") == "object" else {})


def dump_tools(tools: Sequence[Tool], with_descriptions: bool = False) -> Tools:
    """The tools as chat templates expect them. with_descriptions: each has a description, which may be
    empty."""
    return tuple(
        {"type": tool.type, "function": _function(tool.function, with_descriptions)} for tool in tools
    )


def _function(function: Function, with_description: bool) -> dict[str, Any]:
    """A function without parameters has an empty list of them, as OpenAI says. Many templates need one."""
    fields = ("name", "description", "parameters", "strict")
    present = {name: value for name in fields if (value := getattr(function, name)) is not None}
    absent = {"parameters": _NO_PARAMETERS} | ({"description": ""} if with_description else {})
    return present | {name: value for name, value in absent.items() if name not in present}


def make_variables(options: TemplateOptions, formats: Formats) -> dict[str, Any]:
    """The variables of the chat template that a request sets. chat_template_kwargs take precedence.

    Raises RequestError for a schema that is nested too deeply.
    """
    for number, tool in enumerate(options.tools or ()):
        require_shallow(tool.function.parameters, f"tools[{number}].function.parameters", "tools")
    variables: dict[str, Any] = (
        {} if not options.tools else {"tools": list(dump_tools(options.tools, formats.text_descriptions))}
    )
    if options.reasoning_effort is not None:
        variables["reasoning_effort"] = options.reasoning_effort
        variables |= _NO_THINKING if options.reasoning_effort == "none" else {}
    if options.verbosity is not None:
        variables["verbosity"] = options.verbosity
    return variables | (options.chat_template_kwargs or {})


def require_roles(messages: Sequence[Message]) -> None:
    """Raise RequestError where a message has a field that belongs to another role."""
    for number, message in enumerate(messages):
        path = f"messages[{number}]"
        if message.role != "assistant":
            for name in ("tool_calls", "reasoning", "reasoning_content"):
                if getattr(message, name) is not None:
                    refusal = f"{path}.{name}: allowed only with the role 'assistant'"
                    raise RequestError(refusal, "messages")
        if message.role == "tool" and message.tool_call_id is None:
            raise RequestError(f"{path}.tool_call_id: missing; a tool's message has one", "messages")
        if message.role != "tool" and message.tool_call_id is not None:
            raise RequestError(f"{path}.tool_call_id: allowed only with the role 'tool'", "messages")


def further_fields(message: Message, formats: Formats) -> dict[str, Any]:
    """The fields of a message beside role, content and name, as chat templates expect them.

    Raises RequestError for arguments that are nested too deeply.
    """
    fields: dict[str, Any] = {}
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    reasoning = message.reasoning_content or message.reasoning
    if reasoning is not None:
        fields |= {"reasoning": reasoning, "reasoning_content": reasoning}
    if message.tool_calls:
        fields["tool_calls"] = [_call(call, formats) for call in message.tool_calls]
        if reasoning and not message.content:
            fields["thinking"] = (
                reasoning  # the name in gpt-oss's template, which allows no content beside it
            )
    return fields


def _call(call: ToolCall, formats: Formats) -> dict[str, Any]:
    text = call.function.arguments
    arguments: Any = text if formats.text_arguments else _object(text)
    if formats.needs_keyed_arguments and isinstance(arguments, str):
        arguments = {INVALID: arguments}
    call_fields = {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
    return call_fields if call.id is None else {"id": call.id, **call_fields}


def _object(text: str) -> str | Mapping[str, Any]:
    """The object that `text` is the JSON of. `text` itself if it is none: the model had made a mistake."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
    require_shallow(value, "messages: the arguments of a call", "messages")
    return value if isinstance(value, dict) else text


def require_shallow(value: object, name: str, field: str) -> None:
    """Raise RequestError if `value` has too many lists and objects inside of one another."""
    level, depth = [value], 0
    while level := [item for container in level for item in _inner(container)]:
        depth += 1
        if depth > DEEPEST:
            raise RequestError(f"{name}: nested more than {DEEPEST} levels deep", field)


def _inner(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
