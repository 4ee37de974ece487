"""The ranks of a group on another host than rank 0: the first one of the host starts the others of it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from moesaic.config import WorkerConfig
from moesaic.core.errors import ConfigError, ConnectionLost
from moesaic.core.messages import RanksMeet
from moesaic.runtime import out_of_memory
from moesaic.runtime.group.build_rank import follower
from moesaic.runtime.group.launcher import RankLauncher, of_rank


def follow(config: WorkerConfig, meeting: RanksMeet, lost: Callable[[str], None]) -> None:
    """Compute with the ranks of this host until the group ends.

    config: of the worker, for this host. meeting: with the number of this host. lost: called from a thread
    if another rank of this host ends.

    Raises ConnectionLost at the end of the group, and ConfigError or CheckpointError, one line each, for what
    the user has to change.
    """
    launcher = RankLauncher(config, meeting)
    try:
        with launcher.starting():
            group = launcher.gather()
            ranks = follower(of_rank(config, group.rank), group)
        launcher.when_lost(lost)
        ranks.follow()
    except ConnectionLost as error:
        raise launcher.why(error) from None
    except torch.OutOfMemoryError as error:
        raise ConfigError(out_of_memory.of_step(error)) from error
    finally:
        launcher.close()
