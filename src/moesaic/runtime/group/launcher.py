"""The processes of a group: the first rank of a host starts the others there, and they end with it.

If one rank ends, the whole group ends. The first rank notices because its collectives fail, and
`explain_loss`
reports it while the group is idle. The other ranks notice because their standard input ends, even in the
middle of a step. A rank that writes no sign of life to its standard output is killed. The supervisor of the
first rank starts a new group. It also ends the ranks of all hosts when those of one are gone.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue

from moesaic.config import WorkerConfig, one_gpu, worker_environment
from moesaic.core.errors import ConfigError, ConnectionLost, MoesaicError
from moesaic.core.messages import RanksMeet
from moesaic.experts.collectives.group import Group
from moesaic.runtime.machine import allowed_cpus, limit_cores
from moesaic.runtime.model_loading import count_gpus
from moesaic.runtime.process_end import describe_exit, wait_for_killed

try:
    from moesaic.runtime.group.meeting import RankPlace, meet
except ImportError:  # installed without a compiler, or not on Linux
    SHARED_MEMORY = False
else:
    SHARED_MEMORY = True

MODULE = "moesaic.runtime.group"
ALIVE_SECONDS = 0.2
"""Seconds between two signs of life."""
FROZEN_SECONDS = 5.0
"""A rank without a sign of life for so many seconds is killed."""
TURNS = 25
"""Parts in which these seconds are waited for."""
END_SECONDS = 5.0
"""Seconds that a rank gets to end by itself, and to say why."""
ALIVE = b"."
"""A sign of life. A rank that knows why it ends writes a line after the last one."""


@dataclass(frozen=True)
class EndedRank:
    """The process of a rank that ended."""

    rank: int
    pid: int
    code: int
    reason: str
    """The line that it wrote before it ended, or an empty string."""
    ending: str = ""
    """How the process ended, in words for people."""

    @property
    def ended_with_group(self) -> bool:
        """Whether it ended because the group had ended."""
        return not self.reason and self.code == 0

    @property
    def text(self) -> str:
        cause = self.reason or f"process {self.pid} {self.ending}"
        return f"rank {self.rank} of the group is gone: {cause}"


class RankLauncher:
    """Starts and watches the processes of the other ranks of this host. Its first rank has one."""

    def __init__(self, config: WorkerConfig, meeting: RanksMeet | None = None) -> None:
        """Starts the processes. config: of the worker, with all cores and threads of the group on this host.

        meeting: on another host than rank 0's, where the ranks meet. None: this is the host of rank 0.

        Raises ConfigError where ranks cannot share memory, or ranks of other hosts cannot join.
        """
        parallel = config.parallel
        self.size = parallel.ranks_per_node
        if not SHARED_MEMORY:
            allowed_value = "1: the compiled module moesaic.transport._shm is missing"
            raise ConfigError.field("--tensor-parallel-size", parallel.tensor_parallel_size, allowed_value)
        if parallel.nnodes > 1 and config.remote_address is None:
            raise ConfigError.field(
                "--nnodes", parallel.nnodes, "1 without --cluster-address, where hosts join"
            )
        node, first = (0, "") if meeting is None else (meeting.node, meeting.address)
        secret = secrets.token_bytes(32) if meeting is None else meeting.secret
        # A name and no file, so that nothing remains whenever a process is killed.
        name = f"@moesaic-group-{secrets.token_hex(16)}"
        listen = config.remote_address or ""
        self._place = RankPlace(name, secret.hex(), 0, self.size, node, parallel.nnodes, listen, first)
        processes = [self._start(config, local_rank) for local_rank in range(1, self.size)]
        self._end_event, self._ended_ranks = threading.Event(), SimpleQueue[EndedRank]()
        self._ended_rank: EndedRank | None = None
        self._ending = weakref.finalize(self, _end, processes, self._end_event)
        for rank, process in enumerate(processes, start=node * self.size + 1):
            _in_thread(_watch, rank, process, Path(config.model.model), self._ended_ranks)

    @contextlib.contextmanager
    def starting(self) -> Generator[None]:
        """A context until the group is ready. An error ends the processes.

        Where a rank is gone, the error is replaced by the one of `explain_loss`.
        """
        try:
            yield
        except ConnectionLost as lost:
            reason = self.explain_loss(lost)
            self.close()
            raise reason from None
        except BaseException:
            self.close()
            raise

    def explain_loss(self, error: ConnectionLost) -> MoesaicError:
        """The error to raise instead of `error`.

        It is a ConfigError if a rank gave its reason, and otherwise says how the rank's process ended. It is
        `error` if all ranks ended because the group did.
        """
        self._ended_rank = self._ended_rank or _find_first_ended(
            self._ended_ranks, self.size - 1, END_SECONDS
        )
        if self._ended_rank is None or self._ended_rank.ended_with_group:
            return error
        return (
            ConfigError(self._ended_rank.text)
            if self._ended_rank.reason
            else ConnectionLost(self._ended_rank.text)
        )

    def gather(self, announce: Callable[[RanksMeet], None] = lambda meeting: None) -> Group:
        """Wait for all ranks and return this rank's end of the group. announce: see `meet`.

        Raises ConnectionLost if a rank is missing.
        """
        return meet(self._place, announce)

    def watch_ranks(self, report: Callable[[str], None]) -> None:
        """Call `report` once, from a thread, when a rank ends before `close`.

        It is called even while the group is idle.
        """
        _in_thread(_report, self._ended_ranks, self.size - 1, self._end_event, report)

    def close(self) -> None:
        """End the processes and wait until they have ended."""
        self._ending()

    def _start(self, config: WorkerConfig, local_rank: int) -> subprocess.Popen[bytes]:
        """local_rank: number of the rank among those of this host."""
        process = spawn_rank(config, self._place.node * self.size + local_rank)
        assert process.stdin is not None
        # Not in the command, which other users can read.
        process.stdin.write(replace(self._place, local_rank=local_rank).to_line().encode())
        process.stdin.flush()
        return process


def spawn_rank(config: WorkerConfig, rank: int, module: str = MODULE) -> subprocess.Popen[bytes]:
    """Start the process of one rank. It waits for its first line, the place where the ranks meet.

    config: of the worker, with all cores and threads of the group. module: what Python runs.
    """
    command = [sys.executable, "-m", module, "--rank", str(rank)]
    return subprocess.Popen(
        [*command, "--config", rank_config(config, rank).to_json()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=rank_environment(config, rank),
        process_group=0,
    )


def rank_environment(config: WorkerConfig, rank: int) -> dict[str, str]:
    """The environment of a rank's process. Rank i of its host takes GPU i, where there is one."""
    gpus = count_gpus(config.model)
    return worker_environment() | (one_gpu(rank % config.parallel.ranks_per_node, gpus) if gpus else {})


