"""Which parser reads the answers of a model: by vLLM's names, or by what its chat template contains.

Question: Which parser reads tool calls and reasoning, and how is one added?
Question: Which special tokens stay in an answer's text?
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moesaic.core.errors import ConfigError
from moesaic.text.parsers.answer import AnswerParser, Tags
from moesaic.text.parsers.calls import CallParser, Span
from moesaic.text.parsers.grammar import after_reasoning, write_grammar
from moesaic.text.parsers.harmony import ANALYSIS, Harmony
from moesaic.text.parsers.json_calls import Hermes, Mistral
from moesaic.text.parsers.nested_calls import MiniMaxM3
from moesaic.text.parsers.tagged_calls import (
    Glm,
    Hy3,
    Hy3Preview,
    MiMo,
    MiniMaxM2,
    Qwen3Coder,
    TaggedCalls,
)
from moesaic.text.parsers.token_calls import DeepSeekV3, DeepSeekV31, KimiK2
from moesaic.text.parsers.values import Tools

AUTO, NONE = "auto", "none"

CALLS: Mapping[str, type[CallParser]] = {
    "hermes": Hermes,
    "qwen3_coder": Qwen3Coder,
    "qwen3_xml": Qwen3Coder,
    "mimo": MiMo,
    "glm45": Glm,
    "glm47": Glm,
    "openai": Harmony,
    "deepseek_v3": DeepSeekV3,
    "deepseek_v31": DeepSeekV31,
    "kimi_k2": KimiK2,
    "minimax_m2": MiniMaxM2,
    "minimax_m3": MiniMaxM3,
    "hy_v3": Hy3,
    "hy_v3_preview": Hy3Preview,
    "mistral": Mistral,
}
"""Name for --tool-call-parser -> parser."""

_THINK = Tags("<think>", "</think>")
REASONING: Mapping[str, Tags | None] = {
    "deepseek_r1": Tags("<think>", "</think>", starts_open=True),
    "deepseek_v3": _THINK,
    "qwen3": _THINK,
    "mimo": _THINK,
    "glm45": _THINK,
    "glm47": _THINK,
    "kimi_k2": _THINK,
    "minimax_m2": _THINK,
    "hy_v3": Tags("<think:opensource>", "</think:opensource>"),
    "hy_v3_preview": _THINK,
    "minimax_m3": Tags("<mm:think>", "</mm:think>"),
    "mistral": Tags("[THINK]", "[/THINK]"),
    "openai_gptoss": None,
}
"""Name for --reasoning-parser -> its tags. gpt-oss has channels in their place."""

_CALL_MARKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("openai", ("<|channel|>", "<|message|>", "functions")),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("minimax_m3", ("]<]minimax[>[",)),
    ("hy_v3", ("<tool_calls", "<tool_sep", ":opensource")),
    ("hy_v3_preview", ("<tool_calls", "<tool_sep")),
    ("mimo", ("<tool_call>", "<parameter=example_parameter_1>value_1</parameter>")),
    ("qwen3_coder", ("<tool_call>", "<function=")),
    ("glm45", ("<tool_call>", "<arg_key>")),
    ("hermes", ("<tool_call>",)),
    ("mistral", ("[TOOL_CALLS]",)),
)
"""Parser, and the texts that a template contains if its model writes such calls. The first one is taken."""
_HY3_NAMES = ("hy_v3", "hy_v3_preview")
"""Parsers of the two spellings of the same tags. A template tells them apart, also where one is named."""
_REASONING_MARKS = (
    ("openai_gptoss", ("<|channel|>", "<|message|>")),
    ("minimax_m3", ("<mm:think>",)),
    ("hy_v3", ("<think", "<tool_sep", ":opensource")),
    ("hy_v3_preview", ("<think", "<tool_sep")),
    ("qwen3", ("<think>",)),
    ("mistral", ("[THINK]",)),
)
_NAME_THEN_PLUS, _PLUS_THEN_NAME = (
    r"\b{0}['\"]?\]?\s*\+",
    r"\+\s*[\w.\[\]'\"]*\b{0}\b['\"]?\]?(?!['\"\]]|\s*\|)",
)
# A template that adds `arguments` to a text by + needs them as a text. The same holds for descriptions.
_ARGUMENTS_ADDED = re.compile(f"{_NAME_THEN_PLUS}|{_PLUS_THEN_NAME}".format("arguments"))
_ARGUMENT_CHECK = re.compile(r"\barguments['\"]?\]?\s+is\s+(not\s+)?string")
_DESCRIPTION_ADDED = re.compile(f"{_NAME_THEN_PLUS}|{_PLUS_THEN_NAME}".format("description"))


@dataclass(frozen=True)
class Formats:
    """How the answers of one model are read."""

    calls: str | None = None
    """Name of the parser of tool calls."""
    reasoning: str | None = None
    """Name of the parser of reasoning."""
    takes_tools: bool = False
    """The chat template has a place for tools."""
    text_arguments: bool = False
    """The template joins the arguments of earlier calls to other texts, so it needs them as texts."""
    text_descriptions: bool = False
    """The template joins the descriptions of tools to other texts, so each tool needs one."""

    @property
    def tags(self) -> Tags | None:
        return None if self.reasoning is None else REASONING[self.reasoning]

    @property
    def needs_keyed_arguments(self) -> bool:
        """The template writes each argument of earlier calls by itself, so it needs them as objects."""
        return self.calls is not None and issubclass(CALLS[self.calls], TaggedCalls | MiniMaxM3)

    @property
    def short_ids(self) -> bool:
        """Ids of calls have nine letters and digits. Mistral's templates demand that."""
        return self.calls == "mistral"

    def parser(self, tools: Tools | None, in_reasoning: bool, is_forced: bool = False) -> AnswerParser | None:
        """A parser for one answer. None if the answer is content as it is.

        tools: None leaves calls in the content. in_reasoning: the prompt has opened the reasoning. is_forced:
        a grammar makes the answer call.
        """
        calls = self._calls(tools, is_forced)
        if calls is None and self.tags is None:
            return None
        return AnswerParser(calls, self.tags, in_reasoning)

    def marks(self, tools: Tools | None) -> frozenset[str]:
        """The texts that the parser looks for. They stay in the text if they are special tokens."""
        calls, tags = self._calls(tools), self.tags
        call_marks = () if calls is None else (*calls.marks, *calls.other_marks)
        return frozenset((*call_marks, *(() if tags is None else (tags.open, tags.close))))

    def span(self, tools: Tools | None, in_reasoning: bool) -> Span | None:
        """Where an answer has its reasoning. None if it is not told apart. Parameters: see `parser`."""
        if self.reasoning == "openai_gptoss":
            return ANALYSIS
        tags, calls = self.tags, self._calls(tools)
        if tags is None:
            return None
        reasoning_ends = () if calls is None else calls.ends_reasoning
        return Span(tags.open, (tags.close, *reasoning_ends), in_reasoning or tags.starts_open)

    def write_call_grammar(self, tools: Tools, **options: Any) -> str:
        """The grammar of an answer that calls at least one of `tools`. options: of write_grammar."""
        return write_grammar(CALLS[self.calls or ""], tools, tags=self.tags, **options)

    def after_reasoning(self, in_reasoning: bool, special: Mapping[str, int]) -> str:
        """The grammar of an answer with @form after its reasoning; empty if it has none."""
        channels = self.reasoning == "openai_gptoss"
        return after_reasoning(self.tags, in_reasoning=in_reasoning, channels=channels, special=special)

    def _calls(self, tools: Tools | None, is_forced: bool = False) -> CallParser | None:
        in_channels = self.reasoning == "openai_gptoss"
        if in_channels or self.calls == "openai":
            return Harmony(tools if self.calls == "openai" else None, is_forced, in_channels)
        return None if tools is None or self.calls is None else CALLS[self.calls](tools, is_forced)


