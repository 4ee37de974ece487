"""The files in deploy/ name only flags, variables, metrics and files that exist."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import yaml

from moesaic.commands import cli, join, serve
from moesaic.commands.flag_groups import GROUPS
from moesaic.commands.options import Join
from moesaic.config.values import MetricsPrefix
from moesaic.core.metrics import WorkerStats
from moesaic.engine import EngineStats
from moesaic.server.cluster_metrics import ClusterCollector
from moesaic.server.meter import Meter
from moesaic.server.metrics import EngineCollector, Metric
from tests.support.fake_cluster import FakeCluster

DEPLOY = Path(__file__).parent.parent / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "moesaic.json").read_text())
CONFIG = "/etc/moesaic/server.yaml"
"""Where unit and container read deploy/server.yaml."""
WITHOUT_A_PANEL = {
    *("collective_bytes", "group_pairs", "group_local_pairs", "group_shuffled_rows", "group_kept_rows"),
    *(
        "kv_received_tokens",
        "kv_transfer_seconds",
        "kv_transfer_early_bytes",
        "available",
        "paced_runs",
        "paced_late_runs",
        "refused_connections",
        "supervisor_restarts",
    ),
    *("listed_experts", "resident_experts", "memory_divisions"),
    *("prefix_disk_hits", "prefix_disk_read_bytes", "prefix_disk_written_bytes"),
    *("prefix_disk_dropped_blocks", "prefix_disk_damaged_entries"),
    *("spec_decode_num_drafts", "spec_decode_num_accepted_tokens_per_pos"),
    *("spec_decode_break_even_acceptance", "request_prefill_kv_computed_tokens", "cache_config_info"),
    *("num_requests_waiting_by_reason", "prompt_tokens_by_source", "prompt_tokens_cached_by_source"),
    *("request_time_per_output_token_seconds", "request_inference_time_seconds", "iteration_tokens_total"),
    *("request_max_num_generation_tokens", "prompt_tokens_cached"),
}
"""Metrics that the dashboard leaves out."""
SERVICE_KEYS = {
    *("build", "command", "environment", "healthcheck", "image", "ports", "profiles", "restart"),
    *("stop_grace_period", "ulimits", "volumes"),
}
"""Keys of the Compose specification that the file's services use."""


def served(words: list[str], monkeypatch: pytest.MonkeyPatch, **variables: str) -> tuple[Any, ...]:
    """The settings with which this command line of `moesaic` would serve."""
    found: list[tuple[Any, ...]] = []
    monkeypatch.setattr(serve, "run", lambda *settings: found.append(settings) or 0)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    here = [str(DEPLOY / "server.yaml") if word == CONFIG else word for word in words]
    assert cli.main(here) == 0
    return found[0]


def unit(name: str = "moesaic.service") -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(DEPLOY / name)
    return parser["Service"]


def test_the_unit_starts_a_server_with_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    program, *words = shlex.split(unit()["ExecStart"])
    assert program.endswith("/bin/moesaic") and CONFIG in words
    worker, cluster, *_ = served(words, monkeypatch)
    assert (worker.model.model, cluster.expert_servers, cluster.min_replicas) == ("demo", 2, 2)
    assert (unit()["KillMode"], unit()["RestartPreventExitStatus"]) == ("mixed", "2")


