"""Grammars that force calls, in each parser's syntax: text in llguidance's dialect of Lark.

A grammar describes a whole answer: reasoning if the model has any, then one call or several, nothing else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moesaic.core.errors import RequestError
from moesaic.core.structured_outputs import MOST_CHARACTERS
from moesaic.text.parsers.answer import Tags
from moesaic.text.parsers.calls import CallParser
from moesaic.text.parsers.harmony import Harmony
from moesaic.text.parsers.json_calls import Hermes, Mistral
from moesaic.text.parsers.nested_calls import BLOCK, CALL, ITEM, PREFIX, MiniMaxM3
from moesaic.text.parsers.tagged_calls import (
    Glm,
    Hy3,
    Hy3Preview,
    MiMo,
    MiniMaxM2,
    Qwen3Coder,
    TaggedCalls,
)
from moesaic.text.parsers.token_calls import DeepSeekV3, DeepSeekV31, KimiK2, TokenCalls
from moesaic.text.parsers.values import Tools, ValueSchema, find_parameters, resolve_reference

_LINE = "\n"
_NEWLINE = r"\n"
_NEWLINES = r"/\n*/"
_FINAL = "<|channel|>final<|message|>"


JsonRule = Callable[[Mapping[str, Any]], str]
"""Writes a Lark expression for the JSON texts that a schema accepts."""


def any_json(schema: Mapping[str, Any]) -> str:
    """The plainest JsonRule."""
    return f"%json {json.dumps(schema)}"


class Grammar:
    """A grammar while it is written. special: text -> id of the tokenizer's special tokens.

    Special tokens have no text for a grammar: they stand in it by their ids.
    """

    def __init__(self, special: Mapping[str, int], json_rule: JsonRule) -> None:
        self._special = special
        self._json_rule = json_rule
        self._rules = ["%llguidance {}"]
        self._size = 0
        self._marks = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)")

    def rule(self, body: str, form: str = "") -> str:
        """Add a rule and return its name. Raises RequestError for a grammar that is too large."""
        self._size += len(body)
        if self._size > MOST_CHARACTERS:
            reason = f"the grammar of their schemas has more than {MOST_CHARACTERS} characters"
            raise RequestError(f"tools: {reason}", "tools")
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{form}: {body}")
        return name

    def exactly(self, text: str) -> str:
        """The characters and special tokens of `text`."""
        parts, position = list[str](), 0
        for match in self._marks.finditer(text):
            parts += [_quote(text[position : match.start()]), f"<[{self._special[match[0]]}]>"]
            position = match.end()
        return " ".join(filter(None, (*parts, _quote(text[position:]))))

    def text_until(self, end: str) -> str:
        """Any text, and the first `end` after it."""
        match = self._marks.search(end)
        last = end if match is None else end[: match.start()]
        pattern = re.escape(last).replace("/", r"\/").replace("\n", "n")
        if match is None:
            return self.rule(rf"/(.|\n)*{pattern}/", "[lazy]")
        return f"{self.rule(rf'/(.|{_NEWLINE})*{pattern}/')} {self.exactly(end[match.start() :])}"

    def json(self, schema: Mapping[str, Any]) -> str:
        """A JSON text that `schema` accepts."""
        return self.rule(self._json_rule(schema))

    def text(self, start: str) -> str:
        """The grammar, which begins with rule `start`."""
        return "\n".join([self._rules[0], f"start: {start}", *self._rules[1:], ""])


def write_grammar(
    parser: type[CallParser],
    tools: Tools,
    *,
    json_rule: JsonRule = any_json,
    parallel: bool = True,
    tags: Tags | None = None,
    in_reasoning: bool = False,
    special: Mapping[str, int] = {},
    or_form: bool = False,
) -> str:
    """The grammar of an answer that calls at least one of `tools`. For one function give only that tool.

    or_form: it may have @form in place of calls. parallel: it may have more than one call. tags: those of the
    reasoning that may come before; None for none. in_reasoning: the prompt has opened the reasoning. special:
    see Grammar. json_rule: writes schemas.
    """
    grammar = Grammar(special, json_rule)
    calls = _WRITERS[parser](grammar, tools, parallel)
    reasoning = _analysis(grammar) if parser is Harmony else _thoughts(grammar, tags, in_reasoning)
    if or_form:
        form = f"{grammar.exactly(_FINAL)} @form" if parser is Harmony else "@form"
        calls = f"({calls} | {form})"
    return grammar.text(f"{reasoning} {calls}")


def after_reasoning(
    tags: Tags | None, *, in_reasoning: bool = False, channels: bool = False, special: Mapping[str, int] = {}
) -> str:
    """The grammar of an answer with @form after its reasoning. Empty if the answer has no reasoning.

    channels: the model is gpt-oss. The others: see `write_grammar`.
    """
    grammar = Grammar(special, any_json)
    if channels:
        return grammar.text(f"{_analysis(grammar)} {grammar.exactly(_FINAL)} @form")
    return "" if tags is None else grammar.text(f"{_thoughts(grammar, tags, in_reasoning)} @form")


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _names(tools: Tools) -> list[str]:
    return [str(tool["function"]["name"]) for tool in tools]


def _schema(tools: Tools, name: str) -> dict[str, Any]:
    """The schema of a tool's arguments, which are an object."""
    return {"type": "object", **find_parameters(tools, name)}


