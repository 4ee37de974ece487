"""/health, /metrics, /version, /v1/models, /tokenize, /detokenize, headers and the schema."""

from __future__ import annotations

import subprocess
import sys

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from moesaic.core.errors import ConfigError
from moesaic.server.guard import OPEN_PATHS
from moesaic.server.service import Service
from moesaic.text.tokenizer import Tokenizer
from tests.support.fake_worker import engine_and_worker

from .conftest import MODEL, NO_TLS, Launch, Live
from .test_chat import ASK


def samples(live: Live) -> dict[str, float]:
    """Sample -> value; the label model_name is the same everywhere and left out."""
    found = {}
    for family in text_string_to_metric_families(live.get("/metrics").text):
        for sample in family.samples:
            assert sample.labels.pop("model_name") == MODEL
            labels = ",".join(f"{key}={value}" for key, value in sample.labels.items())
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


@pytest.mark.slow
def test_importing_the_server_needs_no_torch() -> None:
    code = "import sys, moesaic.server.app, moesaic.server.run; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_health_version_and_models(live: Live) -> None:
    assert live.get("/health").json() == live.get("/ping").json() == {"status": "ok"}
    assert live.get("/live").json() == {"status": "ok"}
    assert live.get("/version").json() == {"version": "1.2.3"}
    models = live.openai.models.list().data
    assert [(model.id, model.owned_by) for model in models] == [(MODEL, "moesaic")]
    assert live.openai.models.retrieve(MODEL) == models[0]
    assert live.get(f"/v1/models/{MODEL}").json()["max_model_len"] == 256
    assert live.get("/v1/models/other").json()["error"]["code"] == "model_not_found"


def test_metrics_count_what_happened(launch: Launch) -> None:
    live = launch()
    before = samples(live)
    assert before["moesaic:request_success_total{finished_reason=stop}"] == 0
    live.post("/v1/completions", prompt="say:abc", n=2)
    live.post("/v1/completions", prompt="x", max_tokens=5)
    after = samples(live)
    assert after["moesaic:request_success_total{finished_reason=stop}"] == 2
    assert after["moesaic:request_success_total{finished_reason=length}"] == 1
    assert after["moesaic:prompt_tokens_total"] == 2 * 7 + 1
    assert after["moesaic:generation_tokens_total"] == 4 + 4 + 5
    assert after["moesaic:prefix_cache_queries_total"] == 10
    assert after["moesaic:prefix_cache_hits_total"] == 4
    assert after["moesaic:num_preemptions_total"] == 0
    assert after["moesaic:num_requests_running"] == after["moesaic:num_requests_waiting"] == 0
    assert 0 < after["moesaic:kv_cache_usage_perc"] <= 1
    for name, count in {
        "time_to_first_token": 3,
        "inter_token_latency": 10,
        "e2e_request_latency": 3,
        "request_queue_time": 3,
        "request_prefill_time": 3,
        "request_decode_time": 3,
    }.items():
        assert after[f"moesaic:{name}_seconds_count"] == count, name
        assert after[f"moesaic:{name}_seconds_bucket{{le=+Inf}}"] == count
    assert after["moesaic:request_queue_time_seconds_sum"] == 0.75


def test_tokenize_and_detokenize(live: Live) -> None:
    answer = live.post("/tokenize", prompt="ab", return_token_strs=True).json()
    assert answer["count"] == 2 and answer["max_model_len"] == 256 and answer["token_strs"] == ["a", "b"]
    assert live.post("/detokenize", tokens=answer["tokens"]).json() == {"prompt": "ab"}
    chat = live.post("/tokenize", messages=ASK, add_generation_prompt=False).json()
    assert chat["count"] == len("[user]hi") and chat["token_strs"] is None
    for path, body in {
        "/tokenize": {},
        "/detokenize": {"tokens": [9999]},
    }.items():
        response = live.post(path, **body)
        assert response.status_code == 400, path
    assert live.post("/tokenize", prompt="x", messages=ASK).status_code == 400
    assert live.post("/tokenize", prompt="x", model="other").status_code == 404


def test_every_answer_has_a_request_id(live: Live) -> None:
    with live.http as client:
        assert client.get("/health", headers={"X-Request-Id": "abc-1"}).headers["x-request-id"] == "abc-1"
        ids = {client.get(path).headers["x-request-id"] for path in ("/health", "/nothing")}
        odd = client.get("/health", headers={"X-Request-Id": "x" * 999}).headers["x-request-id"]
    assert len(ids) == 2 and len(odd) == 32


def test_the_schema_asks_for_a_key_only_where_one_is_needed(launch: Launch) -> None:
    schema = launch(api_key="k").get("/openapi.json").json()
    locked = {path for path, item in schema["paths"].items() for call in item.values() if "security" in call}
    assert locked == {path for path in schema["paths"] if path not in OPEN_PATHS}


def test_the_schema_promises_no_422(live: Live) -> None:
    schema = live.get("/openapi.json").json()
    statuses = {
        path: set(item["post"]["responses"]) for path, item in schema["paths"].items() if "post" in item
    }
    assert "422" not in set().union(*statuses.values())
    assert {"200", "400", "401", "404", "413", "429", "503"} <= statuses["/v1/completions"]
    assert "ValidationError" not in schema["components"]["schemas"]


def test_many_streams_at_once(live: Live) -> None:
    with httpx.Client(base_url=live.url, trust_env=False, verify=NO_TLS) as client:
        body = {"prompt": ["say:abc", "say:def"], "n": 2, "stream": True}
        texts = [client.post("/v1/completions", json=body).text for _ in range(20)]
    assert all(text.endswith("data: [DONE]\n\n") for text in texts)


def test_defaults_of_the_checkpoint_are_checked(tokenizer: Tokenizer) -> None:
    front, _ = engine_and_worker(tokenizer)
    with pytest.raises(ConfigError, match=r"generation_config.json.*top_p"):
        Service(front, "m", {"top_p": 7})
    with pytest.raises(ConfigError, match="eta"):
        Service(front, "m", {"eta": 7})
