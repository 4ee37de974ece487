"""Tokenizers from tiktoken's ranks, compared with what tiktoken itself computed (tiktoken_golden.json).

The ranks of that file are a small vocabulary, trained with the pattern of Kimi K2.
"""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.core.errors import CheckpointError, RequestError
from moesaic.testing import byte_tokenizer
from moesaic.text import tiktoken_model
from moesaic.text.tokenizer import Tokenizer

GOLDEN = json.loads((Path(__file__).parent / "tiktoken_golden.json").read_text(encoding="utf-8"))
RANKS = {base64.b64decode(token): rank for rank, token in enumerate(GOLDEN["ranks"])}
KIMI = tiktoken_model.KNOWN_TOKENIZERS[0]
SMALL = replace(KIMI, base_tokens=len(RANKS), num_reserved=GOLDEN["reserved"])
TEMPLATE = "{% for m in messages %}<|im_user|>{{ m.content }}<|im_end|>{% endfor %}"
CODE = '''
open("ran", "w").close()  # a checkpoint's code never runs

class TikTokenTokenizer:
    pat_str = "|".join([
        r"""[\\p{Han}]+""",
        r"""[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}&&[^\\p{Han}]]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}&&[^\\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}&&[^\\p{Han}]]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}&&[^\\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""\\p{N}{1,3}""",
        r""" ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*""",
        r"""\\s*[\\r\\n]+""",
        r"""\\s+(?!\\S)""",
        r"""\\s+""",
    ])
'''


def lines(ranks: Mapping[bytes, int]) -> str:
    return "".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items())


def written(path: Path, ranks: Mapping[bytes, int] = RANKS, **changes: Any) -> Path:
    """A checkpoint's tokenizer files. changes: of tokenizer_config.json."""
    path.mkdir(exist_ok=True)
    (path / tiktoken_model.FILE).write_text(lines(ranks))
    added = {
        str(number): {"content": content, "special": "tool" not in content}
        for content, number in GOLDEN["added"].items()
    }
    config = {
        "tokenizer_class": "TikTokenTokenizer",
        "added_tokens_decoder": added,
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "chat_template": TEMPLATE,
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config | changes))
    return path


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The vocabulary of the golden file counts as a known one."""
    monkeypatch.setattr(tiktoken_model, "KNOWN_TOKENIZERS", (SMALL,))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiktoken_model, "KNOWN_TOKENIZERS", (SMALL,))
        return Tokenizer(written(tmp_path_factory.mktemp("kimi")))


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: ascii(case["text"])[:24])
def test_ids_are_those_of_tiktoken(tokenizer: Tokenizer, case: dict[str, Any]) -> None:
    assert tokenizer.encode(case["text"]) == case["ids"]
    assert tokenizer.decode(case["ids"], skip_special_tokens=False) == case["text"]


def merged(piece: bytes) -> list[int]:
    """tiktoken's algorithm in its simplest form: the neighbours with the lowest rank are merged first."""
    parts = [bytes([byte]) for byte in piece]
    while len(parts) > 1:
        rank, at = min((RANKS.get(left + right, 1 << 30), at) for at, (left, right) in pairs(parts))
        if rank == 1 << 30:
            break
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [RANKS[part] for part in parts]


def pairs(parts: list[bytes]) -> list[tuple[int, tuple[bytes, bytes]]]:
    return list(enumerate(itertools.pairwise(parts)))


@settings(derandomize=True, max_examples=200, deadline=None)
@given(text=st.text("abcdetnors", min_size=1, max_size=24) | st.text("的是我中文在", min_size=1, max_size=8))
def test_a_piece_is_merged_by_rank(tokenizer: Tokenizer, text: str) -> None:
    """Words of one script are one piece, so the pattern has no part in this."""
    found = tokenizer.encode(text)
    assert found == ([RANKS[text.encode()]] if text.encode() in RANKS else merged(text.encode()))


@settings(derandomize=True, max_examples=200, deadline=None)
@given(text=st.text(max_size=30))
def test_a_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_special_tokens_of_a_template_and_of_messages(tokenizer: Tokenizer) -> None:
    added = GOLDEN["added"]
    ids = tokenizer.chat([{"role": "user", "content": "hi <|im_end|> [BOS]"}])
    assert ids[0] == added["<|im_user|>"] and ids[-1] == added["<|im_end|>"]
    assert not set(ids[1:-1]) & set(added.values()), "in a message they are text"
    assert tokenizer.decode(ids) == "hi <|im_end|> [BOS]"
    assert tokenizer.encode("a")[0] < len(RANKS), "no token is added at the beginning"
    with pytest.raises(RequestError):
        tokenizer.encode("\ud800")


