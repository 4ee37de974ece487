"""Settings from MOESAIC_* variables and from --config FILE."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moesaic.commands import cli, serve, yaml_settings
from moesaic.config import ClusterConfig, ServerConfig, WorkerConfig
from moesaic.core.errors import ConfigError

Run = Callable[..., tuple[WorkerConfig, ClusterConfig, ServerConfig]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs `moesaic serve` up to where it starts processes: the settings that it would serve with."""
    found: list[Any] = []
    monkeypatch.setattr(serve, "run", lambda *settings: found.append(settings) or 0)

    def run(text: str, *flags: str, **variables: str) -> tuple[WorkerConfig, ClusterConfig, ServerConfig]:
        (tmp_path / "server.yaml").write_text(text)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert cli.main(["serve", "--config", str(tmp_path / "server.yaml"), *flags]) == 0
        return found[-1][:3]

    return run


def test_a_file_is_a_command_line(run: Run) -> None:
    worker, _, server = run(
        "model: demo\nmax-num-seqs: 8\nmax_model_len: 64\nno-mmap: true\nenable-prefix-caching: false\n"
        "served-model-name: [a, b]\nallowed-hosts: [x.example, y.example]\nport: 0\nkv-cache-memory: 1GiB\n"
        "speculative-config: {method: ngram, num_speculative_tokens: 4}\n"
    )
    assert (worker.model.model, worker.scheduler.max_num_seqs, worker.model.max_model_len) == ("demo", 8, 64)
    assert (worker.model.mmap, worker.cache.enable_prefix_caching) == (False, False)
    assert (server.served_model_name, server.more_hosts) == (("a", "b"), ("x.example", "y.example"))
    assert (server.port, worker.cache.kv_cache_memory) == (0, "1GiB")
    assert worker.scheduler.speculative_config == '{"method": "ngram", "num_speculative_tokens": 4}'


def test_values_stay_as_they_are_written(run: Run) -> None:
    """YAML 1.1 has off as a boolean and 2:4 as a number in base 60."""
    _, cluster, _ = run("expert-servers: 2\nnuma: off\nautoscale: 2:4\n", "demo")
    assert (cluster.numa, cluster.autoscale) == ("off", "2:4")