def _add_choice(grammar: Grammar, bodies: Sequence[str]) -> str:
    return grammar.rule(" | ".join(grammar.rule(body) for body in bodies))


def _repeat_call(grammar: Grammar, call: str, separator: str, parallel: bool) -> str:
    """`call`, and more of them if they may be several."""
    return f"{call} ({grammar.exactly(separator)} {call})*" if parallel else call


def _wrap_arguments(grammar: Grammar, tools: Tools, write_prefix: Callable[[str], str], suffix: str) -> str:
    """JSON arguments of one of the tools between two texts. write_prefix: writes the first by name."""
    end = grammar.exactly(suffix)
    bodies = [
        f"{grammar.exactly(write_prefix(name))} {grammar.json(_schema(tools, name))} {end}"
        for name in _names(tools)
    ]
    return _add_choice(grammar, bodies)


def _hermes(grammar: Grammar, tools: Tools, parallel: bool) -> str:
    def write_prefix(name: str) -> str:
        return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": '

    return _repeat_call(
        grammar, _wrap_arguments(grammar, tools, write_prefix, "}\n</tool_call>"), "\n", parallel
    )


def _mistral(grammar: Grammar, tools: Tools, parallel: bool) -> str:
    list_call = _wrap_arguments(
        grammar, tools, lambda name: f'{{"name": {json.dumps(name)}, "arguments": ', "}"
    )
    list_calls = _repeat_call(grammar, list_call, ", ", parallel)
    older = f"{grammar.exactly('[TOOL_CALLS] [')} {list_calls} {grammar.exactly(']')}"
    newer = _wrap_arguments(grammar, tools, lambda name: f"[TOOL_CALLS]{name}[ARGS]", "")
    return _add_choice(grammar, [older, _repeat_call(grammar, newer, "", parallel)])


def _make_section_writer(parser: type[TokenCalls]) -> Callable[[Grammar, Tools, bool], str]:
    begin, separator, end = parser.call

    def write_prefix(name: str) -> str:
        if parser is DeepSeekV3:
            return f"{begin}function{separator}{name}\n```json\n"
        return f"{begin}{name}{separator}"

    def write(grammar: Grammar, tools: Tools, parallel: bool) -> str:
        if parser is KimiK2:
            number = grammar.rule("/[0-9]+/")
            head, middle = begin + "functions.", f"{grammar.exactly(separator)}"
            call = _add_choice(
                grammar,
                [
                    f"{grammar.exactly(f'{head}{name}:')} {number} {middle} "
                    f"{grammar.json(_schema(tools, name))} {grammar.exactly(end)}"
                    for name in _names(tools)
                ],
            )
        else:
            call = _wrap_arguments(
                grammar, tools, write_prefix, ("\n```" if parser is DeepSeekV3 else "") + end
            )
        calls = _repeat_call(grammar, call, "\n" if parser is DeepSeekV3 else "", parallel)
        section_start, section_end = map(grammar.exactly, parser.section)
        return f"{section_start} {calls} {section_end}"

    return write