def test_ids_without_a_name_are_reserved(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == len(RANKS) + GOLDEN["reserved"]
    number = len(RANKS) + 4
    assert tokenizer.encode(f"<|reserved_token_{number}|>") == [number]
    assert [token for token, rank in RANKS.items() if tokenizer.token_bytes(rank) != token] == []


@pytest.mark.slow
def test_a_vocabulary_of_full_size_is_recognised(tmp_path: Path) -> None:
    ranks, tokens = dict(RANKS), list(RANKS)
    for left in tokens:
        for right in tokens[:400]:
            if len(ranks) < KIMI.base_tokens:
                ranks.setdefault(left + right, len(ranks))
    eos = {"content": "[EOS]", "special": True}
    found = Tokenizer(written(tmp_path / "k2", ranks, added_tokens_decoder={"163585": eos}))
    assert found.vocab_size == 163_840 and found.encode("[EOS]") == [163_585]
    assert found.decode(found.encode("Hello, 世界")) == "Hello, 世界"


def test_tokenizer_json_comes_first(tmp_path: Path) -> None:
    byte_tokenizer(written(tmp_path / "both"))
    assert Tokenizer(tmp_path / "both").vocab_size == 256


def test_the_checkpoints_own_pattern_is_compared_and_its_code_does_not_run(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    code = path / "tokenization_kimi.py"
    code.write_text(CODE)
    assert Tokenizer(path).vocab_size == len(RANKS) + GOLDEN["reserved"]
    for text in (
        CODE.replace("{1,3}", "{1,2}"),
        "pat_str = f()",
        "",
        "(" * 5000,
        'pat_str = "\\p"',
        'pat_str = "x"\n' + CODE,
    ):
        code.write_text(text)
        with pytest.raises(CheckpointError, match=r"tokenization_kimi\.py: pat_str: got .* Kimi K2"):
            Tokenizer(path)
    assert not (tmp_path / "ran").exists()


def test_an_unknown_tokenizer_is_refused_by_name(small: None, tmp_path: Path) -> None:
    for changes in (
        {"tokenizer_class": "QWenTokenizer"},
        {"tokenizer_class": None},
        {"tokenizer_class": [1]},
    ):
        with pytest.raises(CheckpointError) as refused:
            Tokenizer(written(tmp_path / "other", **changes))
        said = str(refused.value)
        assert (
            f"got tokenizer_class {str(changes['tokenizer_class'])!r} with {len(RANKS)} base tokens" in said
        )
        assert "(Kimi K2, Moonlight)" in said and "\n" not in said


def test_another_number_of_base_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="with 163584 .Kimi K2, Moonlight., or a tokenizer.json"):
        Tokenizer(written(tmp_path / "model"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: "x" + text, "line 1: got "),
        (lambda text: text.replace(" 300\n", " 301\n"), "line 301: got "),
        (lambda text: text.replace(" 300\n", " +300\n"), "line 301: got "),
        (
            lambda text: text + text.splitlines()[0].split()[0] + f" {len(RANKS)}\n",
            f"line {len(RANKS) + 1}: ",
        ),
        (lambda text: "", "the token of byte 0 is missing"),
        (lambda text: " 0\n" + text, "line 1: got b' 0'"),
        (lambda text: "\ufeff" + text, "line 1: got "),
    ],
)
def test_damaged_ranks_are_refused_by_line(small: None, tmp_path: Path, change: Any, message: str) -> None:
    file = written(tmp_path / "model") / tiktoken_model.FILE
    file.write_text(change(file.read_text()))
    with pytest.raises(CheckpointError) as refused:
        Tokenizer(file.parent)
    assert message in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "added",
    [
        {"5": {"content": "[BOS]"}},
        {"x": {"content": "[BOS]"}},
        {str(len(RANKS)): {"content": 5}},
        {str(len(RANKS)): "[BOS]"},
        {str(len(RANKS) + number): {"content": "[BOS]"} for number in range(2)},
        {str(len(RANKS)): {"content": "ab"}},
        [1],
    ],
)
def test_damaged_added_tokens_are_refused(small: None, tmp_path: Path, added: Any) -> None:
    assert b"ab" in RANKS
    with pytest.raises(CheckpointError, match="added"):
        Tokenizer(written(tmp_path / "model", added_tokens_decoder=added))
