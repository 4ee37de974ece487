"""The threads of the native kernels in a process of their own: pinned, forked, or more than can be
started.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from moesaic.kernels import table

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not table.instruction_sets(), reason="no native kernels in this build"),
]

START = """
import os, resource, threading, time, torch
from pathlib import Path
from moesaic.core.errors import ConfigError
from moesaic.kernels import table

kernels = table.pick("cpu")
rows, weight = torch.randn(9, 200), torch.randn(300, 200)
kernels.set_threads(3, False)
wanted = kernels.linear(rows, weight)

def same():
    return torch.equal(kernels.linear(rows, weight), wanted)

def places():
    return [frozenset(os.sched_getaffinity(int(task.name))) for task in Path("/proc/self/task").iterdir()]

def child_is_well():
    pid = os.fork()
    if pid == 0:
        os._exit(0 if same() else 1)
    for _ in range(1000):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status == 0
        time.sleep(0.01)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return False
"""


def check(script: str) -> None:
    """Runs START and `script` in a new process."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", START + script],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_pinned_threads_have_a_core_each_and_give_it_back() -> None:
    check("""
everywhere = frozenset(os.sched_getaffinity(0))

def soon(true):
    # A thread pins itself once it runs.
    deadline = time.monotonic() + 10
    while not true() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert true(), places()

def pinned():
    alone = [place for place in places() if len(place) == 1]
    return len(alone) == len(set(alone)) == 2

for _ in range(2):
    kernels.set_threads(2, True)
    soon(pinned)
    assert same()
kernels.set_threads(2, False)
soon(lambda: set(places()) == {everywhere})
assert same()
""")


def test_more_threads_than_there_can_be_are_an_error_that_changes_nothing() -> None:
    check("""
size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
resource.setrlimit(resource.RLIMIT_AS, (size + 2**28, -1))
try:
    kernels.set_threads(10_000, False)
except ConfigError as error:
    assert str(error).startswith("--threads: got 10000; allowed: as many as this system can start")
else:
    raise SystemExit("they could be started")
assert same()
kernels.set_threads(2, False)
assert same()
""")


def test_memory_that_a_thread_cannot_get_is_an_error_of_the_operation() -> None:
    check("""
heads, weights = torch.zeros(2, 3, 2**21), torch.zeros(3, 1, 2**21).transpose(1, 2)
kernels.head_linear(heads[..., :8], weights[:, :8])
size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
resource.setrlimit(resource.RLIMIT_AS, (size + 2**26, -1))
for _ in range(20):
    try:
        kernels.head_linear(heads, weights)
    except MemoryError:
        pass
    else:
        raise SystemExit("there was memory enough")
    assert same()
""")


def test_a_forked_process_computes() -> None:
    check("""
assert all(child_is_well() for _ in range(5)) and same()
""")


def test_a_process_forked_in_the_middle_of_an_operation_computes() -> None:
    check("""
stop = threading.Event()
def busy():
    while not stop.is_set():
        same()
thread = threading.Thread(target=busy)
thread.start()
try:
    assert all(child_is_well() for _ in range(20))
finally:
    stop.set()
    thread.join()
""")


def test_threads_of_python_take_turns() -> None:
    check("""
wrong = []
def busy():
    for _ in range(500):
        if not same():
            wrong.append(1)
several = [threading.Thread(target=busy) for _ in range(4)]
for thread in several:
    thread.start()
while any(thread.is_alive() for thread in several):
    for count in (1, 2, 5, 3):
        kernels.set_threads(count, False)
assert not wrong
""")


def test_attention_may_come_before_the_number_of_threads_is_set() -> None:
    """Work that is too small for two threads needs memory for one thread and starts no pool."""
    script = """
import torch
from tests.support.paged_steps import cache, tokens
from moesaic.kernels import table
from moesaic.kernels.batch import AttentionBatch

batch = AttentionBatch.build(tokens([1], [5], block_size=8), 8)
query, keys, values = torch.randn(1, 2, 16), cache(8, 2, 16), cache(8, 2, 16)
found = table.pick("cpu").paged_attention(query, keys, values, batch, 0.3, None)
wanted = table.pick("cpu", "reference").paged_attention(query, keys, values, batch, 0.3, None)
torch.testing.assert_close(found, wanted)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr or done.returncode
