"""Workers that are groups of processes: the tokens of one, through kills of any rank."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from moesaic.core.metrics import GroupStats
from moesaic.core.profile import Profile
from moesaic.testing import byte_tokenizer
from tests.cluster.test_identity import workload
from tests.support import model_configs, pairs, tiny_models
from tests.support.cluster_driver import Answer, Cluster, cluster
from tests.support.group_placements import recorded, write
from tests.support.processes import children, gone

GROUP = {"expert_servers": 0, "tensor_parallel_size": 2}


def alone(model: str, tokens: int) -> tuple[list[Answer], Profile]:
    """The workload in one process, and its routing."""
    completions, profile = recorded(model, *workload(8, tokens))
    outputs = [completion.outputs[0] for completion in completions]
    answers = [(one.token_ids, [entry.logprob for entry in one.logprobs or [] if entry]) for one in outputs]
    return answers, profile


@pytest.fixture(scope="module")
def demo() -> tuple[list[Answer], Profile]:
    return alone("demo", 48)


@pytest.fixture(scope="module")
def expected(demo: tuple[list[Answer], Profile]) -> list[Answer]:
    return demo[0]


def ranks(served: Cluster) -> list[int]:
    """Process ids of the worker's group, the first rank first."""
    [status] = served.supervisor.status()
    assert status.pid is not None
    return [status.pid, *children(status.pid)]


def soon(true: object) -> bool:
    end = time.monotonic() + 60
    while not true():  # type: ignore[operator]
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def stats(served: Cluster) -> GroupStats:
    """Snapshots come a moment after the tokens that they count."""

    def latest() -> GroupStats:
        return served._launched.engine.stats().worker.experts.group

    served.until(lambda: latest() != GroupStats())
    return latest()


def same(found: list[Answer], expected: list[Answer]) -> None:
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    for (_, one), (_, other) in zip(found, expected, strict=True):
        assert one == pytest.approx(other, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_group_dies_and_restarts_as_one(victim: int, expected: list[Answer]) -> None:
    """One rank is killed in the middle of the answers; nobody of its group stays."""
    with cluster(**GROUP) as served:  # type: ignore[arg-type]
        before: list[int] = []

        def disturb(tokens: int) -> None:
            if tokens > 60 and not before:
                before.extend(ranks(served))
                os.kill(before[victim], signal.SIGKILL)

        served.submit(*workload(8, 48))
        same(served.finish(disturb), expected)
        assert before and soon(lambda: all(map(gone, before)))
        assert served.supervisor.report().counters.process_deaths == 1
        after = ranks(served)
    assert soon(lambda: all(map(gone, after)))


@pytest.mark.parametrize(
    ("form", "signum"),
    [
        pytest.param("deepspeed", signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("reduce-scatter", signal.SIGSTOP, marks=pytest.mark.full),
        pytest.param("all-reduce", signal.SIGKILL, marks=pytest.mark.full),
    ],
)
def test_ranks_that_exchange_rows_by_gloo(form: str, signum: signal.Signals, expected: list[Answer]) -> None:
    """The second rank is killed, or frozen, in the middle of the answers."""
    with cluster(collectives_backend="gloo", moe_collectives=form, **GROUP) as served:  # type: ignore[arg-type]
        before: list[int] = []

        def disturb(tokens: int) -> None:
            if tokens > 60 and not before:
                before.extend(ranks(served))
                os.kill(before[1], signum)

        served.submit(*workload(8, 48))
        same(served.finish(disturb), expected)
        assert before and soon(lambda: all(map(gone, before)))
        assert stats(served).all_reduce_bytes + stats(served).reduce_scatter_bytes > 0


@pytest.mark.full
def test_ranks_beside_servers_exchange_rows_by_gloo(expected: list[Answer]) -> None:
    with cluster(
        collectives_backend="gloo",
        **GROUP | {"expert_servers": 1},  # type: ignore[arg-type]
    ) as served:
        served.submit(*workload(8, 48))
        same(served.finish(), expected)
        assert stats(served).all_gather_bytes > 0


@pytest.mark.slow
def test_a_frozen_rank_is_replaced_with_its_group(expected: list[Answer]) -> None:
    """The first rank waits for it and says that it lives: what it waits for is bounded."""
    with cluster(**GROUP) as served:  # type: ignore[arg-type]
        before: list[int] = []

        def disturb(tokens: int) -> None:
            if tokens > 60 and not before:
                before.extend(ranks(served))
                os.kill(before[1], signal.SIGSTOP)

        served.submit(*workload(8, 48))
        same(served.finish(disturb), expected)
        assert soon(lambda: all(map(gone, before)))


@pytest.mark.parametrize("signum", pairs.some([signal.SIGKILL, signal.SIGSTOP], [signal.SIGSTOP]))
def test_a_group_without_work_is_replaced_too(signum: signal.Signals, expected: list[Answer]) -> None:
    """No round tells of the rank, so who watches it does: the next request finds another group."""
    with cluster(**GROUP) as served:  # type: ignore[arg-type]
        before = ranks(served)
        os.kill(before[1], signum)
        assert soon(lambda: all(map(gone, before)))
        assert soon(lambda: served.supervisor.report().counters.process_deaths == 1)
        assert soon(lambda: [one.stage for one in served.supervisor.status()] == ["serving"])
        assert not set(before) & set(ranks(served))
        served.submit(*workload(8, 48))
        same(served.finish(), expected)


@pytest.mark.slow
def test_two_groups_of_two(expected: list[Answer]) -> None:
    with cluster(attention_workers=2, moe_collectives="deepspeed", **GROUP) as served:  # type: ignore[arg-type]
        served.submit(*workload(8, 48))
        same(served.finish(), expected)
        counted = stats(served)
        assert counted.pairs > counted.local_pairs > 0 < counted.all_to_all_bytes


@pytest.mark.slow
def test_a_placement_with_tables_shuffles(demo: tuple[list[Answer], Profile], tmp_path: Path) -> None:
    expected, profile = demo
    file = write(tmp_path, profile, units=2, copies=3)
    with cluster(placement=file, **GROUP) as served:  # type: ignore[arg-type]
        served.submit(*workload(8, 48))
        same(served.finish(), expected)
        counted = stats(served)
        assert 0 < counted.kept_rows < counted.shuffled_rows
        assert counted.local_pairs > 0.5 * counted.pairs


@pytest.mark.slow
def test_a_group_of_four(tmp_path: Path) -> None:
    """Two ranks to an expert, rows shuffled into shards of any size."""
    options = model_configs.mixtral(vocab_size=1024, num_attention_heads=8, num_key_value_heads=2)
    path = str(tiny_models.save(tiny_models.build("mixtral", options), tmp_path / "model"))
    byte_tokenizer(Path(path))
    expected, profile = alone(path, 24)
    settings = GROUP | {"tensor_parallel_size": 4, "expert_tensor_parallel_size": 2}
    file = write(tmp_path, profile, units=2)
    with cluster(path, placement=file, shuffle_align="variable", **settings) as served:  # type: ignore[arg-type]
        assert len(ranks(served)) == 4
        served.submit(*workload(8, 24))
        same(served.finish(), expected)
        counted = stats(served)
        assert 0 < counted.kept_rows == counted.shuffled_rows
