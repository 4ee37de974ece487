"""Writes the corpus of answers: `python -m tests.text.parsers.write_corpus`.

Each line of a file is an answer as a model writes it, and what a client has to see of it. The calls are
written by `writers`, which knows nothing of the parsers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .writers import BREAKS, WRITERS, Call, Damage

FOLDER = Path(__file__).with_name("corpus")
WEATHER: Call = ("get_weather", {"city": "Bern", "days": 2})
NOW: Call = ("now", {})
CALLS: dict[str, list[Call]] = {
    "one": [WEATHER],
    "no arguments": [NOW],
    "two": [WEATHER, NOW],
    "three": [NOW, WEATHER, NOW],
    "one twice": [WEATHER, WEATHER],
    "other scripts": [("get_weather", {"city": "北京 😀 é"})],
    "quotes and lines": [("get_weather", {"city": 'a "b"\n\\c\n  {d: [e]}'})],
    "every type": [
        ("get_weather", {"city": "x", "days": -3, "where": {"lat": None, "on": True}, "exact": False})
    ],
    "nested": [
        ("get_weather", {"where": {"area": {"points": [[1, 2.5], [3]], "name": "a b"}, "of": [{"x": True}]}})
    ],
    "large numbers": [("get_weather", {"days": 12345678901234567890})],
    "an empty text": [("get_weather", {"city": "", "days": 1})],
    "a text like a number": [("get_weather", {"city": "42", "days": 42})],
    "tags in a text": [("get_weather", {"city": "a </parameter> b </function> c </arg_value> d"})],
    "code": [("get_weather", {"city": "def f(x):\n    return x < 1 and x > 0\n# done"})],
}
DAMAGES: dict[str, Damage] = {
    "value open": frozenset({"value open"}),
    "last value open": frozenset({"last value open"}),
    "call open": frozenset({"call open"}),
    "block open": frozenset({"block open"}),
    "value and call open": frozenset({"last value open", "call open"}),
    "call and block open": frozenset({"call open", "block open"}),
    "everything open": frozenset({"value open", "last value open", "call open", "block open"}),
    "bracket missing": frozenset({"bracket missing"}),
    "bracket too many": frozenset({"bracket too many"}),
    "bracket missing, everything open": frozenset({"bracket missing", "call open", "block open"}),
    "bracket too many, everything open": frozenset({"bracket too many", "call open", "block open"}),
}
THINKING = {
    "mistral": ("[THINK]", "[/THINK]"),
    "hy_v3": ("<think:opensource>", "</think:opensource>"),
    "minimax_m3": ("<mm:think>", "</mm:think>"),
}
REASONING = {
    "mistral": "mistral",
    "hy_v3": "hy_v3",
    "hy_v3_preview": "hy_v3_preview",
    "minimax_m3": "minimax_m3",
    "openai": "openai_gptoss",
}
CHANNELS = ("<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant")


def list_answers(syntax: str) -> Iterator[dict[str, Any]]:
    """The answers in one syntax. Those of equal text come once."""
    seen_texts = set[tuple[str, bool]]()
    for answer in _list_answers(syntax):
        if (answer["text"], answer["in_reasoning"]) not in seen_texts:
            seen_texts.add((answer["text"], answer["in_reasoning"]))
            yield answer


def _list_answers(syntax: str) -> Iterator[dict[str, Any]]:
    write = WRITERS[syntax]
    for name, calls in CALLS.items():
        text = write(calls, frozenset())
        yield _answer(syntax, name, text, calls)
        yield _answer(syntax, f"{name}, reasoning", _think(syntax, "Let me see.", text), calls, "Let me see.")
        if syntax != "openai":
            yield _answer(syntax, f"{name}, content", f"I look.\n{text}", calls, content="I look.")
    for calls_name in ("one", "two", "one twice"):
        for name, damage in DAMAGES.items():
            yield _answer(
                syntax, f"{calls_name}, {name}", write(CALLS[calls_name], damage), CALLS[calls_name]
            )
    for name in BREAKS:
        text = write([WEATHER], frozenset({name}))
        if text != write([WEATHER], frozenset()):
            yield _answer(syntax, f"one, {name}", text, [], content=text.strip())
    for name in ("one", "two", "no arguments"):
        if syntax != "openai":
            text = f"Let me see.\n{write(CALLS[name], frozenset())}"
            yield _answer(
                syntax, f"{name}, open reasoning", text, CALLS[name], "Let me see.", in_reasoning=True
            )
    for name, text in (("text", "Bern is a city.\n\nIt has 1 < 2 bears."), ("braces", '{"a": [1, "]"]} }')):
        final = f"<|channel|>final<|message|>{text}" if syntax == "openai" else text
        yield _answer(syntax, name, final, [], content=text)
        yield _answer(syntax, f"{name}, reasoning", _think(syntax, "Hm.", final), [], "Hm.", text)


def _think(syntax: str, thought: str, text: str) -> str:
    if syntax == "openai":
        opening, end, start = CHANNELS
        return f"{opening}{thought}{end}{start}{text}"
    opening, closing = THINKING.get(syntax, ("<think>", "</think>"))
    return f"{opening}\n{thought}\n{closing}\n\n{text}"


def _answer(
    syntax: str,
    name: str,
    text: str,
    calls: list[Call],
    reasoning: str = "",
    content: str = "",
    in_reasoning: bool = False,
) -> dict[str, Any]:
    return {
        "name": name,
        "reasoning_parser": REASONING.get(syntax, "qwen3"),
        "in_reasoning": in_reasoning,
        "text": text,
        "reasoning": reasoning,
        "content": content,
        "calls": [list(call) for call in calls],
    }


def write_text(syntax: str) -> str:
    """The file of one syntax."""
    return "".join(json.dumps(answer, ensure_ascii=False) + "\n" for answer in list_answers(syntax))


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for syntax_name in WRITERS:
        (FOLDER / f"{syntax_name}.jsonl").write_text(write_text(syntax_name), encoding="utf-8")
