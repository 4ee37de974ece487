"""Conversations whose template drops earlier reasoning: what each turn computes is what it adds."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from moesaic.testing import byte_tokenizer
from tests.server.conftest import NO_TLS, PATIENCE
from tests.support import model_configs, tiny_models

TEMPLATE = (
    "{%- set ns = namespace(last=0) %}"
    "{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{%- for m in messages %}[{{ m.role }}]"
    "{%- if m.role == 'assistant' and m.reasoning_content and loop.index0 > ns.last %}"
    "<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}\n{% endfor %}"
    "{%- if add_generation_prompt %}[assistant]<think>\n{% endif %}"
)
"""As Qwen3's: only reasoning behind the last user's message stays. An answer begins with its reasoning."""
LENGTHS = (300, 388, 705, 769, 870)
"""Tokens of the five prompts. Four and one tokens behind a multiple of 64, the opening of an answer lies on
both sides of it."""
MODELS = {
    "grouped-query attention": ("qwen3_moe", model_configs.qwen3, 16),
    "linear attention": ("qwen3_next", model_configs.qwen3_next, 64),
    "short convolutions": ("lfm2_moe", model_configs.lfm2, 64),
}
"""Type, config, and of how many tokens the part is a multiple that a prompt can go on from."""


@contextmanager
def served(path: Path) -> Iterator[httpx.Client]:
    flags = ["--port", "0", "--threads", "1", "--max-model-len", "1024", "--served-model-name", "m"]
    command = [sys.executable, "-m", "moesaic", "serve", str(path), *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = next(line for line in process.stdout if line.startswith("Serving "))
        with httpx.Client(
            base_url=line.split()[-1], timeout=PATIENCE, trust_env=False, verify=NO_TLS
        ) as client:
            yield client
    finally:
        process.kill()
        process.communicate()


def post(client: httpx.Client, path: str, **body: Any) -> Any:
    answer = client.post(path, json={"model": "m", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def read_counter(client: httpx.Client, name: str) -> float:
    found = re.search(rf"^moesaic:{name}\S* (\S+)$", client.get("/metrics").text, re.MULTILINE)
    return 0.0 if found is None else float(found.group(1))


def count_common(one: list[int], other: list[int]) -> int:
    """How many tokens both begin with."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_a_turn_computes_what_it_adds(model: str, tmp_path: Path) -> None:
    kind, make, multiple = MODELS[model]
    path = tiny_models.save(
        tiny_models.build(kind, make(vocab_size=320, max_position_embeddings=1024)), tmp_path / "model"
    )
    byte_tokenizer(path, chat_template=TEMPLATE)
    messages: list[dict[str, str]] = [{"role": "system", "content": "s" * 100}]
    last_tokens: list[int] = []
    num_cached = 0
    with served(path) as client:
        for length in LENGTHS:
            messages.append({"role": "user", "content": ""})
            num_tokens = len(post(client, "/tokenize", messages=messages)["tokens"])
            messages[-1]["content"] = f"{length}".ljust(length - num_tokens, "u")
            tokens = post(client, "/tokenize", messages=messages)["tokens"]
            assert len(tokens) == length
            answer = post(client, "/v1/chat/completions", messages=messages, max_tokens=40, temperature=0)
            common = count_common(last_tokens, tokens)
            assert not last_tokens or common == len(last_tokens) - len("<think>\n")
            usage = answer["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == common // multiple * multiple
            num_cached += common // multiple * multiple
            messages.append({"role": "assistant", "reasoning_content": "r" * 60, "content": "c" * 20})
            last_tokens = tokens
        deadline = time.monotonic() + PATIENCE
        while read_counter(client, "prompt_tokens_cached_total") != num_cached:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert read_counter(client, "prompt_tokens_total") == sum(LENGTHS)
