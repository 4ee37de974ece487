"""A server with more experts than memory computes the rows of one that has all of them in memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("moesaic.kernels.native._native")

import torch
from tests.support import model_configs, quantizers, tiny_models

from moesaic.core.errors import CheckpointError
from moesaic.core.experts import ExpertLayout
from moesaic.experts.backend import CallPairs
from moesaic.experts.native_backend import NativeBackend
from moesaic.experts.streamed_backend import StreamedBackend
from moesaic.kernels import table
from moesaic.models import registry

KINDS = ("bf16", "fp8 blocks", "awq", "nvfp4")


@pytest.fixture(scope="module", params=KINDS)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, ExpertLayout]:
    folder, sizes = tmp_path_factory.mktemp("model"), {"hidden_size": 128, "moe_intermediate_size": 128}
    path = tiny_models.save(
        tiny_models.build("qwen3_moe", model_configs.qwen3(**sizes)), folder / "plain", torch.bfloat16
    )
    if request.param != "bf16":
        path, _ = quantizers.quantize(path, folder / "both", quantizers.FORMATS[request.param])
    return path, registry.expert_layout(path, table.pick("cpu", "auto"), "cpu", "auto")


def part(rng: np.random.Generator, layout: ExpertLayout, experts: int, rows: int = 9) -> CallPairs:
    pairs = 2 * rows
    return CallPairs(
        rng.standard_normal((rows, layout.hidden)).astype(np.float32),
        np.repeat(np.arange(rows), 2),
        rng.integers(0, experts, pairs),
        np.zeros((pairs, layout.hidden), np.float32),
        rng.permutation(pairs),
    )


def test_rows_have_the_same_bits(model: tuple[Path, ExpertLayout]) -> None:
    """With three places, so that a run of more experts goes in pieces."""
    path, layout = model
    place = StreamedBackend(path, layout, "auto", 1, 1 << 28)
    few = next(
        backend
        for memory in range(layout.expert_bytes, 1 << 28, 8192)
        if memory > 4 * layout.expert_bytes
        for backend in [StreamedBackend(path, layout, "auto", 1, memory)]
    )
    whole = NativeBackend(path, layout, "auto", 1)
    every = {layer: range(layout.num_experts) for layer in layout.layers}
    for backend in (place, few, whole):
        backend.load(every)
    assert few.resident_experts == whole.resident_experts and few._pool.count_places(0) < layout.num_experts
    rng = np.random.default_rng(1)
    for layer in layout.layers * 2:
        calls = [part(rng, layout, layout.num_experts) for _ in range(2)]
        answers = []
        for backend in (place, few, whole):
            mine = [CallPairs(**{**vars(one), "results": np.zeros_like(one.results)}) for one in calls]
            backend.run(layer, mine)
            answers.append(np.concatenate([one.results for one in mine]))
        assert np.array_equal(answers[0], answers[2]) and np.array_equal(answers[1], answers[2])
    assert few.residency().loaded_bytes > place.residency().loaded_bytes > 0
    few.keep_only({layout.layers[0]: [2]})
    assert few.resident_experts == {layout.layers[0]: [2]}


def test_what_is_not_held_is_not_computed(model: tuple[Path, ExpertLayout]) -> None:
    path, layout = model
    backend, layer = StreamedBackend(path, layout, "auto", 1, 1 << 28), layout.layers[0]
    backend.load({layer: [0, 1]})
    call = part(np.random.default_rng(0), layout, 3)
    with pytest.raises(KeyError, match="expert 2"):
        backend.run(layer, [call])
    assert not call.results.any() and backend.residency().loaded_bytes == 0
    with pytest.raises(CheckpointError, match="layer 99"):
        backend.load({99: [0]})
    with pytest.raises(CheckpointError, match="experts: got 99"):
        backend.load({layer: [99]})
