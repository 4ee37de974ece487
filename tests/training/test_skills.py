"""The skills of the demo model: every answer is checked by another computation than the one that wrote it."""

from __future__ import annotations

import ast
import json
import random
import re
from collections.abc import Callable
from typing import Any

import pytest

import demo_skill_list
import demo_skills
import demo_words
import skills_lists
import skills_talk
import skills_tools
from demo_skills import Example

DRAWS = 300
SKILLS = demo_skill_list.list_skills()
SUM = re.compile(r"(\d+) ([-+x/]) (\d+) = (\d+)")
OPERATIONS: dict[str, Callable[[int, int], float]] = {
    "+": lambda one, two: one + two,
    "-": lambda one, two: one - two,
    "x": lambda one, two: one * two,
    "/": lambda one, two: one / two,
}


def draw_many(name: str, count: int = DRAWS, seed: str = "tests") -> list[Example]:
    rng = random.Random(f"{seed}:{name}")
    return [SKILLS[name](rng) for _ in range(count)]


def numbers_of(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


@pytest.mark.parametrize("name", SKILLS)
def test_a_seed_gives_the_same_examples_and_another_seed_others(name: str) -> None:
    texts = [example.text for example in draw_many(name, 30)]
    assert texts == [example.text for example in draw_many(name, 30)]
    assert texts != [example.text for example in draw_many(name, 30, "others")]


@pytest.mark.parametrize("name", SKILLS)
def test_training_never_meets_a_held_out_prompt(name: str) -> None:
    rng = random.Random(1)
    draw = SKILLS[name]
    held_out = {example.prompt for example in demo_skills.held_out_examples(draw, name, 20)}
    trained = {demo_skills.draw_one(draw, rng, False).prompt for _ in range(200)}
    assert len(held_out) == 20
    assert not held_out & trained


def test_every_turn_of_a_training_conversation_is_for_training() -> None:
    rng = random.Random(2)
    shares = dict.fromkeys(SKILLS, 1.0)
    for _ in range(300):
        example = demo_skill_list.draw_conversation(rng, SKILLS, shares, False)
        if example.tools:
            continue
        turns = [message for message in example.messages if message["role"] in ("user", "assistant")]
        for at in range(0, len(turns), 2):
            question, answer = (str(message["content"]) for message in turns[at : at + 2])
            is_common = answer in {reply for reply, _ in skills_talk.TALK}
            is_common |= any(what in question for what, _, _ in skills_lists.KNOWN_FUNCTIONS)
            assert is_common or not demo_skills.ask(question, answer).is_held_out


@pytest.mark.parametrize("name", ["sums", "prices", "dates"])
def test_sums_in_answers_are_right(name: str) -> None:
    shown = 0
    for example in draw_many(name):
        found = SUM.findall(example.answer)
        shown += bool(found)
        for one, sign, two, result in found:
            assert OPERATIONS[sign](int(one), int(two)) == int(result), example.answer
    assert shown > DRAWS // 2


def test_sums_in_words_use_the_numbers_of_the_question() -> None:
    for example in draw_many("sums"):
        asked, said = numbers_of(example.question), numbers_of(example.answer)
        expected: float = asked[0]
        text = example.question
        if "gives" in text and "buys" in text:
            expected = asked[0] + asked[1] - asked[2]
        elif "twice" in text:
            expected = 2 * asked[0]
        elif re.search(r"each|times| x |\*", text):
            expected = asked[0] * asked[1]
        elif re.search(r"divided| / ", text):
            expected = asked[0] / asked[1]
        elif re.search(r"minus| - |gives|loses|sells", text):
            expected = asked[0] - asked[1]
        else:
            expected = asked[0] + asked[1]
        assert said[-1] == expected, example


def test_prices_use_the_numbers_of_the_question() -> None:
    for example in draw_many("prices"):
        one, two = numbers_of(example.question)[:2]
        text, said = example.question, numbers_of(example.answer)[-1]
        if "one" in text.split("?")[0].split(".")[-1]:
            assert said * one == two, example
        elif "change" in text:
            assert said == two - one, example
        elif "together" in text:
            assert said == one + two, example
        else:
            assert said == one * two, example


def test_days_and_months_are_those_of_a_calendar() -> None:
    moved = 0
    for example in draw_many("dates", 600):
        names = next(
            (names for names in (demo_words.WEEKDAYS, demo_words.MONTHS) if _mentions(example, names)),
            None,
        )
        if names is None:
            start, step = numbers_of(example.question)[:2]
            assert (start + step - numbers_of(example.answer)[-1]) % 24 == 0
            assert 1 <= numbers_of(example.answer)[-1] <= 24
            continue
        asked = numbers_of(example.question)
        if "How" in example.question:
            continue
        start = next(place for place, name in enumerate(names) if name in example.question)
        step = asked[0] if asked else 1
        if re.search(r"before|ago", example.question):
            step = -step
        wanted = names[(start + step) % len(names)]
        said = example.answer.split()[0] if not asked else example.answer.rstrip(".").split()[-1]
        assert said == wanted, example
        moved += 1
    assert moved > 300


def _mentions(example: Example, names: tuple[str, ...]) -> bool:
    return any(name in example.question for name in names)


def test_lists_are_sorted_counted_and_filtered() -> None:
    for example in draw_many("lists"):
        shown = re.search(r"[:?] (.*,.*)$", example.question)
        assert shown is not None
        items: list[Any] = shown[1].split(", ")
        is_number = items[0].isdigit()
        items = [int(item) for item in items] if is_number else items
        said: list[Any] = example.answer.split(", ")
        said = [int(item) for item in said] if is_number and said[0].isdigit() else said
        text, limit = example.question, numbers_of(example.question)
        if re.search("Sort|order", text):
            assert said == sorted(items)
        elif re.search("Reverse|backwards", text):
            assert said == list(reversed(items))
        elif re.search("How many|Count", text):
            assert numbers_of(example.answer) == [len(items)]
        elif "greater" in text or "less" in text:
            kept = [item for item in items if (item > limit[0] if "greater" in text else item < limit[0])]
            assert said == (kept or ["None of them."])
        elif "start with" in text:
            assert said == [item for item in items if item[0] == text.split("start with ")[1][0]]
        else:
            picked = {"first": items[0], "last": items[-1], "largest": max(items), "smallest": min(items)}
            assert said == [picked[next(word for word in picked if word in text)]]


def test_extracted_objects_have_what_the_text_says() -> None:
    for example in draw_many("extraction"):
        found, text = json.loads(example.answer), example.question
        assert 1 <= len(found) <= 4 and set(found) <= set(skills_lists.FIELDS)
        for value in found.values():
            if value is None:
                continue
            assert str(value) in text, example
        if "age" in found and found["age"] is not None:
            assert numbers_of(text) == [found["age"]]


@pytest.mark.parametrize("kind", skills_lists.FUNCTIONS)
def test_functions_do_what_their_sentences_say(kind: str) -> None:
    expected: dict[str, Callable[..., Any]] = {
        "adds {k} to {p}": lambda p, k: p + k,
        "subtracts {k} from {p}": lambda p, k: p - k,
        "multiplies {p} by {k}": lambda p, k: p * k,
        "divides {p} by {k}": lambda p, k: p / k,
        "returns the square of {p}": lambda p, k: p * p,
        "tells whether {p} is even": lambda p, k: not p & 1,
        "tells whether {p} is odd": lambda p, k: bool(p & 1),
        "tells whether {p} is greater than {k}": lambda p, k: not p <= k,
        "tells whether {p} is less than {k}": lambda p, k: not p >= k,
        "returns the absolute value of {p}": lambda p, k: p if p >= 0 else -p,
        "returns the sum of {p}": lambda p, k: 3 + 8 + 1 + 20,
        "returns the largest of {p}": lambda p, k: 20,
        "returns the smallest of {p}": lambda p, k: 1,
        "returns the length of {p}": lambda p, k: len(list(p)),
        "sorts {p}": lambda p, k: [1, 3, 8, 20],
        "reverses {p}": lambda p, k: " oN seY " if isinstance(p, str) else [20, 1, 8, 3],
        "returns the first of {p}": lambda p, k: 3,
        "returns the last of {p}": lambda p, k: 20,
        "returns the first {k} of {p}": lambda p, k: [v for n, v in enumerate(p) if n < k],
        "keeps those of {p} that are greater than {k}": lambda p, k: list(filter(lambda v: v > k, p)),
        "keeps those of {p} that are less than {k}": lambda p, k: list(filter(lambda v: v < k, p)),
        "adds {k} to each of {p}": lambda p, k: [k + v for v in p],
        "multiplies each of {p} by {k}": lambda p, k: [k * v for v in p],
        "keeps the even ones of {p}": lambda p, k: [8, 20],
        "returns {p} in upper case": lambda p, k: " YES NO ",
        "returns {p} in lower case": lambda p, k: " yes no ",
        "removes spaces around {p}": lambda p, k: "Yes No",
        "splits {p} into words": lambda p, k: ["Yes", "No"],
        "counts the words of {p}": lambda p, k: 2,
        "repeats {p} {k} times": lambda p, k: "".join(p for _ in range(k)),
        "adds {p} and {q}": lambda p, q: p + q,
        "multiplies {p} and {q}": lambda p, q: p * q,
        "subtracts {q} from {p}": lambda p, q: p - q,
        "returns the larger of {p} and {q}": lambda p, q: p if p > q else q,
        "returns the smaller of {p} and {q}": lambda p, q: q if p > q else p,
        "tells whether {p} equals {q}": lambda p, q: not p - q,
    }
    inputs: dict[str, list[Any]] = {
        "number": [7, -4],
        "list": [[3, 8, 1, 20]],
        "text": [" Yes No "],
        "pair": [6, -2],
    }
    for what, expression in skills_lists.FUNCTIONS[kind]:
        for value in inputs[kind]:
            result = eval(expression.format(p="p", q="q", k="3"), {"p": value, "q": 5})
            assert result == expected[what](value, 5 if kind == "pair" else 3), what


def test_functions_parse_and_have_the_name_and_the_parameters_of_the_question() -> None:
    for example in draw_many("functions"):
        code = example.answer.removeprefix("```python\n").removesuffix("\n```")
        node = ast.parse(code).body[0]
        assert isinstance(node, ast.FunctionDef)
        signature = f"{node.name}({', '.join(argument.arg for argument in node.args.args)})"
        assert signature in example.question or example.is_common


def test_known_functions_do_what_their_sentences_say() -> None:
    expected: dict[str, list[Any]] = {
        "two numbers": [6, 2, 8, 4, 12, 3],
        "a number": [36, 12, True, False],
        "a list": [6, 3, 1, [1, 2, 3], [2, 1, 3], 3, 2],
        "a text": ["cba", 1, False],
    }
    values = {"two numbers": (6, 2), "a number": (6,), "a list": ([3, 1, 2],), "a text": ("abc",)}
    for what, signature, expression in skills_lists.KNOWN_FUNCTIONS:
        subject = next(subject for subject in expected if subject in what)
        scope: dict[str, Any] = {}
        exec(f"def {signature}:\n    return {expression}", scope)
        assert scope[signature.split("(")[0]](*values[subject]) == expected[subject].pop(0), what
    assert not any(expected.values())


def _call_of(example: Example) -> dict[str, Any]:
    inside = re.fullmatch(r"<tool_call>\n(.*)\n</tool_call>", example.answer)
    assert inside is not None
    call: dict[str, Any] = json.loads(inside[1])
    return call


def test_calls_fit_the_schema_and_the_request() -> None:
    for example in draw_many("calls"):
        call = _call_of(example)
        tools = {tool["function"]["name"]: tool["function"] for tool in example.tools}
        assert len(tools) == len(example.tools)
        schema = tools[call["name"]]["parameters"]
        assert set(schema["required"]) <= set(call["arguments"]) <= set(schema["properties"])
        for key, value in call["arguments"].items():
            assert schema["properties"][key]["type"] == ("integer" if isinstance(value, int) else "string")
            assert str(value) in example.question
        descriptions = [intent for intent in skills_tools.INTENTS if _describes(intent, tools[call["name"]])]
        assert any(_asks_for(intent, example.question) for intent in descriptions), example


def _describes(intent: skills_tools.Intent, function: dict[str, Any]) -> bool:
    return function["description"] in intent.descriptions


def _asks_for(intent: skills_tools.Intent, text: str) -> bool:
    forms = (re.escape(form).replace(r"\{more\}", ".*") for form in intent.requests)
    patterns = (form.replace(r"\{0\}", r"\w+").replace(r"\{1\}", r"[\w ]+") for form in forms)
    return any(re.fullmatch(pattern, text) for pattern in patterns)


def test_answers_after_a_result_say_what_it_holds() -> None:
    for example in draw_many("results"):
        result = json.loads(str(example.messages[-2]["content"]))
        values = [str(value) for value in result.values() if value not in ("ok", "done")]
        assert all(value in example.answer for value in values), example


def test_no_tool_is_said_only_where_none_fits() -> None:
    for example in draw_many("no_tool"):
        if example.answer != skills_tools.NO_TOOL:
            continue
        functions = [tool["function"] for tool in example.tools]
        fitting = [
            intent for intent in skills_tools.INTENTS if any(_describes(intent, one) for one in functions)
        ]
        assert not any(_asks_for(intent, example.question) for intent in fitting), example


def test_every_text_fits_a_window() -> None:
    assert max(len(example.text) for name in SKILLS for example in draw_many(name, 100)) < 1800
