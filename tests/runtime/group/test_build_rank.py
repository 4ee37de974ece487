"""What a group makes of its settings and of a placement, before anything is computed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.support.group_placements import write
from tests.support.thread_groups import group_of_threads

from moesaic.config import ModelConfig, ParallelConfig, WorkerConfig
from moesaic.core.errors import ConfigError
from moesaic.core.placement import Placement
from moesaic.core.profile import NO_TOPIC, Profile, Routes
from moesaic.experts.collectives.one_shot import local_group
from moesaic.models import files, registry
from moesaic.runtime.group import build_rank
from moesaic.runtime.group.owners import ExpertOwners, check_placement, equal_owners, read_owners
from moesaic.trace.parts import part_path

WORKER = WorkerConfig(ModelConfig("demo", threads=1), parallel=ParallelConfig(2))


def profile() -> Profile:
    """Of demo: one request whose tokens choose at random."""
    routed = registry.routed_model(files.resolve("demo"))
    rng = np.random.default_rng(0)
    experts = np.argsort(rng.random((20, len(routed.layers), routed.num_experts)), axis=2)
    routes = Routes(
        np.arange(20, dtype=np.int32),
        np.array([0, 20]),
        np.array([20]),
        np.array([NO_TOPIC], dtype=np.int16),
        experts[:, :, : routed.top_k].astype(np.int16),
    )
    sizes = routed.vocab_size, routed.num_experts, routed.layers
    return Profile.from_routes(routed.model, *sizes, routes)


@pytest.mark.parametrize("field", ["trace", "record"])
def test_what_is_refused_is_what_was_typed(field: str) -> None:
    config = replace(WORKER, **{field: part_path("some/x.out", "attention worker 0")})
    flag = {"trace": "--trace", "record": "--record-routing"}[field]
    with pytest.raises(ConfigError, match=f"^{flag}: got 'some/x.out'; allowed: nothing with --tensor-par"):
        build_rank.check(config)


def without_tables(file: str) -> None:
    """The same placement, which names none."""
    made = Placement.read(file, 2)
    Path(file).write_text(replace(made, tables="").to_json())


@pytest.mark.parametrize("tables", [True, False], ids=["tables", "no tables"])
@pytest.mark.parametrize("copies", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_copies_that_no_rank_holds_are_told(tmp_path: Path, copies: int, tables: bool) -> None:
    file = write(tmp_path, profile(), 2, copies)
    if not tables:
        without_tables(file)
    settings = {"tensor_parallel_size": 2, "placement": file, "kv_cache_memory": "16MiB"}
    with group_of_threads("demo", **settings) as (model, _, _):
        form = "shuffled (move)" if tables else "reduce-scatter"
        left_out = f", without the placement's {6 * copies} copies" if copies else ""
        assert model.info.collectives == form + left_out


@pytest.mark.parametrize("differs", [False, True])
def test_hosts_with_different_placements_are_refused(differs: bool) -> None:
    """On each rank, before rows go to a rank that does not have their experts."""
    config = replace(WORKER, parallel=ParallelConfig(2, nnodes=2, placement="p.json"))
    owners = equal_owners((1, 3), 5, 2)
    other = {1: owners[1], 3: owners[3][::-1].copy()} if differs else owners
    with ThreadPoolExecutor(2) as pool:
        calls = [
            pool.submit(check_placement, config, end, ExpertOwners(mine, None))
            for end, mine in zip(local_group(2), (owners, other), strict=True)
        ]
    for call in calls:
        with (
            pytest.raises(ConfigError, match="^--placement: got 'p.json'; allowed: the same file on")
            if (differs)
            else nullcontext()
        ):
            call.result()


def test_a_placement_for_fewer_ranks_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path, profile(), 2)
    for size, shared in ((3, 1), (6, 2)):
        config = replace(WORKER, parallel=ParallelConfig(size, shared, placement=file))
        with pytest.raises(ConfigError, match="^--placement: got 'nothing for server 2'"):
            read_owners(config)
