"""The report's three durations: predicted, predicted with the link's speed of the run, and measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.support import model_configs, tiny_models
from tests.test_planning import HARDWARE, JOB, SIZES

from moesaic.commands.offload_report import describe_result, measure_phases
from moesaic.config import ModelConfig, OffloadConfig, WorkerConfig
from moesaic.core.metrics import PassStats
from moesaic.cost.hardware import GIB
from moesaic.planning import WorkerPlan, plan


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> WorkerPlan:
    model = tiny_models.build("qwen3_moe", model_configs.qwen3(**SIZES))
    path = tiny_models.save(model, tmp_path_factory.mktemp("told"), torch.bfloat16)
    options = OffloadConfig("6MiB", offload_schedule="serial", micro_batch_size=4, micro_batches=2)
    return plan(WorkerConfig(ModelConfig(str(path))), options, JOB, HARDWARE)


def made(found: WorkerPlan, speed: float, seconds: float = 2.0) -> PassStats:
    """Three decode steps whose experts were loaded at `speed`."""
    away = found.model.experts - found.price.policy.static_experts
    loaded = 3 * found.model.layers * away * found.model.expert * 2
    busy = {"fast": 0.1, "down": loaded / speed}
    return PassStats(
        False, 2, 8, passes=3, rows=24, context=3 * 8 * 35, loaded_bytes=loaded, seconds=seconds, busy=busy
    )


def test_the_second_prediction_has_the_speed_of_the_run(found: WorkerPlan) -> None:
    """With the serial schedule, seconds are those of the link plus those of computing. Only the link's
    seconds change."""
    planned_speed = HARDWARE.link.down
    [same] = measure_phases(found, [made(found, planned_speed)])
    assert same.link_bandwidth == pytest.approx(
        planned_speed
    ) and same.predicted_at_link_seconds == pytest.approx(same.predicted_seconds)
    [twice] = measure_phases(found, [made(found, 2 * planned_speed)])
    assert twice.predicted_seconds == same.predicted_seconds
    assert twice.predicted_at_link_seconds == pytest.approx(
        same.predicted_seconds - same.link_busy_seconds / 2, rel=1e-3
    )


def test_each_phase_has_its_own_speed(found: WorkerPlan) -> None:
    slow, quick = made(found, GIB / 100), replace(made(found, GIB / 10), prefill=True)
    prefill, decode = measure_phases(found, [slow, quick, slow])
    assert (prefill.name, decode.name, decode.passes) == ("prefill", "decode", 6)
    assert prefill.link_bandwidth == pytest.approx(GIB / 10) and decode.link_bandwidth == pytest.approx(
        GIB / 100
    )


def test_a_table_with_both_predictions(found: WorkerPlan) -> None:
    one = made(found, GIB / 100)
    [phase] = measure_phases(found, [one])
    told = describe_result([phase], seconds=2.5)
    lines = [line.split() for line in told.splitlines()]
    assert ["at", "this", "link", f"{phase.predicted_at_link_seconds:.2f}", "s"] in lines
    assert ["predicted", "/", "measured", f"{phase.predicted_seconds / 2:.2f}"] in lines
    assert ["at", "this", "link", "/", "measured", f"{phase.predicted_at_link_seconds / 2:.2f}"] in lines
    assert ["link", "0.01", "GiB/s"] in lines
    assert phase.as_json()["predicted_at_link_seconds"] == phase.predicted_at_link_seconds
    assert told.endswith("outside passes (sampling, text, the API): 0.50 s")


def test_what_loaded_nothing_has_no_other_prediction(found: WorkerPlan) -> None:
    [phase] = measure_phases(found, [replace(made(found, 1.0), loaded_bytes=0, busy={"fast": 1.0})])
    assert phase.link_bandwidth is None and phase.predicted_at_link_seconds == phase.predicted_seconds
    assert phase.as_json()["link_bytes_per_s"] is None
