from __future__ import annotations

import pytest

from moesaic.cost import curves
from moesaic.cost.machines import MACHINES
from moesaic.policy.scheduling.minimum_batch import Decisions, Load


def test_a_gpu_reads_its_weights_for_as_long_as_it_multiplies_some_hundred_rows() -> None:
    """H100: 989 Tflop/s over 3.35 TB/s are 295 rows of two bytes a weight."""
    found = curves.of_machine(MACHINES["h100"], 176e6, 42e6, 2.0)
    read = 2 * 42e6 / 3.35e12
    assert found.attention.seconds(1) == found.attention.seconds(295) == pytest.approx(20e-6 + read)
    assert found.attention.seconds(2 * 295.2) == pytest.approx(20e-6 + 2 * read, rel=1e-3)
    assert found.experts.seconds(10, 2) == pytest.approx(20e-6 + 2 * 2 * 176e6 / 3.35e12)
    assert found.experts.seconds(1295.2, 1) - found.experts.seconds(295.2, 1) == pytest.approx(
        1000 * 2 * 176e6 / 989e12, rel=1e-3
    )
    assert not found.shares_cores and not Decisions(found, 8, 2).runs_alone(64, Load(128, 128))


def test_devices_are_known_by_the_words_of_their_names() -> None:
    for name, machine in (("Tesla T4", "t4"), ("NVIDIA A100-SXM4-40GB", "a100-80"), ("NVIDIA H200", "h200")):
        found = curves.of_device(name, 1e6, 1e6, 2.0)
        assert found is not None and found.source == f"data sheet of {machine}"
    assert curves.of_device("NVIDIA L40S", 1e6, 1e6, 2.0) is None
