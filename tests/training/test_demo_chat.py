"""The demo model's chat template, in transformers and in this package, and its training windows."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

import demo_chat
import demo_skill_list
import demo_stream
from moesaic.text.parsers.table import detect_formats

SKILLS = demo_skill_list.list_skills()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """A small tokenizer of the skills alone."""
    texts = list(demo_stream.tokenizer_texts([], SKILLS, 1, 1000))
    return demo_stream.train_tokenizer(texts, 700)


def test_transformers_renders_the_same_texts(tokenizer: Any, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    make: Any = PreTrainedTokenizerFast
    fast = make(tokenizer_object=tokenizer, chat_template=demo_chat.CHAT_TEMPLATE)
    rng = random.Random(3)
    for _ in range(40):
        example = demo_skill_list.draw_conversation(rng, SKILLS, dict.fromkeys(SKILLS, 1.0), False)
        messages, tools = list(example.messages), list(example.tools) or None
        options: dict[str, Any] = {"tools": tools, "tokenize": False, "enable_thinking": True}
        assert fast.apply_chat_template(messages, **options) == example.text
        asked = fast.apply_chat_template(messages[:-1], add_generation_prompt=True, **options)
        assert asked == example.prompt
        assert example.text == f"{example.prompt}{example.answer}<|im_end|>\n"


def test_the_server_reads_calls_and_expects_no_reasoning() -> None:
    formats = detect_formats(demo_chat.CHAT_TEMPLATE)
    assert (formats.calls, formats.reasoning, formats.takes_tools) == ("hermes", None, True)
    assert not formats.text_arguments and not formats.text_descriptions


def test_instructions_stand_first_and_later_where_they_are() -> None:
    developer = {"role": "developer", "content": "Be brief."}
    user = {"role": "user", "content": "Hi"}
    function = {"name": "f"}
    tool = {"type": "function", "function": function}
    head = "<|im_start|>system\nBe brief."
    tools = 'Tools, called as <tool_call>{"name": ..., "arguments": {...}}</tool_call>:\nf:  {}<|im_end|>\n'
    assert demo_chat.render([developer, user]).startswith(f"{head}<|im_end|>\n<|im_start|>user\n")
    assert demo_chat.render([developer, user], [tool]).startswith(f"{head}\n{tools}")
    assert demo_chat.render([user], [function]).startswith(f"<|im_start|>system\n{tools}")
    assert "developer\nBe brief." in demo_chat.render([user, developer])


def test_arguments_of_earlier_calls_may_be_text_or_objects() -> None:
    call = demo_chat.write_call("f", {"a": 1})
    as_text = {**call, "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]}
    assert demo_chat.render([call]) == demo_chat.render([as_text])
    assert '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>' in demo_chat.render([call])


def test_digits_are_tokens_of_their_own(tokenizer: Any) -> None:
    tokens = tokenizer.encode("12 + 305 = 317").tokens
    assert [token for token in tokens if token.isdigit()] == list("12305317")


def test_windows_teach_exactly_the_answers(tokenizer: Any) -> None:
    windows = demo_stream.SkillWindows(SKILLS, tokenizer, 1)
    batch = windows.take(5, 3, 512)
    again = demo_stream.SkillWindows(SKILLS, tokenizer, 1).take(5, 3, 512)
    assert batch.tokens.equal(again.tokens) and batch.targets.equal(again.targets)
    assert not windows.take(6, 3, 512).tokens.equal(batch.tokens)
    wanted = batch.targets >= 0
    following = batch.tokens.roll(-1, dims=1)
    assert batch.targets[wanted].equal(following[wanted])
    assert batch.documents is not None
    for number in range(int(batch.documents.max())):
        here = batch.documents == number
        text = tokenizer.decode(batch.tokens[here].tolist(), skip_special_tokens=False)
        learned = tokenizer.decode(batch.targets[here & wanted].tolist(), skip_special_tokens=False)
        if not text.startswith("<|im_start|>"):
            assert text.endswith("<|endoftext|>") and text.endswith(learned)
            continue
        parts = text.split("<|im_start|>assistant\n")[1:]
        assert learned == "".join(part.split("<|im_end|>")[0] + "<|im_end|>" for part in parts)
