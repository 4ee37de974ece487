"""The real supervisor over processes that do only what a test says, in virtual time.

After each turn its health is compared with the law: /health is 200 exactly while requests are computed, or
while an outage is young and a replacement starts. A request that is sent at 200 is answered, or refused,
within --unavailable-timeout.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from dataclasses import dataclass, field
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moesaic.cluster.checkpoint_watch import Verdict
from moesaic.cluster.member import Member, RestartRule, Role, Stage
from moesaic.cluster.router import Router
from moesaic.cluster.supervisor import Supervisor
from moesaic.config import ClusterConfig, ExpertServerConfig, ModelConfig, WorkerConfig
from moesaic.core import messages
from moesaic.core.endpoint import Endpoint
from moesaic.core.errors import ConnectionLost
from moesaic.models.files import resolve
from moesaic.policy.fleet.health import LONGEST_OUTAGE
from moesaic.transport.local import local_pair
from tests.cluster.test_changes import LAYOUT, FakeProcess
from tests.support.fake_worker import info

TURN = 0.1
"""Seconds between two turns of the supervisor while something is about to happen."""


@dataclass(frozen=True)
class Fate:
    """What becomes of a process that is started."""

    seconds: float = 1.0
    """From its start until it serves, dies or refuses."""
    end: str = "serves"
    """serves, dies, or refuses."""


@dataclass
class Attempt:
    """One process."""

    member: Member
    process: FakeProcess
    fate: Fate
    start: float
    is_serving: bool = False
    has_ended: bool = False


@dataclass
class VirtualLauncher:
    """Starts processes whose fates are known beforehand."""

    is_remote = False
    now: float = 0.0
    fates: dict[str, list[Fate]] = field(default_factory=dict)
    """Member -> the fates of its next processes. Without one a process serves after a second."""
    attempts: list[Attempt] = field(default_factory=list)

    def start_worker(self, member: Member, config: WorkerConfig) -> FakeProcess:
        fates = self.fates.get(member.name)
        process = FakeProcess(*local_pair())
        self.attempts.append(Attempt(member, process, fates.pop(0) if fates else Fate(), self.now))
        return process

    def start_server(self, member: Member, config: ExpertServerConfig) -> FakeProcess:
        return self.start_worker(member, WorkerConfig(ModelConfig("demo")))

    def set_address(self, address: str) -> None: ...

    def take(self, process: object) -> bool:
        return False

    def request_hosts(self, numbers: object) -> None: ...

    def stop(self) -> None: ...


class VirtualCluster:
    """Attention workers and servers, each with a copy of every expert."""

    def __init__(self, workers: int = 2, servers: int = 2, timeout: float | None = None) -> None:
        self.launcher = VirtualLauncher()
        self.router = Router(clock=lambda: self.launcher.now)
        cluster = ClusterConfig(
            attention_workers=workers,
            expert_servers=servers,
            min_replicas=servers,
            unavailable_timeout=timeout,
        )
        worker = WorkerConfig(ModelConfig(str(resolve("demo"))))
        self.supervisor = Supervisor(
            worker, cluster, self.router, lambda: self.launcher.now, launcher=self.launcher
        )
        self.supervisor._watchdog._thread = threading.current_thread()  # so that `beat` is ours
        self.obstacle: str | None = None
        self.outage = ""
        """The reason that clients are told. Empty: /health says 200."""
        self.end_reason: str | None = None
        members = self.supervisor._members
        for role, count in ((Role.WORKER, workers), (Role.SERVER, servers)):
            for _ in range(count):
                members.add(role)
        for member in members.clients:
            members.spawn_worker(member)
        self.supervisor._receive(members.workers[0], messages.Layout(LAYOUT))
        self.advance(3.0)
        assert self.supervisor._has_announced

    @property
    def now(self) -> float:
        return self.launcher.now

    @property
    def alive(self) -> list[Attempt]:
        return [attempt for attempt in self.launcher.attempts if not attempt.has_ended]

    @property
    def timeout(self) -> float:
        return self.supervisor._health.policy.timeout

    def find(self, name: str) -> Attempt | None:
        """The process that a member has now."""
        return next((attempt for attempt in self.alive if attempt.member.name == name), None)

    def advance(self, seconds: float) -> None:
        """Lets time pass, turn by turn. Turns are longer while nothing is about to happen."""
        end = self.now + seconds
        while self.now < end and self.end_reason is None:
            waits = [attempt.start + attempt.fate.seconds for attempt in self.alive if not attempt.is_serving]
            waits += [
                member.restart_at
                for member in self.supervisor._members.all_members
                if member.stage is Stage.WAITING
            ]
            is_idle = self.supervisor._members.inbox.empty() and not (
                self.obstacle is None and any(time <= self.now for time in waits)
            )
            coming = min([time for time in waits if time > self.now], default=end) if is_idle else self.now
            self.launcher.now = min(end, max(coming, self.now + TURN), self.now + 5.0)
            self.turn()

    def turn(self) -> None:
        """One turn of the supervisor, after what the processes have done by now."""
        for attempt in self.alive:
            attempt.member.last_seen = self.now
            if not attempt.is_serving and self.now >= attempt.start + attempt.fate.seconds:
                self._fulfil(attempt)
        self._empty_inbox()
        self.supervisor._tick(self.now)
        self._empty_inbox()
        self._listen()

    def kill(self, attempt: Attempt) -> None:
        """The process dies."""
        attempt.has_ended = True
        attempt.process.far.close()
        reader = attempt.member.reader
        assert reader is not None
        reader.join(10)

    def heed(self, obstacle: str | None) -> None:
        """The checkpoint's files change, or are as at the start."""
        self.obstacle = obstacle
        self.supervisor._apply_verdict(Verdict(obstacle, "stamp"))

    def computes(self) -> bool:
        """Whether some process computes each part of a request."""
        serving = {attempt.member.role for attempt in self.alive if attempt.is_serving}
        return Role.WORKER in serving and (Role.SERVER in serving or not self.supervisor._members.servers)

    def will_compute(self) -> bool:
        """Whether processes that start, or will be started by themselves, can compute what is missing."""
        roles = set()
        for member in self.supervisor._members.all_members:
            attempt = self.find(member.name)
            if (attempt is not None and attempt.is_serving) or (
                self.obstacle is None and member.refusal is None
            ):
                roles.add(member.role)
        return {Role.WORKER, Role.SERVER} <= roles

    def close(self) -> None:
        self.supervisor._trust.weights.close()
        for attempt in self.alive:
            attempt.process.far.close()

    def _fulfil(self, attempt: Attempt) -> None:
        """A start ends."""
        member, fate = attempt.member, attempt.fate
        if fate.end == "refuses":
            self.supervisor._receive(member, messages.WorkerFailed("not enough memory", user_error=True))
        if fate.end != "serves":
            self.kill(attempt)
            return
        attempt.is_serving = True
        if member.role is Role.WORKER:
            self.supervisor._receive(member, messages.Ready(info()))
        else:
            reply = messages.HoldReply(member.last_hold, Endpoint("unix:@x"), "avx2")
            self.supervisor._receive(member, reply)

    def _empty_inbox(self) -> None:
        with contextlib.suppress(queue.Empty):
            while (action := self.supervisor._members.inbox.get_nowait()) is not None:
                action()

    def _listen(self) -> None:
        """What the engine is told."""
        try:
            while (message := self.router.receive(0)) is not None:
                if isinstance(message, messages.Outage):
                    self.outage = message.reason
        except ConnectionLost:
            self.end_reason = self.supervisor.describe_end()


