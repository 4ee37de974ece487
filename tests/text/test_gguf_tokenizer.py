"""Tokenizers from the metadata of GGUF files, compared with the tokenizer.json that they were made from."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from gguf import GGUFWriter, TokenType
from tests.text.test_tiktoken_model import GOLDEN, RANKS, SMALL, written
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from moesaic.core.errors import CheckpointError
from moesaic.models.files import generation_defaults
from moesaic.text import gguf_tokenizer, tiktoken_model
from moesaic.text.gguf_tokenizer import PATTERNS
from moesaic.text.tokenizer import Tokenizer, byte_level_alphabet

TEXT = (
    "The Quick brown-fox's 12 dogs can't JUMP over 3456789 lazy GGUFs... don't THEY?\n\n  x = foo_bar(y);\n"
    "Größe naïve cafe\u0301 Ωμέγα Привет, мир! 你好，世界。こんにちは 안녕하세요 😀👍🏽 \t tab\r\n end   "
)
SAMPLES = [
    TEXT,
    "",
    " ",
    "a",
    "hello <|im_start|>user\nhi<|im_end|>",
    "<think>no</think>",
    "9999 ½ ²",
    "é e\u0301",
]
TEMPLATE = "{% for m in messages %}{{ bos_token }}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
SPECIAL, DEFINED = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], ["<think>", "</think>"]


def file_of(path: Path, keys: Mapping[str, Any], **more: Any) -> Path:
    """A GGUF file with a tokenizer alone. keys: after tokenizer.ggml. None leaves one out."""
    writer = GGUFWriter(str(path), "qwen3moe")
    for key, value in (dict(keys) | more).items():
        full = f"tokenizer.ggml.{key}" if key != "chat_template" else "tokenizer.chat_template"
        if isinstance(value, bool):
            writer.add_bool(full, value)
        elif isinstance(value, int):
            writer.add_uint32(full, value)
        elif isinstance(value, str):
            writer.add_string(full, value)
        elif value is not None:
            writer.add_array(full, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def trained(patterns: Sequence[str], composed: bool, ignore_merges: bool = False) -> tokenizers.Tokenizer:
    """A small byte-level tokenizer."""
    found = tokenizers.Tokenizer(models.BPE(ignore_merges=ignore_merges))
    splits = [pre_tokenizers.Split(Regex(one), behavior="isolated") for one in patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    found.decoder = decoders.ByteLevel()
    if composed:
        found.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    found.train_from_iterator([TEXT] * 3, trainer)
    found.add_special_tokens(SPECIAL)
    found.add_tokens(DEFINED)
    return found


def keys_of(own: tokenizers.Tokenizer, pre: str) -> dict[str, Any]:
    """What llama.cpp's converter writes for a byte-level tokenizer, whose model has two more rows."""
    model = json.loads(own.to_str())["model"]
    size = own.get_vocab_size()
    tokens = [str(own.id_to_token(token)) for token in range(size)]
    kinds = [TokenType.CONTROL if each in SPECIAL else TokenType.NORMAL for each in tokens]
    kinds = [
        TokenType.USER_DEFINED if each in DEFINED else kind for each, kind in zip(tokens, kinds, strict=True)
    ]
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": [*tokens, f"[PAD{size}]", f"[PAD{size + 1}]"],
        "token_type": [*map(int, kinds), 5, 5],
        "merges": [" ".join(merge) for merge in model["merges"]],
        "eos_token_id": tokens.index("<|im_end|>"),
        "padding_token_id": tokens.index("<|endoftext|>"),
    }


@pytest.fixture(scope="module")
def own() -> tokenizers.Tokenizer:
    return trained(PATTERNS["qwen2"].patterns, composed=True)


def same(ours: Tokenizer, theirs: tokenizers.Tokenizer) -> None:
    """Whether two tokenizers encode and decode alike."""
    for text in SAMPLES:
        ids = theirs.encode(text).ids
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids)
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids, skip_special_tokens=False)


def test_ids_are_those_of_tokenizer_json(own: tokenizers.Tokenizer, tmp_path: Path) -> None:
    ours = Tokenizer(file_of(tmp_path / "a.gguf", keys_of(own, "qwen2")))
    same(ours, own)
    assert ours.vocab_size == own.get_vocab_size()
    assert ours.encode("e\u0301") == ours.encode("é")
    assert ours.decode([own.get_vocab_size()]) == ""  # a row of the embedding that is no token


