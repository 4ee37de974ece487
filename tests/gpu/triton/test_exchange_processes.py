"""The spinning program in one process and a server in another one, in Triton's interpreter."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.triton_kernels import IS_INTERPRETED

from moesaic.experts import wire
from moesaic.gpu.exchange.exchange_launches import ADDRESSES, LEAST_SLOTS, Exchange
from moesaic.gpu.triton import exchange

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not IS_INTERPRETED, reason="files in place of a GPU's memory"),
]
ROWS, TOP_K, WIDTH, EXPERTS = 3, 2, 8, 4
SIZES = {"words": 16, "request": 64, "hidden": ROWS * WIDTH, "answers": ROWS * TOP_K * WIDTH}
"""Numbers of 4 bytes."""
ROUNDS, POLLS = 4, 1 << 24


def memory(folder: Path) -> dict[str, np.ndarray]:
    """The memory that both processes map."""
    return {
        name: np.memmap(folder / name, np.int32, "r+" if (folder / name).exists() else "w+", shape=size)
        for name, size in SIZES.items()
    }


def serve(folder: Path, end: Connection) -> None:
    """Another process: answers each request with its rows times the expert's number plus one, after a
    while."""
    shared = memory(folder)
    words = shared["words"].view(np.int64)
    hidden = shared["hidden"].view(np.float32).reshape(ROWS, WIDTH)
    answers, found = shared["answers"].view(np.float32).reshape(-1, WIDTH), []
    end.send(True)
    while len(found) < ROUNDS:
        if words[0] == words[1]:
            time.sleep(1e-4)
            continue
        request = memoryview(shared["request"]).cast("B")
        size = wire.size(*wire.read_counts(request), WIDTH, False, on_device=True)
        parsed = wire.parse(request[:size], 1, EXPERTS, WIDTH, on_device=ROWS)
        time.sleep(0.03)
        answers[: len(parsed.rows)] = hidden[parsed.rows] * (parsed.experts[:, None] + 1)
        found.append(int(words[0]))
        words[1] = words[0]
    end.send(found)


def test_a_server_of_another_process_answers_the_kernels(tmp_path: Path) -> None:
    shared, context = memory(tmp_path), multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=serve, args=(tmp_path, theirs), daemon=True)
    process.start()
    assert mine.recv()
    words, abort = shared["words"].ctypes.data, torch.zeros(1, dtype=torch.int64)
    addresses = torch.zeros(ADDRESSES, LEAST_SLOTS, dtype=torch.int64)
    places = shared["request"].ctypes.data, words, words + 8, shared["answers"].ctypes.data
    addresses[:4, 5] = torch.tensor(places)
    ours = Exchange(
        addresses,
        torch.full((1, EXPERTS), 5, dtype=torch.int32),
        torch.from_numpy(wire.header(0, WIDTH, 1))[None],
        wire.ROWS_WORD,
        wire.PAIRS_WORD,
        torch.from_numpy(np.asarray(shared["hidden"])).view(torch.float32).view(ROWS, WIDTH),
        torch.empty(0, 0, dtype=torch.int32),
        torch.tensor([ROWS, 0], dtype=torch.int32),
        torch.tensor([40]),
        torch.zeros(1, LEAST_SLOTS, dtype=torch.int32),
        torch.tensor([abort.data_ptr()]),
    )
    for _ in range(ROUNDS):
        hidden = torch.randn(ROWS, WIDTH)
        ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(ROWS)])
        sources = exchange.dispatch(ours, 0, hidden, ids)
        exchange.post(ours, 0)
        exchange.wait(ours, 0, POLLS)
        assert torch.equal(exchange.collect(sources, TOP_K, WIDTH), hidden[:, None] * (ids[:, :, None] + 1))
    assert ours.step.tolist() == [ROWS, 0] and mine.recv() == [41, 42, 43, 44]
    process.join(20)
    assert process.exitcode == 0
