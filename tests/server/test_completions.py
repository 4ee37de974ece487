"""/v1/completions, most of it through the openai client."""

from __future__ import annotations

import json

import openai
import pytest

from moesaic.server.logprobs import CompletionLogprobsWriter
from moesaic.server.prompts import Prompt
from moesaic.text.tokenizer import Tokenizer
from tests.support.fake_worker import BOS, EOS

from .conftest import MODEL, Launch, Live


def events(text: str) -> list[str]:
    return [line.removeprefix("data: ") for line in text.split("\n\n") if line]


def test_a_completion_has_openais_shape(live: Live) -> None:
    answer = live.post("/v1/completions", model=MODEL, prompt="say:hi there").json()
    assert answer.pop("id").startswith("cmpl-")
    assert answer.pop("created") > 1_600_000_000
    assert answer == {
        "object": "text_completion",
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "text": "hi there",
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
                "prompt_logprobs": None,
            }
        ],
        "system_fingerprint": None,
        "usage": {
            "prompt_tokens": 12,
            "completion_tokens": 9,
            "total_tokens": 21,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_sixteen_tokens_are_the_default(live: Live) -> None:
    answer = live.openai.completions.create(model=MODEL, prompt="x")
    assert answer.choices[0].text == "abcdefghijklmnop"
    assert answer.choices[0].finish_reason == "length"


def test_the_default_length_gives_way_to_the_context(live: Live) -> None:
    answer = live.openai.completions.create(model=MODEL, prompt="x" * 250)
    assert answer.choices[0].text == "abcdef"


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("say:A", ["A"]),
        (["say:A", "say:BB", "say:C"], ["A", "BB", "C"]),
        ([97, 98], ["abcd"]),
        ([[97], [98, 99]], ["abcd", "abcd"]),
    ],
)
def test_every_kind_of_prompt(live: Live, prompt: object, texts: list[str]) -> None:
    answer = live.openai.completions.create(model=MODEL, prompt=prompt, max_tokens=4)
    assert [choice.text for choice in answer.choices] == texts
    assert [choice.index for choice in answer.choices] == list(range(len(texts)))


def test_n_completions_of_two_prompts_are_numbered_prompt_by_prompt(live: Live) -> None:
    answer = live.openai.completions.create(
        model=MODEL, prompt=["say:A", "say:BB"], n=2, extra_body={"best_of": 2}
    )
    assert [choice.text for choice in answer.choices] == ["A", "A", "BB", "BB"]
    assert answer.usage is not None and answer.usage.prompt_tokens == 11
    assert answer.usage.completion_tokens == 10


def test_a_stream_joins_to_the_whole(live: Live) -> None:
    stream = live.openai.completions.create(
        model=MODEL,
        prompt=["say:gr\u00fc\u00dfe \U0001f600", "say:B"],
        stream=True,
        stream_options={"include_usage": True},
    )
    texts, finishes, usage = ["", ""], [None, None], None
    for chunk in stream:
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            finishes[choice.index] = choice.finish_reason
    assert texts == ["gr\u00fc\u00dfe \U0001f600", "B"]
    assert finishes == ["stop", "stop"]
    assert usage is not None and usage.completion_tokens == 15


