"""Skills with short texts: lists, JSON objects of named fields, and one-line Python functions."""

from __future__ import annotations

import json
import random

from demo_skills import Example, ask, join_words
from demo_words import CITIES, COLOURS, JOBS, NAMES, PETS, WORDS, pick_name


def draw_lists(rng: random.Random) -> Example:
    """Sorts, counts, filters or picks from a short list of numbers or words."""
    are_numbers = rng.random() < 0.5
    length = rng.randint(3, 6)
    numbers = rng.sample(range(1, 31), length)
    words = rng.sample(WORDS, length)
    items: list[str] = [str(number) for number in numbers] if are_numbers else words
    kind, shown = rng.choice(("first", "last", "count", "sort", "sort", "reverse", "extra")), ", ".join(items)
    noun = "numbers" if are_numbers else "words"
    if kind == "sort":
        order = sorted(numbers) if are_numbers else sorted(words)
        asked = rng.choice((f"Sort these {noun}: {shown}", f"Put these {noun} in order: {shown}"))
        return ask(asked, ", ".join(map(str, order)))
    if kind == "reverse":
        asked = rng.choice((f"Reverse this list: {shown}", f"Write these {noun} backwards: {shown}"))
        return ask(asked, ", ".join(items[::-1]))
    if kind == "count":
        asked = rng.choice((f"How many {noun} are in this list? {shown}", f"Count these {noun}: {shown}"))
        return ask(asked, f"There are {length} {noun}.")
    if kind in ("first", "last"):
        place = 0 if kind == "first" else -1
        asked = rng.choice(
            (f"What is the {kind} of these {noun}? {shown}", f"The {kind} of these {noun}: {shown}")
        )
        return ask(asked, items[place])
    return _filter(rng, items, are_numbers)


def _filter(rng: random.Random, items: list[str], are_numbers: bool) -> Example:
    """The largest or smallest number, numbers beyond a limit, or words that begin with a letter."""
    shown = ", ".join(items)
    if not are_numbers:
        letter = rng.choice(items)[0]
        kept = [word for word in items if word.startswith(letter)]
        return ask(f"Which of these words start with {letter}? {shown}", ", ".join(kept))
    numbers = [int(item) for item in items]
    kind = rng.choice(("largest", "smallest", "above", "below"))
    if kind in ("largest", "smallest"):
        result = max(numbers) if kind == "largest" else min(numbers)
        return ask(f"What is the {kind} of these numbers? {shown}", str(result))
    limit = rng.choice((5, 10, 15, 20, 25))
    kept_numbers = [number for number in numbers if (number > limit if kind == "above" else number < limit)]
    word = "greater" if kind == "above" else "less"
    answer = ", ".join(map(str, kept_numbers)) or "None of them."
    return ask(f"Which of these numbers are {word} than {limit}? {shown}", answer)


FIELDS = ("name", "age", "city", "job", "colour", "pet")
"""Fields that a person of an extraction can have. The answer lists the wanted ones as they are asked for."""


def draw_extraction(rng: random.Random) -> Example:
    """A sentence or two about somebody, and the fields that are wanted of it as JSON."""
    person: dict[str, str | int] = {
        "name": pick_name(rng, NAMES),
        "age": rng.randint(18, 89),
        "city": pick_name(rng, CITIES),
        "job": rng.choice(JOBS),
        "colour": rng.choice(COLOURS),
        "pet": rng.choice(PETS),
    }
    known = ["name", *rng.sample(FIELDS[1:], rng.randint(2, 4))]
    wanted = rng.sample(known, rng.randint(1, min(4, len(known))))
    if rng.random() < 0.15:
        wanted = rng.sample(FIELDS, rng.randint(2, 3))
    text = _describe(rng, person, known)
    fields = join_words(wanted)
    asked = rng.choice(
        (
            f"Extract {fields} as JSON: {text}",
            f"{text}\nGive me {fields} as JSON.",
            f"Read this text and write a JSON object with {fields}.\n{text}",
        )
    )
    answer = {field: person[field] if field in known else None for field in wanted}
    return ask(asked, json.dumps(answer))


def _describe(rng: random.Random, person: dict[str, str | int], known: list[str]) -> str:
    """Sentences that tell the known fields of a person, in the order of `known`."""
    facts = {
        "age": ("is {} years old", "is {}"),
        "city": ("lives in {}", "comes from {}"),
        "job": ("works as a {}", "has a job as a {}"),
        "colour": ("likes the colour {}", "has a {} car"),
        "pet": ("has a pet {}", "keeps a {}"),
    }
    parts = [rng.choice(facts[field]).format(person[field]) for field in known if field != "name"]
    if rng.random() < 0.5:
        return f"{person['name']} {join_words(parts)}."
    return f"{person['name']} {parts[0]}. " + " ".join(f"{person['name']} {part}." for part in parts[1:])


