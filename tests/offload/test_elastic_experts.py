"""Experts give way and come back with the checkpoint's bytes, and the memory of places that left is free."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from tests.offload.test_weights import EXPERTS, LAYERS, Case, same, save, turns

from moesaic.models.pages import PAGE
from moesaic.offload.by_expert import StreamedByExpert
from moesaic.offload.elastic_experts import ElasticExperts, read_place_sizes

LEAST, MOST = 1, EXPERTS
KINDS = {"one": (torch.bfloat16, False, {}), "shards": (torch.float32, True, {"moe_intermediate_size": 70})}


@pytest.fixture(scope="module", params=KINDS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    dtype, shards, sizes = KINDS[request.param]
    return save(Path(tmp_path_factory.mktemp(request.param)), dtype, shards, **sizes)


def made(case: Case, least: int = LEAST) -> ElasticExperts:
    static = {layer: list(range(least)) for layer in LAYERS}
    streamed = ElasticExperts(case.path, case.layout, static, least, MOST)
    streamed.load_static()
    return streamed


def even(layer: int) -> list[float]:
    return [1.0] * EXPERTS


def audit(streamed: ElasticExperts) -> None:
    """Each expert has one place, no two the same, and none beyond what is in use."""
    for layer in LAYERS:
        own, shared = streamed._own_places[layer], streamed._shared_places[layer]
        assert sorted(own.values()) == list(range(streamed.residents))
        assert sorted(shared.values()) == list(range(EXPERTS - streamed.residents))
        assert own.keys() | shared.keys() == set(range(EXPERTS)) and not own.keys() & shared.keys()
        assert streamed.static[layer] <= own.keys()
        assert streamed.static[layer] == {one for key, one in streamed._static_places if key == layer}
        assert set(streamed._streamed_places[layer]) == set(range(EXPERTS)) - streamed.static[layer]


def loaded_bytes(streamed: ElasticExperts) -> int:
    return streamed.bytes_read


@pytest.mark.parametrize("pages", [1, 3, 7])
def test_pages_bring_every_expert_and_fill_the_empty_places(case: Case, pages: int) -> None:
    streamed = made(case)
    streamed.resize(4, even)
    for count, layer in turns(3):
        for page in random.Random(count).sample(range(pages), pages):
            streamed.load_page(count, layer, page, pages)
        assert same(case, layer, streamed.experts(count, layer))
        audit(streamed)
    assert all(len(streamed.static[layer]) == 4 for layer in LAYERS)


def test_the_next_experts_that_are_loaded_fill_new_places_and_are_not_read_again(case: Case) -> None:
    streamed = made(case)
    streamed.resize(3, even)
    assert [streamed.static[layer] for layer in LAYERS] == [frozenset({0})] * 3
    assert streamed.load_chosen(0, 0, [5]) > 0 and streamed.static[0] == {0, 5}
    assert streamed.load_chosen(3, 0, [5]) == 0
    assert streamed.load_chosen(6, 0, [4, 3]) > 0 and len(streamed.static[0]) == 3
    assert same(case, 0, streamed.experts(6, 0), [0, 3, 4, 5])
    audit(streamed)


def test_the_coldest_give_way_and_those_that_stay_are_not_read_again(case: Case) -> None:
    streamed = made(case)
    streamed.resize(5, even)
    streamed.load_chosen(0, 2, [1, 2, 3, 4])
    heat = [1.0, 5.0, 0.0, 4.0, 2.0, 9.0]
    read = loaded_bytes(streamed)
    streamed.resize(2, lambda layer: heat)
    assert streamed.static[2] == {1, 3} and loaded_bytes(streamed) == read
    assert same(case, 2, streamed.experts(1, 2), [1, 3])
    streamed.load_chosen(1, 2, [0, 2, 4, 5])
    assert same(case, 2, streamed.experts(1, 2))
    audit(streamed)


def test_a_new_place_is_filled_before_an_expert_leaves_for_another(case: Case) -> None:
    streamed = made(case, least=2)
    streamed.resize(3, even)
    streamed.replace_experts(0, [(0, 4), (1, 5)])
    assert streamed.static[0] == {0, 4, 5}
    assert same(case, 0, streamed.experts(0, 0), [0, 4, 5])
    audit(streamed)


def test_what_pages_brought_is_not_read_again_for_an_exchange(case: Case) -> None:
    """A step with prompts fills places, and the next one does not know yet that their experts stay."""
    streamed = made(case)
    streamed.resize(2, even)
    streamed.load_page(0, 0, 0, 1)
    [filled] = streamed._loaded_experts[0]
    assert streamed.static[0] == {0} and filled != 0
    assert streamed.replace_experts(0, [(0, filled)]) == 0 and streamed.static[0] == {0, filled}
    assert streamed.load_chosen(3, 0, [filled]) == 0
    assert same(case, 0, streamed.experts(3, 0), [0, filled])
    audit(streamed)


@pytest.mark.parametrize("seed", range(6))
def test_whatever_comes_experts_have_their_bytes(case: Case, seed: int) -> None:
    """Sizes, pages, choices and exchanges in any order, against the files."""
    rng, streamed = random.Random(seed), made(case)
    for count, layer in turns(12):
        heat = [rng.random() for _ in range(EXPERTS)]
        if not rng.randrange(3):
            streamed.resize(rng.randint(LEAST, MOST), lambda _: heat)  # noqa: B023
            audit(streamed)
        static = streamed.static[layer]
        if rng.randrange(2):
            pages = rng.randint(1, 4)
            for page in rng.sample(range(pages), pages):
                streamed.load_page(count, layer, page, pages)
            assert same(case, layer, streamed.experts(count, layer))
        else:
            likely = rng.sample(range(EXPERTS), 2)
            streamed.load_chosen(count, layer, likely)
            static = streamed.static[layer]
            chosen = set(rng.sample(range(EXPERTS), 3))
            missing = sorted(chosen - static - set(likely))
            loaded = sorted((chosen - static) & set(likely)) if rng.randrange(2) else []
            leaving = sorted(static - chosen)
            exchanges = list(zip(leaving, rng.sample(missing + loaded, len(missing + loaded)), strict=False))
            streamed.replace_experts(layer, exchanges, count, loaded)
            streamed.load_chosen(
                count, layer, [one for one in missing if one not in dict(exchanges).values()]
            )
            assert same(case, layer, streamed.experts(count, layer), chosen | streamed.static[layer])
        audit(streamed)


def test_places_take_what_divisions_count(case: Case) -> None:
    streamed, sizes = made(case), read_place_sizes(case.path, case.layout, converts=False)
    plain = StreamedByExpert.memory_for(case.path, case.layout, {layer: [0] for layer in LAYERS})
    assert streamed.memory_in_use.total - len(streamed._staging) == plain.total
    for residents in (5, 2, MOST, LEAST):
        streamed.resize(residents, even)
        used = streamed.memory_in_use
        assert used.static == residents * -(-sizes.own_bytes // PAGE) * PAGE
        assert used.slot == -(-(EXPERTS - residents) * sizes.largest // PAGE) * PAGE


@pytest.mark.parametrize("residents", [LEAST - 1, MOST + 1])
def test_other_numbers_of_places_are_refused(case: Case, residents: int) -> None:
    with pytest.raises(ValueError, match=f"got {residents} places of each layer; allowed: 1 to 6"):
        made(case).resize(residents, even)
