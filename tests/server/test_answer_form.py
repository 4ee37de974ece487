"""response_format, structured_outputs and their older names in the HTTP API."""

from __future__ import annotations

from typing import Any

import pytest

from moesaic.core.structured_outputs import StructuredOutputsParams
from moesaic.text.structured.grammar import make_grammar

from .conftest import MODEL, Live

ASK: list[Any] = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TAG = {"structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}], "triggers": ["<a>"]}

FORMS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"response_format": {"type": "text"}}, {}),
    ({"response_format": {"type": "json_object"}}, {"json_object": True}),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
        {"json": SCHEMA},
    ),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, {"json_object": True}),
    ({"response_format": {"type": "structural_tag", **TAG}}, {"structural_tag": TAG}),
    ({"structured_outputs": {"json": SCHEMA}}, {"json": SCHEMA}),
    ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
    ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, {"grammar": 'start: "a"'}),
    ({"guided_json": SCHEMA}, {"json": SCHEMA}),
    ({"guided_regex": "a+", "guided_decoding_backend": "xgrammar"}, {"regex": "a+"}),
    ({"guided_choice": ["a"]}, {"choice": ["a"]}),
    ({"guided_grammar": 'start: "a"'}, {"grammar": 'start: "a"'}),
]


@pytest.mark.parametrize(("sent", "form"), FORMS, ids=lambda value: str(value)[:60])
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_every_spelling_reaches_the_worker_as_a_grammar(
    live: Live, path: str, sent: dict[str, Any], form: dict[str, Any]
) -> None:
    body = {"messages": ASK} if path.startswith("chat") else {"prompt": "say:a"}
    assert live.post(f"/v1/{path}", model=MODEL, **body, **sent).status_code == 200
    grammar = make_grammar(StructuredOutputsParams(**form), {"<s>": 256, "</s>": 257}) if form else ""
    assert live.worker.seen[-1].grammar == grammar
    assert live.worker.seen[-1].params.structured_outputs is None, "the worker gets it once"


@pytest.mark.parametrize(
    ("sent", "param", "message"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "it is missing"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "thing"}}}},
            "response_format",
            "response_format: at type: got 'thing'; allowed: ",
        ),
        ({"response_format": {"type": "yaml"}}, "response_format", "response_format.type"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", "invalid regex"),
        ({"structured_outputs": {}}, "structured_outputs", "got none of them; allowed: one of json"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs", "got json, regex"),
        ({"guided_regex": "(a"}, "guided_regex", "guided_regex: at 1(8): invalid regex"),
        (
            {"guided_regex": "a", "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "got structured_outputs, guided_regex; allowed: one of them",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_no_form_is_a_400_that_names_the_field(
    live: Live, sent: dict[str, Any], param: str, message: str
) -> None:
    seen = len(live.worker.seen)
    answer = live.post("/v1/chat/completions", model=MODEL, messages=ASK, **sent)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param
    assert message in error["message"] and "\n" not in error["message"]
    assert len(live.worker.seen) == seen


def test_unknown_fields_of_a_form_are_ignored(live: Live) -> None:
    form = {"regex": "a+", "around": 'start: "b" @form', "_backend": "xgrammar"}
    answer = live.post("/v1/completions", model=MODEL, prompt="say:a", structured_outputs=form)
    assert answer.status_code == 200
    named = "structured_outputs.around, structured_outputs._backend"
    assert answer.headers["X-Moesaic-Ignored-Fields"] == named
    assert live.worker.seen[-1].grammar == make_grammar(StructuredOutputsParams(regex="a+"), {})


@pytest.mark.parametrize("depth", [90, 300, 500, 900])
def test_a_schema_that_is_nested_deeply_is_a_400(live: Live, depth: int) -> None:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    answer = live.post("/v1/completions", model=MODEL, prompt="say:a", response_format=form)
    assert answer.status_code == (200 if depth < 100 else 400), answer.text
    assert depth < 100 or "\n" not in answer.json()["error"]["message"]


def test_the_openai_client_sends_a_schema(live: Live) -> None:
    from pydantic import BaseModel

    class Hello(BaseModel):
        text: str

    # The fake worker answers as it likes. The client parses the answer by itself.
    answer = live.openai.chat.completions.parse(
        model=MODEL,
        messages=ASK,
        response_format=Hello,
        extra_body={"chat_template_kwargs": {"reply": '{"text": "x"}'}},
    )
    assert answer.choices[0].message.parsed == Hello(text="x")
    assert '"text":' in live.worker.seen[-1].grammar
