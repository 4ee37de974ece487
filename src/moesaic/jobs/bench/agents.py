"""The messages of agents that share a system prompt and tool schemas. Pure functions.

Texts are made up and have the size and form of real ones. How many tokens they have is only known to the
server, so lengths are converted by what it counts for two short prompts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moesaic.jobs.bench.workload import WORDS

Json = dict[str, Any]

TOOL_SHARE = 0.5
"""Share of the prefix that is tool schemas. The rest is the system prompt."""
_SUBJECTS = ("file", "issue", "branch", "customer", "calendar", "message", "table", "deployment", "invoice")
_ACTIONS = ("read", "search", "create", "update", "delete", "list", "compare", "export", "run", "watch")
_FIELDS = ("path", "query", "limit", "owner", "since", "labels", "recursive", "format", "timeout", "message")


@dataclass(frozen=True)
class Prefix:
    """What the prompts of all agents begin with."""

    system: str
    tools: list[Json]

    @property
    def num_characters(self) -> int:
        return len(self.system) + sum(len(json.dumps(tool)) for tool in self.tools)


@dataclass(frozen=True)
class TokenScale:
    """How many tokens a server makes of a prompt with so many characters."""

    per_character: float
    template_tokens: float
    """Tokens that the chat template adds to each prompt."""

    def characters(self, tokens: float) -> int:
        """The length of a text with about so many tokens, at least 1."""
        return max(1, round(tokens / self.per_character))

    def prefix_characters(self, tokens: float) -> int:
        """The length of a prefix with about so many tokens, together with what the template adds."""
        return self.characters(max(1.0, tokens - self.template_tokens))


def make_scale(points: Sequence[tuple[int, int]]) -> TokenScale:
    """The scale through two prompts, given as (characters, tokens)."""
    (short_length, short_tokens), (long_length, long_tokens) = points
    per_character = max((long_tokens - short_tokens) / max(1, long_length - short_length), 1e-3)
    return TokenScale(per_character, max(0.0, short_tokens - per_character * short_length))


def make_prefix(num_characters: int, rng: np.random.Generator) -> Prefix:
    """A system prompt and at least one tool schema, of so many characters together or a little more."""
    tools: list[Json] = []
    size = 0
    while not tools or size < TOOL_SHARE * num_characters:
        tools.append(_make_tool(len(tools), rng))
        size += len(json.dumps(tools[-1]))
    return Prefix(make_text(max(1, num_characters - size), rng), tools)


def make_text(num_characters: int, rng: np.random.Generator) -> str:
    """Sentences of common words, cut at so many characters."""
    parts: list[str] = []
    size = 0
    while size < num_characters:
        sentence = _make_sentence(int(rng.integers(6, 18)), rng) + ("\n" if rng.random() < 0.2 else " ")
        parts.append(sentence)
        size += len(sentence)
    return "".join(parts)[:num_characters]


def make_call(prefix: Prefix, turn: int, rng: np.random.Generator) -> Json:
    """A call of one of the tools, which the answer of `turn` is taken to end with."""
    function = prefix.tools[int(rng.integers(len(prefix.tools)))]["function"]
    names = list(function["parameters"]["properties"])[:2]
    arguments = {name: str(rng.choice(WORDS)) for name in names}
    call = {"name": function["name"], "arguments": json.dumps(arguments)}
    return {"id": f"call_{turn}", "type": "function", "function": call}


def _make_sentence(count: int, rng: np.random.Generator) -> str:
    return " ".join(rng.choice(WORDS, count).tolist()).capitalize() + "."


def _make_tool(number: int, rng: np.random.Generator) -> Json:
    """A function with a description and typed arguments, as OpenAI's API takes it."""
    fields = rng.choice(_FIELDS, int(rng.integers(3, 7)), replace=False).tolist()
    parameters = {
        "type": "object",
        "properties": {name: _make_argument(rng) for name in fields},
        "required": fields[:2],
        "additionalProperties": False,
    }
    name = f"{rng.choice(_ACTIONS)}_{rng.choice(_SUBJECTS)}_{number}"
    description = " ".join(_make_sentence(int(rng.integers(8, 16)), rng) for _ in range(3))
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def _make_argument(rng: np.random.Generator) -> Json:
    description = _make_sentence(int(rng.integers(5, 12)), rng)
    match int(rng.integers(4)):
        case 0:
            return {"type": "integer", "minimum": 0, "description": description}
        case 1:
            return {"type": "boolean", "default": False, "description": description}
        case 2:
            choices = rng.choice(WORDS, 4, replace=False).tolist()
            return {"type": "string", "enum": choices, "description": description}
        case _:
            return {"type": "string", "description": description}