def test_the_command_line_wins_over_variables_and_they_over_the_file(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "max-num-seqs: 8\nport: 1\nthreads: 3\nmodel: other\nmmap: true\napi-key: of-the-file\n"
    variables = {"MOESAIC_PORT": "2", "MOESAIC_THREADS": "4", "MOESAIC_SERVED_MODEL_NAME": "a b"}
    secret = {"MOESAIC_API_KEY": "of-the-environment", "MOESAIC_NO_MMAP": "true"}
    worker, _, server = run(text, "demo", "--threads", "5", **variables, **secret)
    assert (worker.scheduler.max_num_seqs, server.port, worker.model.threads) == (8, 2, 5)
    assert (worker.model.model, worker.model.mmap) == ("demo", False)
    assert (server.api_key, server.served_model_name) == ("of-the-environment", ("a", "b"))
    line = capsys.readouterr().err
    assert line.startswith("moesaic: from the environment: MOESAIC_API_KEY (not shown), MOESAIC_NO_MMAP=true")
    assert line.endswith("server.yaml: max-num-seqs=8\n") and line.count("\n") == 1
    assert "MOESAIC_PORT=2, MOESAIC_SERVED_MODEL_NAME=a b; from " in line and "of-the" not in line


def test_a_variable_names_the_file(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run("port: 7\nmodel: demo\n")
    monkeypatch.setenv("MOESAIC_CONFIG", str(tmp_path / "server.yaml"))
    assert cli.main(["serve"]) == 0


def test_without_any_nothing_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "run", lambda *settings: 0)
    assert cli.main(["serve", "demo"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port: 1\nmax-num-seq: 8", ":2: max-num-seq: got '8'; allowed: flags of moesaic serve"),
        ("max-num-seq: 8", "Did you mean --max-num-seqs?"),
        ("max-in-flight: 2", "--max-in-flight is a flag of run-batch."),
        ("max-num-seqs: 8.5", ":1: max-num-seqs: got '8.5'; allowed: an integer"),
        ("max-num-seqs: [1, 2]", ":1: max-num-seqs: got '1,2'; allowed: an integer"),
        ("served-model-name: []", ":1: served-model-name: got '[]'; allowed: a value"),
        ("timeout-header: soon", ":1: timeout-header: got 'soon'; allowed: a number"),
        ("mmap: perhaps", ":1: mmap: got 'perhaps'; allowed: true or false"),
        ("no-mmap: 3", ":1: no-mmap: got '3'; allowed: true or false"),
        ("dtype: fp8", ":1: dtype: got 'fp8'; allowed: auto, float32, bfloat16, float16"),
        ("threads:", ":1: threads: got ''; allowed: an integer"),
        ("port: 70000", ":1: port: got 70000; allowed: 0 to 65535"),
        ("config: x", ":1: config: got 'x'; allowed: flags of moesaic serve, without --config"),
        ("port: 3\nPort: 4", ":2: Port: got '4'; allowed"),
        ("max_num_seqs: 3\nmax-num-seqs: 4", ":2: max-num-seqs: {file}:1 has this key already"),
        ("- a", ": got a list; allowed: a mapping of flags, such as port: 8000"),
        ("a: [", ": this is not YAML: "),
        ("[a]: 3", ":1: got a list as a key; allowed: the name of a flag"),
        ("api-key: with space", ":1: api-key: this key cannot be sent"),
    ],
)
def test_mistakes_in_a_file(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(text)
    assert cli.main(["serve", "demo", "--config", str(file)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"moesaic: {file}") or "Did you mean" in message or "is a flag" in message
    assert message.replace("{file}", str(file)) in error and error.count("\n") == 1


@pytest.mark.parametrize("key", ["api-key", "api-keys"])
def test_no_mistake_prints_a_key(key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(f"{key}: geheim\n{key}: geheim too\n")
    assert cli.main(["serve", "demo", "--config", str(file)]) == 2
    file.write_text(f"{key}: geheim too\n")
    assert cli.main(["serve", "demo", "--config", str(file)]) == 2
    assert "geheim" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("MOESAIC_MAX_NUM_SEQS", "x", "MOESAIC_MAX_NUM_SEQS: got 'x'; allowed: an integer"),
        ("MOESAIC_PORT", "-1", "MOESAIC_PORT: got -1; allowed: 0 to 65535"),
        ("MOESAIC_PORT", "tcp://10.0.0.1:8000", "Kubernetes sets this variable for a service named moesaic"),
        ("MOESAIC_API_KEY", "", "MOESAIC_API_KEY: this key cannot be sent"),
        ("MOESAIC_CONFIG", "nowhere.yaml", "MOESAIC_CONFIG: got 'nowhere.yaml'; allowed: a YAML file"),
    ],
)
def test_mistakes_in_variables(
    name: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, value)
    assert cli.main(["serve", "demo"]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_an_unknown_variable_gets_a_line_and_is_ignored(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """A flag of run-batch is not unknown: one environment may serve both commands."""
    run("", "demo", MOESAIC_MAX_NUM_SEQ="3", MOESAIC_MAX_IN_FLIGHT="2")
    line = capsys.readouterr().err
    assert line == (
        "moesaic: ignored, since no flag is named so: MOESAIC_MAX_NUM_SEQ. "
        "Did you mean MOESAIC_MAX_NUM_SEQS?\n"
    )


def test_run_batch_takes_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "batch.yaml").write_text(f"input-file: {tmp_path}/in.jsonl\noutput_file: out.jsonl\n")
    monkeypatch.setenv("MOESAIC_MODEL", "demo")
    assert cli.main(["run-batch", "--config", str(tmp_path / "batch.yaml")]) == 2
    expected = f"{tmp_path}/batch.yaml:1: input-file: got '{tmp_path}/in.jsonl'; allowed: an existing"
    assert expected in capsys.readouterr().err


def test_other_commands_take_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOESAIC_BASE_URL", "nonsense")
    assert cli.main(["scale"]) == 2
    assert "give at least one of them" in capsys.readouterr().err


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "server.yaml").write_bytes(b"port: \xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        yaml_settings.read(tmp_path / "server.yaml")
    (tmp_path / "server.yaml").write_text("")
    assert yaml_settings.read(tmp_path / "server.yaml") == []
