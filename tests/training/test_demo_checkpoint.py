"""The checkpoint in the package: its files, its figures in the pages, and its answers in this engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import demo_chat
import demo_skill_list
import draw_skills
import write_results
from demo_skills import held_out_examples
from moesaic import LLM, SamplingParams
from moesaic.models import files

DOCS = Path(__file__).parent.parent.parent / "docs"
DEMO = files.resolve("demo")
MOST_BYTES = 16 << 20
SKILLS = demo_skill_list.list_skills()
AIM, BELOW_AIM = 0.9, {"lists": 0.88}
"""The share of right answers that each skill should have, and what one has that misses it."""
QUESTIONS = 12
"""Held-out ones of each skill. evaluation.json has the figures of many more."""


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo", threads=1)


def test_it_is_small_and_has_the_template_of_its_training() -> None:
    assert sum(file.stat().st_size for file in DEMO.iterdir()) <= MOST_BYTES
    settings = json.loads((DEMO / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == demo_chat.CHAT_TEMPLATE


def test_it_was_right_in_nine_of_ten_questions_of_each_skill() -> None:
    skills = json.loads((DEMO / "evaluation.json").read_text())["skills"]
    assert set(SKILLS) <= set(skills)
    assert {name for name, row in skills.items() if row["share"] < BELOW_AIM.get(name, AIM)} == set()


def test_the_pages_show_its_figures() -> None:
    page = write_results.PAGE.read_text(encoding="utf-8")
    assert write_results.replace_results(page, DEMO) == page, "run: python training/write_results.py"
    shares = draw_skills.read_shares(DEMO / "evaluation.json")
    drawn = (DOCS / "skill-map.svg").read_text(encoding="utf-8")
    assert drawn == draw_skills.draw(draw_skills.TITLE, shares), "run: python training/draw_skills.py"


@pytest.mark.slow
@pytest.mark.parametrize("name", SKILLS)
def test_the_engine_answers_held_out_questions(name: str, llm: LLM) -> None:
    exact = 0
    for example in held_out_examples(SKILLS[name], name, QUESTIONS, seed=2):
        messages: Any = list(example.messages[:-1])
        prompt = llm.tokenizer.chat(messages, tools=list(example.tools) or None)
        [answer] = llm.generate([prompt], SamplingParams(max_tokens=200, temperature=0.0))
        exact += answer.text == example.answer
    assert exact >= 0.75 * QUESTIONS
