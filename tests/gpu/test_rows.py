"""Ranks whose rows stay on the sanitizer's device: no row goes to the host, and tokens are those of one
process."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tests.gpu import test_group, test_offload
from tests.support import pairs, tiny_models
from tests.support.gpu_sanitizer import COPIES, WAITS, OnDevice, sanitized
from tests.support.thread_groups import RANK
from tests.support.thread_peers import thread_peers

from moesaic.config import CollectivesBackend, ModelConfig, ParallelConfig, WorkerConfig
from moesaic.core.errors import ConfigError
from moesaic.core.offload import Offload
from moesaic.experts.collectives.group import Group
from moesaic.models import registry
from moesaic.runtime.group import build_rank
from moesaic.runtime.group.build_rank import check_backend
from moesaic.runtime.group.rows import HostRows, RowCollectives
from moesaic.runtime.group.sharded_model import ShardedModel
from moesaic.runtime.group.tensor_rows import DeviceRows
from moesaic.testing import byte_tokenizer

Kind = tuple[torch.dtype, int]
"""Type, and numbers in a row."""


class Copies:
    """Copies from the device to the host that the second rank asks for, which samples no tokens."""

    def __init__(self) -> None:
        self.of = Counter[Kind]()
        self.steps = 0

    def see(self, name: str, given: dict[str, Any], operands: Any, device: torch.device) -> None:
        if name in COPIES and threading.current_thread().name == f"{RANK}1":
            there = [one for _, one in operands if isinstance(one, OnDevice)]
            into = given["self"] if name == "copy_" else None
            if there and (not isinstance(into, OnDevice) if into is not None else device.type == "cpu"):
                self.of[there[0].dtype, there[0].shape[-1] if there[0].dim() > 1 else 1] += 1


@contextmanager
def counted() -> Iterator[Copies]:
    copies, see, run = Copies(), WAITS.see, ShardedModel.run

    def seen(*operation: Any) -> None:
        copies.see(*operation)
        see(*operation)

    def ran(self: ShardedModel, batch: Any) -> torch.Tensor:
        copies.steps += threading.current_thread().name == f"{RANK}1"
        return run(self, batch)

    with mock.patch.object(WAITS, "see", seen), mock.patch.object(ShardedModel, "run", ran):
        yield copies


@contextmanager
def on_device(ranks: int, host: bool = False) -> Iterator[None]:
    """Groups inside exchange rows on the device, or through the host."""
    ends = thread_peers(ranks)

    def connect(config: WorkerConfig, group: Group) -> RowCollectives:
        return HostRows(group) if host else DeviceRows(group, ends[group.rank])

    with mock.patch.object(build_rank, "connect_rows", connect):
        yield


def saved(name: str, folder: Path) -> Path:
    kind, options = test_group.MODELS[name]
    path = tiny_models.save(tiny_models.build(kind, options), folder)
    byte_tokenizer(path)
    return path


NOW = [("mixtral", "deepspeed", 2), ("qwen3", "all-reduce", 2), ("deepseek", "reduce-scatter", 4)]
EVERY = itertools.product(test_group.MODELS, test_group.FORMS, (2, 4))


@pytest.mark.parametrize(("name", "form", "ranks"), pairs.some(EVERY, NOW))
def test_no_row_goes_to_the_host(name: str, form: str, ranks: int, tmp_path: Path) -> None:
    """The host gets the gate's choice once a layer, and nothing else."""
    path = saved(name, tmp_path)
    with (
        counted() as copies,
        on_device(ranks),
        test_group.on_device(path, ranks, None, moe_collectives=form) as llm,
    ):
        found = test_offload.generate(llm)
    test_group.same(found, test_group.alone(path))
    spec = registry.read_spec(path)
    layers = copies.steps * len(registry.routed_model(path).layers)
    chosen: dict[Kind, int] = {(torch.int64, spec.top_k): layers}
    if form != "all-reduce":
        chosen[torch.float32, spec.top_k] = layers
    assert layers > 0 and copies.of == chosen


@pytest.mark.full
def test_rows_through_the_host_are_counted(tmp_path: Path) -> None:
    path = saved("mixtral", tmp_path)
    with counted() as copies, on_device(2, host=True), test_group.on_device(path, 2, None) as llm:
        test_offload.generate(llm)
    assert copies.of[torch.float32, registry.read_spec(path).hidden_size] > copies.steps


@pytest.mark.parametrize(
    ("backend", "gpus", "offload", "wrong"),
    [
        ("gloo", 0, None, ""),
        ("gloo", 2, None, "host, nccl with --device cuda"),
        ("nccl", 0, None, "host, gloo with --device cpu"),
        ("nccl", 1, None, "host: 2 ranks need a GPU each, and torch sees 1"),
        ("nccl", 2, None, "host: this torch has no NCCL"),
        ("nccl", 2, test_offload.STAYS, "host with --fast-memory"),
        ("gloo", 0, test_offload.STAYS, "host with --fast-memory"),
        ("host", 1, test_offload.STAYS, ""),
    ],
)
def test_a_backend_has_to_fit_the_devices(
    backend: CollectivesBackend,
    gpus: int,
    offload: Offload | None,
    wrong: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    model = ModelConfig("demo", device="cuda" if gpus else "cpu")
    config = WorkerConfig(model, parallel=ParallelConfig(2, collectives_backend=backend), offload=offload)
    with sanitized(devices=gpus) if gpus else nullcontext():
        if not wrong:
            check_backend(config)
            return
        with pytest.raises(ConfigError) as raised:
            check_backend(config)
    assert str(raised.value) == f"--collectives-backend: got {backend!r}; allowed: {wrong}"
