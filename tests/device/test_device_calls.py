"""Rows between a worker and expert servers that stay on the sanitizer's device, with real server processes.

Files take the place of the GPUs' memory. Tokens are those of a worker and a server on the CPU.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tests.device import test_servers
from tests.support import gpu_cases, served_worker
from tests.support.gpu_sanitizer import COPIES, WAITS, OnDevice, sanitized
from tests.support.gpu_server_process import Servers, servers
from tests.support.gpu_shared_memory import FileSharing, shared_memory

from moesaic.config import WorkerConfig
from moesaic.core.experts import Directory, ExpertLayout
from moesaic.core.request import SamplingParams
from moesaic.experts.remote import RemoteExperts
from moesaic.runtime.model_loading import layout_of
from moesaic.runtime.worker import Worker

NEW = test_servers.NEW
Kind = tuple[torch.dtype, int]
"""Type, and numbers in a row."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deepseek")
    gpu_cases.write("deepseek-lite-yarn", folder)
    return folder


@pytest.fixture(scope="module")
def layout(path: Path) -> ExpertLayout:
    return layout_of(test_servers.config(path, "cpu").model)


@pytest.fixture(scope="module")
def expected(
    path: Path, layout: ExpertLayout, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, list[int]]:
    """With all on the CPU."""
    with served_worker.server(path, layout, tmp_path_factory.mktemp("expected")) as directory:
        return generated(test_servers.config(path, "cpu"), directory)


@pytest.fixture(scope="module")
def halves(path: Path, layout: ExpertLayout) -> Iterator[Servers]:
    """Two servers with half of the experts each."""
    half = layout.num_experts // 2
    parts = range(half), range(half, layout.num_experts)
    with servers(path, layout, [dict.fromkeys(layout.layers, part) for part in parts]) as found:
        yield found


def config(path: Path, **scheduler: Any) -> WorkerConfig:
    return replace(test_servers.config(path, "cuda", **scheduler), transport="cuda_ipc")


def generated(config: WorkerConfig, directory: Directory, **hooks: Any) -> dict[int, list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True, seed=0)
    return served_worker.generated(config, directory, gpu_cases.prompts()[:4], params, **hooks)


@contextmanager
def on_device() -> Iterator[FileSharing]:
    with sanitized(), shared_memory() as files:
        yield files


@pytest.mark.slow
@pytest.mark.parametrize(
    "scheduler",
    [
        {"inflight_batches": 2},
        {"schedule": "async"},
        {"schedule": "barrier"},
        {"combine": "partial"},
        {"schedule": "async", "combine": "partial"},
    ],
)
def test_tokens_are_those_of_the_host(
    path: Path, halves: Servers, expected: dict[int, list[int]], scheduler: dict[str, Any]
) -> None:
    with on_device() as files:
        assert generated(config(path, **scheduler), halves.directory) == expected
        assert len(files.exported) >= 3, "for the rows, and for the answers of each server"


class Copies:
    """Copies from the device to the host, by kind, and waits of the host."""

    def __init__(self) -> None:
        self.of = Counter[Kind]()
        self.requests = 0

    def see(self, name: str, given: dict[str, Any], operands: Any, device: torch.device) -> None:
        """As `Waits.see`."""
        there = [one for _, one in operands if isinstance(one, OnDevice)]
        into = given.get("self") if name == "copy_" else None
        to_host = device.type == "cpu" if into is None else not isinstance(into, OnDevice)
        if name in COPIES and there and to_host:
            self.of[there[0].dtype, there[0].shape[-1] if there[0].dim() > 1 else 1] += 1


@contextmanager
def counted() -> Iterator[Copies]:
    copies, see, submit = Copies(), WAITS.see, RemoteExperts.submit

    def seen(*operation: Any) -> None:
        copies.see(*operation)
        see(*operation)

    def submitted(self: RemoteExperts, request: Any) -> Any:
        before = len(WAITS.of)
        handle = submit(self, request)
        copies.requests += 1
        assert WAITS.of[before:] == ["synchronize"], "the host waits once for a request"
        return handle

    with mock.patch.object(WAITS, "see", seen), mock.patch.object(RemoteExperts, "submit", submitted):
        yield copies


