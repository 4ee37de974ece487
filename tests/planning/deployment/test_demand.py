from __future__ import annotations

from pathlib import Path

import pytest

from moesaic.core.errors import ConfigError
from moesaic.planning.deployment import demand


def test_a_file_with_tables(tmp_path: Path) -> None:
    path = tmp_path / "work.toml"
    path.write_text("[workload]\nrate = 4\nprompt = [10, 30]\nanswer = 5\n[routing]\nkind = 'zipf'\n")
    found = demand.load(path)
    assert (found.rate, found.prompt, found.answer, found.longest) == (4, 20, 5, 35)
    assert found.rows_per_token == 5 and found.context == 22.5 and found.routing.kind == "zipf"
    assert found.describe() == "4 requests/s, 20 tokens/s; prompts of 20 tokens and answers of 5 on average"


def test_fields_without_tables_and_clients(tmp_path: Path) -> None:
    path = tmp_path / "work.toml"
    path.write_text("kind = 'closed'\nclients = 12\nprefill = false\n")
    found = demand.load(path)
    assert found.rate is None and found.rows_per_token == 1
    assert found.describe().startswith("12 clients; prompts of 100")


def test_a_recorded_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n5,10,4\n7,30,8\n")
    found = demand.load(path)
    assert (found.rate, found.prompt, found.answer, found.longest) == (1.0, 20, 6, 38)
    assert found.workload.kind == "trace" and found.folder == tmp_path


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("work.toml", "rat = 3", "--workload: workload.rat: got 3; allowed: only these fields: kind, rate"),
        ("work.toml", "", "--workload: workload.rate: it is missing, with workload.kind 'poisson'"),
        ("work.toml", "[workload]\nrate=1\n[devices]\n", "--workload: devices: got {}; allowed: only"),
        ("work.toml", "[workload]\nrate=1\n[routing]\nkind='profile'", "--workload: routing.file: got None"),
        ("work.txt", "= 3", "not a TOML file and no .csv"),
        ("trace.csv", "a,b\n1,2\n", "--workload: "),
    ],
)
def test_wrong_files(name: str, text: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        demand.load(tmp_path / name)
    assert expected in str(error.value) and len(str(error.value).splitlines()) == 1


def test_objectives() -> None:
    both = demand.parse_objectives("ttft=2s, itl=50ms")
    assert (both.ttft_ms, both.itl_ms) == (2000, 50)
    assert demand.parse_objectives("itl=0.5s").itl_ms == 500 and demand.parse_objectives(None).ttft_ms is None


@pytest.mark.parametrize("given", ["", "ttft", "ttft=2", "tpot=2s", "itl=2ms,itl=3ms", "itl=0ms"])
def test_wrong_objectives(given: str) -> None:
    with pytest.raises(ConfigError, match="--slo: got .*; allowed: ttft=TIME, itl=TIME or both"):
        demand.parse_objectives(given)
