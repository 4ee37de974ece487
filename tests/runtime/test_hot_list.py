"""The list of hot experts is found again, and a file that cannot be used counts as none."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support import model_configs, tiny_models

from moesaic.core.experts import ExpertLayout
from moesaic.core.offload import Offload
from moesaic.kernels import table
from moesaic.models import registry
from moesaic.policy.offloading.residency import HotExperts
from moesaic.runtime.hot_list import FIRST_PAUSE, ListKeeper, open_list


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return Path(tiny_models.save(tiny_models.build("qwen3_moe", model_configs.qwen3()), folder))


@pytest.fixture
def layout(model: Path) -> ExpertLayout:
    return registry.expert_layout(model, table.REFERENCE)


def counted(layout: ExpertLayout) -> HotExperts:
    hot = HotExperts(layout.num_experts)
    for layer in layout.layers:
        hot.learn(layer, np.array([layer, layer, 5]))
    return hot


def test_a_list_is_found_again_by_the_model(
    model: Path, layout: ExpertLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = open_list("auto", model, layout)
    assert first.counts == {}
    first.save(counted(layout).long_counts)
    assert open_list("auto", model, layout).counts == counted(layout).long_counts
    assert open_list("off", model, layout).counts == {}
    [file] = tmp_path.rglob("*.json")
    assert file.parent == tmp_path / "moesaic/hot-experts"
    assert open_list(str(file), model, layout).counts == counted(layout).long_counts


DAMAGES: dict[str, Any] = {
    "cut": "{",
    "a list": "[]",
    "deep": "[" * 100_000,
    "no text": b"\xff\xfe",
    "another format": {"format": 2},
    "another model": {"model": "a.b.c"},
    "no counts": {"counts": None},
    "another layer": {"counts": {"77": [1.0] * 8}},
    "too few experts": {"counts": {"0": [1.0]}},
    "no numbers": {"counts": {"0": ["1"] * 8}},
    "below 0": {"counts": {"0": [-1] * 8}},
    "not finite": {"counts": {"0": [float("nan")] * 8}},
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_is_no_list_of_the_model_is_a_miss_with_one_line(
    damage: str, model: Path, layout: ExpertLayout, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, content = tmp_path / "list.json", DAMAGES[damage]
    open_list(str(file), model, layout).save(counted(layout).long_counts)
    if isinstance(content, dict):
        content = json.dumps(json.loads(file.read_text()) | content)
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert open_list(str(file), model, layout).counts == {}
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(f"hot experts are learned anew: {file}: ")
    assert "\n" not in record.getMessage()


def test_a_folder_that_cannot_be_written_costs_one_line(
    model: Path, layout: ExpertLayout, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    hot_list = open_list(str(tmp_path / "file/list.json"), model, layout)
    caplog.clear()
    for _ in range(3):
        hot_list.save(counted(layout).long_counts)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_writes_become_rare(model: Path, layout: ExpertLayout, tmp_path: Path) -> None:
    file, now, written = tmp_path / "list.json", 0.0, []
    keeper = ListKeeper(open_list(str(file), model, layout), counted(layout), lambda: now)
    for tick in range(1, 1000):
        now = 0.5 * tick
        keeper.after_step()
        if file.exists():
            written.append(now)
            file.unlink()
    assert written[:4] == [FIRST_PAUSE, 3.0, 7.0, 15.0] and written[-1] - written[-2] == 60.0


def test_the_default_of_a_worker_without_a_plan_is_no_list() -> None:
    offload = Offload(1 << 20, "cgopipe", 1, 1, 1)
    assert offload.hot_experts == "off"
    assert Offload.from_json(json.loads(json.dumps(vars(replace(offload, hot_experts="x"))))).hot_experts
