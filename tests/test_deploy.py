"""The files in deploy/ name only flags, variables, metrics and files that exist."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from moesaic import cli
from moesaic.commands import serve
from moesaic.core.metrics import WorkerStats
from moesaic.engine import EngineStats
from moesaic.server.cluster_metrics import ClusterCollector
from moesaic.server.metrics import EngineCollector, Meter
from tests.support.fake_cluster import FakeCluster

DEPLOY = Path(__file__).parent.parent / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "moesaic.json").read_text())
CONFIG = "/etc/moesaic/server.yaml"
"""Where unit and container read deploy/server.yaml."""


def served(words: list[str], monkeypatch: pytest.MonkeyPatch, **variables: str) -> tuple[Any, ...]:
    """The settings with which this command line of `moesaic` would serve."""
    found: list[tuple[Any, ...]] = []
    monkeypatch.setattr(serve, "run", lambda *settings: found.append(settings) or 0)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    here = [str(DEPLOY / "server.yaml") if word == CONFIG else word for word in words]
    assert cli.main(here) == 0
    return found[0]


def unit() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(DEPLOY / "moesaic.service")
    return parser["Service"]


def test_the_unit_starts_a_server_with_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    program, *words = shlex.split(unit()["ExecStart"])
    assert program.endswith("/bin/moesaic") and CONFIG in words
    worker, cluster, *_ = served(words, monkeypatch)
    assert (worker.model.model, cluster.expert_servers, cluster.min_replicas) == ("demo", 2, 2)
    assert (unit()["KillMode"], unit()["RestartPreventExitStatus"]) == ("mixed", "2")


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
    assert source["url"] == "http://prometheus:9090" and {"server", "prometheus"} <= set(COMPOSE["services"])
    folder = yaml.safe_load((DEPLOY / "grafana" / "dashboards.yaml").read_text())["providers"][0]["options"]
    assert any(f":{folder['path']}/moesaic.json:" in line for line in mounts)


def expressions() -> list[str]:
    queries = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    return [*queries, *(one["query"] for one in DASHBOARD["templating"]["list"])]


def test_every_metric_of_the_dashboard_exists() -> None:
    cluster = FakeCluster(np.ones((2, 4), dtype=np.int64))
    collectors = (
        EngineCollector(lambda: EngineStats(0, WorkerStats()), Meter(), "m"),
        ClusterCollector(cluster, "m"),
    )
    families = [family for one in collectors for family in one.collect()]
    known = {sample.name for family in families for sample in family.samples}
    labels = {label for family in families for sample in family.samples for label in sample.labels}
    named = {name for text in expressions() for name in re.findall(r"moesaic:\w+", text)}
    assert len(named) > 20 and named - known == set()
    by = {name for text in expressions() for name in re.findall(r"by \((\w+)\)", text)}
    shown = set(re.findall(r"\{\{(\w+)\}\}", json.dumps(DASHBOARD)))
    assert by | shown <= labels | {"le"} and by


def test_panels_do_not_overlap_and_use_the_chosen_data_source() -> None:
    panels = DASHBOARD["panels"]
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len(panels) == len({panel["id"] for panel in panels})
    assert {panel["datasource"]["uid"] for panel in panels} == {"${datasource}"}
    assert all(panel["description"] for panel in panels)


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
        (["moesaic", "serve", "--max-num-s"], "--max-num-seqs"),
        (["moesaic", "serve", "--log-level", "de"], "debug"),
    ):
        command = ["bash", "-c", code, "bash", str(tmp_path / "moesaic.bash"), *typed]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert expected in done.stdout.split(), (typed, done.stdout, done.stderr)
