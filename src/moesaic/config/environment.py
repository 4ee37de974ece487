"""What the environment says: read here and nowhere else. Nothing is ever written back."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from moesaic.config.values import check_key


def api_key(environment: Mapping[str, str] | None = None) -> str | None:
    """The key that a server asks for and a client sends, where no flag says it.

    Raises ConfigError for an empty one: where a secret did not arrive, nobody wanted a server without a key.
    """
    key = (os.environ if environment is None else environment).get("MOESAIC_API_KEY")
    if key is not None:
        check_key("MOESAIC_API_KEY", key)
    return key


def hub_cache(environment: Mapping[str, str] | None = None) -> Path:
    """Where the Hugging Face hub's library keeps what it downloads, by that library's own variables."""
    known = os.environ if environment is None else environment
    if "HF_HUB_CACHE" in known:
        return Path(known["HF_HUB_CACHE"]).expanduser()
    cache = Path(known.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface"
    return Path(known.get("HF_HOME", cache)).expanduser() / "hub"


def one_gpu(rank: int, visible: int, environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """What a rank's environment says more, so that it sees one GPU alone: of those that its first rank sees,
    `visible` in number, each in turn.

    Example: rank 3 beside `CUDA_VISIBLE_DEVICES=4,6` sees 6; where the variable is not set, 1 of 2.
    """
    known = (os.environ if environment is None else environment).get("CUDA_VISIBLE_DEVICES")
    names = [str(number) for number in range(visible)] if known is None else known.split(",")
    return {"CUDA_VISIBLE_DEVICES": names[rank % min(visible, len(names))]}


def worker_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a worker process.

    OpenMP threads sleep while they wait unless the user decided otherwise: its spinning default costs
    a scheduler quantum at every operator as soon as another process wants the core.
    """
    known = os.environ if environment is None else environment
    return {"OMP_WAIT_POLICY": "passive", **known}
