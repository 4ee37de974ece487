"""Each state that can last, made with real processes: what a server says in it, and how it ends.

`docs/operations.md` has a table of these states. Each of its rows names a test of this file.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moesaic.models.files import resolve
from tests.support import ray_nodes
from tests.support.moved_clock import compile_clock
from tests.support.troubled_server import PATIENCE, PROCESSES, TroubledServer, find_free_port, serve, start

pytestmark = pytest.mark.slow  # each takes half a minute and more, so most of them are marked full
MISSING = "this file is missing; processes are started again once it is there"


def assert_refused(server: TroubledServer, reason: str) -> None:
    """The state is an outage, and everything that speaks of it gives the reason."""
    server.until(lambda: server.health().status == 503 and reason in server.health().text)
    for reply in (server.health(), server.ask()):
        assert reply.status == 503 and reason in reply.text and reply.retry_after == "10", reply
    status = server.status()
    assert status["health"] == "unavailable" and reason in status["outage"]
    assert server.metric("available") == 0
    assert server.get("/live").status_code == 200
    assert reason in server.log and "Traceback" not in server.log


def assert_served(server: TroubledServer, chat: bool = True) -> None:
    """Requests are computed, and everything says so."""
    server.until(lambda: server.health().status == 200)
    assert server.ask().tokens == 4
    if chat:
        assert server.ask(chat=True).tokens == 4
    status = server.status()
    assert (status["health"], status["outage"]) == ("serving", "")
    assert server.metric("available") == 1


def test_no_attention_worker(tmp_path: Path) -> None:
    with serve(tmp_path, *PROCESSES) as server:
        request = server.begin()
        server.weights.rename(tmp_path / "away")
        server.until(lambda: MISSING in server.log)
        server.kill("attention worker 0")
        assert_refused(server, f"no attention worker serves: {server.weights}: {MISSING}")
        assert server.metric("processes_up") == 2
        assert "no attention worker serves" in request.end()
        assert server.stop() == 0
        assert "Traceback" not in server.log


@pytest.mark.full
def test_no_server_of_a_layer(tmp_path: Path) -> None:
    with serve(tmp_path, *PROCESSES) as server:
        request = server.begin()
        away = server.weights.rename(tmp_path / "away")
        server.until(lambda: MISSING in server.log)
        server.kill("expert server 1")
        assert_refused(server, "no server that serves holds experts 12-23 of layer 0 (and 5 further layers)")
        assert "no server that serves holds experts" in request.end()
        away.rename(server.weights)
        assert_served(server)
        assert server.stop() == 0


def write_site(folder: Path, flag: Path, code: str) -> None:
    """A folder for PYTHONPATH. An attention worker that starts while `flag` exists runs `code` first."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "import os, resource, sys\n"
        f"if os.path.exists({str(flag)!r}) and 'moesaic.runtime' in sys.orig_argv:\n"
        f"    {code}\n"
    )


@pytest.mark.full
def test_no_memory(tmp_path: Path) -> None:
    """No worker can be started: the limit of its address space is too low for its libraries."""
    flag, site = tmp_path / "low", tmp_path / "site"
    write_site(site, flag, "resource.setrlimit(resource.RLIMIT_AS, (1 << 28, 1 << 28))")
    with serve(tmp_path, *PROCESSES, PYTHONPATH=str(site)) as server:
        request = server.begin()
        flag.touch()
        server.kill("attention worker 0")
        assert server.process.wait(PATIENCE) == 1
        ends = r"no attention worker serves(, and its processes keep dying| for \d+ s): attention worker 0: "
        assert re.search(ends, request.end()) and re.search(f"\nmoesaic: {ends}", server.log)


def test_no_disk(tmp_path: Path) -> None:
    """What the server prints and logs goes to a device that is always full."""
    port = find_free_port()
    full_disk = start(tmp_path, Path("demo"), *PROCESSES, port=port, output=Path("/dev/full"))
    with contextlib.closing(full_disk) as server:
        server.url = f"http://127.0.0.1:{port}"
        server.until(lambda: server.health().status == 200 or server.process.poll() is not None)
        assert_served(server)
        assert server.stop() == 0


