"""Builds the tokenizer that the metadata of a GGUF file describes. Does not import torch.

The metadata names a vocabulary, merges or scores, and the pattern that splits a text. Patterns are those of
the models' own tokenizer.json. Ids are those of that file, where the pattern is among PATTERNS.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from moesaic.core.errors import CheckpointError
from moesaic.models.gguf.model import CONTROL, Model
from moesaic.text import tiktoken_model

FRONT = "tokenizer.ggml."
NORMAL, UNKNOWN, USER_DEFINED, UNUSED, BYTE = 1, 2, 4, 5, 6
"""Types of tokens, with CONTROL."""
SPACE = "\u2581"
"""What SentencePiece writes for a space."""
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_OTHER_PATTERN = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_OTHER_PATTERN}|{_SPACES}"
_QWEN2 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_OTHER_PATTERN}|{_SPACES}"
_MARK_PATTERN = (  # a mark belongs to the letter before it
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASE_PATTERN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|%s"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_GPT4O = _CASE_PATTERN % (f"{_CONTRACTION}?", f"{_CONTRACTION}?", r"\p{N}{1,3}")
_TEKKEN = _CASE_PATTERN % ("", "", r"\p{N}")
_LATIN = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅ"
    "ὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛ"
    "Ꜣ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_LATIN}]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    "[一-龥ࠀ-一가-퟿]+",
    r"\p{N}",
)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    (
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
)


@dataclass(frozen=True)
class Pattern:
    """How a text is split into pieces, which are encoded one by one."""

    patterns: tuple[str, ...]
    """Each splits what the one before it left."""
    uses_nfc: bool = False
    """Whether the text is brought into Unicode's composed form first (NFC)."""
    ignore_merges: bool = False
    """Whether a piece that is a token becomes that token, whatever the merges say."""
    bos: bool = False
    """Whether texts begin with the BOS token, if the file does not say it."""


_LLAMA = Pattern((_LLAMA3,), ignore_merges=True, bos=True)
_PLAIN = Pattern((_LLAMA3,))
_QWEN = Pattern((_QWEN2,), uses_nfc=True)
_STARCODER = Pattern((r"\p{N}", _GPT2))
PATTERNS: Mapping[str, Pattern] = {
    "chatglm-bpe": _PLAIN,
    "dbrx": _PLAIN,
    "deepseek-llm": Pattern(_DEEPSEEK_LLM),
    "deepseek-r1-qwen": Pattern((_QWEN2,)),
    "deepseek-v3": Pattern(_DEEPSEEK_V3),
    "glm4": _PLAIN,
    "gpt-2": Pattern((_GPT2,)),
    "gpt-4o": Pattern((_GPT4O,)),
    "lfm2": _LLAMA,
    "llama-bpe": _LLAMA,
    "llama-v3": _LLAMA,
    "llama3": _LLAMA,
    "minimax-m2": Pattern((_GPT4O,)),
    "olmo": Pattern((_GPT2,), uses_nfc=True),
    "qwen2": _QWEN,
    "qwen35": Pattern((_MARK_PATTERN,), uses_nfc=True),
    "refact": _STARCODER,
    "smollm": _STARCODER,
    "starcoder": _STARCODER,
    "tekken": Pattern((_TEKKEN,), ignore_merges=True),
}
"""tokenizer.ggml.pre -> its pattern."""
KIMI = "kimi-k2"
"""The one that `tiktoken_model` knows."""
MODELS = ("gpt2", "llama")


def read(path: Path) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """Returns the tokenizer of the GGUF file at `path`, and what tokenizer_config.json would say.

    Raises CheckpointError that names the key for a tokenizer that is damaged or not known.
    """
    model = Model(path)
    vocabulary = _Vocabulary(model)
    kind = vocabulary.text("model")
    if kind not in MODELS:
        raise vocabulary.make_error("model", kind, ", ".join(MODELS))
    try:
        tokenizer = _sentencepiece(vocabulary) if kind == "llama" else _byte_level(vocabulary)
    except CheckpointError:
        raise
    except Exception as error:  # the library raises a plain Exception for every defect
        raise CheckpointError(f"{path}: tokenizer: {error}") from error
    return tokenizer, vocabulary.settings(kind)


