"""Writes calls in every syntax, sound and damaged as models damage them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

Call = tuple[str, dict[str, Any]]
Damage = frozenset[str]

TOOLS = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "where": {"type": "object"},
                    "exact": {"type": "boolean"},
                },
            },
        },
    }
    for name in ("get_weather", "now")
)
DAMAGES = ("value open", "last value open", "call open", "block open", "bracket missing", "bracket too many")
BREAKS: dict[str, tuple[str, str, int]] = {
    "quote missing": ('", ', ", ", 1),
    "comma missing": (", ", " ", 1),
    "other quotes": ('"', "'", -1),
    "brace too early": (", ", "}, ", 1),
    "garbage": (": ", ": x", 1),
}
"""Damage of JSON whose meaning nobody knows -> what is replaced, by what, and how often at most."""


def plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def write_arguments(arguments: dict[str, Any], damage: Damage) -> str:
    """JSON, damaged if it is to be."""
    text = json.dumps(arguments, ensure_ascii=False)
    for name in damage.intersection(BREAKS):
        text = text.replace(*BREAKS[name])
    text = text[:-1] if "bracket missing" in damage else text
    return text + "}" if "bracket too many" in damage else text


def write_tagged(tags: dict[str, str], line: str, edge: str = "") -> Callable[[list[Call], Damage], str]:
    """line: what stands between tags. edge: what stands at the edges of a value."""

    def write(calls: list[Call], damage: Damage) -> str:
        text = ""
        for name, arguments in calls:
            text += tags["begin"] + line * ("{name}" in tags["name"]) + tags["name"].format(name=name) + line
            for number, (key, value) in enumerate(arguments.items()):
                is_open = ("last " if number == len(arguments) - 1 else "") + "value open" in damage
                end = (edge or line or "\n") if is_open else edge + tags["value end"] + line
                text += tags["key"].format(key=key) + edge + plain(value) + end
            call_end = "" if "call open" in damage else tags["call end"] + line * bool(tags["call end"])
            text += call_end + ("" if "block open" in damage else tags["end"]) + "\n"
        return text

    return write


def write_hermes(calls: list[Call], damage: Damage) -> str:
    text = ""
    for name, arguments in calls:
        brace = "" if "call open" in damage and "block open" not in damage else "}"
        inner = write_arguments(arguments, damage)
        end = "" if "block open" in damage else "\n</tool_call>"
        text += f'<tool_call>\n{{"name": "{name}", "arguments": {inner}{brace}{end}\n'
    return text


def write_tokens(
    begin: str, head: str, end: str, section: tuple[str, str]
) -> Callable[[list[Call], Damage], str]:
    def write(calls: list[Call], damage: Damage) -> str:
        open_end = end.partition("<")[0] if "call open" in damage else end
        inner = "".join(
            begin + head.format(name=name) + write_arguments(arguments, damage) + open_end
            for name, arguments in calls
        )
        return section[0] + inner + ("" if "block open" in damage else section[1])

    return write


def write_mistral(calls: list[Call], damage: Damage) -> str:
    if "call open" in damage:
        last = len(calls) - 1  # a bracket inside of a list is not at the end of its call
        text = ", ".join(
            f'{{"name": "{name}", "arguments": '
            f"{write_arguments(arguments, damage if number == last else frozenset())}}}"
            for number, (name, arguments) in enumerate(calls)
        )
        return f"[TOOL_CALLS] {text if 'block open' in damage else f'[{text}]'}"
    return "".join(
        f"[TOOL_CALLS]{name}[ARGS]{write_arguments(arguments, damage)}" for name, arguments in calls
    )


def write_harmony(calls: list[Call], damage: Damage) -> str:
    prefix = "" if "call open" in damage else "functions."
    return "".join(
        f"<|channel|>commentary to={prefix}{name} <|constrain|>json<|message|>"
        f"{write_arguments(arguments, damage)}<|call|><|start|>assistant"
        for name, arguments in calls
    ).removesuffix("<|start|>assistant")


XML = {
    "begin": "<tool_call>",
    "name": "<function={name}>",
    "key": "<parameter={key}>",
    "value end": "</parameter>",
    "call end": "</function>",
    "end": "</tool_call>",
}
INVOKE = {
    "begin": "<minimax:tool_call>",
    "name": '<invoke name="{name}">',
    "key": '<parameter name="{key}">',
    "value end": "</parameter>",
    "call end": "</invoke>",
    "end": "</minimax:tool_call>",
}
GLM = {
    "begin": "<tool_call>{name}",
    "name": "",
    "key": "<arg_key>{key}</arg_key><arg_value>",
    "value end": "</arg_value>",
    "call end": "",
    "end": "</tool_call>",
}


def write_glm(line: str) -> Callable[[list[Call], Damage], str]:
    def write(calls: list[Call], damage: Damage) -> str:
        return "\n".join(
            write_tagged({**GLM, "begin": f"<tool_call>{name}"}, line)([(name, arguments)], damage).rstrip(
                "\n"
            )
            for name, arguments in calls
        )

    return write


def write_hy3(suffix: str) -> Callable[[list[Call], Damage], str]:
    end = f"{suffix}>"
    tags = {name: tag.replace(">", end) for name, tag in GLM.items()}

    def write(calls: list[Call], damage: Damage) -> str:
        text = "".join(
            write_tagged({**tags, "begin": f"<tool_call{end}{name}<tool_sep{end}"}, "\n")(
                [(name, arguments)], damage
            )
            for name, arguments in calls
        )
        return f"<tool_calls{end}\n{text}</tool_calls{end}"

    return write


PREFIX = "]<]minimax[>["


def write_minimax_m3(calls: list[Call], damage: Damage) -> str:
    text = f"{PREFIX}<tool_call>\n"
    for name, arguments in calls:
        text += f'{PREFIX}<invoke name="{name}">'
        for number, (key, value) in enumerate(arguments.items()):
            is_open = ("last " if number == len(arguments) - 1 else "") + "value open" in damage
            inner = value if isinstance(value, str) else write_element(value)
            text += f"{PREFIX}<{key}>{inner}" + ("" if is_open else f"{PREFIX}</{key}>")
        text += ("" if "call open" in damage else f"{PREFIX}</invoke>") + "\n"
    return text + ("" if "block open" in damage else f"{PREFIX}</tool_call>")


def write_element(value: Any) -> str:
    """A value in elements. What elements cannot write unmistakably without a schema is JSON."""
    if isinstance(value, str) and not is_json(value):
        return value
    if isinstance(value, list):
        pairs = [("item", item) for item in value]
    else:
        pairs = list(value.items()) if isinstance(value, dict) else []
    if not pairs or not all(key.isalpha() and child is not None for key, child in pairs):
        return json.dumps(value, ensure_ascii=False)
    return "".join(f"{PREFIX}<{key}>{write_element(child)}{PREFIX}</{key}>" for key, child in pairs)


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


WRITERS: dict[str, Callable[[list[Call], Damage], str]] = {
    "hermes": write_hermes,
    "qwen3_coder": write_tagged(XML, "\n", "\n"),
    "mimo": write_tagged(XML, "\n"),
    "glm45": write_glm("\n"),
    "glm47": write_glm(""),
    "hy_v3": write_hy3(":opensource"),
    "hy_v3_preview": write_hy3(""),
    "minimax_m2": write_tagged(INVOKE, "\n"),
    "minimax_m3": write_minimax_m3,
    "deepseek_v31": write_tokens(
        "<｜tool▁call▁begin｜>",
        "{name}<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    "deepseek_v3": write_tokens(
        "<｜tool▁call▁begin｜>",
        "function<｜tool▁sep｜>{name}\n```json\n",
        "\n```<｜tool▁call▁end｜>",
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    "kimi_k2": write_tokens(
        "<|tool_call_begin|>",
        "functions.{name}:0<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    "mistral": write_mistral,
    "openai": write_harmony,
}
"""Parser -> writes calls in its syntax, with the damages that its models make."""
