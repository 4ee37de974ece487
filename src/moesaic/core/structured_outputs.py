"""What a structured output must look like. Names and meanings are those of vLLM."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from moesaic.core.errors import RequestError

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
MOST_CHARACTERS = 1 << 20
"""Maximum length of a schema, an expression or a grammar."""


@dataclass(frozen=True)
class StructuredOutputsParams:
    """The form of an answer: exactly one of `json` to `structural_tag`.

    Raises RequestError, naming the field, for a value of another type, or for none or several of them.
    """

    json: str | Mapping[str, Any] | None = None
    """A JSON Schema. The answer is a JSON text that it accepts."""
    regex: str | None = None
    """A regular expression that the whole answer matches."""
    choice: Sequence[str] | None = None
    """The answer is one of these texts."""
    grammar: str | None = None
    """A context-free grammar, as Lark with llguidance's additions or as llama.cpp's GBNF."""
    json_object: bool | None = None
    """True: the answer is any JSON object."""
    structural_tag: str | Mapping[str, Any] | None = None
    """Free text in which everything between certain begins and ends matches a JSON Schema."""
    whitespace_pattern: str | None = None
    """A regular expression for the white space between the parts of JSON. None: see `structured.grammar`."""
    disable_any_whitespace: bool = False
    """No white space between the parts of JSON."""
    disable_additional_properties: bool = False
    """Objects have only the properties that the schema names."""
    around: str = ""
    """A grammar of the whole answer, as Lark, in which @form stands for the form. Empty: the form alone."""

    def __post_init__(self) -> None:
        if self.choice is not None:
            object.__setattr__(self, "choice", _choice(self.choice))
        for name in ("json", "structural_tag"):
            value = getattr(self, name)
            if isinstance(value, Mapping):  # as text, so that equal ones compare equal and can be sent
                object.__setattr__(self, name, _dump_json(name, value))
        for name in ("regex", "grammar", "structural_tag", "whitespace_pattern", "around"):
            _check(name, getattr(self, name), str, "a text")
        _check("json", self.json, str, "a JSON Schema")
        _check("json_object", self.json_object, bool, "true, false")
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool):
                raise _error(name, getattr(self, name), "true, false")
        kinds = self._kinds
        if len(kinds) != 1:
            raise _error("", ", ".join(kinds) or "none of them", f"one of {', '.join(KINDS)}")
        size = sum(len(value) for name in KINDS if isinstance(value := getattr(self, name), str))
        if size > MOST_CHARACTERS:
            raise _error(kinds[0], f"{size} characters", f"at most {MOST_CHARACTERS}")

    @property
    def _kinds(self) -> list[str]:
        return [name for name in KINDS if getattr(self, name) not in (None, False)]

    @property
    def kind(self) -> str:
        """The kind of form that is set: one of KINDS."""
        return self._kinds[0]

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> StructuredOutputsParams:
        """The parameters from a mapping. Raises RequestError for an unknown name."""
        names = [field.name for field in fields(cls)]
        unknown_name = next((name for name in values if name not in names), None)
        if unknown_name is not None:
            raise _error("", f"{unknown_name!r}", ", ".join(names))
        return cls(**values)


def _choice(value: object) -> tuple[str, ...]:
    items = list(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes) else []
    texts = tuple(text for text in items if isinstance(text, str) and text)
    if not texts or len(texts) != len(items):
        raise _error("choice", value, "a list of texts that are not empty")
    if (size := sum(map(len, texts))) > MOST_CHARACTERS:
        raise _error("choice", f"{size} characters", f"at most {MOST_CHARACTERS}")
    return texts


def _dump_json(name: str, value: Mapping[str, Any]) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise _error(name, f"a mapping that is not JSON ({error})", "JSON") from error


def _check(name: str, value: object, kind: type, allowed_values: str) -> None:
    if value is not None and not isinstance(value, kind):
        raise _error(name, value, allowed_values)


def _error(name: str, value: object, allowed_values: str) -> RequestError:
    field = f"structured_outputs.{name}" if name else "structured_outputs"
    value_text = value if isinstance(value, str) else repr(value)
    return RequestError(f"{field}: got {value_text[:200]}; allowed: {allowed_values}", field)
