"""Structured outputs of a real model: what an answer is, and whether its neighbours keep their bits."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema_rs
import pytest

from moesaic import LLM, SamplingParams
from moesaic.core.errors import RequestError
from moesaic.core.reasoning import ReasoningBudget
from moesaic.core.request import FinishReason

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
        "kind": {"enum": ["file", "folder"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 3},
    },
    "required": ["name", "size", "kind", "tags"],
    "additionalProperties": False,
}
FORMS: list[dict[str, Any] | None] = [
    {"json": SCHEMA},
    None,
    {"regex": "[a-z]{2,6}\\([0-9]{1,3}\\)"},
    {"choice": ["true", "false", "none of them"]},
    None,
    {"grammar": 'start: ("x" | "y") "=" /[0-9]{1,4}/ ";"'},
]
PROMPTS = ["def main():", "# sizes\n", "import os", "assert", "Once upon", "let "]


BUDGET = ReasoningBudget(20, "<think>", ("</think>",), (3597, 448, 987, 32), starts_inside=True)
"""Of the last request without a form."""


def params(index: int, form: dict[str, Any] | None) -> SamplingParams:
    return SamplingParams(
        max_tokens=200,
        temperature=0.7 * (index % 3),
        seed=index,
        structured_outputs=form,
        logprobs=1,
        reasoning=BUDGET if index == 4 else None,
    )


def answers(model: LLM, which: list[int]) -> list[tuple[list[int], list[float], str, FinishReason | None]]:
    found = model.generate([PROMPTS[i] for i in which], [params(i, FORMS[i]) for i in which])
    return [
        (one.token_ids, [entry.logprob for entry in one.logprobs or []], one.text, one.finish_reason)
        for one in (each.outputs[0] for each in found)
    ]


@pytest.fixture(scope="module")
def alone() -> list[Any]:
    """Each request in a batch of its own."""
    model = LLM("demo", threads=1, kv_cache_memory="16MiB")
    return [answers(model, [index])[0] for index in range(len(FORMS))]


def test_answers_have_their_form(alone: list[Any]) -> None:
    assert all(alone[index][3] is FinishReason.STOP for index in (0, 2, 3, 5))
    jsonschema_rs.validate(SCHEMA, json.loads(alone[0][2]))
    assert re.fullmatch(r"[a-z]{2,6}\([0-9]{1,3}\)", alone[2][2])
    assert alone[3][2] in ("true", "false", "none of them")
    assert re.fullmatch(r"[xy]=[0-9]{1,4};", alone[5][2])
    assert alone[4][0][20:24] == list(BUDGET.end_ids)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"max_num_batched_tokens": 8, "max_num_seqs": 4},
        pytest.param(
            {"max_model_len": 256, "block_size": 4, "kv_cache_memory": "auto", "enforce_eager": True},
            marks=pytest.mark.slow,
        ),
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.usefixtures("quick_workers")
def test_together_they_have_the_bits_that_they_have_alone(settings: dict[str, Any], alone: list[Any]) -> None:
    model = LLM("demo", **{"threads": 1, "kv_cache_memory": "16MiB", **settings})
    found = answers(model, list(range(len(FORMS))))
    if "tensor_parallel_size" in settings:  # sums in another order, so other last bits
        assert [one[0] for one in found] == [one[0] for one in alone]
    else:
        assert found == alone


@pytest.mark.slow
def test_preempted_requests_go_on(alone: list[Any]) -> None:
    """The cache holds one request of the longest length, so most of them are preempted again and again."""
    model = LLM("demo", threads=1, kv_cache_memory="640KiB", max_model_len=208, block_size=4, max_num_seqs=6)
    assert answers(model, list(range(len(FORMS)))) == alone
    assert model.stats().preemptions > 0


def test_each_of_n_completions_has_the_form() -> None:
    model = LLM("demo", threads=1, kv_cache_memory="16MiB")
    form = SamplingParams(
        n=3, temperature=1.0, max_tokens=60, seed=3, structured_outputs={"regex": "[0-9]{4}"}
    )
    [found] = model.generate(["x = "], form)
    texts = [one.text for one in found.outputs]
    assert all(re.fullmatch("[0-9]{4}", text) for text in texts) and len(set(texts)) > 1


def test_no_allowed_token_ends_the_request_and_not_its_neighbours(alone: list[Any]) -> None:
    model = LLM("demo", threads=1, kv_cache_memory="16MiB")
    stuck = SamplingParams(
        max_tokens=9, min_tokens=8, temperature=0.0, structured_outputs={"choice": ["yes"]}
    )
    found = model.generate([PROMPTS[1], "x"], [params(1, None), stuck])
    assert found[0].outputs[0].token_ids == alone[1][0]
    assert found[1].text == "yes"
    assert found[1].outputs[0].finish_reason is FinishReason.NO_ALLOWED_TOKEN


def test_a_form_that_is_none_is_refused_before_anything_runs() -> None:
    model = LLM("demo", threads=1, kv_cache_memory="16MiB")
    with pytest.raises(RequestError, match=r"structured_outputs.regex: at 1\(8\): invalid regex"):
        model.generate("x", SamplingParams(structured_outputs={"regex": "(a"}))  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="structured_outputs: got 5; allowed: StructuredOutputsParams"):
        SamplingParams(structured_outputs=5)  # type: ignore[arg-type]
