"""Bad words as token sequences."""

from __future__ import annotations

import pytest

from moesaic.core.errors import RequestError
from moesaic.core.request import SamplingParams
from moesaic.models import files
from moesaic.text.tokenizer import BadWords, Tokenizer, check_some_token_is_left


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(files.resolve("demo", None))


@pytest.fixture(scope="module")
def single(tokenizer: Tokenizer) -> set[str]:
    """The words of letters that are one token after a space."""
    texts = [tokenizer.decode([token]) for token in range(tokenizer.vocab_size)]
    return {text[1:] for text in texts if text[:1] == " " and text[1:].isalpha()}


def test_a_word_is_forbidden_at_the_beginning_and_after_a_space(
    tokenizer: Tokenizer, single: set[str]
) -> None:
    words = BadWords(tokenizer)
    both = [word for word in sorted(single) if len(tokenizer.encode(word, False)) == 1][:20]
    assert len(both) == 20
    for word in (*both, f" {both[0]}"):
        plain, spaced = words.sequences([word])
        assert tokenizer.decode(plain) == word.strip() and tokenizer.decode(spaced) == " " + word.strip()
    given = [both[0], "zqx", "é"]
    one_by_one = [sequence for word in given for sequence in words.sequences([word])]
    assert words.sequences([*given, both[0]]) == tuple(one_by_one)


def test_a_form_with_other_tokens_after_the_space_does_not_count(
    tokenizer: Tokenizer, single: set[str]
) -> None:
    """As in vLLM: only a form with as many tokens and another first token counts."""
    longer = [word for word in sorted(single) if len(tokenizer.encode(word, False)) > 1][:20]
    assert longer and all(len(BadWords(tokenizer).sequences([word])) == 1 for word in longer)
    for word in (*longer, "1234567", "zqxzqx"):
        plain = tokenizer.encode(word, False)
        spaced = tokenizer.encode(" " + word, False)
        both = len(plain) == len(spaced) and plain[0] != spaced[0]
        found = BadWords(tokenizer).sequences([word])
        assert found == ((tuple(plain), tuple(spaced)) if both else (tuple(plain),))


def test_words_of_a_call_are_tokenized_once(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    words, calls = BadWords(tokenizer), []
    monkeypatch.setattr(tokenizer, "encode", lambda text, **_: calls.append(text) or [1])
    for _ in range(3):
        words.sequences(("a", "b"))
    assert calls == ["a", " a", "b", " b"]


@pytest.mark.parametrize(
    "given",
    [
        {"bad_words": ["a", ""]},
        {"bad_words": [5]},
        {"bad_words": ["x"] * 1001},
        {"bad_words": ["x" * 2**16, "y"]},
        {"allowed_token_ids": []},
        {"allowed_token_ids": [-1]},
        {"allowed_token_ids": [True]},
        {"allowed_token_ids": 5},
    ],
)
def test_what_is_wrong_is_named(given: dict) -> None:
    with pytest.raises(RequestError, match=f"^{next(iter(given))}: got .*; allowed: ") as caught:
        SamplingParams(**given)
    assert caught.value.field == next(iter(given))


def test_words_that_leave_nothing_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="at least one token"):
        BadWords(tokenizer).sequences([" "])
    check_some_token_is_left([(1,), (2, 3)], [1, 3], 5)
    check_some_token_is_left([(1,)], None, 2)
    with pytest.raises(RequestError, match="every token of allowed_token_ids"):
        check_some_token_is_left([(1,), (3,)], [1, 3], 5)
    with pytest.raises(RequestError, match="forbid every token"):
        check_some_token_is_left([(0,), (1,)], None, 2)
