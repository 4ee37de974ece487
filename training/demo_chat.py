"""The demo model's chat format: one template for training, transformers and the server."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, Any]

END_OF_TEXT = "<|endoftext|>"
START = "<|im_start|>"
END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, START, END)
CALL_TAGS = ("<tool_call>", "</tool_call>")

CHAT_TEMPLATE = """\
{%- set first = messages[0] if messages and messages[0].role in ['system', 'developer'] else none -%}
{%- if first or tools -%}
{{- '<|im_start|>system\\n' -}}
{%- if first -%}{{- first.content or '' -}}{%- endif -%}
{%- if first and tools -%}{{- '\\n' -}}{%- endif -%}
{%- if tools -%}
{{- 'Tools, called as <tool_call>{"name": ..., "arguments": {...}}</tool_call>:' -}}
{%- for tool in tools -%}
{%- set function = tool.function if tool.function is defined else tool -%}
{{- '\\n' -}}{{- function.name -}}{{- ': ' -}}{{- function.description or '' -}}{{- ' ' -}}
{{- (function.parameters or {}).properties | default({}) | tojson -}}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if not (loop.first and first) -%}
{{- '<|im_start|>' -}}{{- message.role -}}{{- '\\n' -}}{{- message.content or '' -}}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function -%}
{%- if not loop.first -%}{{- '\\n' -}}{%- endif -%}
{{- '<tool_call>\\n{"name": ' -}}{{- function.name | tojson -}}{{- ', "arguments": ' -}}
{%- if function.arguments is string -%}
{{- function.arguments -}}
{%- else -%}
{{- function.arguments | tojson -}}
{%- endif -%}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
"""The template has no reasoning: `enable_thinking` is accepted and changes nothing."""


@cache
def _compile() -> Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(CHAT_TEMPLATE)


def render(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), ask: bool = False) -> str:
    """The text of a conversation. With `ask` it ends where the assistant's answer begins."""
    return _compile().render(messages=list(messages), tools=list(tools), add_generation_prompt=ask)


def write_call(name: str, arguments: Mapping[str, Any]) -> Message:
    """An assistant's message that calls one tool."""
    function = {"name": name, "arguments": dict(arguments)}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