def test_a_bos_token_is_added_where_the_file_says_so(own: tokenizers.Tokenizer, tmp_path: Path) -> None:
    keys = keys_of(own, "qwen2") | {"bos_token_id": own.token_to_id("<|endoftext|>")}
    plain = Tokenizer(file_of(tmp_path / "a.gguf", keys)).encode("hi")
    first = own.token_to_id("<|endoftext|>")
    assert Tokenizer(file_of(tmp_path / "b.gguf", keys, add_bos_token=True)).encode("hi") == [first, *plain]
    llama = trained(PATTERNS["llama-bpe"].patterns, composed=False, ignore_merges=True)
    keys = keys_of(llama, "llama-bpe") | {"bos_token_id": first}
    assert Tokenizer(file_of(tmp_path / "c.gguf", keys)).encode("hi")[0] == first
    assert Tokenizer(file_of(tmp_path / "d.gguf", keys, add_bos_token=False)).encode("hi")[0] != first


@pytest.mark.slow
def test_the_chat_template_and_its_special_tokens(own: tokenizers.Tokenizer, tmp_path: Path) -> None:
    keys = keys_of(own, "qwen2") | {
        "bos_token_id": own.token_to_id("<|endoftext|>"),
        "chat_template": TEMPLATE,
    }
    ours = Tokenizer(file_of(tmp_path / "a.gguf", keys))
    try:
        ids = ours.chat([{"role": "user", "content": "hi"}], add_generation_prompt=False)
        assert ids == own.encode("<|endoftext|><|im_start|>hi<|im_end|>").ids
    finally:
        ours.close()


@pytest.mark.slow
def test_every_known_end_of_an_answer_counts(own: tokenizers.Tokenizer, tmp_path: Path) -> None:
    """Files name one id. Models of chats end answers with others too."""
    from tests.support import gguf_files, model_configs, tiny_models

    source = tiny_models.save(
        tiny_models.build("qwen3_moe", model_configs.qwen3(vocab_size=500)), tmp_path / "s"
    )

    def with_tokens(writer: GGUFWriter) -> None:
        keys = keys_of(own, "qwen2")
        writer.add_token_list(keys["tokens"])
        writer.add_token_types(keys["token_type"])
        writer.add_eos_token_id(keys["eos_token_id"])
        writer.add_float32("general.sampling.temp", 0.5)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_files, "byte_tokens", with_tokens)
        file, _ = gguf_files.write(source, tmp_path / "made")
    ends = sorted(own.token_to_id(each) for each in ("<|im_end|>", "<|endoftext|>"))
    assert generation_defaults(file).eos_token_ids == tuple(ends)
    assert generation_defaults(file).sampling == {"temperature": 0.5}


SPLITS = {
    "qwen2": ["I", "'m", " at", " ", "1", "2", "3", "4", "!\n\n", " ", " 你好", ",x"],
    "qwen35": ["I", "'m", " at", " ", "1", "2", "3", "4", "!\n\n", " ", " 你好", ",x"],
    "llama-bpe": ["I", "'m", " at", " ", "123", "4", "!\n\n", " ", " 你好", ",x"],
    "lfm2": ["I", "'m", " at", " ", "123", "4", "!\n\n", " ", " 你好", ",x"],
    "glm4": ["I", "'m", " at", " ", "123", "4", "!\n\n", " ", " 你好", ",x"],
    "gpt-2": ["I", "'m", " at", " 1234", "!", "\n\n ", " 你好", ",", "x"],
    "starcoder": ["I", "'m", " at", " ", "1", "2", "3", "4", "!", "\n\n ", " 你好", ",", "x"],
    "gpt-4o": ["I'm", " at", " ", "123", "4", "!\n\n", " ", " 你好", ",x"],
    "tekken": ["I", "'m", " at", " ", "1", "2", "3", "4", "!\n\n", " ", " 你好", ",x"],
    "deepseek-v3": ["I", "'m", " at", " ", "123", "4", "!\n\n", "  ", "你好", ",x"],
    "deepseek-llm": ["I", "'", "m", " at", " ", *"1234", "!", *"\n\n", "  ", "你好", ",", "x"],
}