class _Vocabulary:
    """The keys `tokenizer.ggml.KEY` of a file."""

    def __init__(self, model: Model) -> None:
        self.path, self._model = model.path, model
        self.tokens = self.texts("tokens")
        kinds = model.metadata.get(f"{FRONT}token_type", [NORMAL] * len(self.tokens))
        if not isinstance(kinds, list) or len(kinds) != len(self.tokens):
            raise self.make_error("token_type", f"{len(kinds)} types", f"{len(self.tokens)}, as tokens")
        self.kinds: Sequence[int] = kinds
        used_ids = {text: number for number, text in enumerate(self.tokens) if kinds[number] != UNUSED}
        count = max(used_ids.values(), default=-1) + 1
        unused_ids = {
            text: number for number, text in enumerate(self.tokens[:count]) if kinds[number] == UNUSED
        }
        self.ids = unused_ids | used_ids
        """Text -> id of the tokens up to the last one that is used. No text becomes an unused one."""
        if len(used_ids) < len(self.tokens) - list(kinds).count(UNUSED):
            raise self.make_error("tokens", "two tokens with the same text", "texts that differ")

    def texts(self, key: str) -> list[str]:
        texts = self._model.texts(FRONT + key)
        if texts is None:
            raise CheckpointError(f"{self.path}: {FRONT}{key} is missing, or is no list of texts")
        return texts

    def text(self, key: str) -> str | None:
        text = self._model.metadata.get(FRONT + key)
        return text if isinstance(text, str) else None

    def numbers(self, key: str) -> list[float]:
        numbers = self._model.metadata.get(FRONT + key)
        if not isinstance(numbers, list) or len(numbers) != len(self.tokens):
            raise CheckpointError(f"{self.path}: {FRONT}{key}: allowed: a number for each token")
        return numbers

    def flag(self, key: str, default: bool) -> bool:
        flag = self._model.metadata.get(FRONT + key, default)
        if type(flag) is not bool:
            raise self.make_error(key, flag, "true, false")
        return flag

    def token_of_key(self, key: str) -> str | None:
        """The token whose id a key has; None if there is no such key."""
        token_id = self._model.metadata.get(FRONT + key)
        if token_id is None:
            return None
        if type(token_id) is not int or not 0 <= token_id < len(self.tokens):
            raise self.make_error(key, token_id, f"0 to {len(self.tokens) - 1}")
        return self.tokens[token_id]

    def make_error(self, key: str, got: object, choices: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {FRONT}{key}: got {str(got)[:60]!r}; allowed: {choices}")

    def make_added_tokens(self, *kinds: int) -> list[AddedToken]:
        """The tokens of these types, in the order of their ids."""
        tokens = ((text, kind) for text, kind in zip(self.tokens, self.kinds, strict=True) if kind in kinds)
        return [AddedToken(text, normalized=False, special=kind != USER_DEFINED) for text, kind in tokens]

    @property
    def pattern(self) -> Pattern:
        name = self.text("pre")
        if name is None or name not in PATTERNS:
            raise self.make_error("pre", name, ", ".join(sorted((*PATTERNS, KIMI))))
        return PATTERNS[name]

    def settings(self, kind: str) -> dict[str, Any]:
        """What tokenizer_config.json would say."""
        if self.flag("add_eos_token", False):
            raise self.make_error("add_eos_token", True, "false: a prompt goes on")
        begins = kind == "llama" or (self.text("pre") != KIMI and self.pattern.bos)
        ids = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
        special_tokens = {f"{name}_token": self.token_of_key(f"{key}_token_id") for name, key in ids.items()}
        template = self._model.metadata.get("tokenizer.chat_template")
        settings = {
            **special_tokens,
            "chat_template": template,
            "add_bos_token": self.flag("add_bos_token", begins),
        }
        return {key: value for key, value in settings.items() if value is not None}


def _byte_level(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    """Byte-level BPE, as of GPT-2."""
    if vocabulary.text("pre") == KIMI:
        return _kimi(vocabulary)
    pattern = vocabulary.pattern
    merges = []
    for merge in vocabulary.texts("merges"):
        left, _, right = merge.partition(" ")
        if not left or not right:
            raise vocabulary.make_error("merges", merge, "two tokens with a space between them")
        merges.append((left, right))
    bpe = models.BPE(vocabulary.ids, merges, ignore_merges=pattern.ignore_merges)
    tokenizer = tokenizers.Tokenizer(bpe)
    if pattern.uses_nfc:
        tokenizer.normalizer = normalizers.NFC()
    splits = [
        pre_tokenizers.Split(Regex(pattern_text), behavior="isolated") for pattern_text in pattern.patterns
    ]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, last])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(vocabulary.make_added_tokens(UNKNOWN, CONTROL, USER_DEFINED))
    return tokenizer


