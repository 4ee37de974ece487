"""Tokenizers of SentencePiece's kind, such as Mixtral's: a word's token begins with the space before it.

Their decoders drop that space from the first token of a text. The answer of a completion goes on with the
prompt's text, so its first token is not the first of a text; that of a chat is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models, normalizers

from moesaic.text.tokenizer import Tokenizer
from tests.support.fake_worker import BOS, EOS, TEMPLATE

from .conftest import MODEL, Live, launched

WORD = "▁"


def spaced_tokenizer(path: Path) -> Tokenizer:
    """Letters, signs, and tokens for " a", " b" and " c", each with the number before that of its letter."""
    pieces = ["<unk>", WORD, f"{WORD}a", "a", f"{WORD}b", "b", f"{WORD}c", "c", *"defghijklmnopqrstuvwxyz:[]"]
    pieces += [f"<unused{number}>" for number in range(len(pieces), BOS)]
    vocab = {piece: number for number, piece in enumerate([*pieces, "<s>", "</s>"])}
    assert (vocab["<s>"], vocab["</s>"]) == (BOS, EOS)
    tokenizer = HFTokenizer(models.BPE(vocab, [(WORD, letter) for letter in "abc"], unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(WORD), normalizers.Replace(" ", WORD)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(WORD, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return Tokenizer(path)


@pytest.fixture(scope="module")
def spaced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with launched(spaced_tokenizer(tmp_path_factory.mktemp("spaced"))) as launch:
        yield launch()


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_begins_with_the_space_that_the_model_wrote(spaced: Live, stream: bool) -> None:
    create = spaced.openai.completions.create
    if stream:
        text = "".join(c.choices[0].text for c in create(model=MODEL, prompt="say:a b", stream=True))
    else:
        text = create(model=MODEL, prompt="say:a b").choices[0].text
    assert text == " a b"
    assert create(model=MODEL, prompt="say:a b", echo=True).choices[0].text == "say:a b a b"


def test_a_stop_string_may_begin_with_that_space(spaced: Live) -> None:
    choice = spaced.openai.completions.create(model=MODEL, prompt="say:a b", stop=" a").choices[0]
    assert (choice.text, choice.finish_reason) == ("", "stop")


def test_a_chat_answer_begins_with_its_first_word(spaced: Live) -> None:
    body = {"messages": [{"role": "user", "content": "b"}], "chat_template_kwargs": {"reply": "a c"}}
    answer = spaced.post("/v1/chat/completions", **body).json()
    assert answer["choices"][0]["message"]["content"] == "a c"
    going_on = {"continue_final_message": True, "add_generation_prompt": False}
    message = {"role": "assistant", "content": "say:c"}
    answer = spaced.post("/v1/chat/completions", messages=[message], **going_on).json()
    assert answer["choices"][0]["message"]["content"] == " c"


@pytest.mark.parametrize("echo", [False, True])
def test_tokens_carry_their_space_and_offsets_point_at_them(spaced: Live, echo: bool) -> None:
    answer = spaced.openai.completions.create(model=MODEL, prompt="say:a b", echo=echo, logprobs=0)
    text, scores = answer.choices[0].text, answer.choices[0].logprobs
    assert scores is not None and scores.tokens is not None and scores.text_offset is not None
    assert scores.tokens[-3:] == [" a", " b", "</s>"]
    assert "".join(scores.tokens[:-1]) == (" " + text if echo else text)
    # The first token of the echoed prompt is the space that its text has lost.
    places = list(zip(scores.text_offset, scores.tokens, strict=True))[echo:-1]
    assert places and all(text.startswith(token, at) for at, token in places)


def test_offsets_of_a_prompt_with_special_tokens(spaced: Live) -> None:
    """The tokenizer puts a space before the word after one; the client's text has none there."""
    body = {"prompt": "<s>a b</s> c", "echo": True, "logprobs": 0, "max_tokens": 0}
    choice = spaced.post("/v1/completions", **body).json()["choices"][0]
    text, scores = choice["text"], choice["logprobs"]
    places = list(zip(scores["text_offset"], scores["tokens"], strict=True))
    assert text == "<s>a b</s> c"
    assert all(text.startswith(token.strip(), at + (text[at] == " ")) for at, token in places), places


def test_candidates_that_differ_in_the_space_are_two(spaced: Live) -> None:
    choice = spaced.openai.completions.create(model=MODEL, prompt="say:a", logprobs=2).choices[0]
    assert choice.logprobs is not None and choice.logprobs.top_logprobs is not None
    assert choice.logprobs.top_logprobs[0] == {" a": -0.5, "a": -1.5}
