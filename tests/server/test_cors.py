"""Web pages of other origins: preflight requests, headers of answers and of errors."""

from __future__ import annotations

import httpx
import pytest

from moesaic.config import CorsConfig
from moesaic.core.errors import ConfigError

from .conftest import NO_TLS, Launch, Live
from .test_chat import ASK

PAGE = "https://chat.example"
CHAT = "/v1/chat/completions"


def preflight(live: Live, origin: str = PAGE, method: str = "POST", asked: str = "authorization"):
    headers = {
        "Origin": origin,
        "Access-Control-Request-Method": method,
        "Access-Control-Request-Headers": f"content-type,{asked}",
    }
    with httpx.Client(
        base_url=live.url, trust_env=False, verify=NO_TLS
    ) as client:  # a browser sends no key here
        return client.options(CHAT, headers=headers)


def test_without_flags_no_answer_has_cors_headers_and_a_preflight_is_told_why(launch: Launch) -> None:
    live = launch(api_key="s3cret")
    answer = preflight(live)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "cors_not_allowed")
    assert "--allowed-origins" in answer.json()["error"]["message"]
    with live.http as client:
        simple = client.post(CHAT, json={"messages": ASK}, headers={"Origin": PAGE})
    assert simple.status_code == 200
    for headers in (answer.headers, simple.headers):
        assert not [name for name in headers if name.startswith("access-control") or name == "vary"]


@pytest.mark.parametrize(
    "origins", [PAGE, f'["{PAGE}", "http://localhost:3000"]', f"http://a.example, {PAGE}"]
)
def test_a_page_that_is_allowed_may_call_and_read_answers_and_errors(launch: Launch, origins: str) -> None:
    live = launch(api_key="s3cret", cors=CorsConfig(origins, "GET,post", "authorization", True))
    answer = preflight(live)
    assert answer.status_code == 200, answer.text
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert answer.headers["access-control-allow-credentials"] == "true"
    assert "POST" in answer.headers["access-control-allow-methods"]
    with live.http as client:
        good = client.post(CHAT, json={"messages": ASK, "stream": True}, headers={"Origin": PAGE})
        wrong = client.post(CHAT, json={}, headers={"Origin": PAGE})
        locked = client.post(CHAT, json={}, headers={"Origin": PAGE, "Authorization": "Bearer x"})
        other = client.post(CHAT, json={"messages": ASK}, headers={"Origin": "https://evil.example"})
    assert [one.status_code for one in (good, wrong, locked, other)] == [200, 400, 401, 200]
    for one in (good, wrong, locked):
        assert one.headers["access-control-allow-origin"] == PAGE
        assert "X-Request-Id" in one.headers["access-control-expose-headers"]
    assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize(
    ("asked", "what"),
    [
        ({"origin": "https://evil.example"}, "CORS origin: got 'https://evil.example'"),
        ({"origin": PAGE + ".evil.example"}, "CORS origin"),
        ({"method": "DELETE"}, "CORS method"),
        ({"asked": "x-secret"}, "CORS headers"),
    ],
)
def test_what_is_not_allowed_is_named(launch: Launch, asked: dict[str, str], what: str) -> None:
    live = launch(cors=CorsConfig(PAGE, "POST", "Authorization"))
    answer = preflight(live, **asked)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "cors_not_allowed")
    assert what in answer.json()["error"]["message"] and "--allowed-origins" in answer.text
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_a_star_allows_every_page(launch: Launch) -> None:
    live = launch(cors=CorsConfig("*"))
    answer = preflight(live, "https://any.example", "PUT", "x-stainless-os")
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "*")
    assert "x-stainless-os" in answer.headers["access-control-allow-headers"]
    with live.http as client:
        assert (
            client.get("/v1/models", headers={"Origin": "null"}).headers["access-control-allow-origin"] == "*"
        )


@pytest.mark.parametrize("given", [{"allowed_methods": "GET"}, {"allow_credentials": True}])
def test_settings_without_origins_are_refused(given: dict) -> None:
    with pytest.raises(ConfigError, match="needs --allowed-origins"):
        CorsConfig(**given)


def test_a_model_with_several_names(launch: Launch) -> None:
    live = launch(other_names=("gpt-4o", "small"))
    assert [card["id"] for card in live.get("/v1/models").json()["data"]] == [
        "org/fake-moe",
        "gpt-4o",
        "small",
    ]
    assert live.get("/v1/models/small").json()["id"] == "small"
    for name in ("gpt-4o", "small", "org/fake-moe"):
        answer = live.post(CHAT, messages=ASK, model=name)
        assert (answer.status_code, answer.json()["model"]) == (200, "org/fake-moe")
    refused = live.post(CHAT, messages=ASK, model="gpt-5")
    assert refused.status_code == 404
    assert "this server serves 'org/fake-moe', 'gpt-4o', 'small'" in refused.json()["error"]["message"]
