from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from moesaic.commands import cli, plan_deployment_report
from moesaic.commands.plan_options import Plan
from moesaic.planning.deployment import search, trials

CLUSTER = """
[links]
inside_latency_us = 5
inside_gb_per_s = 1
[[machines]]
devices = 2
device = "t4"
curves = "curves.toml"
price_per_hour = 2.0
"""
CURVES = """
source = "made up"
attention = { points_ms = [[8, 1.5], [64, 6]] }
experts = { points_ms = [[8, 1], [64, 4]], per_expert_ms = 0.02 }
link = { latency_us = 100, gb_per_s = 0.05 }
"""
WORK = "rate = 40\nprompt = [3, 9]\nanswer = [4, 12]\n"


@pytest.fixture
def line(tmp_path: Path) -> list[str]:
    for name, text in (("cluster.toml", CLUSTER), ("curves.toml", CURVES), ("work.toml", WORK)):
        (tmp_path / name).write_text(text, encoding="utf-8")
    files = ["--cluster", str(tmp_path / "cluster.toml"), "--workload", str(tmp_path / "work.toml")]
    return ["plan", "demo", *files, "--slo", "ttft=1s,itl=80ms"]


def test_a_name_of_sizes_is_not_served() -> None:
    for name, served in (("mixtral-8x7b", "MODEL"), ("./my-model", "./my-model")):
        options = Plan(model=name, hardware="l4", prompt_len=8, gen_len=8)
        assert plan_deployment_report.choose_served(options) == served


@pytest.mark.slow
def test_for_people_and_for_machines(
    line: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name, value in (
        (search, "FIRST", 3),
        (search, "SECOND", 1),
        (trials, "EVENTS", 9000),
        (trials, "REQUESTS", 25),
    ):
        monkeypatch.setattr(module, name, value)
    assert cli.main([*line, "--time-budget", "100", "--top", "2"]) == 0
    text = capsys.readouterr().out
    for part in (
        "demo on 2 x t4 on 1 host",
        "40 requests/s, 320 tokens/s; prompts of 6 tokens and answers of 8 on average",
        "first token at most 1000 ms, mean between tokens at most 80 ms",
        "per million",
        "moesaic serve demo --device cuda",
        "good requests/s",
        "Asynchronous Expert Parallelism: ",
        "deployments were simulated",
    ):
        assert part in text, text
    assert "roofline" not in text, "the curves are measured"
    assert cli.main([*line, "--time-budget", "100", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["complete"] and len(found["ideas"]) == 5
    best = found["deployments"][0]
    assert f"  {best['commands'][0]}\n" in text
    assert best["price_per_million_tokens"] == pytest.approx(2 / 3600 / best["throughput"] * 1e6)
    assert 0 < best["good_share"] <= 1 and best["itl"]["percentiles"]["p99"] > 0
    words = shlex.split(best["commands"][0])[1:]
    assert cli.app.parse_args(words, exit_on_error=False, print_error=False)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["--time-budget", "0"], "--time-budget: got 0.0; allowed: seconds, more than 0"),
        (["--top", "0"], "--top: got 0; allowed: an integer of at least 1"),
        (["--slo", "ttft=soon"], "--slo: got 'ttft=soon'; allowed: ttft=TIME, itl=TIME or both"),
        (["--hardware", "t4"], "--hardware: not with --cluster"),
        (["--cluster", "3xk80"], "--cluster: machines.0.device: got 'k80'; allowed: t4"),
    ],
)
def test_wrong_settings(
    more: list[str], expected: str, line: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    if more[0] in line:
        at = line.index(more[0])
        line = line[:at] + line[at + 2 :]
    assert cli.main([*line, *more]) == 2
    error = capsys.readouterr().err
    assert expected in error and len(error.strip().splitlines()) == 1


def test_settings_of_clusters_need_a_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "demo", "--top", "3"]) == 2
    assert "--top: allowed only with --cluster" in capsys.readouterr().err
    assert cli.main(["plan", "demo", "--cluster", "1xt4"]) == 2
    assert "--workload: got 'nothing'; allowed: a .toml file or a .csv trace" in capsys.readouterr().err
