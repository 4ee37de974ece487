"""The transfer of KV that `bandwidth.py` measures."""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from typing import Any

import numpy as np
import torch

from moesaic.core import messages
from moesaic.core.endpoint import Endpoint
from moesaic.core.request import Request, SamplingParams
from moesaic.core.tokens import IntArray, TokenBatch
from moesaic.models.kvcache.images import ByteLines, Bytes, OnLayerWritten
from moesaic.policy.scheduling.schedulers.actions import StepPlan
from moesaic.runtime.transfer.receiving import KVReceiver
from moesaic.runtime.transfer.sending import KVSender

LAYERS, BLOCKS, BLOCK, LAYER_BYTES = 32, 64, 16, 64 << 10
"""Of one transfer: layers, blocks, tokens of a block, and bytes of a block in a layer. 128 MiB together."""
TOTAL = LAYERS * BLOCKS * LAYER_BYTES


class Cache:
    """Blocks of every layer, of which those of one request are copied."""

    num_layers, layer_bytes, state_bytes = LAYERS, LAYER_BYTES, 0

    def __init__(self) -> None:
        self._lines = ByteLines([torch.ones(BLOCKS, LAYER_BYTES, dtype=torch.uint8) for _ in range(LAYERS)])

    def watch(self, on_layer_written: OnLayerWritten) -> None:
        """Everything is computed before it is sent."""

    def copy_blocks(self, blocks: IntArray, layers: range) -> Bytes:
        return self._lines.copy(blocks, slice(layers.start, layers.stop))

    def put_blocks(self, blocks: IntArray, layers: range, data: Bytes, num_skipped: int = 0) -> None:
        self._lines.put(blocks, data, num_skipped, slice(layers.start, layers.stop))

    def copy_states(self, page: int, seat: int) -> Bytes:
        return np.empty(0, np.uint8)

    def put_states(self, page: int, seat: int, data: Bytes) -> None:
        """There are none."""


def serve_kv(options: argparse.Namespace) -> None:
    """Keep each transfer until all of it is there."""

    def arrived(message: messages.Message) -> None:
        assert isinstance(message, messages.KVReceived)
        receiver.drop([message.transfer])

    local = options.listen.startswith("unix:")
    receiver = KVReceiver(Cache(), BLOCK, arrived, None if local else options.listen)
    near, far = receiver.endpoint.address, receiver.endpoint.remote
    print(json.dumps([near if local else far, receiver.secret.hex()]), flush=True)
    threading.Event().wait()


def send_kv(options: argparse.Namespace, where: Any) -> float:
    """GB/s of one transfer after the other."""
    torch.set_num_threads(1)  # its threads would wait for a core that the transfer needs
    told = threading.Semaphore(0)
    kind = "shm" if options.transport == "shm" else "socket"
    sender = KVSender(Cache(), BLOCK, lambda message: told.release(), kind)  # type: ignore[arg-type]
    rates: list[float] = []
    begun = time.perf_counter()
    while not rates or time.perf_counter() < begun + options.seconds:
        moment, number = time.perf_counter(), len(rates) + 1
        target = messages.KVTarget(number, Endpoint(where[0]), bytes.fromhex(where[1]))
        request = Request(number, [1] * (BLOCKS * BLOCK), SamplingParams())
        sender.expect(messages.Submit([request], [[]], {number: target}))
        sender.on_step_computed(whole(number))
        while sender.stats().sent_bytes < number * TOTAL:
            told.acquire()
        rates.append(TOTAL / (time.perf_counter() - moment) / 1e9)
    sender.close()
    return statistics.median(rates[1:] or rates)


def whole(number: int) -> StepPlan:
    """A step that computes a whole prompt."""
    none, one = np.zeros(0, np.int64), np.array([1])
    table, length = np.arange(BLOCKS)[None], np.array([BLOCKS * BLOCK])
    batch = TokenBatch(one, one, np.array([0, 1]), length, table, none)
    return StepPlan(0, batch, np.array([number]), one, none, none)
