"""The nearest known tokens of a profile that was recorded where no checkpoint was open."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from moesaic.core.profile import Profile
from moesaic.models import files
from moesaic.models.embedding import nearest_known
from moesaic.models.registry import read_spec


def with_nearest(
    profile: Profile, file: Path, model: str, show: Callable[[int, int], None] | None = None
) -> Profile:
    """The same profile with `nearest`, from the embedding of `model`: a directory, a hub id, or demo.

    file: of the profile, for messages. show: is told tokens done and in all. Raises ConfigError for a model
    that the profile is not of.
    """
    path = files.resolve(model)
    profile.check(read_spec(path).routed.model, str(file))
    known = profile.counts[0].known.astype(np.int32)
    return replace(profile, nearest=nearest_known(path, known, show))
