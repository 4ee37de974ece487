"""Groups whose ranks are threads of this process, for tests that need many of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

from moesaic import LLM
from moesaic.config import WorkerConfig
from moesaic.core.errors import ConnectionLost
from moesaic.experts.collectives.group import Group
from moesaic.experts.collectives.one_shot import OneShotGroup, local_group
from moesaic.runtime.group.build_rank import build_follower
from moesaic.runtime.group.launcher import rank_config
from moesaic.transport.peers import HALF_BYTES
from tests.support.linked_ends import linked

RANK = "rank "
"""The beginning of the name of a rank's thread."""


class Threads:
    """Takes the place of a RankLauncher."""

    def __init__(
        self, config: WorkerConfig, within: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> None:
        """within: makes the context in which each thread runs. With --nnodes there is TCP between hosts."""
        self._within = within
        nodes, each = config.parallel.nnodes, config.parallel.ranks_per_node
        far = linked(nodes, each, HALF_BYTES) if nodes > 1 else ()
        self.ends = [OneShotGroup(end) for end in far] or local_group(each)
        self.failed: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._follow, args=(rank_config(config, rank), end), name=f"{RANK}{rank}")
            for rank, end in enumerate(self.ends)
            if rank > 0
        ]
        for thread in self._threads:
            thread.start()

    def gather(self, announce: object = None) -> Group:
        return self.ends[0]

    def starting(self) -> AbstractContextManager[object]:
        return nullcontext()

    def explain_loss(self, error: ConnectionLost) -> ConnectionLost:
        return error

    def close(self) -> None:
        self.ends[0].close()
        for thread in self._threads:
            thread.join()

    def _follow(self, config: WorkerConfig, group: Group) -> None:
        try:
            with self._within():
                build_follower(config, group).follow()
        except ConnectionLost:
            return
        except BaseException as error:
            self.failed.append(error)
            group.close()


@contextmanager
def ranks_of_threads(
    within: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Iterator[list[Threads]]:
    """Inside, workers that are groups have threads in place of the other ranks' processes.

    Gives the groups, in order. within: see Threads.
    """
    made: list[Threads] = []

    def launcher(config: WorkerConfig) -> Threads:
        made.append(Threads(config, within))
        return made[-1]

    try:
        with patch("moesaic.runtime.group.build_rank.RankLauncher", launcher):
            yield made
    finally:
        for each in made:
            each.close()
            assert not each.failed, each.failed


@contextmanager
def group_of_threads(
    model: str, within: Callable[[], AbstractContextManager[object]] = nullcontext, **settings: Any
) -> Iterator[tuple[LLM, Group, Threads]]:
    """An LLM whose worker is a group, the first rank's end of the group, and the ends of the others. within:
    see Threads."""
    with ranks_of_threads(within) as made:
        llm = LLM(model, threads=1, **settings)
        yield llm, made[0].gather(), made[0]