@pytest.mark.parametrize("scheduler", [{"inflight_batches": 2}, {"schedule": "async", "combine": "partial"}])
def test_only_the_gates_choice_comes_to_the_host(
    path: Path, halves: Servers, layout: ExpertLayout, scheduler: dict[str, Any]
) -> None:
    """With partial sums also the gate's weights. Beside that, what the sampler reads: token ids."""
    with on_device(), counted() as copies:
        generated(config(path, **scheduler), halves.directory)
    chosen = {(torch.int64, layout.top_k): copies.requests}
    if "combine" in scheduler:
        chosen[torch.float32, layout.top_k] = copies.requests
    sampled = {kind: count for kind, count in copies.of.items() if kind not in chosen}
    assert copies.requests > NEW * len(layout.layers) and {kind: copies.of[kind] for kind in chosen} == chosen
    assert all(size == 1 or dtype is torch.int64 for dtype, size in sampled), sampled
    assert all(size not in (layout.hidden, layout.top_k) for _, size in sampled), sampled


class Victim:
    """A server that gets a signal while requests run."""

    def __init__(self, servers: Servers, send: signal.Signals) -> None:
        self._process, self._send, self._sent = servers.children[0].pid, send, False

    def after(self, tokens: int) -> None:
        """Called with the number of tokens so far."""
        if tokens >= NEW and not self._sent:
            self._sent = True
            os.kill(self._process, self._send)


@pytest.fixture
def twins(path: Path, layout: ExpertLayout) -> Iterator[Servers]:
    """Two servers with all experts each."""
    every = dict.fromkeys(layout.layers, range(layout.num_experts))
    with servers(path, layout, [every, every]) as found:
        yield found
        for child in found.children:
            child.process.send_signal(signal.SIGCONT)


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", [{"inflight_batches": 2}, {"schedule": "async", "combine": "partial"}])
def test_a_server_that_is_killed_changes_no_token(
    path: Path, twins: Servers, expected: dict[int, list[int]], scheduler: dict[str, Any]
) -> None:
    with on_device() as files:
        victim = Victim(twins, signal.SIGKILL)
        found = generated(config(path, **scheduler), twins.directory, after=victim.after)
        assert found == expected and twins.children[0].process.wait(10) == -signal.SIGKILL
        assert all(memory.closed for memory in files.exported), "its memory was freed once it had ended"


@pytest.mark.slow
def test_a_frozen_server_writes_late_and_hits_nothing_in_use(
    path: Path, twins: Servers, expected: dict[int, list[int]]
) -> None:
    """It has calls when it is frozen. It computes and writes them when it goes on, long after others have."""
    late: dict[str, Any] = {}

    def look(worker: Worker) -> None:
        """At the end of all requests, before the worker closes: the server was given up and is frozen."""
        client = worker._servers
        assert isinstance(client, RemoteExperts) and client._rows is not None
        departures = client._rows.departures
        assert len(departures) == 1
        kept = [memory for *_, heap in departures._waiting for memory, _ in heap._free]
        assert kept and not any(memory.closed for memory in kept)
        in_use = [memory for memory in files.exported if memory not in kept and not memory.closed]
        before = [memory.bytes.tobytes() for memory in kept]
        others = [memory.bytes.tobytes() for memory in in_use]
        os.kill(twins.children[0].pid, signal.SIGCONT)
        until = time.monotonic() + 20
        while len(departures) and time.monotonic() < until:
            time.sleep(0.001)
            departures.poll()
        assert not len(departures) and all(memory.closed for memory in kept)
        late["written"] = any(memory.last != old for memory, old in zip(kept, before, strict=True))
        late["kept"] = [memory.bytes.tobytes() for memory in in_use] == others

    with on_device() as files:
        victim = Victim(twins, signal.SIGSTOP)
        settings = config(path, inflight_batches=2)
        assert generated(settings, twins.directory, after=victim.after, looked_at=look) == expected
    assert late == {"written": True, "kept": True}