@pytest.mark.parametrize("pre", SPLITS)
def test_patterns_split_as_by_hand(pre: str) -> None:
    pieces = [tokenizers.NormalizedString("I'm at 1234!\n\n  你好,x")]
    for pattern in PATTERNS[pre].patterns:
        pieces = [part for one in pieces for part in one.split(Regex(pattern), "isolated")]
    assert [str(piece.normalized) for piece in pieces] == SPLITS[pre]


@pytest.mark.parametrize("text", SAMPLES)
def test_starcoder_and_smollm_split_digits_as_their_tokenizer_json(text: str) -> None:
    theirs = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for name in ("starcoder", "smollm"):
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PATTERNS[name].patterns]
        ours = pre_tokenizers.Sequence([*splits, byte_level])
        assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text)


@pytest.mark.slow
def test_patterns_are_those_of_transformers() -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS as THEIRS
    from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX

    assert PATTERNS["qwen35"].patterns == (PRETOKENIZE_REGEX,)
    both = PATTERNS.keys() & THEIRS.keys()
    assert len(both) >= 8
    assert {name: PATTERNS[name].patterns for name in both} == {name: (THEIRS[name],) for name in both}


def sentencepieces() -> dict[str, Any]:
    """A small vocabulary: tokens of bytes, characters and words, whose scores fall."""
    words = [
        "\u2581t",
        "he",
        "\u2581the",
        "in",
        "er",
        "\u2581a",
        "re",
        "on",
        "\u2581the" + "re",
        "\u2581h",
        "ello",
    ]
    words += ["ll", "llo", "hello", "\u2581hello", "\u2581\u2581", "th", "in" + "g"]
    characters = sorted({*"\u2581the quick brown fox,.?!helloingé".replace(" ", "")})
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [2, 3, 3, *[6] * 256]
    tokens, scores = [*tokens, *words, *characters], [0.0] * 259
    scores += [-1.0 - at for at in range(len(words))] + [-100.0 - at for at in range(len(characters))]
    return {
        "model": "llama",
        "pre": "default",
        "tokens": tokens,
        "scores": scores,
        "token_type": [*kinds, *[1] * (len(tokens) - len(kinds))],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }


def test_sentencepiece_merges_by_scores(tmp_path: Path) -> None:
    keys = sentencepieces()
    ours = Tokenizer(file_of(tmp_path / "a.gguf", keys))
    ids = ours.encode("hello there")
    assert [keys["tokens"][each] for each in ids] == ["<s>", "\u2581hello", "\u2581there"]
    assert ours.decode(ids) == "hello there"
    emoji = ours.encode("the 😀", add_special_tokens=False)
    assert [keys["tokens"][each] for each in emoji[-4:]] == ["<0xF0>", "<0x9F>", "<0x98>", "<0x80>"]
    assert ours.decode(emoji) == "the 😀" and ours.token_bytes(emoji[-1]) == b"\x80"
    other = Tokenizer(file_of(tmp_path / "b.gguf", keys, add_space_prefix=False, add_bos_token=False))
    assert [keys["tokens"][each] for each in other.encode("hello")] == ["hello"]


@pytest.mark.slow
def test_sentencepiece_has_the_ids_of_transformers(tmp_path: Path) -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import (
        convert_gguf_tokenizer,
        get_gguf_tokenizer,
    )

    file = file_of(tmp_path / "a.gguf", sentencepieces())
    architecture, found, _ = get_gguf_tokenizer(str(file))
    theirs, _ = convert_gguf_tokenizer(architecture, found)
    ours = Tokenizer(file)
    for text in ("hello there", "the quick brown fox, is it? No!", "a  b", "thering on 你好é", "x\ny"):
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False) == ids
        assert ours.decode(ids) == theirs.decode(ids)


