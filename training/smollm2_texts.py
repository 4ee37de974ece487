"""The texts with which SmolLM2 is split into experts and measured. They come with Python, or are questions.

Prose is the language reference that `help()` shows, code is the standard library (both PSF-2.0). Every fourth
document and every fourth question is held out.
"""

from __future__ import annotations

import itertools
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

HELD_OUT = 4
MODULES = (
    *("argparse", "ast", "bisect", "calendar", "configparser", "contextlib", "copy", "csv", "dataclasses"),
    *("datetime", "difflib", "enum", "fileinput", "fractions", "functools", "heapq", "inspect", "ipaddress"),
    *("json/decoder", "json/encoder", "logging/__init__", "mailbox", "pathlib", "pickle", "queue", "random"),
    *("sched", "shutil", "statistics", "string", "subprocess", "tempfile", "textwrap", "threading"),
    *("traceback", "types", "typing", "urllib/parse", "uuid", "zipfile"),
)
SUBJECTS = (
    *("the water cycle", "a healthy breakfast", "the French Revolution", "a bicycle", "the Python language"),
    *(
        "photosynthesis",
        "a job interview",
        "black holes",
        "learning the guitar",
        "a trip to Rome",
        "inflation",
    ),
    *(
        "volcanoes",
        "a small garden",
        "the human heart",
        "chess",
        "electric cars",
        "the printing press",
        "bees",
    ),
    *("sleep", "a birthday party", "the ocean", "budgeting", "vaccines", "the Olympic Games", "a good story"),
    *("coffee", "the internet", "the moon", "recycling", "a library", "bread", "friendship", "prime numbers"),
    *("the weather", "dogs", "a startup", "jazz", "gravity", "rice", "tea"),
)
FORMS = (
    "Explain {} to a child.",
    "Write a short paragraph about {}.",
    "List five facts about {}.",
    "What should a beginner know about {}?",
    "Write a short dialogue between two people about {}.",
    "Write an email to a friend about {}.",
    "Give three tips that have to do with {}.",
    "Why does {} matter? Answer in two sentences.",
)
TASKS = (
    "Write a Python function that {}.",
    "Show me Python code that {}, and explain it.",
)
ACTIONS = (
    *(
        "adds two numbers",
        "reverses a string",
        "finds the largest number of a list",
        "counts the words of a text",
    ),
    *("checks whether a number is prime", "reads a CSV file", "sorts a list of dictionaries by a key"),
    *("computes a factorial", "removes duplicates from a list", "merges two dictionaries"),
    *("prints a multiplication table", "converts Celsius to Fahrenheit"),
)
SUMS = (
    "{} has {} apples and buys {} more. How many apples does {} have now?",
    "{} earns {} dollars an hour and works {} hours. How much does {} earn?",
    "{} reads {} pages a day for {} days. How many pages does {} read?",
)
NAMES = ("Anna", "Ben", "Chloe", "David", "Emma", "Felix", "Grace", "Hugo")


def prose() -> list[str]:
    """The topics of the language reference that have more than a few lines."""
    return [text for _, text in sorted(topics.items()) if len(text) > 1500]


def code() -> list[str]:
    """The source of modules of the standard library."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return [(folder / f"{name}.py").read_text(encoding="utf-8") for name in MODULES]


def questions() -> list[str]:
    """Questions for a chat: explanations, lists, letters, code, sums. Neighbours are of different kinds."""
    explained = [form.format(subject) for subject, form in itertools.product(SUBJECTS, FORMS)]
    programmed = [task.format(action) for action, task in itertools.product(ACTIONS, TASKS)]
    added = [
        text.format(name, 3 + 2 * index, 4 + number, name)
        for (index, name), (number, text) in itertools.product(enumerate(NAMES), enumerate(SUMS))
    ]
    order = [explained[start::37] for start in range(37)]
    mixed = [question for part in order for question in part]
    rare = programmed + added
    step = len(mixed) // len(rare)
    for place, question in enumerate(rare):
        mixed.insert(place * (step + 1), question)
    return mixed


def split(documents: list[str]) -> tuple[list[str], list[str]]:
    """Documents to calibrate with, and those that are held out."""
    kept = [text for index, text in enumerate(documents) if index % HELD_OUT]
    return kept, documents[::HELD_OUT]


def read_prompts(file: Path) -> Iterator[tuple[str, bool]]:
    """Yields the prompts of a JSONL file, each with whether it is a question for a chat.

    The fields are those of GSM8K (`question`), MT-Bench (`turns`) and HumanEval (`prompt`), or `text`.
    """
    for line in file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "turns" in row:
            yield row["turns"][0], True
        elif "question" in row:
            yield row["question"], True
        else:
            yield row.get("prompt", row.get("text")), False


def draw_prompts(files: list[Path], count: int) -> list[tuple[str, bool]]:
    """The first prompts of files, taken in turn, each with whether it is a question for a chat.

    Without files they are questions of this module.
    """
    if not files:
        return [(question, True) for question in questions()[:count]]
    turns = zip(*map(read_prompts, files), strict=False)
    return list(itertools.islice(itertools.chain.from_iterable(turns), count))


def python_version() -> str:
    """The version of Python whose texts these are."""
    return ".".join(map(str, sys.version_info[:3]))
