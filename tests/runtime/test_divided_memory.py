"""What divisions of memory are made of, what reading costs, and in which order memory moves."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moesaic.core.metrics import ResidencyStats
from moesaic.core.offload import Division, DivisionPrices, Offload
from moesaic.policy.offloading.residency import HotExperts
from moesaic.runtime.divided_memory import LOG_INTERVAL, MEASURED_STEPS, DividedMemory, MemoryMover, ReadMeter

PRICES = DivisionPrices((1,), (0.1,), 0.5, layers=1, num_experts=4, top_k=1)
OFFLOAD = Offload(1, "on-demand", 1, 1, 1, division=PRICES)


class Passes:
    link_seconds, loaded_bytes, forgotten = 0.0, 0, 0

    @property
    def residency(self) -> ResidencyStats:
        return ResidencyStats(loaded_bytes=self.loaded_bytes)

    def forget_loaded(self) -> None:
        self.forgotten += 1


def test_the_price_of_a_read_is_that_of_the_last_steps() -> None:
    passes, hot = Passes(), HotExperts(4)
    meter = ReadMeter(OFFLOAD, DividedMemory([], 1, read_bytes=10.0), hot, passes)  # type: ignore[arg-type]
    assert meter.read().seconds == 0.5 and meter.read().shares == (0.25,) * 4
    hot.learn(0, np.array([1, 1, 1, 2]))
    for _ in range(80):
        passes.loaded_bytes, passes.link_seconds = passes.loaded_bytes + 20, passes.link_seconds + 4.0
        reads = [meter.after_step() for _ in range(MEASURED_STEPS)]
        assert reads[:-1] == [None] * (MEASURED_STEPS - 1)
    assert reads[-1] is not None and reads[-1].seconds == pytest.approx(2.0)
    assert reads[-1].shares == pytest.approx((0.75, 0.25, 0.0, 0.0))
    for _ in range(MEASURED_STEPS):
        last = meter.after_step()
    assert last is not None and last.seconds == pytest.approx(2.0), "nothing was read"


def test_what_shrinks_gives_its_memory_back_first(caplog: pytest.LogCaptureFixture) -> None:
    done: list[Any] = []
    kv, experts = SimpleNamespace(num_blocks=9), SimpleNamespace(residents=2)

    def resize_kv(num_blocks: int) -> None:
        done.append(("cache", num_blocks))
        kv.num_blocks = num_blocks

    def resize_experts(residents: int, heat: object) -> None:
        done.append(("experts", residents))
        experts.residents = residents

    kv.resize, experts.resize = resize_kv, resize_experts
    passes, now = Passes(), [0.0]
    mover = MemoryMover(experts, kv, HotExperts(4), passes, clock=lambda: now[0])  # type: ignore[arg-type]
    with caplog.at_level(logging.INFO):
        mover.divide(Division(5, 3))
        assert done[:2] == [("cache", 3), ("experts", 5)]
        done.clear()
        mover.divide(Division(1, 8))
        assert done == [("experts", 1), ("cache", 8)]
        now[0] = LOG_INTERVAL
        mover.divide(Division(2, 7))
    assert (mover.residents, mover.changes, passes.forgotten) == (2, 3, 3)
    assert [record.getMessage() for record in caplog.records] == [
        "memory has 5 experts of each layer and 3 blocks of the cache after 1 changes",
        "memory has 2 experts of each layer and 7 blocks of the cache after 3 changes",
    ]
