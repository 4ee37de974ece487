"""Rows between a worker and expert servers that stay on the sanitizer's device, with real server processes.

Files take the place of the GPUs' memory. Tokens are those of a worker and a server on the CPU.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from tests.gpu import test_servers
from tests.support import gpu_cases, pairs, served_worker
from tests.support.gpu_graphs import graphs
from tests.support.gpu_sanitizer import COPIES, DEVICE, WAITS, OnDevice, sanitized
from tests.support.gpu_server_process import SECRET, Servers, servers
from tests.support.gpu_shared_memory import FileSharing, shared_memory
from tests.support.triton_kernels import IS_INTERPRETED

from moesaic.config import WorkerConfig
from moesaic.core.experts import Directory, ExpertLayout
from moesaic.core.request import SamplingParams
from moesaic.experts import wire
from moesaic.experts.backend import CallPairs
from moesaic.experts.client import ExpertRequest
from moesaic.experts.remote import RemoteExperts
from moesaic.experts.torch_backend import TorchBackend
from moesaic.gpu.ipc.device_calls import CallRows, DeviceIncoming
from moesaic.gpu.ipc.device_rows import ServerRows, WorkerRows
from moesaic.runtime.build import build_worker
from moesaic.runtime.context import WorkerContext
from moesaic.runtime.model_loading import read_expert_layout
from moesaic.runtime.step import step_kind
from moesaic.runtime.worker import Worker
from moesaic.transport.local import local_pair
from moesaic.transport.wakeup import Wakeup

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
    return read_expert_layout(test_servers.config(path, "cpu").model)


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
        before = len(WAITS.mine.of)
        handle = submit(self, request)
        copies.requests += 1
        assert WAITS.mine.of[before:] == ["synchronize"], "the host waits once for a request"
        return handle

    with mock.patch.object(WAITS, "see", seen), mock.patch.object(RemoteExperts, "submit", submitted):
        yield copies


@pytest.mark.slow
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


ATTEMPTS = 4
"""A busy machine may give up the server before it is frozen. Then it writes nothing late."""


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
@pytest.mark.parametrize(
    "scheduler",
    [{"inflight_batches": 2}, pytest.param({"schedule": "async", "combine": "partial"}, marks=pairs.REST)],
)
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
        assert isinstance(client, RemoteExperts) and isinstance(client.memory, WorkerRows)
        departures = client.memory.departures
        assert len(departures) == 1
        kept = [memory for *_, heap in departures._waiting for memory, _ in heap._free]
        assert kept and not any(memory.closed for memory in kept)
        in_use = [memory for memory in files.exported if memory not in kept and not memory.closed]
        before = [memory.bytes.tobytes() for memory in kept]
        others = [memory.bytes.tobytes() for memory in in_use]
        os.kill(twins.children[0].pid, signal.SIGCONT)
        until = time.monotonic() + 60
        while len(departures) and time.monotonic() < until:
            time.sleep(0.001)
            departures.poll()
        assert not len(departures) and all(memory.closed for memory in kept)
        late["written"] = any(memory.last != old for memory, old in zip(kept, before, strict=True))
        late["kept"] = [memory.bytes.tobytes() for memory in in_use] == others

    for _ in range(ATTEMPTS):
        with on_device() as files:
            victim = Victim(twins, signal.SIGSTOP)
            settings = config(path, inflight_batches=2)
            assert generated(settings, twins.directory, after=victim.after, looked_at=look) == expected
        assert late["kept"]
        if late["written"]:
            return
    pytest.fail("the server never wrote late")


@pytest.mark.slow
def test_a_server_that_answers_nan_is_found_and_left(
    path: Path, layout: ExpertLayout, expected: dict[int, list[int]]
) -> None:
    every = dict.fromkeys(layout.layers, range(layout.num_experts))
    blamed: list[int] = []

    def look(worker: Worker) -> None:
        assert isinstance(worker._servers, RemoteExperts)
        blamed.extend(entry.server for entry in worker._servers._blamed_servers)

    with servers(path, layout, [every, every], broken=0) as found, on_device():
        settings = config(path, inflight_batches=2)
        assert generated(settings, found.directory, looked_at=look, faults=True) == expected
    assert blamed == [0]


@pytest.mark.slow
def test_a_whole_answer_outlives_its_connection(path: Path, layout: ExpertLayout) -> None:
    """A server may leave its memory, which is freed then, before the worker has used what it answered."""
    held = dict.fromkeys(layout.layers, range(layout.num_experts))
    ours, theirs = local_pair()
    with servers(path, layout, [held]) as found, on_device(), torch.inference_mode():
        worker, _ = build_worker(WorkerContext(config(path), theirs, time.monotonic, wakeup=Wakeup()))
        remote = worker._servers
        assert isinstance(remote, RemoteExperts) and isinstance(remote.memory, WorkerRows)
        with closing(remote), closing(ours):
            remote.update(found.directory, SECRET)
            hidden, ids = torch.randn(3, layout.hidden).to(DEVICE), torch.arange(3)[:, None].to(DEVICE)
            handle = remote.submit(ExpertRequest(layout.layers[0], hidden, ids))
            while (rows := remote.poll(handle)) is None:
                remote.wait(1.0, remote.wakeup.fileno())
            wanted = rows.cpu().clone()
            remote.update(Directory(2, [], {}), SECRET)
            remote._retire()
            while remote._connections or len(remote.memory.departures):
                remote.arrivals()
            assert torch.equal(remote.rows(handle).cpu(), wanted)
            remote.release(handle)


@pytest.mark.slow
@pytest.mark.skipif(not IS_INTERPRETED, reason="a GPU compiles what it runs")
def test_recorded_steps_send_rows_from_the_device(
    path: Path, halves: Servers, expected: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CUDA graph ends at each request, whose rows are in the memory that it writes at every replay."""
    monkeypatch.setattr(step_kind, "bucket", lambda rows: 4)
    with on_device(), graphs(), np.errstate(all="ignore"), counted() as copies:
        settings = config(path, kernels="triton", inflight_batches=2)
        assert generated(settings, halves.directory) == expected
    assert copies.requests > NEW