def detect_formats(template: str | None, calls: str = AUTO, reasoning: str = AUTO) -> Formats:
    """The formats of a model with this chat template. calls, reasoning: as `check_parsers` allows them."""
    text = template or ""
    return Formats(
        calls=_choose_parser(calls, text, _CALL_MARKS),
        reasoning=_choose_parser(reasoning, text, _REASONING_MARKS),
        takes_tools=re.search(r"\btools\b", text) is not None,
        text_arguments=_ARGUMENTS_ADDED.search(text) is not None and _ARGUMENT_CHECK.search(text) is None,
        text_descriptions=_DESCRIPTION_ADDED.search(text) is not None,
    )


def check_parsers(calls: str, reasoning: str) -> None:
    """Raise ConfigError unless these are names of parsers, `auto` or `none`."""
    for flag, name, names in (
        ("--tool-call-parser", calls, CALLS),
        ("--reasoning-parser", reasoning, REASONING),
    ):
        if name not in (AUTO, NONE, *names):
            raise ConfigError.field(flag, name, ", ".join((AUTO, NONE, *names)))


def _choose_parser(name: str, template: str, rows: tuple[tuple[str, tuple[str, ...]], ...]) -> str | None:
    """The parser of this name; with `auto` the one whose texts the template contains."""
    detected_name = next((parser for parser, marks in rows if all(mark in template for mark in marks)), None)
    if name == AUTO or (name in _HY3_NAMES and detected_name in _HY3_NAMES):
        return detected_name
    return None if name == NONE else name
