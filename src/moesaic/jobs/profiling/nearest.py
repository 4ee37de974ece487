"""Finds the nearest known tokens for a profile that was recorded without the checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from moesaic.core.profile import Profile
from moesaic.models import files
from moesaic.models.embedding import nearest_known
from moesaic.models.registry import routed_model


def with_nearest(
    profile: Profile, file: Path, model: str, show: Callable[[int, int], None] | None = None
) -> Profile:
    """The same profile with `nearest`, computed from the embedding of `model`: a directory, a hub id, or
    demo.

    file: path of the profile, for messages. show: called with the tokens done and their total. Raises
    ConfigError if the profile was made for another model.
    """
    path = files.resolve(model)
    profile.check(routed_model(path).model, str(file))
    known = profile.counts[0].known.astype(np.int32)
    return replace(profile, nearest=nearest_known(path, known, show))