def test_a_server_waits_once_for_its_device(path: Path, layout: ExpertLayout) -> None:
    """Two calls of one run: one with an answer for each pair, one with partial sums."""
    rng, width = np.random.default_rng(0), layout.hidden
    layer, held = layout.layers[0], {layout.layers[0]: range(layout.num_experts)}
    hidden = rng.standard_normal((5, width), dtype=np.float32)
    hidden[3, 0] = np.nan
    experts, rows = np.array([0, 1, 2, 3]), np.array([0, 1, 0, 2])
    places, weights = np.array([4, 1, 3]), np.array([0.5, 1.0, 2.0, 1.0], np.float32)
    with on_device():
        backend = TorchBackend(path, layout, "cuda", "reference", 1)
        backend.load(held)
        server, calls = ServerRows(DEVICE, width), []
        memory = torch.from_numpy(hidden).to(DEVICE).view(-1).view(torch.uint8)
        for gate in (None, weights):
            answers = 4 if gate is None else 3
            shared = CallRows(memory, torch.zeros(4 * answers * width, dtype=torch.uint8, device=DEVICE))
            request = wire.Request(layer, 0, experts, rows, gate, hidden[:0], places=places)
            incoming = DeviceIncoming(Answer(answers), 0, 4 * width, shared)  # type: ignore[arg-type]
            calls.append(server.open(incoming, request))
        before = len(WAITS.of)
        pairs = np.arange(4)
        backend.run(layer, [CallPairs(one.hidden, rows, experts, one.rows, pairs) for one in calls])
        server.finish([(one, pairs) for one in calls])
        assert WAITS.of[before:] == ["tolist", "synchronize"], "the reference reads expert ids, too"
        exact, sums = (one.answer.cpu().numpy() for one in calls)
    assert [list(one.incoming.answer) for one in calls] == [[1, 1, 1, 0], [1, 1, 0]]
    reference = TorchBackend(path, layout, "cpu", "reference", 1)
    reference.load(held)
    wanted = np.zeros((4, width), np.float32)
    reference.run(layer, [CallPairs(hidden[places], rows, experts, wanted, pairs)])
    assert np.allclose(exact[:3], wanted[:3], atol=1e-6) and np.isnan(exact[3]).any()
    assert np.allclose(sums[0], 0.5 * wanted[0] + 2 * wanted[2], atol=1e-6)
    assert np.allclose(sums[1], wanted[1], atol=1e-6)


class Answer:
    """An Incoming, of which only the answer is used."""

    def __init__(self, rows: int) -> None:
        self.answer = memoryview(bytearray(rows))