def _in_thread(work: Callable[..., None], *arguments: object) -> None:
    threading.Thread(target=work, args=arguments, name="watching a rank", daemon=True).start()


def _report(
    ended_ranks: SimpleQueue[EndedRank],
    num_others: int,
    end_event: threading.Event,
    report: Callable[[str], None],
) -> None:
    first = _find_first_ended(ended_ranks, num_others, None)
    if first is not None and not end_event.is_set():
        report(first.text)


def _find_first_ended(
    ended_ranks: SimpleQueue[EndedRank], num_others: int, seconds: float | None
) -> EndedRank | None:
    """The rank whose end made the rest of the `num_others` end. None if no rank ends in time."""
    ended_rank = None
    with contextlib.suppress(Empty):
        for _ in range(num_others):
            ended_rank = ended_ranks.get(timeout=seconds if ended_rank is None else END_SECONDS)
            if not ended_rank.ended_with_group:
                break
    return ended_rank


def _watch(
    rank: int, process: subprocess.Popen[bytes], model: Path, ended_ranks: SimpleQueue[EndedRank]
) -> None:
    """Watch a rank until it ends. It sends signs of life once Python has loaded the program."""
    assert process.stdout is not None
    output = b""  # without signs of life
    poller = select.poll()  # select.select knows no descriptor of 1024 or more
    with process.stdout as signs:
        poller.register(signs, select.POLLIN)
        while read := os.read(signs.fileno(), 4096):
            output = (output + read).lstrip(ALIVE)
            # In turns: while the whole machine is paused, only one of them passes.
            if not any(poller.poll(1000 * FROZEN_SECONDS / TURNS) for _ in range(TURNS)):
                process.kill()
    line = output.partition(b"\n")[0].decode(errors="replace")
    code = process.wait()
    ended_ranks.put(EndedRank(rank, process.pid, code, line, describe_exit(code, model)))


def _end(processes: list[subprocess.Popen[bytes]], end_event: threading.Event) -> None:
    """Close the standard input of the processes, which ends them."""
    end_event.set()
    for process in processes:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already
            process.stdin.close()
    for process in processes:
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            wait_for_killed(process, "rank")


def rank_config(config: WorkerConfig, rank: int) -> WorkerConfig:
    """The settings of one rank of the group: it gets its share of the worker's cores and threads."""
    size = config.parallel.ranks_per_node
    local_rank = rank % size
    cpus = config.cpus or (tuple(allowed_cpus()) if config.model.pin_threads else ())
    own_cpus = (
        cpus[local_rank * len(cpus) // size : (local_rank + 1) * len(cpus) // size]
        if len(cpus) >= size
        else cpus
    )
    threads = config.most_threads or limit_cores(len(cpus) or len(allowed_cpus()))
    return replace(config, cpus=own_cpus, most_threads=max(1, threads // size))
