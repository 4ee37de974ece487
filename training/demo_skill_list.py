"""All skills of the demo model by name, and conversations of several turns."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from demo_skills import Draw, Example, draw_one
from demo_texts import Domain
from skills_lists import draw_extraction, draw_functions, draw_lists
from skills_numbers import draw_dates, draw_prices, draw_sums
from skills_talk import draw_talk, unknown_questions
from skills_tools import draw_calls, draw_no_tool, draw_results

INSTRUCTIONS = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer briefly.",
    "Be friendly and short.",
    "You are the demo model of moesaic.",
    "Answer the user's questions.",
)
INSTRUCTION_SHARE = 0.25
TWO_TURN_SHARE = 0.15


def list_skills(domains: Sequence[Domain] = ()) -> dict[str, Draw]:
    """Every skill's drawer by name. The texts give questions that nobody can answer."""
    return {
        "sums": draw_sums,
        "prices": draw_prices,
        "dates": draw_dates,
        "lists": draw_lists,
        "extraction": draw_extraction,
        "functions": draw_functions,
        "calls": draw_calls,
        "results": draw_results,
        "no_tool": draw_no_tool,
        "talk": draw_talk,
        "unknown": unknown_questions(domains),
    }


def join_turns(rng: random.Random, earlier: Example | None, example: Example) -> Example:
    """An example, after an earlier one if neither has tools, sometimes with an instruction before it."""
    before = () if earlier is None or earlier.tools or example.tools else earlier.messages
    messages = (*before, *example.messages)
    if rng.random() < INSTRUCTION_SHARE:
        role = rng.choice(("system", "system", "developer"))
        messages = ({"role": role, "content": rng.choice(INSTRUCTIONS)}, *messages)
    return Example(messages, example.tools)


def draw_conversation(
    rng: random.Random, skills: Mapping[str, Draw], shares: Mapping[str, float], is_held_out: bool
) -> Example:
    """A conversation whose turns are all of one side of the split. shares: how often each skill comes."""
    name = rng.choices(list(shares), list(shares.values()))[0]
    example = draw_one(skills[name], rng, is_held_out)
    earlier = None
    if rng.random() < TWO_TURN_SHARE:
        earlier = draw_one(skills[rng.choice(list(skills))], rng, is_held_out)
    return join_turns(rng, earlier, example)


def held_out_conversations(skills: Mapping[str, Draw], count: int) -> list[Example]:
    """Two-turn conversations of held-out questions, for a test of context."""
    rng = random.Random("held-out:conversations")
    names = [name for name in skills if name not in ("calls", "results", "no_tool")]
    return [
        join_turns(rng, *(draw_one(skills[rng.choice(names)], rng, True) for _ in range(2)))
        for _ in range(count)
    ]
