"""Streamed experts have the checkpoint's own bytes, in whatever order they are loaded."""

from __future__ import annotations

import ctypes
import json
import os
import random
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.support import model_configs, tiny_models

from moesaic.core.errors import CheckpointError, ConfigError
from moesaic.core.experts import ExpertLayout
from moesaic.kernels import table
from moesaic.kernels.weights import ExpertWeights
from moesaic.models import registry
from moesaic.models.headers import SINGLE, Headers
from moesaic.offload.arena import Arena
from moesaic.offload.reading import ALIGNMENT
from moesaic.offload.weights import Memory, StreamedExperts

EXPERTS = 6
LAYERS = (0, 2, 3)
"""The layers with routed experts, three of four. The number is odd, so every layer is loaded into
both slots.
"""
SOME: dict[int, Sequence[int]] = {0: [1, 4], 2: range(EXPERTS)}
"""Experts that stay on the fast level: some of a layer, all of the next, none of the last."""


@dataclass(frozen=True)
class Case:
    path: Path
    layout: ExpertLayout
    tensors: Mapping[str, torch.Tensor]

    def streamed(self, static: Mapping[int, Sequence[int]], direct: bool = True) -> StreamedExperts:
        arena = Arena(StreamedExperts.memory_for(self.path, self.layout, static).total)
        return StreamedExperts(self.path, self.layout, static, arena, direct)

    def blocks(self, layer: int, experts: Iterable[int]) -> set[tuple[Path, int]]:
        """The blocks of the files that contain these experts."""
        headers = Headers(self.path)
        places = [headers.find(*part) for one in experts for part in self.layout.tensors(layer, one)]
        return {
            (one.file, block)
            for one in places
            for block in range(one.offset // ALIGNMENT, -(-(one.offset + one.size) // ALIGNMENT))
        }

    def num_bytes(self, layer: int, experts: Iterable[int]) -> int:
        """The bytes of these blocks. The last block of a file may be shorter."""
        return sum(
            min(ALIGNMENT, file.stat().st_size - block * ALIGNMENT)
            for file, block in self.blocks(layer, experts)
        )


def save(path: Path, dtype: torch.dtype, shards: bool, **sizes: int) -> Case:
    """Saves a Qwen3-MoE whose layer 1 is dense."""
    options = {"num_hidden_layers": 4, "num_experts": EXPERTS, "mlp_only_layers": [1], **sizes}
    model = tiny_models.build("qwen3_moe", model_configs.qwen3(**options)).to(dtype)
    model.save_pretrained(path, max_shard_size="60KB" if shards else "1GB")
    files = sorted(path.glob("*.safetensors"))
    assert (len(files) > 3) == shards
    name = str(dtype).removeprefix("torch.")
    layout = registry.expert_layout(
        path, table.pick("cpu", "auto"), "cpu", name if name != "float16" else "auto"
    )
    return Case(path, layout, {name: one for file in files for name, one in load_file(file).items()})


@pytest.fixture(scope="module", params=["one-bf16", "one-f32", "shards-bf16", "shards-f32-wide"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Small experts, several in a block. With `wide`, experts of several blocks each."""
    shards, dtype, *wide = request.param.split("-")
    sizes = {"moe_intermediate_size": 70} if wide else {}
    path = tmp_path_factory.mktemp(request.param)
    return save(path, torch.bfloat16 if dtype == "bf16" else torch.float32, shards == "shards", **sizes)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return save(tmp_path_factory.mktemp("plain"), torch.bfloat16, shards=False)


def bits(tensor: torch.Tensor | None) -> bytes:
    assert tensor is not None
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def same(case: Case, layer: int, weights: ExpertWeights, experts: Iterable[int] = range(EXPERTS)) -> bool:
    """Whether these experts have the file's bytes, at the addresses that kernels are told."""
    addresses = weights.table.memory
    for expert in experts:
        parts = zip(
            case.layout.tensors(layer, expert), weights.matrices_of(expert), addresses[:, expert], strict=True
        )
        for (name, *shape), tensor, address in parts:
            wanted = case.tensors[name]
            assert tensor.dtype == wanted.dtype and list(tensor.shape) == shape
            if ctypes.string_at(int(address), wanted.nbytes) != bits(wanted) or bits(tensor) != bits(wanted):
                return False
    return True


def turns(passes: int) -> list[tuple[int, int]]:
    return list(enumerate(LAYERS * passes))


# ---- pages


@pytest.mark.parametrize("direct", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("pages", [1, pytest.param(2, marks=pytest.mark.slow), 3, 7])
@pytest.mark.parametrize("static", [{}, SOME], ids=["none-stay", "some-stay"])
def test_pages_in_any_order_bring_every_expert(
    case: Case, static: Mapping[int, Sequence[int]], pages: int, direct: bool
) -> None:
    streamed = case.streamed(static, direct)
    assert streamed.direct <= direct
    total = streamed.load_static()
    for count, layer in turns(2):
        order = random.Random(count).sample(range(pages), pages)
        loaded = sum(streamed.load_page(count, layer, page, pages) for page in order)
        away = set(range(EXPERTS)) - set(static.get(layer, ()))
        assert loaded == case.num_bytes(layer, away), "every block once"
        assert same(case, layer, streamed.experts(count, layer))
        total += loaded
    assert streamed.bytes_read == total


def test_a_missing_page_is_missed(case: Case) -> None:
    """Shows that the test above would notice a missing page."""
    streamed = case.streamed({})
    for page in (0, 2):
        streamed.load_page(0, 0, page, 3)
    assert not same(case, 0, streamed.experts(0, 0))


@pytest.mark.parametrize("pages", [1, 3])
def test_slots_alternate_and_do_not_touch_each_other(case: Case, pages: int) -> None:
    streamed = case.streamed({0: [2]})
    streamed.load_static()
    before: tuple[int, int] | None = None
    for count, layer in turns(3):
        for page in range(pages):
            streamed.load_page(count, layer, page, pages)
            if before is not None:
                assert same(case, before[1], streamed.experts(*before)), "the last layer is still there"
        before = count, layer


def test_experts_are_made_once(plain: Case) -> None:
    streamed = plain.streamed(SOME)
    for layer in LAYERS:
        first, second = streamed.experts(0, layer), streamed.experts(1, layer)
        assert streamed.experts(4, layer) is first and streamed.experts(7, layer) is second
        assert first.table is first.table and first.resident_ids == tuple(range(EXPERTS))
        alike = (first.table.memory == second.table.memory).all(dim=0).tolist()
        assert [one for one, stays in enumerate(alike) if stays] == list(SOME.get(layer, ()))


def test_experts_that_all_stay_need_no_slots(plain: Case) -> None:
    streamed = plain.streamed(dict.fromkeys(LAYERS, range(EXPERTS)))
    assert streamed.memory.slot == 0 and streamed.load_page(0, 2, 0, 2) == 0
    assert streamed.load_static() > 0
    assert all(same(plain, layer, streamed.experts(count, layer)) for count, layer in turns(2))


def test_addresses_keep_their_place_in_a_block(case: Case) -> None:
    """A tensor has the same offset in its block in memory and in the file. So a direct read needs no further
    copy."""
    streamed, headers = case.streamed(SOME), Headers(case.path)
    for (name, *shape), tensor in zip(
        case.layout.tensors(3, 5), streamed.experts(1, 3).matrices_of(5), strict=True
    ):
        assert tensor.data_ptr() % ALIGNMENT == headers.find(name, *shape).offset % ALIGNMENT


# ---- chosen experts


@pytest.mark.parametrize("chosen", [[], [3], [5, 0], [1, 2, 4], list(range(EXPERTS))], ids=str)
@pytest.mark.parametrize("static", [{}, SOME], ids=["none-stay", "some-stay"])
def test_chosen_experts_come_alone(
    case: Case, static: Mapping[int, Sequence[int]], chosen: list[int]
) -> None:
    streamed = case.streamed(static)
    streamed.load_static()
    for count, layer in turns(2):
        kept = set(static.get(layer, ()))
        coming, weights = set(chosen) - kept, streamed.experts(count, layer)
        away = set(range(EXPERTS)) - kept
        for expert in away:
            for part in weights.matrices_of(expert):
                part.fill_(-7.0)
        assert streamed.load_chosen(count, layer, chosen) == case.num_bytes(layer, coming)
        assert same(case, layer, weights, coming | kept)
        read = case.blocks(layer, coming)
        for expert in away - coming:
            if not case.blocks(layer, [expert]) & read:
                assert all(bool((part == -7.0).all()) for part in weights.matrices_of(expert)), "not read"


def test_wide_experts_share_few_blocks(tmp_path: Path) -> None:
    """Shows that the test above looks at experts of which no block was read."""
    case = save(tmp_path, torch.float32, shards=False, moe_intermediate_size=200)
    streamed = case.streamed({})
    for part in streamed.experts(0, 0).matrices_of(3):
        part.fill_(-7.0)
    assert streamed.load_chosen(0, 0, [0]) <= case.layout.expert_bytes + 2 * ALIGNMENT
    assert all(bool((part == -7.0).all()) for part in streamed.experts(0, 0).matrices_of(3))
    assert same(case, 0, streamed.experts(0, 0), [0])


# ---- the arena


@pytest.mark.parametrize("static", [{}, SOME, dict.fromkeys(LAYERS, range(EXPERTS))])
def test_bytes_are_told_before_they_are_taken(case: Case, static: Mapping[int, Sequence[int]]) -> None:
    told = StreamedExperts.memory_for(case.path, case.layout, static)
    arena = Arena(told.total + 5 * ALIGNMENT)
    arena.take(1)
    streamed = StreamedExperts(case.path, case.layout, static, arena)
    assert streamed.memory == told and arena.used_bytes == told.total + ALIGNMENT
    away = [set(range(EXPERTS)) - set(static.get(layer, ())) for layer in LAYERS]
    needs = [len(case.blocks(layer, ids)) for layer, ids in zip(LAYERS, away, strict=True)]
    assert told.slot == max(needs) * ALIGNMENT
    kept = {block for layer in static for block in case.blocks(layer, static[layer])}
    assert told.static == len(kept) * ALIGNMENT
    assert Memory(3, 4).total == 11


def test_an_arena_that_is_too_small(plain: Case) -> None:
    arena = Arena(StreamedExperts.memory_for(plain.path, plain.layout, SOME).total - ALIGNMENT)
    with pytest.raises(ConfigError, match="fast memory: got"):
        StreamedExperts(plain.path, plain.layout, SOME, arena)
    assert arena.used_bytes == 0


# ---- what is refused


@pytest.mark.parametrize(
    ("static", "message"),
    [
        ({0: [EXPERTS]}, "got 'expert 6 of layer 0'; allowed: experts 0 to 5 of layers 0, 2, 3"),
        ({0: [-1]}, "got 'expert -1 of layer 0'"),
        ({1: [0]}, "got 'expert 0 of layer 1'"),
    ],
)
def test_experts_that_do_not_exist(plain: Case, static: dict[int, list[int]], message: str) -> None:
    with pytest.raises(ConfigError, match=f"static experts: {message}"):
        plain.streamed(static)
    streamed = plain.streamed({})
    with pytest.raises(KeyError):
        streamed.load_page(0, 1, 0, 1)
    with pytest.raises(KeyError):
        streamed.load_chosen(0, 0, [EXPERTS])
    for page in (-1, 2):
        with pytest.raises(ValueError, match=f"page {page} of 2"):
            streamed.load_page(0, 0, page, 2)


def refused(case: Case, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        case.streamed({})
    assert "\n" not in str(caught.value)


def test_types_that_would_have_to_be_converted(plain: Case, tmp_path: Path) -> None:
    half = save(tmp_path, torch.float16, shards=False)
    refused(half, f"{tmp_path / SINGLE}: tensor .*gate_proj.weight: got F16; allowed: F32: streamed experts")
    refused(replace(plain, layout=replace(plain.layout, dtype="float32")), "got BF16; allowed: F32")
    refused(replace(plain, layout=replace(plain.layout, dtype="float16")), "--dtype: got 'float16'; allowed")


def test_numbers_that_do_not_begin_at_a_multiple_of_their_size(plain: Case, tmp_path: Path) -> None:
    data = (plain.path / SINGLE).read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    (tmp_path / SINGLE).write_bytes(
        struct.pack("<Q", length + 1) + data[8 : 8 + length] + b" " + data[8 + length :]
    )
    refused(replace(plain, path=tmp_path), "gate_proj.weight at byte .*; allowed: a multiple of 2")


@pytest.mark.parametrize("kept", [0, 7, 100, -1])
def test_a_file_that_ends_early(plain: Case, tmp_path: Path, kept: int) -> None:
    """The last tensors of a file are not experts' tensors, so they are cut out of the header too."""
    (tmp_path / SINGLE).write_bytes((plain.path / SINGLE).read_bytes()[:kept])
    if kept == -1:
        cut_behind_experts(plain, tmp_path / SINGLE)
    refused(replace(plain, path=tmp_path), "truncated or corrupt" if kept == -1 else "not a safetensors file")


def cut_behind_experts(case: Case, file: Path) -> None:
    headers = Headers(case.path)
    parts = [part for layer in LAYERS for one in range(EXPERTS) for part in case.layout.tensors(layer, one)]
    end = max(place.offset + place.size for place in (headers.find(*part) for part in parts))
    os.truncate(file, end - 1)


@pytest.mark.parametrize("direct", [True, False])
def test_a_file_that_is_cut_while_it_is_read(plain: Case, tmp_path: Path, direct: bool) -> None:
    size = (tmp_path / SINGLE).write_bytes((plain.path / SINGLE).read_bytes())
    case = replace(plain, path=tmp_path)
    streamed = case.streamed({0: [0]}, direct)
    cut_behind_experts(plain, tmp_path / SINGLE)
    change = f"{SINGLE}: this file changed while it was served: it has {{}} bytes instead of {size}$"
    for layer in LAYERS:
        with pytest.raises(CheckpointError, match=change.format((tmp_path / SINGLE).stat().st_size)):
            streamed.load_page(0, layer, 0, 1)
    os.truncate(tmp_path / SINGLE, 0)
    with pytest.raises(CheckpointError, match=change.format(0)):
        streamed.load_static()
    streamed.close()
    with pytest.raises(CheckpointError, match=f"{SINGLE}: cannot be read"):
        streamed.load_static()


def test_a_file_that_may_end_with_its_last_tensor(plain: Case, tmp_path: Path) -> None:
    """An expert's last byte is the last one of the file. Its last block is short, and that is no damage."""
    name, rows, columns = plain.layout.tensors(0, 0)[2]
    headers, wanted = Headers(plain.path), plain.tensors
    entries, data = {}, b""
    order = [part for layer in LAYERS for one in range(EXPERTS) for part in plain.layout.tensors(layer, one)]
    for one in [part for part in order if part[0] != name] + [(name, rows, columns)]:
        begin, raw = len(data), bits(wanted[one[0]])
        data += raw
        entries[one[0]] = {"dtype": "BF16", "shape": list(one[1:]), "data_offsets": [begin, len(data)]}
    assert headers.find(name, rows, columns).size == rows * columns * 2
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    (tmp_path / SINGLE).write_bytes(struct.pack("<Q", len(header)) + header + data)
    assert (tmp_path / SINGLE).stat().st_size % ALIGNMENT
    case = replace(plain, path=tmp_path)
    for direct in (True, False):
        streamed = case.streamed({}, direct)
        streamed.load_page(0, 0, 0, 1)
        assert same(case, 0, streamed.experts(0, 0))
