"""Rows of ranks between real GPUs, by NCCL. Nothing here runs where torch sees no GPU; `test_rows.py` does in
its stead, and `tests/runtime/group/test_rows.py` has the same exchange by gloo."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gpu import test_group, test_offload
from tests.runtime.group.test_rows import in_processes, in_threads, same
from tests.support import tiny_models

from moesaic.experts.collectives.one_shot import local_group
from moesaic.gpu.triton.graphs import GraphRecorder
from moesaic.kernels import table
from moesaic.runtime.group.tensor_rows import DeviceRows
from moesaic.runtime.group.torch_peers import TorchPeers
from moesaic.testing import byte_tokenizer

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
CUDA = torch.device("cuda", 0)
pytestmark = [
    pytest.mark.skipif(not GPUS, reason="torch sees no CUDA device"),
    pytest.mark.skipif(not torch.distributed.is_nccl_available(), reason="this torch has no NCCL"),
    pytest.mark.slow,
]
two = pytest.mark.skipif(GPUS < 2, reason=f"two ranks need a GPU each, and torch sees {GPUS}")


def test_one_rank_has_the_bits_and_bytes_of_the_host() -> None:
    """It sends rows to itself only."""
    same(in_threads(1, lambda group: DeviceRows(group, TorchPeers("nccl", group, CUDA)), "cuda"), 1)


@two
def test_two_ranks_have_the_bits_and_bytes_of_the_host(tmp_path: Path) -> None:
    same(in_processes(2, "nccl", tmp_path), 2)


@two
@pytest.mark.parametrize("kernels", ["reference", "triton"])
@pytest.mark.parametrize("form", test_group.FORMS)
def test_ranks_have_the_tokens_of_one_process(tmp_path: Path, form: str, kernels: str) -> None:
    kind, options = test_group.MODELS["qwen3"]
    byte_tokenizer(tiny_models.save(tiny_models.build(kind, options), tmp_path))
    settings: dict[str, Any] = {
        "tensor_parallel_size": 2, "moe_collectives": form, "collectives_backend": "nccl",
        "kernels": kernels, "kv_cache_memory": "64MiB",
    }  # fmt: skip
    _, found = test_offload.answers(tmp_path, device="cuda", **settings)
    test_group.same(found, test_group.alone(tmp_path))


def test_a_graph_holds_an_exchange_and_is_gone_before_the_connection() -> None:
    """Of one rank, which sends rows to itself. NCCL would wait in `close` for a graph that is still there."""
    group, seconds = local_group(1)[0], 60.0
    rows = DeviceRows(group, TorchPeers("nccl", group, CUDA), table.pick("cuda", "triton"))
    given = torch.arange(12.0, device=CUDA).view(3, 4)
    rows.all_reduce(given)
    made = GraphRecorder()(lambda: rows.all_gather(rows.all_reduce(given), [3]))
    rows.when_closing(made.free)
    for number in (1.0, -2.0):
        given.fill_(number)
        assert torch.equal(made.run().cpu(), torch.full((3, 4), number))
    closing = threading.Thread(target=rows.close, daemon=True)
    closing.start()
    closing.join(seconds)
    assert not closing.is_alive()
