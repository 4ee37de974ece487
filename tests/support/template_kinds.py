"""Small chat templates, one for each way in which published ones treat messages, and a renderer of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from moesaic.core.errors import TemplateError
from moesaic.text.templates import chat_template
from moesaic.text.templates.chat_template import ChatTemplate
from moesaic.text.templates.jinja_template import TemplateRefused, compile_template, render_template
from moesaic.text.templates.renderer import Limits

_CALLS = "{% for c in m.tool_calls or [] %}<{{ c.function.name }} {{ c.function.arguments }}>{% endfor %}"
_TOOLS = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
_TURN = "[{{ m.role }}]{{ m.content }}" + _CALLS
_EACH = "{% for m in messages %}"
_KNOWN = "{% if m.role in ('system', 'user', 'assistant', 'tool') %}"
_ALTERNATE = (
    "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.role }}: {{ m.content }}{% endfor %}"
)
_REST = "{% set rest = messages[1:] if messages[0].role == 'system' else messages %}"

KINDS: Mapping[str, str] = {
    "every role": f"{_TOOLS}{_EACH}{_TURN}{{% endfor %}}",
    "known roles": f"{_TOOLS}{_EACH}{_KNOWN}{_TURN}{{% endif %}}{{% endfor %}}",
    "strict": (
        f"{_TOOLS}{_EACH}{{% if m.role == 'system' and not loop.first %}}"
        "{{ raise_exception('a system message begins') }}{% endif %}"
        f"{_KNOWN}{_TURN}{{% else %}}{{{{ raise_exception('a role') }}}}{{% endif %}}{{% endfor %}}"
    ),
    "first only": (
        f"{_TOOLS}{_REST}{{% if rest != messages %}}{{{{ messages[0].content }}}}{{% endif %}}"
        "{% for m in rest %}{% if m.role in ('user', 'assistant', 'tool') %}"
        + _TURN
        + "{% endif %}{% endfor %}"
    ),
    "first developer": (
        f"{_TOOLS}{{% set rest = messages %}}{{% if messages[0].role in ('system', 'developer') %}}"
        "{% set rest = messages[1:] %}[developer]{{ messages[0].content }}{% endif %}"
        "{% for m in rest %}{% if m.role == 'assistant' %}{% if m.tool_calls %}{{ m.thinking }}"
        + _CALLS
        + "{% else %}{{ m.content }}{% endif %}"
        "{% elif m.role in ('user', 'tool') %}{{ m.content }}{% endif %}{% endfor %}"
    ),
    "only developer": _EACH + "{% if m.role != 'system' %}" + _TURN + "{% endif %}{% endfor %}",
    "no system": (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "{% set rest = messages %}" + _ALTERNATE
    ),
    "system in the first turn": (
        _REST + "{% if rest != messages %}{{ messages[0].content }} {% endif %}" + _ALTERNATE
    ),
    "trims": _TOOLS + _EACH + _KNOWN + "{{ m.content | trim }}" + _CALLS + "{% endif %}{% endfor %}",
    "as JSON": f"{_TOOLS}{{{{ messages | tojson }}}}",
    "as ASCII": _TOOLS + "{{ messages | tojson(ensure_ascii=True) }}",
    "last system counts": (
        "{% set ns = namespace(text='') %}"
        + _EACH
        + "{% if m.role == 'system' %}{% set ns.text = m.content %}"
        "{% endif %}{% endfor %}{{ ns.text }}"
        + _TOOLS
        + _EACH
        + "{% if m.role in ('user', 'assistant', 'tool') %}"
        + _TURN
        + "{% endif %}{% endfor %}"
    ),
    "systems on top": (
        _EACH
        + "{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}"
        + _EACH
        + "{% if m.role in ('user', 'assistant', 'tool') %}"
        + _TURN
        + "{% endif %}{% endfor %}"
    ),
    "needs tools": "{% for t in tools %}{{ t | tojson }}{% endfor %}"
    + _EACH
    + _KNOWN
    + _TURN
    + "{% endif %}{% endfor %}",
    "drops reasoning": (
        f"{_TOOLS}{_EACH}{_KNOWN}[{{{{ m.role }}}}]"
        "{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}"
        + _CALLS
        + "{% endif %}{% endfor %}"
    ),
    "last turn only": "{{ messages[-1].content }}",
    "no content": _EACH + "{{ m.role }}{% endfor %}",
    "cuts": _EACH + "{{ m.content[:6] }}{% endfor %}",
    "few efforts": (
        "{% if reasoning_effort is defined and reasoning_effort not in ('no_think', 'low', 'high') %}"
        "{{ raise_exception('an effort') }}{% endif %}{{ reasoning_effort }}"
        + _EACH
        + "{{ m.content }}{% endfor %}"
    ),
    "upper case": _EACH + "{{ m.content | upper }}{% endfor %}",
}
"""What a template does -> its source."""

TAKES_INSTRUCTIONS = (
    "every role",
    "known roles",
    "strict",
    "first only",
    "first developer",
    "only developer",
    "system in the first turn",
    "trims",
    "as JSON",
    "as ASCII",
    "last system counts",
    "systems on top",
    "drops reasoning",
    "upper case",
    "no system",
)
"""Kinds whose prompts have every instruction, wherever the client puts it."""


class LocalRenderers:
    """Renders a template in this process, as `Renderers` does in others."""

    def __init__(self, source: str, limits: Limits) -> None:
        self._template = compile_template(source)
        self.count = 0
        """Number of conversations that were rendered."""

    def render(self, variables: Mapping[str, Any], max_characters: int | None = None) -> str:
        self.count += 1
        try:
            return render_template(
                self._template, json.loads(json.dumps(variables)), max_characters or 1 << 30
            )
        except TemplateRefused as error:
            raise TemplateError(str(error), is_refusal=True) from None

    def close(self) -> None:
        pass


def make_template(source: str) -> ChatTemplate:
    """The chat template `source`, rendered in this process."""
    renderers = chat_template.Renderers
    chat_template.Renderers = LocalRenderers  # type: ignore[misc, assignment]
    try:
        return ChatTemplate(source, Limits(), {"bos_token": "<s>"})
    finally:
        chat_template.Renderers = renderers  # type: ignore[misc]
