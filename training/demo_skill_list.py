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
MORE_TURNS_SHARE = 0.25
MOST_TURNS = 5


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


def join_turns(rng: random.Random, examples: Sequence[Example]) -> Example:
    """One conversation of examples without tools, or of one with them; some have an instruction first."""
    messages = tuple(message for example in examples for message in example.messages)
    if rng.random() < INSTRUCTION_SHARE:
        role = rng.choice(("system", "system", "developer"))
        messages = ({"role": role, "content": rng.choice(INSTRUCTIONS)}, *messages)
    return Example(messages, examples[-1].tools)


def draw_conversation(
    rng: random.Random, skills: Mapping[str, Draw], shares: Mapping[str, float], is_held_out: bool
) -> Example:
    """A conversation whose turns are all of one side of the split. shares: how often each skill comes."""

    def draw_turn() -> Example:
        name = rng.choices(list(shares), list(shares.values()))[0]
        return draw_one(skills[name], rng, is_held_out)

    turns = [draw_turn()]
    while not turns[-1].tools and len(turns) < MOST_TURNS and rng.random() < MORE_TURNS_SHARE:
        turn = draw_turn()
        if turn.tools:
            break
        turns.append(turn)
    return join_turns(rng, turns)


def held_out_conversations(skills: Mapping[str, Draw], count: int) -> list[Example]:
    """Two-turn conversations of held-out questions, for a test of context."""
    rng = random.Random("held-out:conversations")
    names = [name for name in skills if name not in ("calls", "results", "no_tool")]
    return [
        join_turns(rng, [draw_one(skills[rng.choice(names)], rng, True) for _ in range(2)])
        for _ in range(count)
    ]