@pytest.mark.slow
@pytest.mark.parametrize("pre", ["qwen2", "gpt-4o", "tekken", "llama-bpe"])
def test_byte_level_has_the_ids_of_transformers(pre: str, tmp_path: Path) -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import (
        convert_gguf_tokenizer,
        get_gguf_tokenizer,
    )

    own = trained(PATTERNS[pre].patterns, composed=False)
    file = file_of(tmp_path / "a.gguf", keys_of(own, pre))
    architecture, found, _ = get_gguf_tokenizer(str(file))
    theirs, _ = convert_gguf_tokenizer(architecture, found)
    ours = Tokenizer(file)
    for text in SAMPLES[:-1]:  # transformers leaves out the composed form
        text = text.replace("e\u0301", "é")
        if not PATTERNS[pre].ignore_merges:
            assert ours.encode(text, add_special_tokens=False) == theirs.encode(text).ids


def test_kimi_has_the_ids_of_tiktoken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tiktoken_model, "KNOWN_TOKENIZERS", (SMALL,))
    character = {byte: shown for shown, byte in byte_level_alphabet().items()}
    theirs = Tokenizer(written(tmp_path / "tiktoken"))
    added = [str(theirs._tokenizer.id_to_token(len(RANKS) + at)) for at in range(GOLDEN["reserved"])]
    kinds = [TokenType.USER_DEFINED if "tool" in each else TokenType.CONTROL for each in added]
    keys = {
        "model": "gpt2",
        "pre": "kimi-k2",
        "tokens": [*("".join(character[byte] for byte in token) for token in RANKS), *added],
        "token_type": [*[1] * len(RANKS), *map(int, kinds)],
        "merges": ["a b"],
        "bos_token_id": len(RANKS),
    }
    ours = Tokenizer(file_of(tmp_path / "a.gguf", keys))
    for text in [*SAMPLES, added[2] + " x"]:
        assert ours.encode(text) == theirs.encode(text)
    keys["token_type"] = [*[int(TokenType.CONTROL)] * 2, *[1] * (len(keys["tokens"]) - 2)]
    with pytest.raises(CheckpointError, match="token_type: got 'another order'; allowed: tokens of text"):
        Tokenizer(file_of(tmp_path / "b.gguf", keys))


Change = Callable[[dict[str, Any]], Any]
WRONG: dict[str, tuple[Change, str]] = {
    "another model": (lambda keys: keys.update(model="bert"), "model: got 'bert'; allowed: gpt2, llama"),
    "no model": (lambda keys: keys.update(model=None), "model: got 'None'; allowed: gpt2, llama"),
    "no pattern": (lambda keys: keys.update(pre=None), "pre: got 'None'; allowed: chatglm-bpe, dbrx, "),
    "the default pattern": (lambda keys: keys.update(pre="default"), "pre: got 'default'; allowed: chatglm"),
    "no tokens": (lambda keys: keys.update(tokens=None), "tokens is missing"),
    "tokens of numbers": (lambda keys: keys.update(tokens=[1, 2]), "tokens is missing"),
    "no merges": (lambda keys: keys.update(merges=None), "merges is missing"),
    "a merge of one token": (lambda keys: keys["merges"].append("a"), "merges: got 'a'; allowed: two tokens"),
    "a merge of no tokens": (lambda keys: keys["merges"].append("q qq"), "tokenizer: "),
    "few types": (lambda keys: keys["token_type"].pop(), "types'; allowed: "),
    "a token twice": (lambda keys: keys["tokens"].__setitem__(3, "a"), "tokens: got 'two tokens with the"),
    "an end that is no token": (lambda keys: keys.update(eos_token_id=5000), "eos_token_id: got '5000'"),
    "an end after texts": (lambda keys: keys.update(add_eos_token=True), "add_eos_token: got 'True'"),
    "a word for a flag": (lambda keys: keys.update(add_bos_token="no"), "add_bos_token: got 'no'"),
    "sentencepiece without scores": (lambda keys: keys.update(model="llama"), "scores: allowed: a number"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_wrong_metadata_is_one_line(own: tokenizers.Tokenizer, tmp_path: Path, what: str) -> None:
    change, says = WRONG[what]
    keys = keys_of(own, "qwen2")
    change(keys)
    file = file_of(tmp_path / "a.gguf", keys)
    with pytest.raises(CheckpointError) as refused:
        gguf_tokenizer.read(file)
    assert says in str(refused.value) and "\n" not in str(refused.value)
    assert str(file) in str(refused.value) and len(str(refused.value)) < 500
