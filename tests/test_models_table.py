"""The table of models in docs/models.md is what scripts/models_table.py writes, and says what doctor says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from scripts import models_table
from scripts.models_table import MEASURED, ROOT, ROWS, Row

from moesaic.commands import cli
from moesaic.kernels import table


def told_by_doctor(row: Row, machine: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    config = folder / "config.json"
    config.write_text(json.dumps(row.raw))
    file = str(ROOT / "examples" / f"{machine}.toml")
    cli.main(["doctor", str(config), "--hardware", file, "--json"])
    return json.loads(capsys.readouterr().out)


def test_the_page_has_the_table_of_today() -> None:
    page = models_table.PAGE.read_text(encoding="utf-8")
    assert models_table.replaced(page) == page, "run: python -m scripts.models_table"


@pytest.mark.skipif(not table.pick("cpu").can_use_quantized, reason="kernels are not compiled")
@pytest.mark.parametrize(
    "hub_id",
    [
        "allenai/OLMoE-1B-7B-0924-Instruct",
        "Qwen/Qwen3-30B-A3B-FP8",
        "Qwen/Qwen3-30B-A3B-GPTQ-Int4",
        "openai/gpt-oss-20b",
    ],
)
def test_doctor_says_the_same(hub_id: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [row] = [row for row in ROWS if row.hub_id == hub_id]
    told = told_by_doctor(row, "server", tmp_path, capsys)
    model, server = models_table.sizes(row), models_table.machine("server")
    [weights] = [one["weights"] for one in told["formats"] if one["experts_as"] == told["stored"]["type"]]
    assert weights == model.weights
    assert told["speeds"][0]["answers"] == pytest.approx(models_table.in_memory(model, server))


def test_measured_figures_are_those_of_the_benchmarks() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert all(f"| {one.tokens} |" in page or f"decode is {one.tokens}," in page for one in MEASURED)


def test_a_price_is_near_what_was_measured() -> None:
    hardware = models_table.machine("two-cores")
    for one in MEASURED:
        row = Row(one.shape, models_table.SHAPES[one.shape])
        price = models_table.in_memory(models_table.sizes(row), hardware)
        assert price is not None and 0.7 < price / one.tokens < 1.3