@pytest.mark.parametrize("role", get_args(typing.get_type_hints(Join)["role"]))
def test_the_unit_of_each_role_joins(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the variables that the comment of the unit has for /etc/moesaic/join."""
    text = (DEPLOY / "moesaic-join@.service").read_text()
    variables = dict(re.findall(r"(?m)^#   ([A-Z]+)=(.*)$", text))
    line = unit("moesaic-join@.service")["ExecStart"].replace("%i", role).replace("%d", "/run/credentials/x")
    for name, value in variables.items():
        line = line.replace(f"${{{name}}}", value).replace(f"${name}", value)
    program, *words = shlex.split(line)
    found: list[Join] = []
    monkeypatch.setattr(join, "run", lambda options, as_json: found.append(options) or 0)
    assert program.endswith("/bin/moesaic") and "$" not in line and cli.main(words) == 0
    assert (found[0].address, found[0].role, found[0].threads) == ("first-host:7000", role, 8)
    name, file = unit("moesaic-join@.service")["LoadCredential"].split(":")
    assert found[0].secret_file == f"/run/credentials/x/{name}" and file in text.partition("[Unit]")[0]


def test_the_drop_in_opens_the_cluster(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (DEPLOY / "moesaic-cluster.conf").read_text().replace("%d", "/run/credentials/x").splitlines()
    assert "[Service]" in lines
    variables = dict(re.findall(r"^Environment=(\w+)=(\S+)$", "\n".join(lines), flags=re.MULTILINE))
    cluster = served(shlex.split(unit()["ExecStart"])[1:], monkeypatch, **variables)[1]
    assert "ignored" not in capsys.readouterr().err and len(variables) == 2
    [loaded] = [line.partition("=")[2] for line in lines if line.startswith("LoadCredential=")]
    assert loaded == unit("moesaic-join@.service")["LoadCredential"]
    assert cluster.cluster_secret_file == f"/run/credentials/x/{loaded.partition(':')[0]}"
    assert cluster.cluster_address == "tcp:0.0.0.0:7000"


def test_the_container_starts_the_same_on_every_address(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    variables = COMPOSE["services"]["server"]["environment"] | {"MOESAIC_API_KEY": "geheim"}
    settings = served(COMPOSE["services"]["server"]["command"], monkeypatch, **variables)
    assert (settings[2].host, settings[2].api_key) == ("0.0.0.0", "geheim")
    assert "ignored" not in capsys.readouterr().err, "every variable is a flag"
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    command = json.loads(next(line for line in lines if line.startswith("CMD")).removeprefix("CMD"))
    assert command == COMPOSE["services"]["server"]["command"]
    health = COMPOSE["services"]["server"]["healthcheck"]["test"]
    assert health[1:3] == ["python", "-c"] and "/health" in health[3] and compile(health[3], "health", "exec")


def test_the_files_that_compose_mounts_exist() -> None:
    mounts = [line for one in COMPOSE["services"].values() for line in one.get("volumes", ())]
    files = [line.split(":")[0] for line in mounts if line.startswith("./")]
    assert len(files) == 5 and [name for name in files if not (DEPLOY / name).is_file()] == []
    scraped = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())["scrape_configs"]
    assert scraped[0]["static_configs"][0]["targets"] == ["server:8000"]
    source = yaml.safe_load((DEPLOY / "grafana" / "datasource.yaml").read_text())["datasources"][0]
    assert source["jsonData"]["timeInterval"] == scraped[0]["scrape_interval"], "Grafana assumes 15s"
    assert source["url"] == "http://prometheus:9090" and {"server", "prometheus"} <= set(COMPOSE["services"])
    folder = yaml.safe_load((DEPLOY / "grafana" / "dashboards.yaml").read_text())["providers"][0]["options"]
    assert any(f":{folder['path']}/moesaic.json:" in line for line in mounts)


def panels() -> list[dict[str, Any]]:
    """The panels of the dashboard without the titles of their rows."""
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def expressions(prefix: str) -> list[str]:
    """Every query of the dashboard, where `prefix` is chosen for the metrics that vLLM has, too."""
    queries = [target["expr"] for panel in panels() for target in panel["targets"]]
    found = [*queries, *(one["query"] for one in DASHBOARD["templating"]["list"])]
    return [text.replace("${prefix}", prefix) for text in found]


def exported(prefix: MetricsPrefix) -> list[Metric]:
    """The metrics of a server with several processes, started with this --metrics-prefix."""
    cluster = FakeCluster(np.ones((2, 4), dtype=np.int64))
    engine = EngineCollector(lambda: EngineStats(0, WorkerStats()), Meter(), "m", prefix)
    return [*engine.collect(), *ClusterCollector(cluster, "m").collect()]


@pytest.mark.parametrize("prefix", get_args(MetricsPrefix))
def test_every_metric_of_the_dashboard_exists(prefix: MetricsPrefix) -> None:
    families = exported(prefix)
    known = {sample.name for family in families for sample in family.samples}
    labels = {label for family in families for sample in family.samples for label in sample.labels}
    texts = expressions(prefix.removesuffix(":"))
    named = {name for text in texts for name in re.findall(r"[$\w{}]+:\w+", text)}
    assert len(named) > 50 and named - known == set()
    assert any(name.startswith(prefix) for name in named)
    by = {
        name.strip()
        for text in texts
        for found in re.findall(r"by \((.+?)\)", text)
        for name in found.split(",")
    }
    shown = set(re.findall(r"\{\{(\w+)\}\}", json.dumps(DASHBOARD)))
    assert by | shown <= labels | {"le"} and by


def test_the_dashboard_offers_each_prefix() -> None:
    [choice] = [one for one in DASHBOARD["templating"]["list"] if one["name"] == "prefix"]
    offered = [f"{option['value']}:" for option in choice["options"]]
    assert offered == [f"{name}:" for name in choice["query"].split(",")] == list(get_args(MetricsPrefix))


def test_a_new_metric_gets_a_panel_or_is_named_here() -> None:
    shown = {name for text in expressions("moesaic") for name in re.findall(r"moesaic:(\w+)", text)}
    missing = {
        family.name.removeprefix("moesaic:")
        for family in exported("moesaic:")
        if not {sample.name.removeprefix("moesaic:") for sample in family.samples} & shown
    }
    assert missing == WITHOUT_A_PANEL


def test_panels_do_not_overlap_and_use_the_chosen_data_source() -> None:
    every = DASHBOARD["panels"]
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in every}
    assert len(places) == len(every) == len({panel["id"] for panel in every})
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in every)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24
    assert {panel["datasource"]["uid"] for panel in panels()} == {"${datasource}"}
    assert all(panel["description"] and panel["targets"] for panel in panels())


def test_every_flag_that_the_files_mention_exists() -> None:
    known = {flag for flags in GROUPS.values() for flag in flags} | {"--help-all"}
    texts = [
        (DEPLOY / name).read_text() for name in ("server.yaml", "grafana/moesaic.json", "prometheus.yaml")
    ]
    texts.append(unit()["ExecStart"])
    mentioned = {flag for text in texts for flag in re.findall(r"--[a-z][a-z-]*", text)}
    assert len(mentioned) > 5 and mentioned - known == set()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("name", ["moesaic.service", "moesaic-join@.service"])
def test_systemd_understands_the_unit(name: str, tmp_path: Path) -> None:
    """With another program in the place of the server's, which need not be installed here."""
    text = (DEPLOY / name).read_text()
    instance = tmp_path / name.replace("@", "@expert-server")
    (tmp_path / name).write_text(re.sub("(?m)^(ExecStart=)[^ ]+", rf"\1{sys.executable}", text))
    if name == "moesaic.service":
        (tmp_path / f"{name}.d").mkdir()
        shutil.copy(DEPLOY / "moesaic-cluster.conf", tmp_path / f"{name}.d")
    command = ["systemd-analyze", "verify", "--man=no", str(instance)]
    done = subprocess.run(command, capture_output=True, text=True)
    complaints = [line for line in (done.stdout + done.stderr).splitlines() if "moesaic" in line]
    assert complaints == [] and done.returncode == 0, done.stderr


def test_compose_has_only_known_keys() -> None:
    services = COMPOSE["services"]
    assert set(COMPOSE) == {"services", "volumes"} and set(COMPOSE["volumes"]) == {"models"}
    assert {key for service in services.values() for key in service} <= SERVICE_KEYS
    assert set(services["server"]["build"]) <= {"context", "dockerfile", "args", "target"}
    assert set(services["server"]["healthcheck"]) <= {
        "test",
        "interval",
        "timeout",
        "retries",
        "start_period",
    }
    assert all("image" in service or "build" in service for service in services.values())
    named = [line.split(":")[0] for service in services.values() for line in service.get("volumes", ())]
    assert {name for name in named if not name.startswith("./")} == set(COMPOSE["volumes"])
    ports = [port for service in services.values() for port in service["ports"]]
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port) for port in ports), "of this host alone"
    assert "EXPOSE 8000" in (DEPLOY / "Dockerfile").read_text().splitlines()


@pytest.mark.slow
def test_bash_completes_commands_and_flags(tmp_path: Path) -> None:
    script = cli.app.generate_completion(prog_name="moesaic", shell="bash")
    (tmp_path / "moesaic.bash").write_text(script)
    code = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
_moesaic 2>/dev/null || $(complete -p moesaic | sed 's/.*-F \\([^ ]*\\).*/\\1/')
printf '%s\\n' "${COMPREPLY[@]}"
"""
    for typed, expected in (
        (["moesaic", "ser"], "serve"),
        (["moesaic", "clu"], "cluster"),
        (["moesaic", "cluster", "in"], "init"),
        (["moesaic", "serve", "--max-num-s"], "--max-num-seqs"),
        (["moesaic", "serve", "--log-level", "de"], "debug"),
    ):
        command = ["bash", "-c", code, "bash", str(tmp_path / "moesaic.bash"), *typed]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert expected in done.stdout.split(), (typed, done.stdout, done.stderr)
