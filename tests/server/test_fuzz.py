"""Requests made up from the published schema, right ones and wrong ones: never a 5xx, never off-schema."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import positive_data_acceptance
from schemathesis.schemas import BaseSchema

from moesaic.text.tokenizer import Tokenizer
from tests.support.fake_cluster import FakeCluster

from .conftest import MODEL, Live, launched

OPERATIONS = {
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model_id}"),
    ("GET", "/health"),
    ("GET", "/ping"),
    ("GET", "/live"),
    ("GET", "/metrics"),
    ("GET", "/version"),
    ("GET", "/v1/fault_tolerance/status"),
    ("POST", "/scale_elastic_ep"),
    ("DELETE", "/scale_elastic_ep"),
    ("POST", "/v1/fault_tolerance/kill"),
}
CASES = [
    (method, path, mode)
    for method, path in sorted(OPERATIONS)
    for mode in GenerationMode
    if method == "POST" or mode is GenerationMode.POSITIVE  # a GET has nothing to get wrong
]


@pytest.fixture(
    scope="module",
    params=[pytest.param(None, id="open"), pytest.param("s3cret", id="locked", marks=pytest.mark.full)],
)
def live(tokenizer: Tokenizer, request: pytest.FixtureRequest) -> Iterator[Live]:
    with launched(tokenizer) as launch:
        yield launch(api_key=request.param, cluster=FakeCluster())


@pytest.fixture(scope="module")
def published(live: Live) -> BaseSchema:
    return schemathesis.openapi.from_dict(live.get("/openapi.json").json())


@pytest.mark.slow
def test_every_operation_is_fuzzed(published: BaseSchema) -> None:
    found = {(item.ok().method.upper(), item.ok().path) for item in published.get_all_operations()}
    assert found == OPERATIONS


@pytest.mark.slow
@pytest.mark.parametrize(("method", "path", "mode"), CASES)
def test_every_answer_is_one_that_the_schema_promises(
    published: BaseSchema, live: Live, method: str, path: str, mode: GenerationMode
) -> None:
    operation = published[path][method]

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    def ask(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body["model"] = MODEL
        # A schema cannot say that prompt and answer must fit the context, or that best_of equals n.
        unknowable = [positive_data_acceptance]
        positive = mode is GenerationMode.POSITIVE
        headers = live.headers if positive else None
        case.call_and_validate(base_url=live.url, headers=headers, excluded_checks=unknowable, timeout=60)
        if positive and path.endswith(("completions", "responses", "messages")):
            case.body["stream"] = not case.body.get("stream")
            case.body.pop("stream_options", None)
            case.call_and_validate(base_url=live.url, headers=headers, excluded_checks=unknowable, timeout=60)

    ask()
