"""The budget of reasoning: when its end is forced, and that this follows from the answer's tokens alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher

from moesaic.core.reasoning import ReasoningBudget
from moesaic.text.structured.reasoning import BudgetFilter
from moesaic.text.structured.token_filter import GrammarFilter, Masks
from moesaic.text.structured.vocabulary import Vocabulary

TEXTS = [
    "<think>",
    "</think>",
    "</",
    "think",
    ">",
    "a",
    " ",
    "\n",
    "<",
    "hm",
    "<tool>",
    "ok",
    "<think>\n",
    "é",
]
ID = {text: number for number, text in enumerate(TEXTS)}
HALVES = [len(TEXTS), len(TEXTS) + 1]
"""The two bytes of a character."""
END, WIDTH = len(TEXTS) + 2, 37
TOKENS = [*(text.encode() for text in TEXTS), *(bytes([byte]) for byte in "ü".encode()), b"<end>"]
SPECIAL = ReasoningBudget(3, "<think>", ("</think>", "<tool>"), (ID["</think>"],))
"""The end of the reasoning is one token."""
PLAIN = replace(SPECIAL, end_ids=(ID["</"], ID["think"], ID[">"]))
"""It is three."""


def ids(*texts: str) -> list[int]:
    return [ID[text] for text in texts]


def allowed(masks: Masks) -> list[int]:
    bits = np.unpackbits(masks[-1].view(np.uint8), bitorder="little")
    assert not bits[WIDTH:].any()
    return np.flatnonzero(bits).tolist()


@pytest.mark.parametrize(
    ("budget", "tokens", "forced"),
    [
        (SPECIAL, [], None),
        (SPECIAL, ids("<think>"), None),
        (SPECIAL, ids("<think>", "a", "a"), None),
        (SPECIAL, ids("<think>", "a", "a", "a"), "</think>"),
        (SPECIAL, ids("\n", " ", "<think>\n", "a", "a", "a"), "</think>"),
        (SPECIAL, ids("<", "think", ">", "a", "a", "a"), "</think>"),
        (SPECIAL, ids("<think>", "a", "a", "a", "</think>"), None),
        (SPECIAL, ids("<think>", "a", "</think>", "a", "a", "a"), None),
        (SPECIAL, ids("<think>", "</", "think", ">", "a", "a", "a"), None),
        (SPECIAL, ids("<think>", "a", "<tool>", "a", "a"), None),
        (SPECIAL, ids("ok", "<think>", "a", "a", "a", "a"), None),
        (SPECIAL, ids("a", "a", "a", "a"), None),
        (SPECIAL, ids("<think>", "a", "a", "</"), "</think>"),
        (replace(SPECIAL, starts_inside=True), ids("a", "a"), None),
        (replace(SPECIAL, starts_inside=True), ids("a", "a", "a"), "</think>"),
        (replace(SPECIAL, starts_inside=True, tokens=0), [], "</think>"),
        (replace(SPECIAL, tokens=0), ids("<think>"), "</think>"),
        (replace(SPECIAL, tokens=0), [], None),
        (PLAIN, ids("<think>", "a", "a", "a"), "</"),
        (PLAIN, ids("<think>", "a", "a", "a", "</"), "think"),
        (PLAIN, ids("<think>", "a", "a", "</"), "think"),
        (PLAIN, ids("<think>", "a", "a", "a", "</", "think"), ">"),
        (PLAIN, ids("<think>", "a", "a", "a", "</", "think", ">"), None),
        (replace(SPECIAL, can_start_later=True), ids("ok", "<think>", "a", "a", "a"), "</think>"),
        (replace(SPECIAL, can_start_later=True), ids("ok", "<think>", "a", "</think>", "<think>", "a"), None),
        (
            replace(SPECIAL, can_start_later=True),
            ids("<think>", "a", "a", "</think>", "<think>", "a"),
            "</think>",
        ),
    ],
)
def test_the_end_is_forced_behind_the_budget(
    budget: ReasoningBudget, tokens: list[int], forced: str | None
) -> None:
    one = BudgetFilter(budget, TOKENS, WIDTH)
    assert one.accept(tokens)
    assert one.restricts == (forced is not None)
    assert allowed(one.masks()) == (list(range(WIDTH)) if forced is None else [ID[forced]])


def test_another_token_than_the_forced_one_is_not_accepted() -> None:
    one = BudgetFilter(SPECIAL, TOKENS, WIDTH)
    assert one.accept(ids("<think>", "a", "a", "a"))
    assert not one.accept(ids("a")) and one.accept(ids("</think>", "ok"))


@given(st.lists(st.integers(0, END), max_size=20), st.integers(0, 20), st.sampled_from([SPECIAL, PLAIN]))
def test_a_filter_goes_back_and_on(tokens: list[int], back: int, budget: ReasoningBudget) -> None:
    one, taken = BudgetFilter(budget, TOKENS, WIDTH), list[int]()
    for token in tokens:
        taken.append(token if one.accept([token]) else allowed(one.masks())[0])
        assert taken[-1] == token or one.accept(taken[-1:])
    whole, size = allowed(one.masks()), min(back, len(taken))
    one.roll_back(size)
    drafted = one.masks(taken[len(taken) - size :])
    assert len(drafted) == size + 1 and allowed(drafted) == whole
    assert one.valid(taken[len(taken) - size :]) == size
    assert one.accept(taken[len(taken) - size :]) and allowed(one.masks()) == whole
    assert BudgetFilter(budget, TOKENS, WIDTH).accept(taken)


def with_grammar() -> BudgetFilter:
    vocabulary = Vocabulary(TOKENS, frozenset({ID["<think>"], ID["</think>"], END}))
    lark = rf"start: <[{ID['<think>']}]> /(.|\n)*/ <[{ID['</think>']}]> " + '"ok"'
    grammar = LLMatcher.grammar_from_lark("%llguidance {}\n" + lark)
    return BudgetFilter(
        SPECIAL,
        TOKENS,
        WIDTH,
        GrammarFilter(LLMatcher(vocabulary.build_tokenizer(WIDTH, (END,)), grammar), WIDTH),
    )


def test_the_grammar_holds_before_and_behind() -> None:
    one = with_grammar()
    assert allowed(one.masks()) == ids("<think>")
    assert one.accept(ids("<think>", "a", "hm", "a")) and allowed(one.masks()) == ids("</think>")
    assert one.accept(ids("</think>")) and one.restricts and ID["ok"] in allowed(one.masks())
    assert ID["a"] not in allowed(one.masks())
    one.roll_back(2)
    assert one.accept(ids("hm", "</think>", "ok")) and allowed(one.masks()) == [END]


def test_a_character_is_completed_where_a_grammar_wants_it() -> None:
    one = with_grammar()
    assert one.accept([*ids("<think>", "a", "a"), HALVES[0]])
    assert HALVES[1] in allowed(one.masks()) and ID["</think>"] not in allowed(one.masks())
    assert one.accept(HALVES[1:]) and allowed(one.masks()) == ids("</think>")
