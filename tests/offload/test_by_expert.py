"""Experts in places of their own have the checkpoint's bytes, also after they took another one's place."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from tests.offload.test_weights import EXPERTS, LAYERS, SOME, Case, same, save, turns

from moesaic.offload.arena import Arena
from moesaic.offload.by_expert import StreamedByExpert

KINDS = {"one": (torch.bfloat16, False, {}), "shards": (torch.float32, True, {"moe_intermediate_size": 70})}


@pytest.fixture(scope="module", params=KINDS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    dtype, shards, sizes = KINDS[request.param]
    return save(Path(tmp_path_factory.mktemp(request.param)), dtype, shards, **sizes)


def made(case: Case, static: dict[int, list[int]]) -> StreamedByExpert:
    told = StreamedByExpert.memory_for(case.path, case.layout, static)
    arena = Arena(told.total)
    streamed = StreamedByExpert(case.path, case.layout, static, arena)
    assert streamed.memory == told and arena.free_bytes == 0
    streamed.load_static()
    return streamed


STATIC = {layer: list(SOME.get(layer, ())) for layer in LAYERS}


@pytest.mark.parametrize("pages", [1, 3, 7])
def test_pages_bring_every_expert(case: Case, pages: int) -> None:
    streamed = made(case, STATIC)
    for count, layer in turns(2):
        for page in random.Random(count).sample(range(pages), pages):
            streamed.load_page(count, layer, page, pages)
        assert same(case, layer, streamed.experts(count, layer))


def test_an_expert_takes_the_place_of_another_one(case: Case) -> None:
    streamed = made(case, {layer: [1, 4] for layer in LAYERS})
    rng, memory = random.Random(5), streamed.memory
    for count, layer in turns(6):
        stays = sorted(streamed.static[layer])
        away = [expert for expert in range(EXPERTS) if expert not in stays]
        new, out = rng.choice(away), rng.choice(stays)
        assert streamed.replace_experts(layer, [(out, new)]) > 0
        assert streamed.static[layer] == frozenset(stays) - {out} | {new}
        assert same(case, layer, streamed.experts(count, layer), streamed.static[layer])
        streamed.load_chosen(count, layer, [out])
        assert same(case, layer, streamed.experts(count, layer), [*streamed.static[layer], out])
        streamed.load_page(count, layer, 0, 1)
        assert same(case, layer, streamed.experts(count, layer))
    assert streamed.memory == memory


def test_what_is_in_a_slot_is_copied_and_not_read_again(case: Case) -> None:
    streamed = made(case, {layer: [1, 4] for layer in LAYERS})
    for count, layer in turns(3):
        leaving, other = sorted(streamed.static[layer])
        coming, missing = [expert for expert in range(EXPERTS) if expert not in streamed.static[layer]][:2]
        size = streamed.load_chosen(count, layer, [missing])
        streamed.load_chosen(count, layer, [coming])
        read = streamed.replace_experts(layer, [(leaving, coming), (other, missing)], count, [coming])
        assert read == size, "only the other one was read"
        assert streamed.static[layer] == {coming, missing}
        assert same(case, layer, streamed.experts(count, layer), [coming, missing])


def test_an_expert_that_is_streamed_has_no_place_to_give(case: Case) -> None:
    streamed = made(case, {layer: [1] for layer in LAYERS})
    with pytest.raises(KeyError):
        streamed.replace_experts(0, [(2, 3)])
