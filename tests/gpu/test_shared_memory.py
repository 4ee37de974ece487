"""Memory of the sanitizer's device that real processes share."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection

import numpy as np
import pytest
import torch
from tests.support.gpu_sanitizer import DEVICE, STREAM, sanitized
from tests.support.gpu_shared_memory import FREED, shared_memory

from moesaic.core.errors import ConfigError, DamagedMessage
from moesaic.gpu.ipc import device_sharing
from moesaic.gpu.ipc.device_sharing import BLOCK
from moesaic.kernels.moving import pin_tensor


def _double(end: Connection) -> None:
    """Another process: doubles the numbers in the memory that it is told."""
    with sanitized(), shared_memory():
        opened = device_sharing.sharing(DEVICE).open(end.recv_bytes())
        numbers = opened.tensor[:16].view(torch.float32)
        numbers.mul_(2)
        STREAM.synchronize()
        opened.close()
        end.send(True)


def test_a_process_sees_what_another_writes_once_it_is_done() -> None:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_double, args=(theirs,))
    process.start()
    with sanitized(), shared_memory():
        exported = device_sharing.sharing(DEVICE).export(16)
        numbers = exported.tensor[:16].view(torch.float32)
        assert exported.tensor.shape == (BLOCK,) and int(exported.tensor[BLOCK - 1]) == FREED
        numbers.copy_(torch.tensor([1.0, -2.0, 0.5, 3.0]))
        mine.send_bytes(exported.name)
        assert mine.recv()
        assert numbers.tolist() == [2.0, -4.0, 1.0, 6.0]
        exported.close()
        with pytest.raises(ConfigError, match="exported itself"):
            device_sharing.sharing(DEVICE).open(exported.name)
        with pytest.raises(DamagedMessage):
            device_sharing.sharing(DEVICE).open(b"no name")
    process.join(10)
    assert process.exitcode == 0


def test_a_copy_that_nobody_waited_for_is_not_seen_yet() -> None:
    """As on a GPU: the other process must not be told before the stream was waited for."""
    with sanitized(), shared_memory() as files:
        exported = device_sharing.sharing(DEVICE).export(8)
        raw = exported.tensor.numbers  # type: ignore[attr-defined]
        zeros = pin_tensor(torch.zeros(8, dtype=torch.uint8))
        exported.tensor[:8].copy_(zeros, non_blocking=True)
        assert raw[:8].tolist() == [FREED] * 8
        STREAM.synchronize()
        assert raw[:8].tolist() == [0] * 8 and len(files.exported) == 1


def test_memory_of_the_host_is_the_devices_too() -> None:
    with sanitized(), shared_memory():
        words = np.zeros(4096, np.uint8)
        mapped = device_sharing.sharing(DEVICE).map_host(words)
        mapped.tensor[:8].view(torch.int64).fill_(-1)
        assert words[:9].tolist() == [255] * 8 + [0]
        mapped.close()
