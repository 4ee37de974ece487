"""Turns the form that a request wants into the grammar that its worker compiles.

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
from moesaic.text.structured.json_schema import SchemaError, prepare_schema
from moesaic.text.structured.refused_part import describe_refusal
from moesaic.text.structured.vocabulary import Vocabulary

WHITESPACE = r"(\n[ \t]{0,20}| ?)"
"""White space between the parts of JSON: nothing, a space, or a new line with an indentation.

It is bounded, since a model that is unsure can otherwise write white space until its tokens are used up.
"""
_MAX_ERROR_CHARACTERS = 300


def make_grammar(params: StructuredOutputsParams, special: Mapping[str, int]) -> str:
    """llguidance's grammar of an answer.

    special: text -> id of the tokenizer's special tokens, which text alone does not match. Raises
    RequestError, naming the field, if the form cannot be put into a grammar.
    """
    try:
        return _grammar(params, tuple(special.items()))
    except RecursionError as error:
        raise _make_error(params.kind, "it is nested too deeply") from error
    except SchemaError as error:
        raise _make_error(
            params.kind, f"at {error.path[1:]}: {error}" if error.path else str(error)
        ) from error


@lru_cache(maxsize=16)
def _grammar(params: StructuredOutputsParams, special_tokens: tuple[tuple[str, int], ...]) -> str:
    """The grammar of a form, remembered: a server checks a form in a thread, and then submits its request."""
    value, special = getattr(params, params.kind), dict(special_tokens)
    match params.kind:
        case "json":
            schema = _parse_json("json", value)
            if not isinstance(schema, dict | bool):
                raise _make_error("json", "got neither an object nor a boolean; allowed: a JSON Schema")
            grammar = LLMatcher.grammar_from_json_schema(_schema(schema, params))
        case "json_object":
            grammar = LLMatcher.grammar_from_json_schema(_schema({"type": "object"}, params))
        case "regex":
            grammar = LLMatcher.grammar_from_regex(value)
        case "choice":
            # One terminal, since the library keeps a place in every alternative of a rule.
            lark = "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(text) for text in value)
            grammar = LLMatcher.grammar_from_lark(lark)
        case "grammar":
            try:
                grammar = grammar_from("grammar", value)
            except ValueError as error:
                raise _make_error("grammar", str(error)) from error
        case _:
            lark = _structural(_parse_json("structural_tag", value), params, special)
            grammar = LLMatcher.grammar_from_lark(lark)
    return _nest_form(params.around, str(grammar)) if params.around else str(grammar)


def _nest_form(outer_grammar: str, form: str) -> str:
    """The grammar of an answer in which the grammar `form` is called @form."""
    inner = json.loads(form)["grammars"] if form.startswith("{") else [{"lark_grammar": form}]
    return json.dumps(
        {"grammars": [{"lark_grammar": outer_grammar}, {**inner[0], "name": "form"}, *inner[1:]]}
    )


def check(params: StructuredOutputsParams, special: Mapping[str, int]) -> None:
    """Raises RequestError, naming the field, if a form is not valid or too large.

    It takes up to some hundred milliseconds for a large form. special: as in `make_grammar`.
    """
    tokenizer = _bytes_and(tuple(special.items()))
    error = _find_error(make_grammar(params, special), tokenizer)
    if error is None:
        return
    if params.kind != "json" or params.around:
        raise _make_error(params.kind, error)

    def is_refused(part: Any) -> bool:
        try:
            grammar = LLMatcher.grammar_from_json_schema(_schema(part, params))
        except SchemaError:  # a reference leads out of the part
            return False
        return _find_error(grammar, tokenizer) is not None

    path, reason = describe_refusal(error, _parse_json("json", getattr(params, params.kind)), is_refused)
    raise _make_error("json", f"at {path[1:]}: {reason}" if path else reason)


def _find_error(grammar: str, tokenizer: LLTokenizer) -> str | None:
    """What the library says against a grammar. None: nothing."""
    error, messages = LLMatcher.validate_grammar_with_warnings(grammar, tokenizer, limits=limits())
    return messages[0] if error else None


def limits() -> LLParserLimits:
    """The library's limits of a grammar's size and of the work for one token, without its verbose errors."""
    return LLParserLimits(verbose_errors=False)


def literal(text: str, special: Mapping[str, int]) -> str:
    """A Lark expression for `text`, in which special tokens are tokens. Empty for an empty text."""
    parts: list[str] = []
    remaining = text
    while remaining:
        matches = [
            (remaining.find(token), -len(token), token) for token in special if token and token in remaining
        ]
        begin, _, token = min(matches, default=(len(remaining), 0, ""))
        if begin:
            parts.append(json.dumps(remaining[:begin]))
        if token:
            parts.append(f"<[{special[token]}]>")
        remaining = remaining[begin + len(token) :]
    return " ".join(parts)


def json_rule(schema: Mapping[str, Any] | bool) -> str:
    """A Lark expression for JSON texts that `schema` accepts, with white space as in WHITESPACE."""
    return "%json " + json.dumps(_with_options(schema, {"whitespace_pattern": WHITESPACE}))


def _schema(schema: Any, params: StructuredOutputsParams) -> str:
    options: dict[str, Any] = {"whitespace_pattern": params.whitespace_pattern or WHITESPACE}
    if params.disable_any_whitespace:
        options = {"whitespace_flexible": False}
    return json.dumps(_with_options(schema, options, is_closed=params.disable_additional_properties))


def _with_options(schema: Any, options: dict[str, Any], is_closed: bool = False) -> Any:
    """The schema as the library takes it, with the library's options unless it has some of its own.

    Raises SchemaError for one that cannot be kept to. is_closed: see prepare_schema.
    """
    if isinstance(schema, bool):  # options need an object
        if not schema:
            raise SchemaError("", "no JSON text is allowed by it")
        schema = {}
    return {"x-guidance": options, **prepare_schema(schema, is_closed)}


def _structural(tag: Any, params: StructuredOutputsParams, special: Mapping[str, int]) -> str:
    """Free text with tags: {"structures": [{"begin", "schema", "end"}], "triggers": [text]}."""
    structures, triggers = _tags(tag)
    lines = [r"%llguidance {}", "TEXT: /(.|\\n)*/"]
    for number, (begin, schema, end) in enumerate(structures):
        trigger = next((text for text in triggers if text and begin.startswith(text)), None)
        if trigger is None:
            requirement = "structures that begin with a trigger"
            raise _make_error("structural_tag", f"got one that begins with {begin!r}; allowed: {requirement}")
        body = f"%json {_schema(schema, params)} {literal(end, special)}"
        if begin.startswith(tuple(special)):
            lines.append(f"tag_{number}: TEXT {literal(begin, special)} {body}")
        elif any(token in trigger for token in special):
            requirement = "special tokens at its start"
            raise _make_error("structural_tag", f"got the trigger {trigger!r}; allowed: {requirement}")
        else:
            lines.append(f"begin_{number}[lazy]: TEXT {json.dumps(trigger)}")
            lines.append(f"tag_{number}: begin_{number} {literal(begin[len(trigger) :], special)} {body}")
    tags = " | ".join(f"tag_{number}" for number in range(len(structures)))
    lines.insert(1, f"start: ({tags})* TEXT")
    return "\n".join(lines)


def _tags(tag: Any) -> tuple[list[tuple[str, Any, str]], list[str]]:
    """The structures (begin, schema, end) and the triggers of a structural tag."""
    requirement = "an object with structures (begin, schema, end) and triggers"
    try:
        structures = [
            (structure["begin"], structure["schema"], structure["end"]) for structure in tag["structures"]
        ]
        triggers = list(tag["triggers"])
    except (KeyError, TypeError) as error:
        raise _make_error("structural_tag", f"no {error}; allowed: {requirement}") from error
    texts = [*triggers, *(text for begin, _, end in structures for text in (begin, end))]
    are_texts = all(isinstance(text, str) for text in texts)
    if (
        not are_texts
        or not structures
        or not all(isinstance(structure[1], dict | bool) for structure in structures)
    ):
        raise _make_error("structural_tag", f"got {json.dumps(tag)}; allowed: {requirement}")
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
    return Vocabulary(tokens, numbers).build_tokenizer(size, (min(numbers, default=free[-1]),))


def _parse_json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _make_error(name, f"not JSON: {error}") from error


def _make_error(name: str, reason: str) -> RequestError:
    field = f"structured_outputs.{name}"
    return RequestError(f"{field}: {' '.join(reason.split())[:_MAX_ERROR_CHARACTERS]}", field)
