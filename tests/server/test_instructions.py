"""Instructions in every API: their texts are in the prompt, or the error names the message."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from moesaic.testing import byte_tokenizer
from moesaic.text.tokenizer import Tokenizer
from tests.support.template_kinds import KINDS

from .conftest import Live, launched, prompt_of

TEMPLATES = {
    "strict": KINDS["strict"],
    "first only": KINDS["first only"],
    "known roles": KINDS["known roles"],
    "users only": "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}",
}
USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Live]]:
    """A function that starts a server with a template; one for each."""
    started = dict[str, Live]()
    with ExitStack() as stack:

        def serve(kind: str) -> Live:
            if kind not in started:
                path = tmp_path_factory.mktemp("template")
                byte_tokenizer(path, ["<s>", "</s>"], chat_template=TEMPLATES[kind], eos_token="</s>")
                started[kind] = stack.enter_context(launched(Tokenizer(path)))(max_model_len=512)
            return started[kind]

        yield serve


def role(name: str, text: str) -> dict[str, str]:
    return {"role": name, "content": text}


CHATS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (
        "/v1/chat/completions",
        {"messages": [role("system", "Zebra0"), role("developer", "Zebra1"), USER, role("system", "Zebra2")]},
    ),
    "messages": (
        "/v1/messages",
        {"max_tokens": 2, "system": "Zebra0", "messages": [USER, role("system", "Zebra1\nZebra2")]},
    ),
    "responses": (
        "/v1/responses",
        {"instructions": "Zebra0", "input": [role("developer", "Zebra1"), USER, role("developer", "Zebra2")]},
    ),
}


@pytest.mark.parametrize("kind", ["strict", "first only", "known roles"])
@pytest.mark.parametrize("api", CHATS)
def test_every_instruction_is_in_the_prompt(serving: Callable[[str], Live], kind: str, api: str) -> None:
    live, (path, body) = serving(kind), CHATS[api]
    assert live.post(path, **body).status_code == 200
    assert all(f"Zebra{number}" in prompt_of(live) for number in range(3))


@pytest.mark.parametrize("kind", ["strict", "first only", "known roles"])
def test_what_only_counts_counts_every_instruction(serving: Callable[[str], Live], kind: str) -> None:
    live = serving(kind)
    tokens = live.post("/tokenize", **CHATS["chat"][1]).json()["tokens"]
    assert bytes(tokens).decode().count("Zebra") == 3
    body = CHATS["messages"][1]
    count = live.post("/v1/messages/count_tokens", **body).json()["input_tokens"]
    assert live.post("/v1/messages", **body).json()["usage"]["input_tokens"] == count
    assert count > len("Zebra0\n\nZebra1\nZebra2hi")


@pytest.mark.parametrize(
    ("path", "body", "message", "field"),
    [
        (
            "/v1/chat/completions",
            {"messages": [USER, role("assistant", "lost"), USER]},
            "messages[1]",
            "messages",
        ),
        ("/tokenize", {"messages": [USER, role("assistant", "lost"), USER]}, "messages[1]", "messages"),
        ("/v1/responses", {"input": [USER, role("assistant", "lost"), USER]}, "input[1]", "input"),
        (
            "/v1/messages",
            {"max_tokens": 2, "system": "x", "messages": [USER, role("assistant", "lost"), USER]},
            "messages[1]",
            None,
        ),
        (
            "/v1/messages/count_tokens",
            {"system": "x", "messages": [USER, role("assistant", "lost"), USER]},
            "messages[1]",
            None,
        ),
    ],
)
def test_a_lost_message_is_refused_by_its_name(
    serving: Callable[[str], Live], path: str, body: dict[str, Any], message: str, field: str | None
) -> None:
    answer = serving("users only").post(path, **body)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["message"] == (
        f"{message}: the chat template of this model leaves this text of the role 'assistant' out; "
        "allowed: a request without it, or --chat-template"
    )
    assert error.get("param") == field
