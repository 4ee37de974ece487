"""A pool of few places has the checkpoint's bytes of whatever was chosen."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.offload.test_weights import EXPERTS, LAYERS, Case, same, save

from moesaic.core.errors import CheckpointError, ConfigError
from moesaic.offload.pool import ExpertPool
from moesaic.offload.reading import ALIGNMENT
from moesaic.offload.weights import Files


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return save(Path(tmp_path_factory.mktemp("pool")), torch.bfloat16, False, moe_intermediate_size=70)


def pool_of(case: Case, places: int) -> ExpertPool:
    whole = ExpertPool(case.path, case.layout, 1 << 30)
    assert whole.count_places(0) == EXPERTS * len(LAYERS), "not more than there are experts"
    for memory in range(ALIGNMENT, 1 << 22, ALIGNMENT):
        with contextlib.suppress(ConfigError):
            pool = ExpertPool(case.path, case.layout, memory)
            if pool.count_places(0) == places:
                return pool
    raise AssertionError("no memory has room for so many")


def test_whatever_is_chosen_is_there_with_its_bytes(case: Case) -> None:
    pool, rng = pool_of(case, 4), random.Random(0)
    for _ in range(60):
        layer, chosen = rng.choice(LAYERS), rng.sample(range(EXPERTS), rng.randint(1, 4))
        pool.learn(layer, np.array(chosen))
        weights = pool.load_experts(layer, chosen)
        assert same(case, layer, weights, chosen) and set(chosen) <= set(weights.resident_ids)
    found = pool.stats
    assert 0 < found.hits < found.chosen and found.exchanges > 0
    assert found.loaded_bytes >= (found.chosen - found.hits) * case.layout.expert_bytes


def test_the_hottest_stays_while_others_come_and_go(case: Case) -> None:
    pool = pool_of(case, 3)
    for expert in range(1, EXPERTS):
        for chosen in ([0], [expert]):
            pool.learn(0, np.array(chosen))
            pool.load_experts(0, chosen)
    assert pool.stats.hits == EXPERTS - 2, "expert 0, each time but the first"


def test_a_read_that_fails_costs_no_place(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_of(case, 2)
    monkeypatch.setattr(Files, "run", lambda *_: (_ for _ in ()).throw(CheckpointError("gone")))
    for _ in range(3):
        with pytest.raises(CheckpointError, match="gone"):
            pool.load_experts(0, [0, 1])
    monkeypatch.undo()
    assert same(case, 0, pool.load_experts(0, [0, 1]), [0, 1])


def test_too_little_memory_is_refused_with_what_is_enough(case: Case) -> None:
    with pytest.raises(ConfigError, match="--fast-memory: got '[0-9]+ bytes'; allowed: at least 1MiB"):
        ExpertPool(case.path, case.layout, 4096)