def _make_tagged_writer(parser: type[TaggedCalls], line: str) -> Callable[[Grammar, Tools, bool], str]:
    """line: what stands between tags."""

    def write(grammar: Grammar, tools: Tools, parallel: bool) -> str:
        bodies = [_function(grammar, parser, line, tools, name) for name in _names(tools)]
        begin, end = parser.marks[0], parser.end
        if parser is Glm:
            call = _add_choice(grammar, [f"{grammar.exactly(begin)} {body}" for body in bodies])
        else:
            call = _add_choice(
                grammar,
                [f"{grammar.exactly(begin + line)} {body} {grammar.exactly(line + end)}" for body in bodies],
            )
        return _repeat_call(grammar, call, "\n", parallel)

    return write


def _function(grammar: Grammar, parser: type[TaggedCalls], line: str, tools: Tools, name: str) -> str:
    """A call of tool `name`: arguments in the schema's order, those that are not required at will."""
    start = grammar.exactly(parser.name[0] + name + parser.name[1] + line)
    return f"{start} {_arguments(grammar, parser, line, tools, name)} {grammar.exactly(parser.name_end)}"


def _arguments(grammar: Grammar, parser: type[TaggedCalls], line: str, tools: Tools, name: str) -> str:
    """The arguments of a call of tool `name`."""
    schema, parts = _schema(tools, name), list[str]()
    required_keys = schema.get("required")
    for key in schema["properties"] if isinstance(schema.get("properties"), Mapping) else ():
        value = _argument(grammar, parser, line, schema, key)
        parts.append(value if isinstance(required_keys, list) and key in required_keys else f"({value})?")
    return " ".join(parts)


def _argument(
    grammar: Grammar, parser: type[TaggedCalls], line: str, schema: Mapping[str, Any], key: str
) -> str:
    newline = "\n" if parser.own_lines else ""
    separator = "" if not parser.value[0] else line
    prefix = parser.key[0] + key + parser.key[1] + separator + parser.value[0] + newline
    value = _value(grammar, schema["properties"][key], schema, newline + parser.value[1])
    return grammar.rule(f"{grammar.exactly(prefix)} {value} {grammar.exactly(line)}")


def _value(grammar: Grammar, schema: object, root: Mapping[str, Any], end: str) -> str:
    """A value that is written as a text, and `end` after it. root: what references in `schema` point into."""
    fields: Mapping[str, Any] = schema if isinstance(schema, Mapping) else {}
    values, types = fields.get("enum"), ValueSchema.read(fields, root).types
    if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
        choices = " | ".join(json.dumps(value, ensure_ascii=False) for value in values)
        return f"({choices}) {grammar.exactly(end)}"
    if not types or "string" in types:  # without a schema a value may be any text, as a string may
        return grammar.text_until(end)
    definitions = {name: root[name] for name in ("$defs", "definitions") if name in root}
    return f"{grammar.json({**fields, **definitions})} {grammar.exactly(end)}"


def _harmony(grammar: Grammar, tools: Tools, parallel: bool) -> str:
    """The grammar of a single call, since the model's turn ends with it."""
    channel, message = grammar.exactly("<|channel|>"), grammar.exactly("<|message|>")
    constrain = grammar.exactly("<|constrain|>json")
    return _add_choice(
        grammar,
        [
            f"{channel} {grammar.exactly(f'commentary to=functions.{name} ')} {constrain} {message} "
            f"{grammar.json(_schema(tools, name))}"
            for name in _names(tools)
        ],
    )


def _thoughts(grammar: Grammar, tags: Tags | None, in_reasoning: bool) -> str:
    """The reasoning of an answer, which only an answer that begins inside of it must have."""
    if tags is None:
        return ""
    thought_text = grammar.text_until(tags.close)
    is_open = in_reasoning or tags.starts_open
    thinking = (
        thought_text if is_open else f"({grammar.rule(f'{grammar.exactly(tags.open)} {thought_text}')})?"
    )
    return f"{thinking} {grammar.rule(_NEWLINES)}"


def _analysis(grammar: Grammar) -> str:
    thought_text = grammar.text_until("<|end|>")
    opening, next_ = grammar.exactly("<|channel|>analysis<|message|>"), grammar.exactly("<|start|>assistant")
    return f"({grammar.rule(f'{opening} {thought_text} {next_}')})?"