def _kimi(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    """The tokenizer of Kimi K2, whose ranks are the ids of its tokens."""
    byte = tiktoken_model.byte_level_alphabet()
    base = [text for text, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True) if kind == NORMAL]
    if base != vocabulary.tokens[: len(base)]:
        raise vocabulary.make_error("token_type", "another order", "tokens of text, then all others")
    unknown_text = next((text for text in base if not all(character in byte for character in text)), None)
    if unknown_text is not None:
        raise vocabulary.make_error("tokens", unknown_text, "the characters that stand for bytes")
    ranks = {bytes(byte[character] for character in text): rank for rank, text in enumerate(base)}
    known_tokenizer = next(
        candidate for candidate in tiktoken_model.KNOWN_TOKENIZERS if "Kimi K2" in candidate.models
    )
    added_tokens = [
        AddedToken(text, normalized=False, special=kind != USER_DEFINED)
        for text, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True)
        if kind != NORMAL
    ]
    return tiktoken_model.build(ranks, known_tokenizer, added_tokens)


def _sentencepiece(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    """BPE of SentencePiece: pairs merge in the order of the scores of what they become, bytes stand for
    characters that no token has."""
    ids = vocabulary.ids
    merges = _merges(ids, vocabulary.numbers("scores"), vocabulary.kinds)
    unknown_token = vocabulary.token_of_key("unknown_token_id")
    bpe = models.BPE(ids, merges, unk_token=unknown_token, fuse_unk=True, byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(bpe)
    prefix: list[Any] = [normalizers.Prepend(SPACE)] if vocabulary.flag("add_space_prefix", True) else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])
    # The decoder takes away the space that the normalizer put before the text.
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    tokenizer.add_tokens(vocabulary.make_added_tokens(UNKNOWN, CONTROL, USER_DEFINED))
    return tokenizer


def _merges(ids: Mapping[str, int], scores: Sequence[float], kinds: Sequence[int]) -> list[tuple[str, str]]:
    """Every pair of tokens that together are a token, those with the best scores first."""
    scored_pairs = []
    for text, token in ids.items():
        if kinds[token] == NORMAL:
            pairs = ((text[:split], text[split:]) for split in range(1, len(text)))
            token_pairs = [pair for pair in pairs if pair[0] in ids and pair[1] in ids]
            token_pairs.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
            scored_pairs += [(scores[token], pair) for pair in token_pairs]
    scored_pairs.sort(
        key=lambda scored_pair: (scored_pair[0], len(scored_pair[1][0]), len(scored_pair[1][1])), reverse=True
    )
    return [pair for _, pair in scored_pairs]
