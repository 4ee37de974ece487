"""From the form that a request wants to the grammar that its worker compiles.

Question: How does a structured output become a grammar?
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from moesaic.core.errors import RequestError
from moesaic.core.structured_outputs import StructuredOutputsParams
from moesaic.text.structured.vocabulary import Vocabulary

WHITESPACE = r"(\n[ \t]{0,20}| ?)"
"""White space between the parts of JSON: nothing, a space, or a new line with an indentation.

It is bounded, since a model that is unsure can otherwise write white space until its tokens are used up.
"""
FORMATS = frozenset(
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"]
)
"""Formats of JSON Schema that an answer keeps to."""
_VALUES = ("const", "default", "enum", "examples")
"""Keywords whose contents are values and not schemas."""
_SHOWN = 300


def grammar_of(params: StructuredOutputsParams, special: Mapping[str, int]) -> str:
    """llguidance's grammar of an answer.

    special: text -> id of the tokenizer's special tokens, which text alone does not match. Raises
    RequestError, naming the field, if the form cannot be put into a grammar.
    """
    try:
        return _grammar(params, tuple(special.items()))
    except RecursionError as error:
        raise _refused(params.kind, "it is nested too deeply") from error


@lru_cache(maxsize=16)
def _grammar(params: StructuredOutputsParams, special_tokens: tuple[tuple[str, int], ...]) -> str:
    """As `grammar_of`. A server asks twice: in a thread to check a form, and to submit its request."""
    value, special = getattr(params, params.kind), dict(special_tokens)
    match params.kind:
        case "json":
            schema = _loaded("json", value)
            if not isinstance(schema, dict | bool):
                raise _refused("json", "got neither an object nor a boolean; allowed: a JSON Schema")
            grammar = LLMatcher.grammar_from_json_schema(_schema(schema, params))
        case "json_object":
            grammar = LLMatcher.grammar_from_json_schema(_schema({"type": "object"}, params))
        case "regex":
            grammar = LLMatcher.grammar_from_regex(value)
        case "choice":
            lark = "start: " + " | ".join(json.dumps(text) for text in value)
            grammar = LLMatcher.grammar_from_lark(lark)
        case "grammar":
            try:
                grammar = grammar_from("grammar", value)
            except ValueError as error:
                raise _refused("grammar", str(error)) from error
        case _:
            lark = _structural(_loaded("structural_tag", value), params, special)
            grammar = LLMatcher.grammar_from_lark(lark)
    return _inside_of(params.around, str(grammar)) if params.around else str(grammar)


def _inside_of(around: str, form: str) -> str:
    """The grammar of an answer in which the grammar `form` is called @form."""
    inner = json.loads(form)["grammars"] if form.startswith("{") else [{"lark_grammar": form}]
    return json.dumps({"grammars": [{"lark_grammar": around}, {**inner[0], "name": "form"}, *inner[1:]]})


def check(params: StructuredOutputsParams, special: Mapping[str, int]) -> None:
    """Raises RequestError, naming the field, if a form is not valid or too large.

    It takes up to some hundred milliseconds for a large form. special: as in `grammar_of`.
    """
    tokenizer = _bytes_and(tuple(special.items()))
    error, messages = LLMatcher.validate_grammar_with_warnings(
        grammar_of(params, special), tokenizer, limits=limits()
    )
    if error:
        raise _refused(params.kind, messages[0])


def limits() -> LLParserLimits:
    """The library's limits of a grammar's size and of the work for one token, without its verbose errors."""
    return LLParserLimits(verbose_errors=False)


def literal(text: str, special: Mapping[str, int]) -> str:
    """A Lark expression for `text`, in which special tokens are tokens. Empty for an empty text."""
    parts: list[str] = []
    rest = text
    while rest:
        found = [(rest.find(token), -len(token), token) for token in special if token and token in rest]
        begin, _, token = min(found, default=(len(rest), 0, ""))
        if begin:
            parts.append(json.dumps(rest[:begin]))
        if token:
            parts.append(f"<[{special[token]}]>")
        rest = rest[begin + len(token) :]
    return " ".join(parts)


def json_rule(schema: Mapping[str, Any] | bool) -> str:
    """A Lark expression for JSON texts that `schema` accepts, with white space as in WHITESPACE."""
    return "%json " + json.dumps(_prepared(schema, {"whitespace_pattern": WHITESPACE}))


def _schema(schema: Any, params: StructuredOutputsParams) -> str:
    options: dict[str, Any] = {"whitespace_pattern": params.whitespace_pattern or WHITESPACE}
    if params.disable_any_whitespace:
        options = {"whitespace_flexible": False}
    return json.dumps(_prepared(schema, options, closed=params.disable_additional_properties))


def _prepared(schema: Any, options: dict[str, Any], closed: bool = False) -> Any:
    """The schema as the library takes it, with the library's options unless it has some of its own.

    Formats that the library does not know are left out: to JSON Schema a format is a remark. closed: objects
    have no properties that the schema does not name.
    """

    def changed(one: Any) -> Any:
        if isinstance(one, list):
            return [changed(part) for part in one]
        if not isinstance(one, dict):
            return one
        inner = {name: part if name in _VALUES else changed(part) for name, part in one.items()}
        if isinstance(inner.get("format"), str) and inner["format"] not in FORMATS:
            del inner["format"]
        if closed and isinstance(inner.get("properties"), dict):
            inner.setdefault("additionalProperties", False)
        return inner

    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    return {"x-guidance": options, **changed(schema)}


def _structural(tag: Any, params: StructuredOutputsParams, special: Mapping[str, int]) -> str:
    """Free text with tags: {"structures": [{"begin", "schema", "end"}], "triggers": [text]}."""
    structures, triggers = _tags(tag)
    lines = [r"%llguidance {}", "TEXT: /(.|\\n)*/"]
    for number, (begin, schema, end) in enumerate(structures):
        trigger = next((text for text in triggers if text and begin.startswith(text)), None)
        if trigger is None:
            allowed = "structures that begin with a trigger"
            raise _refused("structural_tag", f"got one that begins with {begin!r}; allowed: {allowed}")
        body = f"%json {_schema(schema, params)} {literal(end, special)}"
        if begin.startswith(tuple(special)):
            lines.append(f"tag_{number}: TEXT {literal(begin, special)} {body}")
        elif any(token in trigger for token in special):
            allowed = "special tokens at its start"
            raise _refused("structural_tag", f"got the trigger {trigger!r}; allowed: {allowed}")
        else:
            lines.append(f"begin_{number}[lazy]: TEXT {json.dumps(trigger)}")
            lines.append(f"tag_{number}: begin_{number} {literal(begin[len(trigger) :], special)} {body}")
    tags = " | ".join(f"tag_{number}" for number in range(len(structures)))
    lines.insert(1, f"start: ({tags})* TEXT")
    return "\n".join(lines)


def _tags(tag: Any) -> tuple[list[tuple[str, Any, str]], list[str]]:
    """The structures (begin, schema, end) and the triggers of a structural tag."""
    allowed = "an object with structures (begin, schema, end) and triggers"
    try:
        structures = [(one["begin"], one["schema"], one["end"]) for one in tag["structures"]]
        triggers = list(tag["triggers"])
    except (KeyError, TypeError) as error:
        raise _refused("structural_tag", f"no {error}; allowed: {allowed}") from error
    texts = [*triggers, *(text for begin, _, end in structures for text in (begin, end))]
    good = all(isinstance(text, str) for text in texts)
    if not good or not structures or not all(isinstance(one[1], dict | bool) for one in structures):
        raise _refused("structural_tag", f"got {json.dumps(tag)}; allowed: {allowed}")
    return structures, triggers


@lru_cache(maxsize=4)
def _bytes_and(special: tuple[tuple[str, int], ...]) -> LLTokenizer:
    """A tokenizer of single bytes and of the special tokens, with which a grammar is checked."""
    size = 256 + max([number for _, number in special], default=0) + 1
    tokens = [b""] * size
    for text, number in special:
        tokens[number] = text.encode()
    free = [number for number in range(size) if not tokens[number]]
    for byte, number in zip(range(256), free, strict=False):
        tokens[number] = bytes([byte])
    numbers = frozenset(number for _, number in special)
    return Vocabulary(tokens, numbers).compiled(size, (min(numbers, default=free[-1]),))


def _loaded(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refused(name, f"not JSON: {error}") from error


def _refused(name: str, why: str) -> RequestError:
    field = f"structured_outputs.{name}"
    return RequestError(f"{field}: {' '.join(why.split())[:_SHOWN]}", field)