def _make_hy3_writer(syntax: type[Hy3]) -> Callable[[Grammar, Tools, bool], str]:
    def write(grammar: Grammar, tools: Tools, parallel: bool) -> str:
        calls = [
            f"{grammar.exactly(syntax.call_begin + name + syntax.separator + _LINE)} "
            f"{_arguments(grammar, syntax, _LINE, tools, name)} {grammar.exactly(syntax.end + _LINE)}"
            for name in _names(tools)
        ]
        section_start, section_end = syntax.section
        call = _repeat_call(grammar, _add_choice(grammar, calls), "", parallel)
        return f"{grammar.exactly(section_start + _LINE)} {call} {grammar.exactly(section_end)}"

    return write


_NOTES = {"title", "description", "default", "examples", "$schema", "$defs", "definitions"}
"""Keywords that do not say what a value is."""


def _minimax_m3(grammar: Grammar, tools: Tools, parallel: bool) -> str:
    calls = []
    for name in _names(tools):
        schema = _schema(tools, name)
        head, end = f'{PREFIX}<{CALL} name="{name}">', f"{PREFIX}</{CALL}>{_LINE}"
        members = _members(grammar, schema, schema, frozenset())
        calls.append(f"{grammar.exactly(head)} {members} {grammar.exactly(end)}")
    call = _repeat_call(grammar, _add_choice(grammar, calls), "", parallel)
    start, end = f"{PREFIX}<{BLOCK}>{_LINE}", f"{PREFIX}</{BLOCK}>"
    return f"{grammar.exactly(start)} {call} {grammar.exactly(end)}"


def _members(
    grammar: Grammar, schema: Mapping[str, Any], root: Mapping[str, Any], outer_paths: frozenset[str]
) -> str:
    """The elements of an object, in the schema's order, those that are not required at will."""
    parts, properties, required_keys = list[str](), schema.get("properties"), schema.get("required")
    for key, member_schema in properties.items() if isinstance(properties, Mapping) else ():
        element = _element(grammar, key, member_schema, root, outer_paths)
        is_required = isinstance(required_keys, list) and key in required_keys
        parts.append(element if is_required else f"({element})?")
    return " ".join(parts)


def _element(
    grammar: Grammar, key: str, schema: object, root: Mapping[str, Any], outer_paths: frozenset[str]
) -> str:
    """Write an element. outer_paths: the references that lead to it, of which none is followed twice."""
    start, end = f"{PREFIX}<{key}>", f"{PREFIX}</{key}>"
    fields: Mapping[str, Any] = schema if isinstance(schema, Mapping) else {}
    path = fields.get("$ref")
    if isinstance(path, str) and set(fields) - _NOTES == {"$ref"} and path not in outer_paths:
        schema, outer_paths = resolve_reference(path, root), outer_paths | {path}
        fields = schema if isinstance(schema, Mapping) else {}
    keywords, properties = set(fields) - _NOTES, fields.get("properties")
    is_object = fields.get("type") == "object" and isinstance(fields.get("additionalProperties", False), bool)
    inner = None
    if keywords == {"type", "items"} and fields["type"] == "array":
        inner = f"({_element(grammar, ITEM, fields['items'], root, outer_paths)})*"
    elif is_object and properties and keywords <= {"type", "properties", "required", "additionalProperties"}:
        inner = _members(grammar, fields, root, outer_paths)
    if inner is None:  # JSON, in which each keyword holds
        return grammar.rule(f"{grammar.exactly(start)} {_value(grammar, schema, root, end)}")
    return grammar.rule(f"{grammar.exactly(start)} {inner} {grammar.exactly(end)}")


_WRITERS: Mapping[type[CallParser], Callable[[Grammar, Tools, bool], str]] = {
    Hermes: _hermes,
    Mistral: _mistral,
    DeepSeekV3: _make_section_writer(DeepSeekV3),
    DeepSeekV31: _make_section_writer(DeepSeekV31),
    KimiK2: _make_section_writer(KimiK2),
    Qwen3Coder: _make_tagged_writer(Qwen3Coder, "\n"),
    MiMo: _make_tagged_writer(MiMo, "\n"),
    MiniMaxM2: _make_tagged_writer(MiniMaxM2, "\n"),
    MiniMaxM3: _minimax_m3,
    Glm: _make_tagged_writer(Glm, "\n"),
    Hy3: _make_hy3_writer(Hy3),
    Hy3Preview: _make_hy3_writer(Hy3Preview),
    Harmony: _harmony,
}