NUMBER_NAMES = ("x", "n", "a", "value", "number")
LIST_NAMES = ("items", "values", "numbers", "data", "xs")
TEXT_NAMES = ("text", "s", "word", "line", "name")
FUNCTIONS: dict[str, tuple[tuple[str, str], ...]] = {
    "number": (
        ("adds {k} to {p}", "{p} + {k}"),
        ("subtracts {k} from {p}", "{p} - {k}"),
        ("multiplies {p} by {k}", "{p} * {k}"),
        ("divides {p} by {k}", "{p} / {k}"),
        ("returns the square of {p}", "{p} ** 2"),
        ("tells whether {p} is even", "{p} % 2 == 0"),
        ("tells whether {p} is odd", "{p} % 2 == 1"),
        ("tells whether {p} is greater than {k}", "{p} > {k}"),
        ("tells whether {p} is less than {k}", "{p} < {k}"),
        ("returns the absolute value of {p}", "abs({p})"),
    ),
    "list": (
        ("returns the sum of {p}", "sum({p})"),
        ("returns the largest of {p}", "max({p})"),
        ("returns the smallest of {p}", "min({p})"),
        ("returns the length of {p}", "len({p})"),
        ("sorts {p}", "sorted({p})"),
        ("reverses {p}", "{p}[::-1]"),
        ("returns the first of {p}", "{p}[0]"),
        ("returns the last of {p}", "{p}[-1]"),
        ("returns the first {k} of {p}", "{p}[:{k}]"),
        ("keeps those of {p} that are greater than {k}", "[v for v in {p} if v > {k}]"),
        ("keeps those of {p} that are less than {k}", "[v for v in {p} if v < {k}]"),
        ("adds {k} to each of {p}", "[v + {k} for v in {p}]"),
        ("multiplies each of {p} by {k}", "[v * {k} for v in {p}]"),
        ("keeps the even ones of {p}", "[v for v in {p} if v % 2 == 0]"),
    ),
    "text": (
        ("returns {p} in upper case", "{p}.upper()"),
        ("returns {p} in lower case", "{p}.lower()"),
        ("removes spaces around {p}", "{p}.strip()"),
        ("splits {p} into words", "{p}.split()"),
        ("reverses {p}", "{p}[::-1]"),
        ("returns the length of {p}", "len({p})"),
        ("counts the words of {p}", "len({p}.split())"),
        ("repeats {p} {k} times", "{p} * {k}"),
    ),
    "pair": (
        ("adds {p} and {q}", "{p} + {q}"),
        ("multiplies {p} and {q}", "{p} * {q}"),
        ("subtracts {q} from {p}", "{p} - {q}"),
        ("returns the larger of {p} and {q}", "max({p}, {q})"),
        ("returns the smaller of {p} and {q}", "min({p}, {q})"),
        ("tells whether {p} equals {q}", "{p} == {q}"),
    ),
}
"""What a function does -> its expression, for each kind of parameter."""
KNOWN_FUNCTIONS: tuple[tuple[str, str, str], ...] = (
    ("returns the larger of two numbers", "larger(a, b)", "max(a, b)"),
    ("returns the smaller of two numbers", "smaller(a, b)", "min(a, b)"),
    ("adds two numbers", "add(a, b)", "a + b"),
    ("subtracts two numbers", "subtract(a, b)", "a - b"),
    ("multiplies two numbers", "multiply(a, b)", "a * b"),
    ("divides two numbers", "divide(a, b)", "a / b"),
    ("squares a number", "square(x)", "x ** 2"),
    ("doubles a number", "double(x)", "x * 2"),
    ("tells whether a number is even", "is_even(x)", "x % 2 == 0"),
    ("tells whether a number is odd", "is_odd(x)", "x % 2 == 1"),
    ("returns the sum of a list", "total(items)", "sum(items)"),
    ("returns the largest item of a list", "largest(items)", "max(items)"),
    ("returns the smallest item of a list", "smallest(items)", "min(items)"),
    ("sorts a list", "sort(items)", "sorted(items)"),
    ("reverses a list", "reverse(items)", "items[::-1]"),
    ("returns the length of a list", "count(items)", "len(items)"),
    ("returns the average of a list", "average(items)", "sum(items) / len(items)"),
    ("reverses a text", "reverse(text)", "text[::-1]"),
    ("counts the words of a text", "count_words(text)", "len(text.split())"),
    ("tells whether a text is a palindrome", "is_palindrome(text)", "text == text[::-1]"),
)
"""What a function without given names does, its signature and its expression. They are always trained."""
VERBS = ("get", "make", "compute", "do", "find", "run", "apply", "take", "give", "my")
NOUNS = ("result", "value", "answer", "thing", "output", "step", "part", "number", "item", "data")


def draw_functions(rng: random.Random) -> Example:
    """A one-line Python function, mostly with a given name and given parameters."""
    if rng.random() < 0.1:
        what, signature, expression = rng.choice(KNOWN_FUNCTIONS)
        asked = rng.choice(("Write a Python function that {}.", "Write a function in Python that {}."))
        return _ask_code(asked.format(what), signature, expression, is_common=True)
    kind = rng.choice(("number", "list", "text", "pair"))
    what, expression = rng.choice(FUNCTIONS[kind])
    names = {"number": NUMBER_NAMES, "list": LIST_NAMES, "text": TEXT_NAMES, "pair": NUMBER_NAMES}[kind]
    first, second = rng.sample(names, 2)
    words = {"p": first, "q": second, "k": str(rng.randint(2, 20))}
    name = f"{rng.choice(VERBS)}_{rng.choice(NOUNS)}"
    parameters = f"{first}, {second}" if kind == "pair" else first
    asked = rng.choice(
        (
            f"Write a Python function {name}({parameters}) that {what.format(**words)}.",
            f"Write a function `{name}({parameters})` in Python. It {what.format(**words)}.",
            f"I need a Python function {name}({parameters}) that {what.format(**words)}.",
        )
    )
    return _ask_code(asked, f"{name}({parameters})", expression.format(**words))


def _ask_code(asked: str, signature: str, expression: str, is_common: bool = False) -> Example:
    answer = f"```python\ndef {signature}:\n    return {expression}\n```"
    return ask(asked, answer, is_common)