@pytest.mark.full
def test_no_descriptors(tmp_path: Path) -> None:
    with serve(tmp_path, *PROCESSES) as server:
        pid = server.pid("expert server 1")  # by a connection that stays open
        num_open = len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))
        server.limit(resource.RLIMIT_NOFILE, num_open)
        os.kill(pid, signal.SIGKILL)
        assert_refused(server, "Too many open files")
        assert server.log.count("it is tried again every 1 s") <= 1, "it is said once"
        server.limit(resource.RLIMIT_NOFILE, 1024)
        assert_served(server)
        assert server.stop() == 0


@pytest.fixture
def two_ports() -> tuple[str, ...]:
    """The beginning of a command whose network has two ports for programs that name none."""
    script = 'ip link set lo up; echo "40000 40001" > /proc/sys/net/ipv4/ip_local_port_range; exec "$@"'
    prefix = ("unshare", "-n", "sh", "-c", script, "sh")
    done = subprocess.run([*prefix, "true"], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no network namespace can be made here: {done.stderr.strip()}")
    return prefix


def test_no_ports(two_ports: tuple[str, ...], tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    joining = ("--cluster-address", "tcp:127.0.0.1:7000", "--cluster-secret-file", str(secret))
    refused = start(tmp_path, Path("demo"), "--expert-servers", "3", *joining, prefix=two_ports)
    with contextlib.closing(refused) as server:
        assert server.process.wait(PATIENCE) == 2
        reason = "at most 2: this host has 2 ports on which they could listen"
        assert server.log == f"moesaic: --expert-servers: got 3; allowed: {reason}\n"


@pytest.mark.full
def test_a_file_that_was_replaced(tmp_path: Path) -> None:
    """By a rename, as `mv` and `rsync` do. Processes that run have the old bytes mapped."""
    with serve(tmp_path, *PROCESSES) as server:
        before = server.ask().text.partition('"text"')[2].partition("usage")[0]
        new_bytes = bytearray(server.weights.read_bytes())
        for place in range(len(new_bytes) // 2, len(new_bytes), 64):
            new_bytes[place] ^= 1
        other_file = server.model / "other"
        other_file.write_bytes(new_bytes)
        old_file = tmp_path / "old"
        os.link(server.weights, old_file)
        other_file.replace(server.weights)
        server.until(lambda: "no process is started" in server.log and "other bytes of tensors" in server.log)
        assert_served(server)
        assert server.ask().text.partition('"text"')[2].partition("usage")[0] == before
        server.kill("expert server 0")
        assert_refused(server, "model.safetensors: this file changed while it was served: it has other bytes")
        old_file.replace(server.weights)
        assert_served(server)
        assert server.stop() == 0


@pytest.mark.full
def test_a_clock_that_was_set(tmp_path: Path) -> None:
    preload = compile_clock(tmp_path)
    if preload is None:
        pytest.skip("no C compiler")
    offset = Path(preload["CLOCK_OFFSET_FILE"])
    with serve(tmp_path, *PROCESSES, outage_seconds=600.0, **preload) as server:
        deaths = server.metric("process_deaths_total")

        def hour() -> int:
            created = re.search(r'"created":(\d+)', server.ask().text)
            assert created is not None
            return int(created[1]) // 3600

        hours = [hour()]
        for seconds in (3600, -3600):
            request = server.begin(max_tokens=200)
            offset.write_text(str(seconds))
            hours.append(hour())
            assert request.end() == "" and request.tokens > 100, "and no token is lost"
            assert_served(server)
        assert hours[1] - hours[0] in (1, 2) and hours[0] - hours[2] in (0, 1), "the clock was set"
        assert server.metric("process_deaths_total") == deaths
        assert server.metric("e2e_request_latency_seconds_sum") < 600, "times are not those of the clock"
        server.kill("expert server 0")
        server.until(lambda: server.metric("processes_up") == 3)
        assert_served(server)
        assert server.stop() == 0


def template_processes(pid: int) -> list[int]:
    """The processes of this server that render chat templates."""
    found = []
    for child in Path(f"/proc/{pid}/task").glob("*/children"):
        for number in child.read_text().split():
            with contextlib.suppress(OSError):
                if b"templates/__main__.py" in Path(f"/proc/{number}/cmdline").read_bytes():
                    found.append(int(number))
    return found


@pytest.mark.full
def test_template_processes_that_die(tmp_path: Path) -> None:
    with serve(tmp_path, *PROCESSES) as server:
        is_over = threading.Event()

        def kill_all() -> None:
            while not is_over.is_set():
                for pid in template_processes(server.process.pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

        killer = threading.Thread(target=kill_all)
        killer.start()
        try:
            server.until(lambda: server.ask(chat=True).status != 200)
            reply = server.ask(chat=True)
            assert reply.status in (400, 503) and "chat template" in reply.text, reply
            assert_served(server, chat=False)
        finally:
            is_over.set()
            killer.join()
        server.until(lambda: server.ask(chat=True).status == 200)
        assert server.stop() == 0


@pytest.mark.full
def test_a_tokenizer_file_that_is_broken(tmp_path: Path) -> None:
    """The server has read it. A process that starts does not need it. A server that starts refuses it."""
    with serve(tmp_path, *PROCESSES, outage_seconds=600.0) as server:
        (server.model / "tokenizer.json").write_text("{")
        assert_served(server)
        server.kill("attention worker 0")
        server.until(lambda: server.metric("processes_up") == 3 and server.ask().status == 200)
        assert_served(server)
        assert server.stop() == 0
        folder = tmp_path / "second"
        folder.mkdir()
        with contextlib.closing(start(folder, server.model)) as second:
            assert second.process.wait(PATIENCE) == 2
            assert re.fullmatch(r"moesaic: .*tokenizer\.json.*\n", second.log)


@pytest.mark.full
def test_a_secret_that_was_changed(tmp_path: Path) -> None:
    """Who joins with the new one is refused. The server keeps that of its start."""
    secret = tmp_path / "secret"
    joining = ("--cluster-address", "tcp:127.0.0.1:0", "--cluster-secret-file", str(secret))
    with serve(tmp_path, *PROCESSES, *joining) as server:
        address = server.status()["join_address"].removeprefix("tcp:")
        old_secret = secret.read_text()
        command = [sys.executable, "-m", "moesaic", "join", address, "--secret-file", str(secret)]
        secret.write_text(secrets.token_hex(32) + "\n")
        with subprocess.Popen([*command, "--threads", "1"], stderr=subprocess.PIPE, text=True) as stranger:
            try:
                server.until(lambda: server.metric("refused_connections_total") > 0)
                assert_served(server)
                assert server.metric("processes_up") == 3
            finally:
                stranger.kill()
        assert "refused" in server.log or "secret" in server.log
        secret.write_text(old_secret)
        with subprocess.Popen([*command, "--threads", "1"], stderr=subprocess.PIPE, text=True) as friend:
            try:
                server.until(lambda: server.metric("processes_up") == 4)
            finally:
                friend.kill()
        assert server.stop() == 0


@pytest.mark.full
def test_an_unreachable_standby(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    joining = ("--cluster-secret-file", str(secret), "--cluster-address", "tcp:127.0.0.1:0")
    with serve(tmp_path, *PROCESSES, *joining) as server:
        address = server.status()["join_address"]
        folder = tmp_path / "standby"
        folder.mkdir()
        flags = (*PROCESSES, *joining[:2], "--cluster-address", "tcp:127.0.0.2:0", "--standby-for", address)
        with contextlib.closing(start(folder, server.model, *flags)) as standby:
            server.until(lambda: server.status()["standbys"] or standby.process.poll() is not None)
            assert standby.process.poll() is None, standby.log
            standby.process.kill()
            server.until(lambda: not server.status()["standbys"])
            assert_served(server)
        assert server.stop() == 0


def test_a_frozen_process(tmp_path: Path) -> None:
    """A process that is stopped, as one that waits for a disk without end, is killed and replaced."""
    with serve(tmp_path, *PROCESSES, outage_seconds=600.0) as server:
        request = server.begin(max_tokens=300)
        os.kill(server.pid("expert server 1"), signal.SIGSTOP)
        server.until(lambda: "expert server 1 sent nothing for 5 s: killing it" in server.log)
        assert request.end() == ""
        assert_served(server)
        assert server.stop() == 0


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::FutureWarning:ray.*")
def test_ray_is_gone(tmp_path: Path) -> None:
    """All nodes of a Ray cluster die at once."""
    pytest.importorskip("ray")
    flags = ("--attention-workers", "1", "--expert-servers", "1", "--distributed-executor-backend", "ray")
    with ray_nodes.running([1, 1, 1]) as nodes, serve(tmp_path, *flags) as server:
        request = server.begin()
        nodes.kill_all()
        assert_refused(server, "no attention worker serves and no server that serves holds experts 0-23")
        # Ray's library ends the server's process once it has looked for its cluster for a minute.
        assert server.process.wait(PATIENCE) == 1
        assert "peer closed connection" in request.end()
        assert "Failed to connect to GCS within 60 seconds" in server.log


def test_a_slow_start(tmp_path: Path) -> None:
    """The worker that replaces a dead one takes long. Requests wait for it, and SIGTERM does not."""
    flag, site = tmp_path / "slow", tmp_path / "site"
    write_site(site, flag, "__import__('time').sleep(600)")
    with serve(tmp_path, *PROCESSES, outage_seconds=600.0, PYTHONPATH=str(site)) as server:
        request = server.begin()
        flag.touch()
        server.kill("attention worker 0")
        server.until(lambda: server.status()["health"] == "recovering")
        assert "ReadTimeout" in server.ask(seconds=2.0).text, "a new request waits"
        assert server.health().status == 200
        assert "no attention worker serves" in server.status()["outage"]
        assert server.metric("available") == 1
        assert not request.error
        assert server.stop() == 0
        assert request.end()


@contextlib.contextmanager
def hanging_folder(folder: Path) -> Iterator[tuple[Path, Path, subprocess.Popen[str]]]:
    """A file system with the demo, the file that makes it hang, and its program.

    Skips the test where nobody may mount one.
    """
    mount_point = folder / "mount"
    mount_point.mkdir()
    command = [sys.executable, "-m", "tests.support.hanging_files", str(resolve("demo")), str(mount_point)]
    with subprocess.Popen(
        [*command, str(folder / "hang")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as program:
        try:
            assert program.stdout is not None and program.stderr is not None
            if program.stdout.readline() != "mounted\n":
                pytest.skip(f"no file system can be mounted here: {program.stderr.read()[-200:]}")
            yield mount_point, folder / "hang", program
        finally:
            program.kill()
            subprocess.run(["umount", "-l", str(mount_point)], check=False, capture_output=True)


@contextlib.contextmanager
def serve_from_hanging(folder: Path, mount_point: Path) -> Iterator[TroubledServer]:
    port = find_free_port()
    with contextlib.closing(start(folder, mount_point, *PROCESSES, port=port)) as server:
        server.url = f"http://127.0.0.1:{port}"
        server.until(lambda: server.health().status == 200 or server.process.poll() is not None)
        assert_served(server)
        yield server


@pytest.mark.full
def test_a_file_system_that_hangs(tmp_path: Path) -> None:
    """As a network file system does whose server is gone: system calls wait, and SIGKILL ends them."""
    with (
        hanging_folder(tmp_path) as (mount_point, _, program),
        serve_from_hanging(tmp_path, mount_point) as server,
    ):
        program.send_signal(signal.SIGSTOP)
        assert_served(server)
        server.kill("expert server 1")
        assert_refused(server, "no server that serves holds experts 12-23 of layer 0 (and 5 further layers)")
        program.send_signal(signal.SIGCONT)
        assert_served(server)
        program.send_signal(signal.SIGSTOP)
        assert_served(server)
        assert server.stop() == 0


@pytest.mark.full  # one process after the other is waited for
def test_a_process_that_cannot_be_killed(tmp_path: Path) -> None:
    """In state D: the file system has got what a process asked for, and never answers."""
    with (
        hanging_folder(tmp_path) as (mount_point, hang_file, program),
        serve_from_hanging(tmp_path, mount_point) as server,
    ):
        hang_file.touch()
        time.sleep(3.0)  # each process looks at its files meanwhile, and waits from then on
        assert_served(server)
        server.process.send_signal(signal.SIGTERM)
        server.until(lambda: "State:\tZ" in Path(f"/proc/{server.process.pid}/status").read_text())
        assert "expert server" in server.log and "cannot be killed: it waits for a disk" in server.log
        hang_file.unlink()
        program.kill()
        assert server.process.wait(PATIENCE) == 0
