"""Tokens beside tokenizer.json: those that it lacks, those that are special, and those that end an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moesaic import LLM, SamplingParams
from moesaic.core.errors import CheckpointError
from moesaic.core.request import FinishReason
from moesaic.models import files
from moesaic.testing import byte_tokenizer
from moesaic.text.tokenizer import Tokenizer

TEXT = "a<|im_end|>b<think>c</s>d [X] e"


def declare(number: int, text: str, **flags: object) -> dict[str, Any]:
    return {str(number): {"content": text, "lstrip": False, "rstrip": False, "normalized": False, **flags}}


def write(path: Path, file: str, value: object) -> None:
    (path / file).write_text(json.dumps(value))


DECODER = {**declare(257, "<|im_end|>", special=True), **declare(258, "<think>", special=False)}
CASES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "added_tokens_decoder": {"tokenizer_config.json": {"added_tokens_decoder": DECODER}},
    "added_tokens.json": {"added_tokens.json": {"<think>": 258, "<|im_end|>": 257}},
    "a token that is there": {
        "tokenizer_config.json": {"added_tokens_decoder": declare(256, "</s>", special=True)}
    },
    "special_tokens_map.json": {
        "special_tokens_map.json": {"eos_token": {"content": "</s>"}, "pad_token": "b"}
    },
    "a special token of the vocabulary": {"tokenizer_config.json": {"additional_special_tokens": ["b"]}},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    byte_tokenizer(tmp_path, ["</s>"])
    for file, value in CASES[case].items():
        write(tmp_path, file, value)
    ours, theirs = Tokenizer(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ids = ours.encode(TEXT)
    assert ids == theirs.encode(TEXT)
    for skip in (False, True):
        wanted = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert ours.decode(ids, skip) == wanted


def test_a_token_without_a_place_is_refused(tmp_path: Path) -> None:
    byte_tokenizer(tmp_path, ["</s>"], added_tokens_decoder=declare(300, "<far>"))
    with pytest.raises(CheckpointError, match="'<far>': got id 300; allowed: 257, the next one"):
        Tokenizer(tmp_path)


def test_a_special_token_without_an_id_is_left_out(tmp_path: Path) -> None:
    byte_tokenizer(tmp_path, ["</s>"], pad_token="[PAD]")
    assert Tokenizer(tmp_path).vocab_size == 257


@pytest.mark.parametrize(
    ("settings", "more", "ends"),
    [
        ({}, {}, ()),
        ({"eos_token": "</s>"}, {}, (256,)),
        ({"eos_token": {"content": "</s>"}}, {}, (256,)),
        ({"eos_token": "<not there>"}, {}, ()),
        ({"eos_token": None}, {"eos_token": "</s>"}, ()),
        ({}, {"eos_token": "</s>"}, (256,)),
        ({"added_tokens_decoder": DECODER, "eos_token": "</s>"}, {}, (256, 257)),
    ],
)
def test_tokens_that_end_an_answer(
    settings: dict[str, Any], more: dict[str, Any], ends: tuple[int, ...], tmp_path: Path
) -> None:
    byte_tokenizer(tmp_path, ["</s>"], **settings)
    write(tmp_path, "special_tokens_map.json", more)
    assert Tokenizer(tmp_path).end_token_ids == ends


def test_the_eos_token_of_the_tokenizer_ends_an_answer(tmp_path: Path) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=20)
    demo = LLM("demo")
    wanted = demo.generate("def", greedy)[0].outputs[0].token_ids
    end = wanted[5]
    for file in files.resolve("demo").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    vocabulary = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    name = next(text for text, number in vocabulary.items() if number == end)
    write(tmp_path, "tokenizer_config.json", settings | {"eos_token": name})
    answer = LLM(str(tmp_path)).generate("def", greedy)[0].outputs[0]
    assert answer.finish_reason is FinishReason.STOP and answer.token_ids == wanted[: wanted.index(end) + 1]


def test_templates_of_a_folder_have_the_names_of_their_files(tmp_path: Path) -> None:
    byte_tokenizer(tmp_path, ["</s>"])
    (tmp_path / "chat_template.jinja").write_text("plain {{ messages[0].content }}")
    folder = tmp_path / "additional_chat_templates"
    folder.mkdir()
    (folder / "tool_use.jinja").write_text("{{ tools | length }} tools {{ messages[0].content }}")
    (folder / "rag.jinja").write_text("other {{ messages[0].content }}")
    tokenizer = Tokenizer(tmp_path)
    question = [{"role": "user", "content": "x"}]
    assert tokenizer.render(question) == "plain x"
    assert tokenizer.render(question, tools=[{}, {}]) == "2 tools x"
    tokenizer.close()
    (tmp_path / "mine.jinja").write_text("mine {{ messages[0].content }}")
    tokenizer = Tokenizer(tmp_path, tmp_path / "mine.jinja")
    assert tokenizer.render(question, tools=[{}]) == "mine x"
    tokenizer.close()


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"])
@pytest.mark.parametrize("content", ["{", "[1]"])
def test_a_damaged_file_is_named(file: str, content: str, tmp_path: Path) -> None:
    byte_tokenizer(tmp_path, ["</s>"])
    (tmp_path / file).write_text(content)
    with pytest.raises(CheckpointError, match=f"{file}: not"):
        Tokenizer(tmp_path)
