"""Request parameters of vLLM beyond OpenAI's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.fake_worker import BOS, VOCAB

from .conftest import Launch, Live
from .test_chat import ASK

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BOTH = [
    (COMPLETIONS, {"prompt": "say:hi"}),
    (CHAT, {"messages": ASK, "chat_template_kwargs": {"reply": "hi"}}),
]


def stream(live: Live, path: str, **body: object) -> list[dict[str, Any]]:
    text = live.post(path, **body, stream=True).text
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize(("path", "body"), BOTH)
def test_allowed_tokens_and_bad_words_reach_the_worker_as_ids(
    launch: Launch, path: str, body: dict[str, Any]
) -> None:
    live = launch()
    answer = live.post(path, **body, allowed_token_ids=[72, 65, 72], bad_words=["ab", " c"])
    assert answer.status_code == 200
    params = live.worker.seen[-1].params
    assert params.allowed_token_ids == (72, 65)
    assert params.bad_words == ()
    assert params.bad_word_ids == ((97, 98), (99,))


@pytest.mark.parametrize(("path", "body"), BOTH)
def test_a_salt_reaches_the_worker(launch: Launch, path: str, body: dict[str, Any]) -> None:
    live = launch()
    assert live.post(path, **body, cache_salt="tenant").status_code == 200
    assert live.worker.seen[-1].params.cache_salt == "tenant"


@pytest.mark.parametrize(("path", "body"), BOTH)
def test_the_tokens_of_log_probabilities_may_be_chosen(
    launch: Launch, path: str, body: dict[str, Any]
) -> None:
    live = launch()
    wanted = {"logprobs": 0} if path == COMPLETIONS else {"logprobs": True}
    assert live.post(path, **body, **wanted, logprob_token_ids=[7, 3]).status_code == 200
    assert live.worker.seen[-1].params.logprob_token_ids == (7, 3)
    refused = live.post(path, **body, **wanted, logprob_token_ids=[VOCAB]).json()["error"]
    assert refused["param"] == "logprob_token_ids"


@pytest.mark.parametrize(("path", "body"), BOTH)
@pytest.mark.parametrize("streamed", [False, True])
def test_tokens_of_log_probabilities_may_be_named_by_their_ids(
    live: Live, path: str, body: dict[str, Any], streamed: bool
) -> None:
    wanted = {"logprobs": 1} if path == COMPLETIONS else {"logprobs": True, "top_logprobs": 1}
    fields = {**body, **wanted, "return_tokens_as_token_ids": True}
    answers = stream(live, path, **fields) if streamed else [live.post(path, **fields).json()]
    logprobs = [
        choice["logprobs"] for answer in answers for choice in answer["choices"] if choice["logprobs"]
    ]
    if path == COMPLETIONS:
        names = [name for piece in logprobs for name in piece["tokens"]]
        tops = [name for piece in logprobs for top in piece["top_logprobs"] for name in top]
    else:
        entries = [entry for piece in logprobs for entry in piece["content"]]
        names = [entry["token"] for entry in entries]
        tops = [top["token"] for entry in entries for top in entry["top_logprobs"]]
    assert names[:2] == ["token_id:104", "token_id:105"]
    assert tops and all(name.startswith("token_id:") for name in tops)


@pytest.mark.parametrize(("path", "body"), BOTH)
@pytest.mark.parametrize(
    ("fields", "constraint"),
    [
        ({"ebnf": 'root ::= "yes"'}, '"yes"'),
        ({"response_format": {"type": "json_object", "schema": {"const": 71}}}, '"const": 71'),
    ],
)
def test_forms_of_other_servers_constrain(
    live: Live, path: str, body: dict[str, Any], fields: dict[str, Any], constraint: str
) -> None:
    assert live.post(path, **body, **fields).status_code == 200
    assert constraint in live.worker.seen[-1].grammar.replace("\\", "")


@pytest.mark.parametrize(("path", "body"), BOTH)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop_regex", "[a-z]"),
        ("format", "json"),
        ("prompt_embeds", "AA=="),
        ("template", "{{ .Prompt }}"),
        ("logprob_token_ids", [1]),
        ("logprob_token_ids", [1] * 129),
        ("ebnf", "root ::= ("),
        ("cache_salt", ""),
    ],
)
def test_what_constrains_and_cannot_be_done_is_refused(
    live: Live, path: str, body: dict[str, Any], field: str, value: object
) -> None:
    answer = live.post(path, **body, **{field: value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


@pytest.mark.parametrize(("path", "body"), BOTH)
@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("allowed_token_ids", [VOCAB], f"got token id {VOCAB}; allowed: token ids 0 to {VOCAB - 1}"),
        ("allowed_token_ids", [], "at least 1 item"),
        ("bad_words", [""], "at least 1 character"),
        ("bad_words", [" "], "at least one token"),
        ("bad_words", ["x"] * 1001, "at most 1000"),
        ("priority", 3, "got 3; allowed: 0"),
        ("prompt_logprobs", 21, "less than or equal to 20"),
        ("prompt_logprobs", -1, "greater than or equal to 0"),
        ("truncate_prompt_tokens", 0, "got 0; allowed: 1 to"),
        ("truncate_prompt_tokens", 256, "got 256; allowed: 1 to 255"),
        ("truncation_side", "middle", "'left'"),
    ],
)
def test_a_wrong_value_is_named(
    live: Live, path: str, body: dict[str, Any], field: str, value: object, says: str
) -> None:
    answer = live.post(path, **body, **{field: value})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, field), error
    assert says in error["message"]


def test_words_that_forbid_all_allowed_tokens_are_refused(live: Live) -> None:
    answer = live.post(COMPLETIONS, prompt="x", allowed_token_ids=[97], bad_words=["a"])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "bad_words")


def test_lists_of_ids_count_for_every_completion(live: Live) -> None:
    ids = [1] * (1 << 12)
    answer = live.post(COMPLETIONS, prompt="x", n=65, allowed_token_ids=ids)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "allowed_token_ids")


@pytest.mark.parametrize(("path", "body"), BOTH)
def test_values_that_ask_for_nothing_are_accepted(live: Live, path: str, body: dict[str, Any]) -> None:
    nothing = {"priority": 0, "bad_words": [], "allowed_token_ids": None, "truncate_prompt_tokens": None}
    assert live.post(path, **body, **nothing).status_code == 200


def test_scores_of_a_prompt_in_vllms_format(live: Live) -> None:
    answer = live.post(COMPLETIONS, prompt=["abc", "x"], max_tokens=1, prompt_logprobs=2).json()
    first, second = (choice["prompt_logprobs"] for choice in answer["choices"])
    assert second == [None]
    assert first == [
        None,
        {
            "98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"},
            "99": {"logprob": -1.5, "rank": 2, "decoded_token": "c"},
        },
        {
            "99": {"logprob": -0.5, "rank": 1, "decoded_token": "c"},
            "100": {"logprob": -1.5, "rank": 2, "decoded_token": "d"},
        },
    ]
    chat = live.post(CHAT, messages=ASK, prompt_logprobs=0, return_token_ids=True).json()
    assert len(chat["prompt_logprobs"]) == len(chat["prompt_token_ids"])
    token = chat["prompt_token_ids"][1]
    assert list(chat["prompt_logprobs"][1]) == [str(token)]
    assert chat["prompt_logprobs"][1][str(token)]["rank"] is None


def test_echo_and_scores_of_the_prompt_together(live: Live) -> None:
    body = {"prompt": "abc", "max_tokens": 1, "echo": True, "logprobs": 1, "prompt_logprobs": 3}
    choice = live.post(COMPLETIONS, **body).json()["choices"][0]
    assert [len(one) for one in choice["logprobs"]["top_logprobs"][1:3]] == [1, 1]
    assert [len(one) for one in choice["prompt_logprobs"][1:]] == [3, 3]
    assert choice["prompt_logprobs"][1]["100"]["logprob"] == -9999.0


@pytest.mark.parametrize(("path", "body"), BOTH)
def test_scores_of_a_prompt_do_not_stream_and_are_limited(
    live: Live, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = live.post(path, **body, prompt_logprobs=1, stream=True)
    assert "only with stream false" in refused.json()["error"]["message"]
    monkeypatch.setattr("moesaic.server.prompts.MOST_SCORES", 5)
    refused = live.post(path, **body, prompt_logprobs=1)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_logprobs")


def test_token_ids_of_prompt_and_answer(live: Live) -> None:
    whole = live.post(COMPLETIONS, prompt=["say:hi", "A"], max_tokens=4, return_token_ids=True).json()
    first, second = whole["choices"]
    assert bytes(first["prompt_token_ids"]) == b"say:hi" and second["prompt_token_ids"] == [65]
    assert bytes(first["token_ids"][:2]) == b"hi" and len(first["token_ids"]) == 3  # with the end of sequence
    chunks = stream(live, COMPLETIONS, prompt="say:hi", max_tokens=4, return_token_ids=True)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [token for choice in choices for token in choice["token_ids"]] == first["token_ids"]
    assert [choice.get("prompt_token_ids") for choice in choices] == [first["prompt_token_ids"], None, None]
    plain = live.post(COMPLETIONS, prompt="x", max_tokens=1).json()["choices"][0]
    assert not {"token_ids", "prompt_token_ids"} & set(plain) and plain["prompt_logprobs"] is None


@pytest.mark.parametrize("reply", ["hi", "\u00e9"])
def test_token_ids_of_a_chat(live: Live, reply: str) -> None:
    """The second answer has a character of two tokens: the first one of them has no text."""
    body = {"messages": ASK, "chat_template_kwargs": {"reply": reply}, "return_token_ids": True}
    whole = live.post(CHAT, **body).json()
    ids = whole["choices"][0]["token_ids"]
    assert bytes(ids[:-1]).decode() == reply == whole["choices"][0]["message"]["content"]
    chunks = stream(live, CHAT, **body)
    assert [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])] == ids
    assert [chunk.get("prompt_token_ids") for chunk in chunks][:2] == [whole["prompt_token_ids"], None]
    assert "prompt_token_ids" not in live.post(CHAT, messages=ASK).json()


def test_prompts_are_cut(live: Live) -> None:
    for more, kept in (({}, "hi"), ({"truncation_side": "left"}, "hi"), ({"truncation_side": "right"}, "sa")):
        body = {"prompt": "say:hi", "max_tokens": 1, "echo": True, "return_token_ids": True, **more}
        choice = live.post(COMPLETIONS, **body, truncate_prompt_tokens=2).json()["choices"][0]
        assert bytes(choice["prompt_token_ids"]).decode() == kept and choice["text"].startswith(kept)
    long = {"prompt": "x" * 3000, "max_tokens": 6, "return_token_ids": True}
    assert live.post(COMPLETIONS, **long).status_code == 400
    choice = live.post(COMPLETIONS, **long, truncate_prompt_tokens=-1).json()["choices"][0]
    assert (len(choice["prompt_token_ids"]), len(choice["token_ids"])) == (250, 6)
    messages = [{"role": "user", "content": "x" * 3000}]
    chat = live.post(CHAT, messages=messages, return_token_ids=True, max_tokens=5, truncate_prompt_tokens=20)
    assert bytes(chat.json()["prompt_token_ids"]) == b"x[assistant]say:hello"[-20:]


def test_a_chat_can_have_the_tokenizers_special_tokens(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = launch()
    plain = live.post(CHAT, messages=ASK, return_token_ids=True).json()["prompt_token_ids"]
    tokenizer = live.front.engine.tokenizer
    monkeypatch.setattr(tokenizer, "_bos", [BOS])
    more = live.post(CHAT, messages=ASK, return_token_ids=True, add_special_tokens=True).json()
    assert more["prompt_token_ids"] == [BOS, *plain]
    without = live.post(CHAT, messages=ASK, return_token_ids=True, add_special_tokens=False).json()
    assert without["prompt_token_ids"] == plain
    counted = live.post("/tokenize", messages=ASK, add_special_tokens=True).json()
    assert counted["tokens"] == [BOS, *plain]
