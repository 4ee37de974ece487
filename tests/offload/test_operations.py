"""What tasks leave in memory between a layer's gate and its merge."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.core.test_tokens import batch
from tests.support import model_configs, tiny_models

from moesaic.kernels import table
from moesaic.models import registry
from moesaic.models.kvcache.paged_kv import PagedKV
from moesaic.models.model import Model
from moesaic.offload.caches import ResidentCache
from moesaic.offload.link import Link
from moesaic.offload.operations import Operations
from moesaic.offload.parts import MicroBatch
from moesaic.offload.post_attention import LocalPostAttention
from moesaic.policy.offloading import prefetch
from moesaic.policy.offloading.prefetch import order_guesses
from moesaic.policy.offloading.tasks import Kind, Lane, Task


class Held:
    """Has all experts in memory and records which of them were asked for."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.chosen: list[tuple[int, int, list[int]]] = []
        self.turns: list[tuple[int, int]] = []

    def load_page(self, count: int, layer: int, page: int, pages: int) -> int:
        return 100 * page + pages

    def load_chosen(self, count: int, layer: int, experts: Any) -> int:
        self.chosen.append((count, layer, list(experts)))
        return 7

    def experts(self, count: int, layer: int) -> Any:
        self.turns.append((count, layer))
        return self._model.experts[layer]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = tiny_models.save(
        tiny_models.build("qwen3_moe", model_configs.qwen3()), tmp_path_factory.mktemp("operations")
    )
    return registry.load(Path(path), table.REFERENCE)


def parts_of(model: Model, cache: ResidentCache, count: int) -> list[MicroBatch]:
    """Micro-batches of one row each, whose sequences have a block of their own."""
    made = []
    for index in range(count):
        rows = batch([1], before=[0], wanted=[0])
        rows = type(rows)(**{**vars(rows), "token_ids": np.array([index + 3])})
        rows = type(rows)(**{**vars(rows), "block_tables": np.array([[index]])})
        hidden = model.embed(torch.from_numpy(rows.token_ids))
        positions = torch.from_numpy(rows.positions)
        made.append(MicroBatch(rows, np.array([index]), cache.attention(rows), positions, hidden))
    return made


@pytest.fixture
def made(model: Model) -> tuple[Operations, Held, list[MicroBatch]]:
    spec = model.spec
    kv = PagedKV(spec.kv, spec.num_layers, 4, 4, torch.float32, torch.device("cpu"), table.REFERENCE)
    cache, held = ResidentCache(kv, 4), Held(model)
    static = {layer: frozenset({0, 5}) for layer in range(3)}
    after = LocalPostAttention(model, held, static, Link(), Link())
    operations = Operations(model, held, static, Link(), Link(), after, likely=2)
    parts = parts_of(model, cache, 3)
    operations.begin(parts, cache, turn=30, pages=2, prefill=False)
    return operations, held, parts


def do(operations: Operations, kind: Kind, layer: int, part: int, lane: Lane = Lane.FAST) -> None:
    with torch.inference_mode():
        operations(Task(kind, lane, layer, part, ()))


