"""A cluster on the first of several hosts, and processes of the other hosts that join it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moesaic import SamplingParams
from moesaic.cluster.supervisor import Supervisor
from tests.support.cluster_driver import Answer, Cluster, cluster
from tests.support.hosts import Host, Hosts

SERVER, WORKER, PREFILL, RANKS = "expert server", "attention worker", "prefill worker", "ranks"
"""Roles, as the status names them."""


def nothing(tokens: int) -> None:
    """Disturbs nobody."""


class After:
    """Does something once when so many tokens are there, and when `moment` holds."""

    def __init__(
        self, tokens: int, act: Callable[[], object], moment: Callable[[], object] = lambda: True
    ) -> None:
        self._tokens, self._act, self._moment, self.done = tokens, act, moment, False

    def __call__(self, tokens: int) -> None:
        if not self.done and tokens >= self._tokens and self._moment():
            self.done = True
            self._act()


class JoinedCluster:
    """A cluster, and what joined it."""

    def __init__(self, folder: Path) -> None:
        self.served: Cluster
        """The cluster, once all of its processes serve."""
        self.joined: list[subprocess.Popen[Any]] = []
        """The `moesaic join` processes, also those whose host was killed."""
        self._folder = folder

    def join(
        self, host: Host, role: str = SERVER, *flags: str, at: Supervisor | None = None
    ) -> subprocess.Popen[Any]:
        """Starts `moesaic join` on a host. at: the supervisor of a cluster that does not serve yet."""
        supervisor = self.served.supervisor if at is None else at
        address = (supervisor.report().join_address or "").removeprefix("tcp:")
        command = [sys.executable, "-m", "moesaic", "join", address, "--role", role.replace(" ", "-")]
        command += ["--secret-file", str(self._folder / "secret"), "--threads", "1", *flags]
        with (self._folder / f"log-{len(self.joined)}").open("w") as log:
            self.joined.append(host.popen(command, stdout=log, stderr=log))
        return self.joined[-1]

    def bring(self, host: Host, roles: Sequence[str]) -> None:
        """Starts a process for each of these roles on a host, and waits until they serve."""
        before = {role: len(self.numbers(role)) for role in roles}
        for role in roles:
            self.join(host, role)
        for role in before:
            self.until(before[role] + list(roles).count(role), role)

    def answers(
        self, prompts: list[list[int]], params: list[SamplingParams], disturb: Callable[[int], None] = nothing
    ) -> list[Answer]:
        """The answers to these requests, which are sent now. `disturb` gets the number of their tokens."""
        before, told = len(self.served.running.answers), self.served.running.tokens
        self.served.submit(prompts, params)
        return self.served.finish(lambda tokens: disturb(tokens - told))[before:]

    def numbers(self, role: str) -> set[int]:
        """The numbers of the processes of this role that serve. No number is used again."""
        found = self.served.supervisor.status()
        return {one.number for one in found if one.role == role and one.stage == "serving"}

    def until(self, count: int, role: str = SERVER) -> None:
        """Waits until so many processes of this role are there, all of them serve, and nothing changes."""

        def settled() -> bool:
            report = self.served.supervisor.report()
            all_of_role = sum(one.role == role for one in report.processes)
            return report.change is None and len(self.numbers(role)) == count == all_of_role

        try:
            self.served.until(settled)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.logs()}") from error

    @property
    def all_joined(self) -> bool:
        """Whether every process that still runs has joined once. One that cannot, the first time, ends."""
        logs = [(self._folder / f"log-{number}").read_text() for number in range(len(self.joined))]
        return all(
            one.poll() is not None or "Joined" in log for one, log in zip(self.joined, logs, strict=True)
        )

    def logs(self) -> str:
        """What the processes that joined have written."""
        return "".join(f"{path.name}: {path.read_text()}" for path in sorted(self._folder.glob("log-*")))


@contextmanager
def joined_cluster(
    hosts: Hosts, folder: Path, first: Sequence[tuple[Any, ...]] = (), **settings: Any
) -> Iterator[JoinedCluster]:
    """A cluster that other hosts can join. The caller has entered host 0.

    folder: for secret and logs. All hosts have it. first: what is given to `JoinedCluster.join` for processes
    that join before the cluster serves.
    settings: of `cluster_driver.cluster`.
    """
    for old in folder.glob("log-*"):
        old.unlink()
    address, secret = f"tcp:{hosts[0].address}:0", str(folder / "secret")
    found = JoinedCluster(folder)

    def begun(supervisor: Supervisor) -> None:
        for each in first:
            found.join(*each, at=supervisor)

    door = {"cluster_address": address, "cluster_secret_file": secret}
    with cluster(**door, begun=begun, **settings) as found.served:
        yield found
