"""Experts that are copied to a device from RAM have the checkpoint's own bytes, in any order of a
schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.offload.test_weights import EXPERTS, LAYERS, SOME, Case, save, turns
from tests.support.gpu_sanitizer import OnDevice, sanitized

from moesaic.core.errors import ConfigError
from moesaic.kernels.weights import ExpertWeights
from moesaic.offload import device
from moesaic.offload.device import DeviceLink, DeviceMemory, StagedExperts

THERE = torch.device("cuda")


@pytest.fixture(scope="module", params=["one", "shards"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Layers of different sizes, whose experts share blocks."""
    path: Path = tmp_path_factory.mktemp(request.param)
    return save(path, torch.float32, request.param == "shards", moe_intermediate_size=70)


@pytest.fixture(autouse=True)
def gpu() -> Iterator[None]:
    with sanitized(), torch.inference_mode():
        yield


def staged(case: Case, static: Mapping[int, Sequence[int]]) -> StagedExperts:
    return StagedExperts(case.path, case.layout, static, DeviceMemory(THERE), DeviceLink(THERE))


def finish() -> None:
    DeviceLink(THERE).finish()


def same(case: Case, layer: int, weights: ExpertWeights, experts: Sequence[int] = range(EXPERTS)) -> bool:
    for expert in experts:
        parts = zip(case.layout.tensors(layer, expert), weights.matrices_of(expert), strict=True)
        for (name, *_), tensor in parts:
            assert isinstance(tensor, OnDevice)
            if not torch.equal(tensor.cpu(), case.tensors[name]):
                return False
    return True


@pytest.mark.parametrize("pages", [1, 2, 3, 7])
@pytest.mark.parametrize("static", [{}, SOME], ids=["none-stay", "some-stay"])
def test_a_page_is_staged_while_later_ones_of_the_layer_before_are_on_their_way(
    case: Case, static: Mapping[int, Sequence[int]], pages: int
) -> None:
    """As in `pipeline`, page p is staged as soon as page p of the layer before has been loaded."""
    streamed = staged(case, static)
    streamed.load_static()
    layers = turns(2)
    for page in range(pages):
        streamed.stage_page(layers[0][1], page, pages)
    for (count, layer), (_, following) in zip(layers, [*layers[1:], layers[0]], strict=True):
        for page in range(pages):
            streamed.load_page(count, layer, page, pages)
            finish()
            streamed.stage_page(following, page, pages)
        assert same(case, layer, streamed.experts(count, layer))


def test_chosen_experts_come_alone(case: Case) -> None:
    streamed = staged(case, {0: [1]})
    streamed.load_static()
    loaded = streamed.load_chosen(0, 0, [0, 1, 4])
    finish()
    assert same(case, 0, streamed.experts(0, 0), [0, 1, 4])
    whole = streamed.load_page(0, 0, 0, 1)
    assert 0 < loaded < whole


def test_experts_that_stay_come_in_pieces(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """All experts stay on the fast level, so no pinned memory of a layer is needed."""
    monkeypatch.setattr(device, "PIECE", 3 * 4096)
    streamed = staged(case, dict.fromkeys(LAYERS, range(EXPERTS)))
    assert streamed.memory.slot == 0 and streamed.load_static() == streamed.memory.static > 4 * 3 * 4096
    assert all(same(case, layer, streamed.experts(0, layer)) for layer in LAYERS)


def test_memory_that_cannot_be_pinned_is_told(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.empty

    def full(*given: Any, **options: Any) -> torch.Tensor:
        if options.get("pin_memory"):
            raise RuntimeError("CUDA error: out of memory\nCompile with ...")
        return real(*given, **options)

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(ConfigError, match=r"^pinned memory: got \d+; allowed: what RAM has free \(CUDA"):
        staged(case, {})


def test_links_count_what_went_over_them() -> None:
    down, up = DeviceLink(THERE), DeviceLink(THERE)
    rows = torch.arange(6.0).view(2, 3)
    there = down.copy(rows)
    down.finish()
    assert there.device.type == "cuda" and torch.equal(up.copy(there.t()), rows.t())
    assert down.copied_bytes == up.copied_bytes == 24
    some = torch.empty(1, 3, device=THERE)
    down.gather(some, rows, torch.tensor([1]))
    down.finish()
    assert some.tolist() == [[3.0, 4.0, 5.0]] and down.copied_bytes == 36