def test_one_memory_serves_the_answers_of_all_micro_batches(
    made: tuple[Operations, Held, list[MicroBatch]], monkeypatch: pytest.MonkeyPatch
) -> None:
    operations, held, parts = made
    used, model = [], operations._model
    after = operations._post_attention
    kernel = model.kernels.experts

    def seen(weights: Any, rows: torch.Tensor, ids: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        used.append(out.data_ptr())
        return kernel(weights, rows, ids, out)

    kernels = replace(model.kernels, experts=seen)  # type: ignore[arg-type]
    monkeypatch.setattr(after, "_model", replace(model, kernels=kernels))
    for layer in (0, 1):
        for part in range(3):
            for kind in (Kind.PRE, Kind.ATTENTION, Kind.POST_WITH_EXPERTS):
                do(operations, kind, layer, part)
            assert parts[part].gate_output is None and parts[part].answers is None
    assert len(used) == 6 and len(set(used)) == 1
    assert held.turns == [(30, 0)] * 3 + [(31, 1)] * 3


def test_experts_are_chosen_by_all_rows_and_those_that_stay_are_not_loaded(
    made: tuple[Operations, Held, list[MicroBatch]],
) -> None:
    operations, held, parts = made
    for part in range(3):
        for kind in (Kind.PRE, Kind.ATTENTION, Kind.POST_WITHOUT_EXPERTS):
            do(operations, kind, 0, part)
    ids = {int(one) for part in parts for one in part.gate_output.expert_ids.flatten()}  # type: ignore[union-attr]
    do(operations, Kind.LOAD_CHOSEN, 0, 0, Lane.LINK_DOWN)
    assert held.chosen == [(30, 0, sorted(ids - {0, 5}))] and operations.loaded_bytes == 7
    assert all(part.answers is None for part in parts), "rows wait without memory for their answers"
    before = [part.hidden for part in parts]
    for part in range(3):
        do(operations, Kind.EXPERTS, 0, part)
        assert parts[part].gate_output is None and not torch.equal(parts[part].hidden, before[part])


def test_the_next_gate_says_which_experts_are_likely(
    made: tuple[Operations, Held, list[MicroBatch]], monkeypatch: pytest.MonkeyPatch
) -> None:
    operations, held, parts = made
    monkeypatch.setattr(prefetch, "WORTHWHILE", -1.0)  # every guess is loaded
    for part in range(3):
        for kind in (Kind.PRE, Kind.ATTENTION, Kind.POST_WITHOUT_EXPERTS):
            do(operations, kind, 0, part)
    block = operations._model.blocks[1]
    with torch.inference_mode():
        guesses = [block.guess_experts(part.gate_output.residual) for part in parts]  # type: ignore[union-attr]
    best = [expert for expert in order_guesses([ids.numpy() for ids in guesses]) if expert not in (0, 5)]
    do(operations, Kind.LOAD_CHOSEN, 0, 0, Lane.LINK_DOWN)
    do(operations, Kind.LOAD_LIKELY, 1, 0, Lane.LINK_DOWN)
    assert held.chosen.pop() == (31, 1, best[:2])
    do(operations, Kind.LOAD_LIKELY, 1, 0, Lane.LINK_DOWN)
    assert held.chosen.pop() == (31, 1, []), "nothing was chosen in this layer before"


def test_experts_that_came_before_their_gates_had_spoken_do_not_come_again(
    made: tuple[Operations, Held, list[MicroBatch]], monkeypatch: pytest.MonkeyPatch
) -> None:
    operations, held, parts = made
    monkeypatch.setattr(prefetch, "WORTHWHILE", -1.0)  # every guess is loaded

    def gated() -> set[int]:
        for part in range(3):
            for kind in (Kind.PRE, Kind.ATTENTION, Kind.POST_WITHOUT_EXPERTS):
                do(operations, kind, 0, part)
        ids = [part.gate_output.expert_ids.flatten() for part in parts]  # type: ignore[union-attr]
        return {int(one) for one in torch.cat(ids)} - {0, 5}

    do(operations, Kind.LOAD_LIKELY, 3, 0, Lane.LINK_DOWN)
    assert held.chosen.pop() == (33, 0, []), "nothing is known yet"
    first = gated()
    do(operations, Kind.LOAD_CHOSEN, 0, 0, Lane.LINK_DOWN)
    assert held.chosen.pop() == (30, 0, sorted(first))
    do(operations, Kind.LOAD_LIKELY, 3, 0, Lane.LINK_DOWN)
    turn, layer, likely = held.chosen.pop()
    assert (turn, layer, len(likely)) == (33, 0, 2) and set(likely) <= first, "of the next pass"
    operations.begin(parts, operations._cache, turn=33, pages=2, prefill=False)  # type: ignore[arg-type]
    second = gated()
    do(operations, Kind.LOAD_CHOSEN, 0, 0, Lane.LINK_DOWN)
    assert held.chosen.pop() == (33, 0, sorted(second - set(likely)))
    do(operations, Kind.LOAD_CHOSEN, 0, 0, Lane.LINK_DOWN)
    do(operations, Kind.LOAD_LIKELY, 3, 0, Lane.LINK_DOWN)
    for prefill in (True, False):  # its pages come to the same place
        operations.begin(parts, operations._cache, turn=36, pages=2, prefill=prefill)  # type: ignore[arg-type]
    held.chosen.clear()
    third = gated()
    do(operations, Kind.LOAD_CHOSEN, 0, 0, Lane.LINK_DOWN)
    assert held.chosen.pop() == (36, 0, sorted(third))


def test_a_layer_beyond_the_last_is_the_next_pass_s_first(
    made: tuple[Operations, Held, list[MicroBatch]],
) -> None:
    operations, _, _ = made
    do(operations, Kind.LOAD_PAGE, 3, 1, Lane.LINK_DOWN)
    assert operations.loaded_bytes == 102


def test_the_slow_lane_merges_nothing(made: tuple[Operations, Held, list[MicroBatch]]) -> None:
    """In a layer without routed experts both lanes have a task. Only one of them goes on with the rows."""
    operations, _, parts = made
    for kind in (Kind.PRE, Kind.ATTENTION, Kind.POST_WITHOUT_EXPERTS):
        do(operations, kind, 0, 0)
    do(operations, Kind.EXPERTS, 0, 0, Lane.SLOW)
    assert parts[0].gate_output is not None


def test_an_expert_that_was_loaded_ahead_may_stay(
    made: tuple[Operations, Held, list[MicroBatch]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each step would load it ahead, as it is never missing."""
    monkeypatch.setattr(prefetch, "WORTHWHILE", -1.0)  # every guess is loaded
    operations, held, _ = made
    replaced: list[tuple[int, int, list[int]]] = []

    class Replacing:
        def replace_experts(self, layer: int, exchanges: Any, count: int, loaded: Any) -> int:
            replaced.append((layer, count, [new for _, new in exchanges if new in loaded]))
            return 0

    operations._exchanges = Replacing()
    monkeypatch.setattr(
        operations._hot, "exchanges", lambda layer, stays, coming, chosen: [(0, expert) for expert in coming]
    )
    for _ in range(2):  # in the second step the experts of the first one are loaded ahead
        for part in range(3):
            for kind in (Kind.PRE, Kind.ATTENTION, Kind.POST_WITHOUT_EXPERTS):
                do(operations, kind, 0, part)
        do(operations, Kind.LOAD_CHOSEN, 0, 0, Lane.LINK_DOWN)
        do(operations, Kind.LOAD_LIKELY, 0, 0, Lane.LINK_DOWN)
    ahead = held.chosen[1][2]
    assert len(ahead) == 2 and replaced == [(0, 30, []), (0, 30, sorted(ahead))]
