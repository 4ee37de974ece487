"""A server that joined by hand and lost its cluster joins again, or says why it cannot."""

from __future__ import annotations

import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.support.flipping_relay import Change, relay

from moesaic.cluster.join_listener import MAX_PENDING, JoinListener, RemoteProcess
from moesaic.cluster.joining import server
from moesaic.cluster.joining.enlisting import server_config, worker_config
from moesaic.cluster.joining.loop import DELAYS, REFUSALS, join
from moesaic.cluster.joining.options import JoinOptions
from moesaic.config import ExpertServerConfig, ModelConfig, ParallelConfig, QueueConfig, WorkerConfig
from moesaic.core import messages
from moesaic.core.endpoint import Endpoint
from moesaic.core.errors import CheckpointError, ConfigError, ConnectionLost
from moesaic.core.experts import ExpertLayout
from moesaic.experts.process import _ExpertLoader
from moesaic.gpu.nvshmem import package as nvshmem_package
from moesaic.models import fingerprint
from moesaic.models.fingerprint import DigestQueue
from moesaic.transport.authentication import PeerRefused

SECRET, OTHER = b"s" * 32, b"o" * 32
SIZES = ExpertLayout({0: "a"}, "g", "u", "d", 8, 4, 2, 1, "float32")


def checkpoint(path: Path, number: float = 1.0) -> Path:
    """A directory with one tensor of four numbers."""
    path.mkdir(exist_ok=True)
    save_file({"a": np.full(4, number, np.float32)}, path / "model.safetensors")
    (path / "config.json").write_text("{}")
    return path


@cache
def layout() -> ExpertLayout:
    """The layout that a cluster sends which serves `checkpoint`."""
    with tempfile.TemporaryDirectory() as folder:
        return replace(SIZES, weights=fingerprint.compute_fingerprint(checkpoint(Path(folder))))


@contextmanager
def listener(
    welcome: Callable[[RemoteProcess], None], address: str = "tcp:127.0.0.1:0", secret: bytes = SECRET
) -> Iterator[JoinListener]:
    listening = JoinListener(address, secret, welcome)
    try:
        yield listening
    finally:
        listening.close()


def enlisted(**settings: Any) -> messages.EnlistReply:
    """What a cluster answers that serves `checkpoint`. settings: of its servers."""
    config = ExpertServerConfig("m", layout(), "unix:@", **settings)
    return messages.EnlistReply("m", layout().weights, config.to_json())


class Joiner:
    """`join`, without sleeping."""

    def __init__(self, address: str, model: Path) -> None:
        self.joining = JoinOptions(address, model=str(checkpoint(model)))
        self.told = 0
        self.lost: list[str] = []
        self.slept: list[float] = []
        self.between: Callable[[], object] = lambda: None
        """Happens once, in the first sleep."""

    def run(self) -> int:
        life = partial(server.serve_once, self.joining, SECRET)
        return join(life, self._tell, lambda error: self.lost.append(str(error)), self._sleep)

    def _tell(self, model: str) -> None:
        self.told += 1

    def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        assert len(self.slept) < 50, "it tries for ever"
        between, self.between = self.between, lambda: None
        between()


def given_up(process: RemoteProcess) -> None:
    """As the supervisor does with who is silent."""
    process.connection.send(enlisted())
    process.kill()


def test_who_was_given_up_joins_again_until_it_is_sent_away(tmp_path: Path) -> None:
    peers: list[RemoteProcess] = []

    def welcome(process: RemoteProcess) -> None:
        peers.append(process)
        if len(peers) < 3:
            given_up(process)
        else:
            process.connection.send(enlisted())
            process.stop()

    with listener(welcome) as listening:
        joiner = Joiner(listening.address, tmp_path)
        assert joiner.run() == 0
    assert joiner.told == 3
    assert joiner.slept == [DELAYS[0]] * 2, "each time from the beginning"
    assert len(joiner.lost) == 2 and all(line.startswith(f"{listening.address}: ") for line in joiner.lost)


def test_a_cluster_that_is_gone_for_good_is_given_up(tmp_path: Path) -> None:
    with listener(given_up) as listening:
        joiner = Joiner(listening.address, tmp_path)
        joiner.between = listening.close
        with pytest.raises(ConnectionLost, match=f"refused; given up after {len(DELAYS)} attempts") as raised:
            joiner.run()
    assert joiner.slept == list(DELAYS)
    assert len(joiner.lost) == 1, "one line for one loss"
    assert "\n" not in str(raised.value)


