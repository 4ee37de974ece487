"""The tokens in which a forced text is written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tokenizers
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from moesaic.models import files
from moesaic.text.structured import vocabulary
from moesaic.text.structured.vocabulary import Vocabulary

CHOICES = 'start: "blue house" | "blue horse"'


def written(tokenizer: LLTokenizer, lark: str, end: int) -> list[int]:
    """The answer that takes the last allowed token at each place."""
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(lark))
    found: list[int] = []
    while not found or found[-1] != end:
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        found.append(int(np.flatnonzero(bits)[-1]))
        assert matcher.consume_token(found[-1]) and len(found) < 40
    return found[:-1]


def test_a_forced_text_has_the_models_own_tokens() -> None:
    path = files.resolve("demo", None)
    read = vocabulary.read(path)
    tokens = written(read.build_tokenizer(len(read.tokens), (0,)), 'start: "return blue house;"', 0)
    assert tokens == read.encode("return blue house;") and len(tokens) < len("return blue house;")


@pytest.fixture
def sentencepiece(tmp_path: Path) -> Path:
    """A tokenizer as SentencePiece's: it adds a space to a text's beginning, and has bytes for the rest."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = [
        "b",
        "l",
        "u",
        "e",
        "▁",
        "h",
        "o",
        "s",
        "r",
        "bl",
        "ue",
        "▁h",
        "ou",
        "se",
        "blue",
        "▁blue",
        "▁hou",
    ]
    vocab = {piece: number for number, piece in enumerate([*pieces, *words])}
    merges = [
        ("b", "l"),
        ("u", "e"),
        ("▁", "h"),
        ("o", "u"),
        ("s", "e"),
        ("bl", "ue"),
        ("▁h", "ou"),
        ("▁", "blue"),
    ]
    made = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(Regex(" "), "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(parts)
    made.add_special_tokens(["</s>"])
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_a_tokenizer_that_adds_a_space(sentencepiece: Path) -> None:
    read = vocabulary.read(sentencepiece)
    text = {number: token.decode(errors="replace") for number, token in enumerate(read.tokens)}
    assert text[read.tokens.index(b" hou")] == " hou" and read.tokens[2 + 0xE9] == b"\xe9"
    found = written(read.build_tokenizer(len(read.tokens), (1,)), CHOICES, 1)
    assert [text[token] for token in found] in (["blue", " hou", "se"], ["blue", " h", "o", "r", "se"])
    found = written(read.build_tokenizer(len(read.tokens), (1,)), 'start: "blé"', 1)
    assert [read.tokens[token] for token in found] == [b"bl", b"\xc3", b"\xa9"]


def test_metaspace(tmp_path: Path) -> None:
    vocab = {
        "</s>": 0,
        "▁": 1,
        "▁yes": 2,
        "yes": 3,
        "no": 4,
        "▁no": 5,
        "y": 6,
        "e": 7,
        "s": 8,
        "n": 9,
        "o": 10,
    }
    merges = [("y", "e"), ("ye", "s"), ("n", "o"), ("▁", "yes"), ("▁", "no")]
    made = tokenizers.Tokenizer(models.BPE({**vocab, "ye": 11}, merges))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = decoders.Metaspace(prepend_scheme="first")
    made.add_special_tokens(["</s>"])
    made.save(str(tmp_path / "tokenizer.json"))
    read = vocabulary.read(tmp_path)
    assert read.tokens[2] == b" yes" and read.special == {0}
    assert written(read.build_tokenizer(16, (0,)), 'start: "yes no"', 0) == [3, 5]


def test_more_tokens_than_logits_and_fewer() -> None:
    words = Vocabulary([b"<end>", b"a", b"b", b"ab"], frozenset({0}))
    assert written(words.build_tokenizer(3, (0,)), 'start: "ab"', 0) == [1, 2]
    assert written(words.build_tokenizer(70, (0,)), 'start: "ab"', 0) in ([3], [1, 2])


def test_a_token_that_is_too_long_for_the_library_is_never_allowed() -> None:
    """The library panics at tokens of more than 1024 bytes, which some trained vocabularies have."""
    tokens = [*(bytes([byte]) for byte in range(256)), b"<end>", b"-" * 1024, b"-" * 1025]
    compiled = Vocabulary(tokens, frozenset({256})).build_tokenizer(len(tokens), (256,))
    matcher = LLMatcher(compiled, LLMatcher.grammar_from_regex("-*"))
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    assert np.flatnonzero(bits).tolist() == [ord("-"), 256, 257]
