"""The masks of a grammar's filter, against trying every token."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLParserLimits

from moesaic.core.structured_outputs import StructuredOutputsParams
from moesaic.text.structured.grammar import make_grammar
from moesaic.text.structured.token_filter import GrammarFilter, Masks
from moesaic.text.structured.vocabulary import Vocabulary

WORDS = ["{", "}", '"', ":", ",", "a", "b", '"a"', '":', "1", "12", "[", "]", " ", "true", "tru", "e", "\n"]
END, UNUSED = 18, 19
"""The end-of-sequence token, and a token without bytes."""
WIDTH = 37
"""More logits than tokens, as in models whose head is padded."""
VOCABULARY = Vocabulary([*(word.encode() for word in WORDS), b"<end>", b""], frozenset({END}))
SCHEMA = {"type": "object", "additionalProperties": {"enum": [1, 12, True, ["a"]]}}

Build = Callable[[], GrammarFilter]


@pytest.fixture(scope="module")
def build() -> Build:
    tokenizer = VOCABULARY.build_tokenizer(WIDTH, (END,))
    grammar = make_grammar(StructuredOutputsParams(json=SCHEMA), {})
    return lambda: GrammarFilter(LLMatcher(tokenizer, grammar), WIDTH)


def allowed(masks: Masks, row: int) -> list[int]:
    bits = np.unpackbits(masks[row].view(np.uint8), bitorder="little")
    assert not bits[WIDTH:].any(), "no bit is set behind the last logit"
    return np.flatnonzero(bits).tolist()


def one_by_one(build: Build, tokens: list[int]) -> list[int]:
    """Each token that a fresh filter accepts behind `tokens`."""
    found = []
    for token in range(WIDTH):
        one = build()
        assert one.accept(tokens)
        if one.accept([token]):
            found.append(token)
    return found


@pytest.mark.slow
@given(st.data())
@settings(max_examples=10)
def test_masks_allow_what_is_accepted(build: Build, data: st.DataObject) -> None:
    one, tokens = build(), []
    for _ in range(data.draw(st.integers(0, 12))):
        mask = allowed(one.masks(), 0)
        if mask == [END]:
            break
        tokens.append(data.draw(st.sampled_from([token for token in mask if token != END])))
        assert one.accept(tokens[-1:])
    assert allowed(one.masks(), 0) == one_by_one(build, tokens)
    assert UNUSED not in allowed(one.masks(), 0)


def test_drafted_tokens_change_nothing(build: Build) -> None:
    one = build()
    text = ["{", '"a"', ":", "1", "}"]
    drafted = [WORDS.index(word) for word in text]
    masks = one.masks(drafted)
    assert len(masks) == 6
    for row in range(6):
        assert allowed(masks, row) == one_by_one(build, drafted[:row])
    assert one.valid(drafted) == 5
    assert allowed(one.masks(), 0) == [WORDS.index("{")]
    wrong = [*drafted[:2], WORDS.index("]"), *drafted[3:]]
    assert one.valid(wrong) == 2
    assert len(one.masks(wrong)) == 3, "the last mask is that of the place of the wrong token"
    assert one.accept(drafted) and one.accept([END])


def test_tokens_are_taken_back(build: Build) -> None:
    one = build()
    tokens = [WORDS.index(word) for word in ("{", '"a"', ":", "1")]
    assert one.accept(tokens)
    before = one.masks()
    assert one.accept([WORDS.index("}"), END])
    one.roll_back(2)
    assert np.array_equal(one.masks(), before)
    one.roll_back(4)
    assert allowed(one.masks(), 0) == [WORDS.index("{")]


def test_after_a_token_that_is_not_allowed_nothing_is(build: Build) -> None:
    one = build()
    assert not one.accept([WORDS.index("]")])
    assert allowed(one.masks(), 0) == []
    assert one.valid([WORDS.index("{")]) == 0
    assert not one.accept([WORDS.index("{")])
    assert "doesn't satisfy the grammar" in one.error


def test_a_form_beyond_the_limits_allows_nothing() -> None:
    grammar = make_grammar(StructuredOutputsParams(grammar='start: x*\nx: "a" x? "b"? | "a" "b" x | x x'), {})
    tokenizer, limits = VOCABULARY.build_tokenizer(WIDTH, (END,)), LLParserLimits(step_max_items=3)
    one = GrammarFilter(LLMatcher(tokenizer, grammar, log_level=0, limits=limits), WIDTH)
    assert allowed(one.masks(), 0) == []
    assert "Too many items" in one.error


def test_the_end_ends_a_complete_answer(build: Build) -> None:
    one = build()
    assert one.accept([WORDS.index("{"), WORDS.index("}")])
    assert allowed(one.masks(), 0) == [END]
    assert one.accept([END])