def test_a_cluster_that_was_started_anew_is_joined(tmp_path: Path) -> None:
    with listener(given_up) as listening:
        joiner = Joiner(listening.address, tmp_path)
        joiner.between = listening.close
        sleep, again = joiner._sleep, ExitStack()

        def later(seconds: float) -> None:
            sleep(seconds)
            if len(joiner.slept) == 4:
                again.enter_context(listener(RemoteProcess.stop, listening.address))

        joiner._sleep = later  # type: ignore[method-assign]
        with again, pytest.raises(PeerRefused, match="the cluster is shutting down and accepts no processes"):
            joiner.run()
    assert joiner.slept == list(DELAYS[:4])


def test_a_server_by_hand_schedules_as_the_others(tmp_path: Path) -> None:
    joining = JoinOptions("tcp:127.0.0.1:1", model=str(checkpoint(tmp_path)))
    told = enlisted(mmap=False, schedule="async", queues=QueueConfig(0.25, 4, 8, 1.5))
    config = server_config(joining, told, "127.0.0.1")
    assert config.queues == QueueConfig(0.25, 4, 8, 1.5)
    assert (config.schedule, config.queue_policy, config.mmap) == ("async", "defrag", False)


@pytest.mark.parametrize(("name", "flag"), [("paced", "--paced"), ("policy_file", "--schedule-policy-file")])
def test_a_file_of_the_settings_that_is_not_here(tmp_path: Path, name: str, flag: str) -> None:
    joining = JoinOptions("tcp:127.0.0.1:1", model=str(checkpoint(tmp_path)))
    with pytest.raises(ConfigError, match=f"{flag}: got '.*nowhere'; allowed: a file at the same path"):
        server_config(joining, enlisted(**{name: str(tmp_path / "nowhere")}), "127.0.0.1")


def test_a_server_for_graphs_of_other_hosts_needs_a_gpu_and_nvshmem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = enlisted(transport="nvshmem", device="cuda")
    monkeypatch.setattr(nvshmem_package, "MODULE", "moesaic.missing")
    joining = JoinOptions("tcp:127.0.0.1:1", model=str(checkpoint(tmp_path)))
    with pytest.raises(ConfigError, match="--transport: got 'nvshmem'; .*nvshmem4py is not installed"):
        server_config(joining, told, "127.0.0.1")
    monkeypatch.setattr(nvshmem_package, "MODULE", "json")
    assert server_config(joining, told, "127.0.0.1").device == "cuda"
    with pytest.raises(ConfigError, match="^--device: got 'cpu'; allowed: cuda: the cluster has --transport"):
        server_config(replace(joining, device="cpu"), told, "127.0.0.1")


def test_a_placement_of_ranks_that_is_not_here(tmp_path: Path) -> None:
    joining = JoinOptions("tcp:127.0.0.1:1", role="ranks", model=str(checkpoint(tmp_path)))
    parallel = ParallelConfig(2, nnodes=2, placement=str(tmp_path / "nowhere"))
    settings = WorkerConfig(ModelConfig("m"), parallel=parallel).to_json()
    with pytest.raises(ConfigError, match="--placement: got '.*nowhere'; allowed: a file at the same path"):
        worker_config(joining, messages.EnlistReply("m", "", settings), "127.0.0.1")


def test_files_that_change_after_they_were_compared_are_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    joining = JoinOptions("tcp:127.0.0.1:1", model=str(checkpoint(tmp_path)))
    compare = fingerprint.compute_fingerprint

    def then_changed(path: Path) -> str:
        found = compare(path)
        checkpoint(path, 2.0)
        return found

    monkeypatch.setattr(fingerprint, "compute_fingerprint", then_changed)
    stamp = server_config(joining, enlisted(), "127.0.0.1").checkpoint_stamp
    assert stamp
    with pytest.raises(CheckpointError, match="the files changed since they were first read"):
        fingerprint.check_unchanged(tmp_path, stamp)


class Heard:
    """A supervisor's connection as a server sees it. ended: once the server closed it."""

    def __init__(self) -> None:
        self.told: list[messages.Message] = []
        self.ended = threading.Event()

    def send(self, message: messages.Message) -> None:
        self.told.append(message)

    def close(self) -> None:
        self.ended.set()


