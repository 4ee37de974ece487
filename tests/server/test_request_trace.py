"""Traces of requests without a collector: nothing happens without the flag, and mistakes are one line."""

from __future__ import annotations

import subprocess
import sys

import pytest

from moesaic.commands import serve
from moesaic.config import ServerConfig
from moesaic.core.errors import ConfigError
from moesaic.server.app import create_app
from moesaic.server.request_trace import Tracing
from moesaic.server.service import Service
from moesaic.text.tokenizer import Tokenizer
from tests.server.conftest import MODEL
from tests.support.fake_worker import engine_and_worker


def test_nothing_is_traced_without_the_flag(tokenizer: Tokenizer) -> None:
    front, _ = engine_and_worker(tokenizer)
    app = create_app(Service(front, MODEL))
    assert Tracing not in [one.cls for one in app.user_middleware]
    with serve._spans(None, MODEL) as spans:
        assert spans is None


def test_missing_packages_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "moesaic.server.otlp", raising=False)
    monkeypatch.delattr("moesaic.server.otlp", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    serve.check_packages(None)
    with pytest.raises(
        ConfigError, match=r"^--otlp-traces-endpoint.*pip install 'moesaic\[otel\]'"
    ) as caught:
        serve.check_packages("http://localhost:4318")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["grpc://localhost:4317", "localhost:4318", "http://", "http://a:99999", "http://[", ""]
)
def test_a_wrong_url_is_named(url: str) -> None:
    with pytest.raises(ConfigError, match="--otlp-traces-endpoint: got"):
        ServerConfig(otlp_traces_endpoint=url)


@pytest.mark.slow
def test_opentelemetry_is_not_imported_without_the_flag() -> None:
    """FastAPI itself imports opentelemetry's API, which does nothing alone."""
    code = "import sys, moesaic.commands.serve, moesaic.server.app; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = ("opentelemetry.sdk", "opentelemetry.exporter", "requests", "moesaic.server.otlp")
    assert [name for name in done.stdout.split() if name.startswith(heavy)] == []
