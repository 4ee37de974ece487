"""What a batch file asks for, told before any of it runs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tests.support.fake_batch_server import line

from moesaic.jobs.batch import lengths
from moesaic.jobs.batch.lengths import COMPLETION, REFUSED_JOB, UNLIMITED_TOKENS, survey
from moesaic.jobs.batch.output import read_answered_keys
from moesaic.planning import Job
from moesaic.testing import byte_tokenizer
from moesaic.text.tokenizer import Tokenizer

LIMIT = 1000


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    """A token a byte; of a chat only the contents."""
    byte_tokenizer(tmp_path, chat_template="{% for m in messages %}{{ m['content'] }}{% endfor %}")
    return Tokenizer(tmp_path)


@pytest.fixture
def written(tmp_path: Path) -> Any:
    def write(*lines: str) -> Path:
        path = tmp_path / "in.jsonl"
        path.write_text("".join(one + "\n" for one in lines))
        return path

    return write


def chat(custom_id: str, content: Any, **body: Any) -> str:
    return line(custom_id, "/v1/chat/completions", messages=[{"role": "user", "content": content}], **body)


def test_worked_example(tokenizer: Tokenizer, written: Any) -> None:
    """Prompts of 10, 20 and 4 x 30 tokens, answers of 5, 16 where nothing is said, and 40."""
    path = written(
        line("a", prompt="x" * 10, max_tokens=5),
        line("b", prompt=[1] * 20),
        line("c", prompt=["y" * 30, [2] * 30], n=2, max_tokens=40),
    )
    assert survey(path, tokenizer, LIMIT) == Job(requests=6, prompt=23, generate=26, longest=70)
    # padded: to 30 tokens, and 40 may follow
    padded = Job(requests=6, prompt=23, generate=26, longest=70, padded_length=30)
    assert survey(path, tokenizer, LIMIT, pad=True) == padded
    assert math.ceil((10 + 20 + 30 + 30) / 4) == 23 and math.ceil((5 + COMPLETION + 40 + 40) / 4) == 26


def test_chats(tokenizer: Tokenizer, written: Any) -> None:
    path = written(chat("a", "x" * 10), chat("b", "x" * 10, max_completion_tokens=6, max_tokens=9))
    assert survey(path, tokenizer, LIMIT) == Job(2, 10, (UNLIMITED_TOKENS + 6) // 2, 10 + UNLIMITED_TOKENS)
    # what sets no limit gives way to the context's end
    assert survey(path, tokenizer, 100) == Job(2, 10, (90 + 6) // 2, 100)


def test_chats_with_tools(tmp_path: Path, written: Any) -> None:
    """The prompt has the tools, and the arguments of earlier calls as objects."""
    template = (
        "{{ tools | tojson }}{{ effort }}{% for m in messages %}{{ m.content }}"
        "{% for c in m.tool_calls %}{{ c.function.arguments.x }}{% endfor %}{% endfor %}"
    )
    byte_tokenizer(tmp_path, chat_template=template)
    tools: list[Any] = [{"type": "function", "function": {"name": "f"}}]
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": "12345"}'}}]
    messages = [
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c", "content": "done"},
    ]
    body = {"tools": tools, "max_tokens": 7, "chat_template_kwargs": {"effort": "high"}}
    path = written(line("a", "/v1/chat/completions", messages=messages, **body))
    tools[0]["function"]["parameters"] = {"type": "object", "properties": {}}
    prompt = len(json.dumps(tools)) + len("high12345done")
    assert survey(path, Tokenizer(tmp_path), LIMIT) == Job(1, prompt, 7, prompt + 7)


def test_lines_that_will_be_refused_count_for_nothing(tokenizer: Tokenizer, written: Any) -> None:
    refused = [
        line("long", prompt="x" * LIMIT, max_tokens=1),
        line("far", prompt="x", max_tokens=10**12),
        line("infinite", prompt="x", max_tokens=float("inf")),
        line("text", prompt="x", max_tokens="many"),
        line("minus", prompt="x", max_tokens=-5),
        line("empty", prompt=""),
        line("none", prompt=None),
        line("odd", prompt={"a": 1}),
        line("shapes", "/v1/chat/completions", messages="hello"),
        "no JSON",
        line("url", "/v1/embeddings"),
    ]
    good = line("good", prompt="x" * 8, max_tokens=4)
    found = survey(written(*refused, good), tokenizer, LIMIT)
    assert found == Job(requests=1, prompt=8, generate=4, longest=12)
    assert survey(written(*refused), tokenizer, LIMIT) == REFUSED_JOB


def test_no_template_is_no_chat(tmp_path: Path, written: Any) -> None:
    byte_tokenizer(tmp_path)
    assert survey(written(chat("a", "hi")), Tokenizer(tmp_path), LIMIT) == REFUSED_JOB


def test_what_is_done_is_left_out(tokenizer: Tokenizer, written: Any, tmp_path: Path) -> None:
    path = written(line("a", prompt="x" * 500), "no JSON", line("b", prompt="x" * 10, max_tokens=2))
    out = tmp_path / "out.jsonl"
    result: dict[str, Any] = {"id": "batch_req_1", "custom_id": "a", "response": None, "error": None}
    bad = {"id": "batch_req_2", "custom_id": None, "response": None, "error": {"line": 2}}
    out.write_text(json.dumps(result) + "\n" + json.dumps(bad) + '\n{"id": "batch_req_3", "custom_')
    assert read_answered_keys(out) == {"a", 2} and read_answered_keys(tmp_path / "none") == set()
    assert survey(path, tokenizer, LIMIT, read_answered_keys(out)) == Job(1, 10, 2, 12)
    assert survey(path, tokenizer, LIMIT, {"a", "b", 2}) is None
    assert survey(written(), tokenizer, LIMIT) is None


@pytest.mark.parametrize("last", [{"prompt": "x" * 600, "max_tokens": 9}, {"prompt": "x", "max_tokens": 608}])
def test_the_longest_is_found_behind_those_that_are_counted(
    tokenizer: Tokenizer, written: Any, monkeypatch: pytest.MonkeyPatch, last: dict[str, Any]
) -> None:
    monkeypatch.setattr(lengths, "SAMPLE_LINES", 3)
    monkeypatch.setattr(lengths, "LONGEST_LINES", 2)
    short = [line(f"s{index}", prompt="x" * 10, max_tokens=1) for index in range(20)]
    path = written(*short[:12], line("last", **last), *short[12:])
    assert survey(path, tokenizer, LIMIT) == Job(21, 10, 1, 609)
    prompt, answer = max(10, len(last["prompt"])), last["max_tokens"]
    assert survey(path, tokenizer, LIMIT, pad=True) == Job(21, 10, 1, prompt + answer, padded_length=prompt)
