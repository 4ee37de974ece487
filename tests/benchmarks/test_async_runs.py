"""The schedulers over modelled devices, in virtual time: the papers' devices with a hot server."""

from __future__ import annotations

from dataclasses import replace

import async_runs
import pytest
from async_runs import Cluster, Setting

from moesaic.core import paced_devices
from moesaic.core.curves import Thresholds

DEVICES = replace(paced_devices.read(async_runs.PAPER), dilation=1.0)
SMALL = Setting(model=(8, 8, 2), decodes=512, tokens=4, skew=0.75)


@pytest.mark.slow
def test_under_skew_most_runs_of_large_batches_are_partial_and_more_tokens_come_out() -> None:
    found = async_runs.simulate(SMALL, DEVICES)
    never = replace(DEVICES, thresholds=Thresholds(separate_rows=9999))
    gathered = async_runs.simulate(SMALL, never)
    assert found.share > 0.5 > 0.05 > gathered.share
    assert found.tokens == gathered.tokens == 4 * 512 * 4
    assert found.seconds < gathered.seconds


def test_small_batches_go_on_together_since_a_run_of_few_rows_costs_as_much() -> None:
    few = replace(SMALL, decodes=64)
    found = async_runs.simulate(few, DEVICES)
    alone = async_runs.simulate(few, replace(DEVICES, thresholds=Thresholds(1, 0)))
    assert found.share < 0.05 and alone.share > 0.9
    assert found.seconds < alone.seconds


@pytest.mark.parametrize("persistent", [False, True])
def test_a_hot_server_gets_its_share_of_the_pairs(persistent: bool) -> None:
    cluster = Cluster(replace(SMALL, persistent=persistent), DEVICES)
    for layer in (0, 1, 5):
        shares = [0.0] * 4
        for expert, logit in enumerate(cluster.logits(layer)):
            shares[expert // 2] += float(2.718281828**logit)
        hot = 0 if persistent else layer % 4
        assert shares[hot] == pytest.approx(0.75) and sum(shares) == pytest.approx(1.0)
