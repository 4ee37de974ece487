"""The list of a model's hot experts, a file that is kept from one start to the next.

It has how often each expert was chosen, layer by layer. A start with `--fast-memory` reads it to choose the
experts that stay in memory first. It changes only how much is read, never an answer. So a file that cannot be
used counts as none, with one line in the log.

Question: Which experts stay in memory first after a restart?
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from moesaic.config import environment
from moesaic.core import hot_counts
from moesaic.core.errors import ConfigError
from moesaic.core.experts import ExpertLayout
from moesaic.core.home import expand_home
from moesaic.core.hot_counts import CountsByLayer
from moesaic.core.offload import AUTO_LIST, NO_LIST
from moesaic.models.fingerprint import origin
from moesaic.policy.offloading.residency import HotExperts

LOG = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds between two writes of the file: the first, and the longest. Each one is twice the last."""
MOST_BYTES = 256 << 20
"""A larger file is not read: it is none of ours."""


class HotList:
    """A list in a file, for one model."""

    def __init__(self, path: Path | None, model: str, layout: ExpertLayout) -> None:
        """path: None: nothing is read or written. model: the fingerprint of the checkpoint."""
        self._path, self._model, self._layout = path, model, layout
        self.counts: CountsByLayer = {} if path is None else self._read(path)
        """Layer -> [E] how often each expert was chosen. Empty: nobody knows."""

    def save(self, counts: Mapping[int, Sequence[float]]) -> None:
        """Write the file in one step. After a failure, which the log has, nothing is written any more."""
        path = self._path
        if path is None:
            return
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(hot_counts.to_text(self._model, counts), "utf-8")
            temporary.replace(path)  # other processes may read it now
        except OSError as error:
            self._path = None
            LOG.warning("hot experts are not kept for the next start: %s: %s", path, error.strerror)
            with contextlib.suppress(OSError):
                temporary.unlink()

    def _read(self, path: Path) -> CountsByLayer:
        try:
            counts = self._parse(path)
        except FileNotFoundError:
            return {}
        except OSError as error:
            problem = str(error.strerror)
        except (ValueError, RecursionError) as error:
            problem = str(error).splitlines()[0]
        else:
            LOG.info("the experts that stay first are those of %s", path)
            return counts
        LOG.warning("hot experts are learned anew: %s: %s", path, problem)
        return {}

    def _parse(self, path: Path) -> CountsByLayer:
        """Raises OSError, and ValueError for what is no list of this model."""
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"got more than {MOST_BYTES >> 20} MiB; allowed: a list of hot experts")
        layout = self._layout
        return hot_counts.parse(path.read_text("utf-8"), self._model, layout.layers, layout.num_experts)


class ListKeeper:
    """Writes a list again and again while experts are counted."""

    def __init__(
        self, hot_list: HotList, hot: HotExperts, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._list, self._hot, self._clock = hot_list, hot, clock
        self._pause = FIRST_PAUSE
        self._next_write = clock() + FIRST_PAUSE

    def after_step(self) -> None:
        """A step ended. No step may run meanwhile."""
        now = self._clock()
        if now >= self._next_write:
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            self._next_write = now + self._pause
            self._list.save(self._hot.long_counts)


def open_list(setting: str, path: Path, layout: ExpertLayout) -> HotList:
    """The list of the checkpoint at `path`.

    setting: the value of --hot-experts: a file, `auto` for that of the model in the user's cache folder, or
    `off`. Without a cache folder there is no list, and the log has one line.
    """
    if setting == NO_LIST:
        return HotList(None, "", layout)
    model = origin(path)
    try:
        file = (
            environment.cache_folder() / "hot-experts" / f"{model}.json"
            if setting == AUTO_LIST
            else expand_home(setting)
        )
    except ConfigError as error:
        LOG.warning("hot experts are not kept for the next start: %s", error)
        return HotList(None, model, layout)
    return HotList(file, model, layout)