def test_a_stream_is_events_that_end_with_done(live: Live) -> None:
    response = live.post("/v1/completions", prompt="say:AB", stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    parsed = [json.loads(chunk) for chunk in chunks]
    assert [chunk["choices"][0]["text"] for chunk in parsed] == ["A", "B", ""]
    assert all("usage" not in chunk for chunk in parsed)
    assert len({chunk["id"] for chunk in parsed}) == 1


def test_tokens_without_text_are_streamed_too(live: Live) -> None:
    """Clients measure when tokens come: the first two of a character's three bytes have no text yet."""
    *chunks, _ = events(live.post("/v1/completions", prompt="say:\u20acB", stream=True).text)
    assert [json.loads(chunk)["choices"][0]["text"] for chunk in chunks] == ["", "", "\u20ac", "B", ""]


def test_usage_is_null_until_the_last_chunk_or_in_every_chunk(live: Live) -> None:
    options = {"include_usage": True}
    *chunks, last, _ = events(
        live.post("/v1/completions", prompt="say:AB", stream=True, stream_options=options).text
    )
    assert [json.loads(chunk)["usage"] for chunk in chunks] == [None] * 3
    assert json.loads(last)["choices"] == [] and json.loads(last)["usage"]["total_tokens"] == 9
    options["continuous_usage_stats"] = True
    chunks = events(live.post("/v1/completions", prompt="say:AB", stream=True, stream_options=options).text)
    counts = [json.loads(chunk)["usage"]["completion_tokens"] for chunk in chunks[:-1]]
    assert counts == [1, 2, 3, 3]


def test_logprobs(live: Live) -> None:
    choice = live.openai.completions.create(model=MODEL, prompt="x", max_tokens=3, logprobs=3).choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["a", "b", "c"]
    assert choice.logprobs.token_logprobs == [-0.5] * 3
    assert choice.logprobs.text_offset == [0, 1, 2]
    assert choice.logprobs.top_logprobs is not None
    # JSON has no minus infinity.
    assert choice.logprobs.top_logprobs[0] == {"a": -0.5, "b": -1.5, "c": -9999.0}


def test_text_offsets_point_into_the_text_also_inside_a_character(live: Live) -> None:
    choice = live.openai.completions.create(model=MODEL, prompt="say:a\u20acb", logprobs=0).choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["a", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "b", "</s>"]
    assert choice.logprobs.text_offset == [0, 1, 1, 1, 2, 3]
    assert choice.text == "a\u20acb"


def test_text_offsets_count_the_special_tokens_that_the_client_sent(live: Live) -> None:
    body = {"prompt": "<s>xy</s>z", "echo": True, "logprobs": 0, "max_tokens": 1}
    for extra in ({}, {"skip_special_tokens": False}):
        choice = live.post("/v1/completions", **body, **extra).json()["choices"][0]
        assert choice["text"] == "<s>xy</s>za"
        assert choice["logprobs"]["text_offset"] == [0, 3, 4, 5, 9, 10]
    body["prompt"] = [BOS, 120, EOS]
    for extra in ({}, {"skip_special_tokens": False}):
        choice = live.post("/v1/completions", **body, **extra).json()["choices"][0]
        assert choice["text"] == "<s>x</s>a"
        assert choice["logprobs"]["text_offset"] == [0, 3, 4, 8]
    body |= {
        "prompt": "<s>xy",
        "truncate_prompt_tokens": 2,
    }  # nobody knows whether the tokenizer put it first
    assert live.post("/v1/completions", **body).json()["choices"][0]["text"] == "xya"


@pytest.mark.parametrize("skip", [True, False])
def test_a_token_that_the_tokenizer_put_first_is_no_part_of_the_echo(
    tokenizer: Tokenizer, skip: bool
) -> None:
    writer = CompletionLogprobsWriter(tokenizer, 0, skip, Prompt([BOS, 120, 121], "xy"))
    assert writer.write([BOS, 120, 121], [None] * 3).text_offset == [0, 0, 1]
    assert writer.write([EOS, 97], [None] * 2).text_offset == [2, 2 if skip else 6], (
        "the answer's own are shown"
    )


def test_echo_puts_the_prompt_first(live: Live) -> None:
    answer = live.openai.completions.create(model=MODEL, prompt=["say:A", "say:B"], echo=True)
    assert [choice.text for choice in answer.choices] == ["say:AA", "say:BB"]
    answer = live.openai.completions.create(model=MODEL, prompt=[97, 98], echo=True, max_tokens=1)
    assert answer.choices[0].text == live.post("/detokenize", tokens=[97, 98]).json()["prompt"] + "a"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo_with_logprobs_scores_the_prompt(live: Live, stream: bool, max_tokens: int) -> None:
    """What evaluation harnesses do: the prompt's scores, its first token without one."""
    body = {"prompt": "xyz", "echo": True, "logprobs": 1, "max_tokens": max_tokens, "stream": stream}
    response = live.post("/v1/completions", **body)
    chunks = [json.loads(chunk) for chunk in events(response.text)[:-1]] if stream else [response.json()]
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    scores = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    joined = {name: [value for score in scores for value in score[name]] for name in scores[0]}
    assert text == "xyz" + "a" * max_tokens
    assert joined["tokens"] == list(text)
    assert joined["token_logprobs"] == [None, -0.5, -0.5] + [-0.5] * max_tokens
    assert joined["top_logprobs"][:2] == [None, {"y": -0.5}]
    assert joined["text_offset"] == list(range(len(text)))
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    if not stream:
        assert chunks[0]["usage"]["completion_tokens"] == max_tokens


def test_a_prompt_of_one_token_has_no_scores(live: Live) -> None:
    body = {"prompt": "x", "echo": True, "logprobs": 1, "max_tokens": 0}
    logprobs = live.post("/v1/completions", **body).json()["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [None] and logprobs["tokens"] == ["x"]


def test_stop_strings(live: Live) -> None:
    for stop in ("def", ["zzz", "def"]):
        choice = live.openai.completions.create(model=MODEL, prompt="x", stop=stop).choices[0]
        assert choice.text == "abc" and choice.finish_reason == "stop"
        assert choice.stop_reason == "def"
    kept = live.openai.completions.create(
        model=MODEL, prompt="x", stop="def", extra_body={"include_stop_str_in_output": True}
    )
    assert kept.choices[0].text == "abcdef"


def test_parameters_reach_the_engine_and_defaults_are_the_models(launch: Launch) -> None:
    live = launch(default_sampling={"temperature": 0.6, "top_k": 20, "top_p": 0.9})
    live.post("/v1/completions", prompt="x", max_tokens=2)
    sent = {
        "seed": 7,
        "top_p": 0.5,
        "min_p": 0.1,
        "presence_penalty": 1,
        "frequency_penalty": -1.5,
        "repetition_penalty": 1.1,
        "min_tokens": 1,
        "ignore_eos": True,
        "stop_token_ids": (5,),
        "skip_special_tokens": False,
    }
    answer = live.post(
        "/v1/completions", prompt="x", max_tokens=2, logit_bias={"65": -100}, temperature=0, **sent
    )
    assert answer.status_code == 200
    first, second = (request.params for request in live.worker.seen)
    assert (first.temperature, first.top_k, first.top_p) == (0.6, 20, 0.9)
    assert (second.temperature, second.top_k) == (0, 20)
    assert dict(second.logit_bias) == {65: -100.0}
    assert {name: getattr(second, name) for name in sent} == sent


def test_null_is_absent_and_harmless_fields_are_ignored(live: Live) -> None:
    nulls = dict.fromkeys(
        ["temperature", "n", "stop", "logprobs", "suffix", "stream", "stream_options", "seed"]
    )
    harmless = {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"}
    assert live.post("/v1/completions", prompt="say:A", **nulls, **harmless).status_code == 200


def test_the_openai_client_gets_its_own_exceptions(live: Live) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        live.openai.completions.create(model=MODEL, prompt="x" * 300)
    assert caught.value.code == "context_length_exceeded" and caught.value.param == "prompt"
    with pytest.raises(openai.NotFoundError) as missing:
        live.openai.completions.create(model="gpt-5", prompt="x")
    assert missing.value.code == "model_not_found"
