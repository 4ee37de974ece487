"""Hosts for tests, made of Linux namespaces on this machine: `with Hosts(3) as hosts`.

A host has a network of its own with one address, and its own processes, /dev/shm and /tmp. So nothing is
shared by accident: no Unix socket, no memory, no temporary file. Other files are those of this machine.
A bridge in another network namespace, the switch, connects the hosts. This machine's network stays as it is.

Everything belongs to a few processes that end with the thread that made the hosts, however it ends. With the
last process of a namespace the kernel removes its interfaces and mounts. So nothing is left behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.processes import gone

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("ip", "tc", "unshare", "nsenter", "mount")
NETWORK, MOUNTS, PROCESSES = 0x40000000, 0x00020000, 0x20000000
"""CLONE_NEWNET, CLONE_NEWNS and CLONE_NEWPID."""
PR_SET_PDEATHSIG = 1
PATIENCE = 60.0
"""Seconds after which a host that does not start or end counts as stuck."""
_LIBC = ctypes.CDLL(None, use_errno=True)


@functools.cache
def missing() -> str:
    """Why this machine can make no hosts. Empty if it can."""
    if sys.platform != "linux":
        return "hosts in tests are Linux namespaces"
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    if absent:
        return f"hosts in tests need the program {absent[0]}"
    tried = subprocess.run(
        shlex.split("unshare --net --mount --pid --fork ip link add name b type bridge"),
        capture_output=True,
        text=True,
        check=False,
    )
    return f"hosts in tests need root: {tried.stderr.strip()}" if tried.returncode else ""


class Hosts(Sequence["Host"]):
    """Hosts that can reach each other. The thread that enters this context must outlive it."""

    def __init__(self, count: int, shared: Sequence[Path] = ()) -> None:
        """shared: folders below /tmp that every host has, such as one with a secret."""
        self._shared = _outermost([ROOT, Path(sys.prefix), Path(sys.base_prefix), *shared])
        self._hosts = [Host(self, number) for number in range(count)]
        self._switch: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Hosts:
        script = "ip link add name bridge type bridge && ip link set bridge up && echo ready"
        self._switch = _begin(["unshare", "--net", "sh", "-c", f"{script} && exec sleep infinity"])
        try:
            for host in self._hosts:
                host.boot()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for host in self._hosts:
            host.kill()
        if self._switch is not None:
            _end(self._switch)
            self._switch = None

    def __getitem__(self, number: int) -> Host:  # type: ignore[override]
        return self._hosts[number]

    def __len__(self) -> int:
        return len(self._hosts)

    @property
    def pids(self) -> list[int]:
        """The processes that the hosts consist of."""
        own = [] if self._switch is None else [self._switch.pid]
        return own + [host.init for host in self._hosts if host.up]

    @property
    def shared(self) -> list[Path]:
        """Folders below /tmp that every host has."""
        return self._shared

    def at_switch(self, command: str) -> list[str]:
        """The command line of a program that runs in the network of the switch."""
        assert self._switch is not None
        return ["nsenter", f"--net=/proc/{self._switch.pid}/ns/net", *shlex.split(command)]


class Host:
    """One of `Hosts`."""

    def __init__(self, hosts: Hosts, number: int) -> None:
        self._hosts, self.number = hosts, number
        self.address = f"10.77.0.{number + 1}"
        self._started: subprocess.Popen[bytes] | None = None
        self._children: list[subprocess.Popen[Any]] = []
        self._relay: subprocess.Popen[bytes] | None = None
        self.init = 0
        """Process id of the host's first process, with which all others end."""

    @property
    def up(self) -> bool:
        return self._started is not None

    def boot(self) -> None:
        """Start the host, also after it was killed: its address is the same, and /tmp is empty."""
        assert not self.up
        flags = ["--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self._started = _begin(["unshare", *flags, "sh", "-c", _script(self._hosts.shared)])
        pid = self._started.pid
        self.init = int(Path(f"/proc/{pid}/task/{pid}/children").read_text())
        port, mac = f"port{self.number}", f"02:00:00:00:00:{self.number + 1:02x}"
        self._at_switch(
            f"sh -c 'ip link del {port} 2>/dev/null || true'"
        )  # it may outlive a host for a while
        self._at_switch(f"ip link add name {port} type veth peer name eth0 address {mac} netns {self.init}")
        self._at_switch(f"ip link set {port} master bridge up")
        self._inside(f"ip address add {self.address}/24 dev eth0")
        self._inside("ip link set eth0 up")

    def popen(self, command: Sequence[str], **settings: Any) -> subprocess.Popen[Any]:
        """Start a program on this host, as a child of this process."""
        where = Path(settings.pop("cwd", None) or Path.cwd())
        environment = {**settings.pop("env", os.environ), "TMPDIR": "/tmp"}
        with self._namespaces("net", "mnt", "pid") as (net, mnt, pid):

            def enter() -> None:
                _setns(net, NETWORK)
                _setns(mnt, MOUNTS)
                os.chdir(where)

            def start() -> subprocess.Popen[Any]:
                _setns(pid, PROCESSES)  # for the children of this thread
                return subprocess.Popen(command, preexec_fn=enter, env=environment, **settings)

            child = _in_thread(start)
        self._children.append(child)
        return child

    def run(self, command: Sequence[str], timeout: float = PATIENCE) -> str:
        """Run a program on this host. Returns its output. Raises AssertionError if it fails."""
        child = self.popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        said, _ = child.communicate(timeout=timeout)
        assert child.returncode == 0, said
        return str(said)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """This thread, and what it starts inside, have the network of this host and nothing else of it."""
        own = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            with self._namespaces("net") as (net,):
                _setns(net, NETWORK)
            try:
                yield
            finally:
                _setns(own, NETWORK)
        finally:
            os.close(own)

    def kill(self) -> None:
        """Kill every process of the host at once. A host that is down stays so."""
        started, self._started = self._started, None
        if started is None:
            return
        self._stop_relay()
        os.kill(self.init, signal.SIGKILL)  # and the kernel kills all others
        started.kill()
        for child in self._children:
            child.wait(PATIENCE)  # the first process is not gone before the others are waited for
        self._children.clear()
        started.wait(PATIENCE)
        soon(lambda: gone(self.init))

    # ---- its link

    def cut(self) -> None:
        """Take the link down. What the host sends and what is sent to it is lost, and nobody is told."""
        self._at_switch(f"ip link set port{self.number} down")

    def heal(self) -> None:
        """Take the link up again."""
        self._at_switch(f"ip link set port{self.number} up")

    def limit(self, rate: str | None) -> None:
        """Limit the bytes that pass in each direction. rate: as `tc` takes it, such as "10mbit", or None."""
        action = "del" if rate is None else "replace"
        queue = "" if rate is None else f"tbf rate {rate} burst 16kb latency 300ms"
        self._at_switch(f"tc qdisc {action} dev port{self.number} root {queue}")
        self._inside(f"tc qdisc {action} dev eth0 root {queue}")

    def disturb(self, delay: float = 0.0, loss: float = 0.0) -> None:
        """Delay each packet by `delay` seconds, and lose this share of them. Each call replaces the last."""
        number = self.number
        self._stop_relay()
        self._at_switch(f"ip link add name near{number} type veth peer name far{number}")
        self._at_switch(f"ip link set port{number} nomaster")
        self._at_switch(f"ip link set far{number} master bridge up")
        self._at_switch(f"ip link set near{number} up")
        program = f"{sys.executable} -m tests.support.packet_relay port{number} near{number} {delay} {loss}"
        self._relay = _begin(self._hosts.at_switch(program), cwd=ROOT)

    def calm(self) -> None:
        """End what `disturb` began."""
        if self._relay is not None:
            self._stop_relay()
            self._at_switch(f"ip link set port{self.number} master bridge")

    def _stop_relay(self) -> None:
        if self._relay is not None:
            _end(self._relay)
            self._relay = None
            self._at_switch(f"ip link del near{self.number}")

    def _at_switch(self, command: str) -> None:
        _run(self._hosts.at_switch(command))

    def _inside(self, command: str) -> None:
        _run(["nsenter", f"--net=/proc/{self.init}/ns/net", *shlex.split(command)])

    @contextmanager
    def _namespaces(self, *names: str) -> Iterator[list[int]]:
        """Descriptors of the host's namespaces."""
        with contextlib.ExitStack() as opened:
            found = []
            for name in names:
                found.append(os.open(f"/proc/{self.init}/ns/{name}", os.O_RDONLY))
                opened.callback(os.close, found[-1])
            yield found


def _script(shared: Sequence[Path]) -> str:
    """What the first process of a host does. /tmp is built elsewhere, since `shared` is below the old one."""
    lines = [
        "set -e",
        "mount -t tmpfs -o mode=1777 shm /dev/shm",
        "mkdir /dev/shm/new",
        "mount -t tmpfs -o mode=1777 tmp /dev/shm/new",
    ]
    for folder in shared:
        place = shlex.quote(f"/dev/shm/new/{folder.relative_to('/tmp')}")
        lines += [f"mkdir -p {place}", f"mount --rbind {shlex.quote(str(folder))} {place}"]
    lines += ["mount --move /dev/shm/new /tmp", "rmdir /dev/shm/new", "ip link set lo up", "echo ready"]
    return "\n".join([*lines, "sleep infinity & wait"])  # a shell that waits also reaps orphans


def _outermost(folders: Sequence[Path]) -> list[Path]:
    """Those of the folders that are below /tmp, and in none of the others."""
    below = {folder.resolve() for folder in folders if folder.resolve().is_relative_to("/tmp")}
    return sorted(one for one in below if not any(other in one.parents for other in below))


def _begin(command: Sequence[str], **settings: Any) -> subprocess.Popen[bytes]:
    """Start a process that ends with this thread, and wait until it prints a line."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, preexec_fn=end_with_parent, **settings
    )
    assert process.stdout is not None
    with process.stdout:
        if not process.stdout.readline():
            raise OSError(f"{shlex.join(command)}: exited with code {process.wait(PATIENCE)}")
    return process


def end_with_parent() -> None:
    """The calling process is killed when the thread that started it ends."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(PATIENCE)


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 0, f"{shlex.join(command)}: {done.stderr}"


def _setns(descriptor: int, kind: int) -> None:
    if _LIBC.setns(descriptor, kind):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _in_thread(start: Callable[[], subprocess.Popen[Any]]) -> subprocess.Popen[Any]:
    """Call `start` in a thread of its own, whose namespaces it may change."""
    found: list[subprocess.Popen[Any] | BaseException] = []

    def call() -> None:
        try:
            found.append(start())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


def soon(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Wait until `condition` holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)