def test_who_cannot_read_its_experts_again_leaves(tmp_path: Path) -> None:
    """Such as after the files were replaced. Its digests would never come, or be those of other weights."""
    tensors = {name: np.ones(shape, np.float32) for name, *shape in SIZES.tensors(0, 0)}
    file = checkpoint(tmp_path) / "model.safetensors"
    save_file(tensors, file)
    digests = DigestQueue(tmp_path, SIZES)
    save_file(tensors, tmp_path / "new")
    (tmp_path / "new").replace(file)
    config = ExpertServerConfig(str(tmp_path), SIZES, "unix:x", joined=True)
    heard, backend = Heard(), SimpleNamespace(name="reference", load=lambda _: None, keep_only=lambda _: None)
    stamp = fingerprint.stamp(tmp_path)
    loader = _ExpertLoader(heard, backend, Endpoint("tcp:x:1"), config, stamp, digests)  # type: ignore[arg-type]
    loader.change(messages.Hold(1, {0: [0]}))
    try:
        assert heard.ended.wait(60)
    finally:
        loader.close()
    holds, failed = heard.told
    assert isinstance(holds, messages.HoldReply) and isinstance(failed, messages.WorkerFailed)
    assert "the files changed since they were first read" in failed.error


def test_who_is_refused_does_not_ask_again(tmp_path: Path) -> None:
    """Neither the first time, nor where the secret was changed meanwhile."""
    with listener(given_up, secret=OTHER) as listening:
        joiner = Joiner(listening.address, tmp_path)
        with pytest.raises(PeerRefused, match=f"no connection to {listening.address}: .*another secret"):
            joiner.run()
        assert not joiner.slept
    with ExitStack() as stack, listener(given_up) as listening:

        def change() -> None:
            listening.close()
            stack.enter_context(listener(given_up, listening.address, OTHER))

        joiner = Joiner(listening.address, tmp_path)
        joiner.between = change
        with pytest.raises(PeerRefused, match="another secret"):
            joiner.run()
    assert joiner.slept == list(DELAYS[:REFUSALS])


def test_a_refusal_that_somebody_on_the_way_caused_is_not_the_end(tmp_path: Path) -> None:
    """A server that has been in the cluster asks again. Nobody has vouched for what ended its handshake."""
    peers: list[RemoteProcess] = []

    def welcome(process: RemoteProcess) -> None:
        peers.append(process)
        (given_up if len(peers) < 2 else RemoteProcess.stop)(process)

    changes = [Change("up", 4000, 0), Change("up", 30, 5), Change("down", 55, 1)]
    with listener(welcome) as listening, relay(listening.address, *changes) as between:
        joiner = Joiner(f"tcp:127.0.0.1:{between.port}", tmp_path)
        with pytest.raises(PeerRefused, match="the cluster is shutting down and accepts no processes"):
            joiner.run()
    assert joiner.slept == list(DELAYS[:3]) and len(between.flipped) == 2


def test_strangers_who_say_nothing_keep_nobody_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with listener(RemoteProcess.stop) as listening, ExitStack() as stack:
        host, port = listening.address.removeprefix("tcp:").split(":")
        silent = [
            stack.enter_context(socket.create_connection((host, int(port)), 10.0)) for _ in range(MAX_PENDING)
        ]
        with pytest.raises(PeerRefused, match="the cluster is shutting down and accepts no processes"):
            Joiner(listening.address, tmp_path).run()
        assert silent[0].recv(1) == b""
        name = "tcp:{}:{}".format(*silent[0].getsockname())
    why = f"it was the oldest of {MAX_PENDING} handshakes"
    assert caplog.records[0].getMessage() == f"dropped {name} at {listening.address}: {why}"


def test_who_never_was_in_the_cluster_does_not_wait_for_it(tmp_path: Path) -> None:
    with listener(given_up) as listening:
        pass
    joiner = Joiner(listening.address, tmp_path)
    with pytest.raises(ConnectionLost, match="refused"):
        joiner.run()
    assert not joiner.slept and not joiner.lost


def test_a_server_with_other_weights_is_refused_on_both_sides(tmp_path: Path) -> None:
    told: list[messages.Message | None] = []

    def welcome(process: RemoteProcess) -> None:
        process.connection.send(enlisted())
        told.append(process.connection.receive(60.0))
        process.kill()

    with listener(welcome) as listening:
        joiner = Joiner(listening.address, tmp_path)
        checkpoint(tmp_path, 2.0)
        with pytest.raises(ConfigError, match="^--model: got .* other bytes of tensors") as refused:
            joiner.run()
        listening.close()
    assert told == [messages.WorkerFailed(str(refused.value), user_error=True)]
    assert not joiner.slept
