"""The ranks of a group on another host than rank 0: the first one of the host starts the others of it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from moesaic.config import WorkerConfig
from moesaic.core.errors import ConfigError, ConnectionLost
from moesaic.core.messages import RanksMeet
from moesaic.runtime import out_of_memory
from moesaic.runtime.group.build_rank import build_follower
from moesaic.runtime.group.launcher import RankLauncher, of_rank


def follow(config: WorkerConfig, meeting: RanksMeet, on_rank_lost: Callable[[str], None]) -> None:
    """Compute with the ranks of this host until the group ends.

    config: of the worker, for this host. meeting: with the number of this host. on_rank_lost: called from a thread
    if another rank of this host ends.

    Raises ConnectionLost at the end of the group, and ConfigError or CheckpointError, one line each, for what
    the user has to change.
    """
    launcher = RankLauncher(config, meeting)
    try:
        with launcher.starting():
            group = launcher.gather()
            ranks = build_follower(of_rank(config, group.rank), group)
        launcher.watch_ranks(on_rank_lost)
        ranks.follow()
    except ConnectionLost as error:
        raise launcher.explain_loss(error) from None
    except torch.OutOfMemoryError as error:
        raise ConfigError(out_of_memory.describe_step_error(error)) from error
    finally:
        launcher.close()