FATES = st.builds(
    Fate, st.sampled_from([0.1, 1.0, 8.0, 45.0, 600.0]), st.sampled_from(["serves", "dies", "refuses"])
)


class Outages(RuleBasedStateMachine):
    """Processes die, start slowly, refuse, and serve again, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.cluster: VirtualCluster | None = None

    @initialize(timeout=st.sampled_from([None, 5.0, 60.0]))
    def start(self, timeout: float | None) -> None:
        self.cluster = VirtualCluster(timeout=timeout)
        self.outage_began_at: float | None = None
        self.probe_sent_at: float | None = None
        """When a request was sent that nobody has answered."""

    @rule(timeout=st.sampled_from([None, 5.0]))
    @precondition(lambda self: self.cluster is not None and self.cluster.end_reason is not None)
    def start_anew(self, timeout: float | None) -> None:
        """The service has ended, and somebody starts it again."""
        self.teardown()
        self.start(timeout)

    @rule(places=st.sampled_from([[0], [1], [2], [3], [0, 1], [2, 3]]), fates=st.lists(FATES, max_size=8))
    @precondition(lambda self: self.cluster is not None and self.cluster.end_reason is None)
    def kill(self, places: list[int], fates: list[Fate]) -> None:
        """The next processes of these members have these fates."""
        assert self.cluster is not None
        for place in places:
            name = self.cluster.supervisor._members.all_members[place].name
            self.cluster.launcher.fates[name] = list(fates)
            attempt = self.cluster.find(name)
            if attempt is not None:
                self.cluster.kill(attempt)
        self.step(0.0)

    @rule(obstacle=st.sampled_from([None, "model.safetensors: this file is missing"]))
    @precondition(lambda self: self.cluster is not None and self.cluster.end_reason is None)
    def change_files(self, obstacle: str | None) -> None:
        assert self.cluster is not None
        self.cluster.heed(obstacle)
        self.step(0.0)

    @rule(seconds=st.sampled_from([0.1, 1.0, 10.0, 70.0, 500.0]))
    @precondition(lambda self: self.cluster is not None and self.cluster.end_reason is None)
    def wait(self, seconds: float) -> None:
        assert self.cluster is not None
        end = self.cluster.now + seconds
        while end - self.cluster.now > 1e-3 and self.cluster.end_reason is None:
            self.step(min(end - self.cluster.now, 2.0))

    def step(self, seconds: float) -> None:
        """Lets time pass, and compares with the law."""
        cluster = self.cluster
        assert cluster is not None
        if seconds:
            cluster.advance(seconds)
        else:
            cluster.turn()
        computes = cluster.computes()
        if computes:
            self.outage_began_at = None
        elif self.outage_began_at is None:
            self.outage_began_at = cluster.now
        age = 0.0 if self.outage_began_at is None else cluster.now - self.outage_began_at
        if cluster.end_reason is not None:
            keeps_dying = "keep dying" in cluster.end_reason
            assert not computes and (keeps_dying or age >= LONGEST_OUTAGE * cluster.timeout - 2.0)
            return
        is_ok = computes or (age < cluster.timeout and cluster.will_compute())
        # A turn of `advance` may be 2 s long, in which an outage can begin unseen.
        if not 0 <= cluster.timeout - age <= 2.0:
            assert (cluster.outage == "") == is_ok, (cluster.outage, age, cluster.timeout)
        self._probe(computes)

    def _probe(self, computes: bool) -> None:
        """A request that is sent whenever /health says 200 and no other one waits."""
        assert self.cluster is not None
        if computes or self.cluster.outage:
            self.probe_sent_at = None  # answered, or refused by a 503
        elif self.probe_sent_at is None:
            self.probe_sent_at = self.cluster.now
        else:
            assert self.cluster.now - self.probe_sent_at <= self.cluster.timeout + 2.0

    @invariant()
    def a_reason_names_what_is_missing(self) -> None:
        if self.cluster is not None and self.cluster.outage:
            assert any(
                words in self.cluster.outage
                for words in ("no attention worker serves", "no server that serves")
            )

    def teardown(self) -> None:
        if self.cluster is not None:
            self.cluster.close()


TestOutages = Outages.TestCase
TestOutages.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
TestOutages.pytestmark = [pytest.mark.slow]  # type: ignore[attr-defined]


@pytest.fixture
def cluster() -> VirtualCluster:
    return VirtualCluster()


def test_one_worker_of_two_that_keeps_dying_does_not_end_the_service(cluster: VirtualCluster) -> None:
    cluster.launcher.fates["attention worker 0"] = [Fate(0.1, "dies")] * 40
    victim = cluster.find("attention worker 0")
    assert victim is not None
    cluster.kill(victim)
    cluster.advance(600.0)
    assert cluster.end_reason is None and not cluster.outage
    notes = [failure.what for failure in cluster.supervisor.report().failures]
    assert any("attention worker 0 keeps dying" in note for note in notes)
    starts = [at.start for at in cluster.launcher.attempts if at.member.name == "attention worker 0"]
    assert 30 < len(starts) < 70, "it is started again every ten seconds"
    cluster.close()


@pytest.mark.parametrize("seconds", [0.1, 8.0, 45.0, 600.0])
def test_starts_that_die_end_the_service_however_long_they_take(seconds: float) -> None:
    cluster = VirtualCluster(workers=1)
    cluster.launcher.fates["attention worker 0"] = [Fate(seconds, "dies")] * 99
    victim = cluster.find("attention worker 0")
    assert victim is not None
    cluster.kill(victim)
    cluster.advance(100_000.0)
    assert cluster.end_reason is not None and "no attention worker serves" in cluster.end_reason
    starts = [at.start for at in cluster.launcher.attempts if at.member.name == "attention worker 0"]
    assert len(starts) <= RestartRule().max_deaths
    if seconds < 30.0:  # longer starts reach the end of the longest outage first
        assert "keep dying" in cluster.end_reason
    cluster.close()


def test_a_refused_start_is_not_repeated_as_a_crash(cluster: VirtualCluster) -> None:
    for number in (0, 1):
        name = f"attention worker {number}"
        cluster.launcher.fates[name] = [Fate(1.0, "refuses")] * 3
        victim = cluster.find(name)
        assert victim is not None
        cluster.kill(victim)
    cluster.advance(5.0)
    assert cluster.outage == "no attention worker serves: attention worker 0: not enough memory"
    cluster.advance(100.0)
    assert not cluster.outage and cluster.end_reason is None
    cluster.close()


def test_a_file_that_comes_back_is_loaded_at_once(cluster: VirtualCluster, tmp_path: Path) -> None:
    cluster.heed("model.safetensors: this file is missing")
    for attempt in list(cluster.alive):
        if attempt.member.role is Role.SERVER:
            cluster.kill(attempt)
    cluster.advance(20.0)
    assert cluster.outage == (
        "no server that serves holds experts 0-3 of layer 0: model.safetensors: this file is missing"
    )
    assert len(cluster.launcher.attempts) == 4
    cluster.heed(None)
    cluster.advance(2.0)
    assert not cluster.outage and cluster.computes()
    config = cluster.supervisor._members._worker_config
    assert config.checkpoint_stamp == "stamp", "they find the files that are there now"
    cluster.close()
