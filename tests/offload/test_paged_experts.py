"""Experts in a GPU's memory have the checkpoint's bytes, and the page table has those that are there."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from tests.offload.test_device import THERE, same
from tests.offload.test_weights import EXPERTS, LAYERS, Case, save, turns
from tests.support.gpu_sanitizer import sanitized

from moesaic.offload.device import DeviceLink, DeviceMemory
from moesaic.offload.paged_experts import PagedExperts


@pytest.fixture(scope="module", params=["one", "shards"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    path: Path = tmp_path_factory.mktemp(request.param)
    return save(path, torch.float32, request.param == "shards", moe_intermediate_size=70)


@pytest.fixture(autouse=True)
def gpu() -> Iterator[None]:
    with sanitized(), torch.inference_mode():
        yield


def made(case: Case, stay: list[int]) -> PagedExperts:
    down, memory = DeviceLink(THERE), DeviceMemory(THERE)
    paged = PagedExperts(case.path, case.layout, dict.fromkeys(LAYERS, stay), memory, down)
    assert paged.load_static() > 0 or not stay
    return paged


def there(case: Case, paged: PagedExperts, count: int, layer: int, wanted: Iterable[int]) -> bool:
    """Whether these experts and no others are there, for kernels and in the table on the device."""
    DeviceLink(THERE).finish()
    weights = paged.experts(count, layer)
    assert weights.on_device is weights.page_table
    table = weights.on_device.addresses.cpu().tolist()
    wanted = sorted(wanted)
    held = list(weights.resident_ids) == wanted and same(case, layer, weights, wanted)
    return held and table == weights.addresses


@pytest.mark.parametrize("pages", [1, 3, 7])
def test_pages_bring_every_expert(case: Case, pages: int) -> None:
    paged = made(case, [1, 4])
    for count, layer in turns(2):
        for page in random.Random(count).sample(range(pages), pages):
            paged.load_page(count, layer, page, pages)
        assert there(case, paged, count, layer, range(EXPERTS))


def test_what_is_there_follows_every_load(case: Case) -> None:
    """Chosen experts, more of them, and exchanges. In the next turn of a slot they are gone."""
    paged, rng = made(case, [1, 4]), random.Random(5)
    for count, layer in turns(6):
        assert there(case, paged, count, layer, paged.static[layer])
        away = [expert for expert in range(EXPERTS) if expert not in paged.static[layer]]
        first, second, new = rng.sample(away, 3)
        paged.load_chosen(count, layer, [first, new])
        assert there(case, paged, count, layer, [*paged.static[layer], first, new])
        out = rng.choice(sorted(paged.static[layer]))
        assert paged.replace_experts(layer, [(out, new)]) > 0
        assert there(case, paged, count, layer, [*paged.static[layer], first]) and new in paged.static[layer]
        paged.load_chosen(count, layer, [out, second])
        assert there(case, paged, count, layer, [*paged.static[layer], first, second, out])


def test_an_unchanged_table_is_not_written_again(case: Case) -> None:
    paged = made(case, [2])
    assert paged.experts(0, 0) is paged.experts(0, 0)
    paged.load_chosen(0, 0, [3])
    assert paged.experts(0, 0).resident_ids == (2, 3) and paged.experts(2, 0).resident_ids == (2,)
