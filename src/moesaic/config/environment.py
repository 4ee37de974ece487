"""Environment variables. They are read here and nowhere else, and never written."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from moesaic.config.values import check_key
from moesaic.core.errors import ConfigError
from moesaic.core.home import expand_home

_API_KEY, _ADMIN_KEY = "MOESAIC_API_KEY", "MOESAIC_ADMIN_KEY"
"""They stay in the process that they were given to: its children have no use for a key."""


def api_key(environment: Mapping[str, str] | None = None) -> str | None:
    """The API key of MOESAIC_API_KEY, for servers and clients that no flag gives one; None without it.

    Raises ConfigError for an empty key. It means that a secret was not passed on; a server without a key
    would not be what its user wants.
    """
    return _key(_API_KEY, environment)


def admin_key(environment: Mapping[str, str] | None = None) -> str | None:
    """The admin key of MOESAIC_ADMIN_KEY; None without it. Raises ConfigError as `api_key` does."""
    return _key(_ADMIN_KEY, environment)


def _key(name: str, environment: Mapping[str, str] | None) -> str | None:
    key = (os.environ if environment is None else environment).get(name)
    if key is not None:
        check_key(name, key)
    return key


def settings(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Every variable that begins with MOESAIC_. `moesaic serve` and `run-batch` take flags from them."""
    variables = os.environ if environment is None else environment
    return {name: value for name, value in variables.items() if name.startswith("MOESAIC_")}


def ucx_tls(environment: Mapping[str, str] | None = None) -> str | None:
    """The transports that UCX, below NIXL, may use, by its variable UCX_TLS. None: any."""
    return (os.environ if environment is None else environment).get("UCX_TLS")


def hub_cache(environment: Mapping[str, str] | None = None) -> Path:
    """Folder of the checkpoints that the Hugging Face hub's library downloaded, by that library's
    variables. Raises ConfigError if they name none and the user has no home directory."""
    variables = os.environ if environment is None else environment
    if "HF_HUB_CACHE" in variables:
        return _expand("HF_HUB_CACHE", variables["HF_HUB_CACHE"])
    cache = Path(variables.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface"
    return _expand("HF_HOME", variables.get("HF_HOME", cache)) / "hub"


def cache_folder(environment: Mapping[str, str] | None = None) -> Path:
    """Folder of what moesaic keeps between runs, in the user's cache folder.

    Raises ConfigError if no variable names one and the user has no home directory.
    """
    variables = os.environ if environment is None else environment
    return _expand("XDG_CACHE_HOME", variables.get("XDG_CACHE_HOME") or "~/.cache") / "moesaic"


def _expand(variable: str, folder: str | Path) -> Path:
    try:
        return expand_home(folder)
    except ConfigError as error:
        allowed_values = "a folder, in the environment, since this user has no home directory"
        raise ConfigError.field(variable, str(folder), allowed_values) from error


def one_gpu(rank: int, visible: int, environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment variables with which rank `rank` sees a single GPU.

    visible: the number of GPUs that the first rank sees. Ranks take them in turn.
    Example: with `CUDA_VISIBLE_DEVICES=4,6` rank 3 sees GPU 6; without the variable it sees GPU 1 of 2.
    """
    visible_devices = (os.environ if environment is None else environment).get("CUDA_VISIBLE_DEVICES")
    names = (
        [str(number) for number in range(visible)] if visible_devices is None else visible_devices.split(",")
    )
    return {"CUDA_VISIBLE_DEVICES": names[rank % min(visible, len(names))]}


def gpus(
    devices: str | None, environment: Mapping[str, str] | None = None, folder: Path = Path("/dev")
) -> tuple[str, ...]:
    """The GPUs that processes of this host may take, in order, by their names in CUDA_VISIBLE_DEVICES.

    devices: the value of --devices. Without it they are those of the variable. Without that, they are all of
    NVIDIA's device files in `folder`. Example: `CUDA_VISIBLE_DEVICES=4,6` -> ("4", "6").
    """
    visible_devices = (os.environ if environment is None else environment).get("CUDA_VISIBLE_DEVICES")
    if devices is None and visible_devices is None:
        return tuple(str(number) for number in range(len(list(folder.glob("nvidia[0-9]*")))))
    names = [name.strip() for name in (visible_devices or "" if devices is None else devices).split(",")]
    invalid = next((place for place, name in enumerate(names) if name in ("", "-1")), len(names))
    return tuple(names[:invalid])  # CUDA ignores what follows an invalid name


def worker_environment(
    environment: Mapping[str, str] | None = None, devices: Sequence[str] = ()
) -> dict[str, str]:
    """The environment of a worker process. devices: the GPUs that it sees; empty: those of this process.

    OpenMP threads sleep while they wait, unless the user set it otherwise. By default they spin, which costs
    a scheduler quantum at every operator when another process needs the core. NCCL, which does not encrypt,
    listens on the loopback interface only, unless the user set it otherwise. The keys of the HTTP API are
    left out.
    """
    variables = os.environ if environment is None else environment
    own_variables = {name: value for name, value in variables.items() if name not in (_API_KEY, _ADMIN_KEY)}
    device_variables = {"CUDA_VISIBLE_DEVICES": ",".join(devices)} if devices else {}
    return {"OMP_WAIT_POLICY": "passive", "NCCL_SOCKET_IFNAME": "lo", **own_variables, **device_variables}


def model_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of the process of one of several models.

    It has no variables of moesaic: their values are in the settings that the process gets, and its server
    has no use for a key.
    """
    variables = os.environ if environment is None else environment
    return {name: value for name, value in variables.items() if not name.startswith("MOESAIC_")}


def actor_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a process that a Ray actor starts.

    It sees the GPUs that Ray gave the actor, or none. It has neither Ray's own variables nor its number of
    OpenMP threads, which is that of the actor.
    """
    own_variables = {
        name: value
        for name, value in worker_environment(environment).items()
        if name != "OMP_NUM_THREADS" and not name.startswith("RAY_")
    }
    return {"CUDA_VISIBLE_DEVICES": "", **own_variables}


def renderer_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a process that renders chat templates.

    It holds what Python needs to start and the time zone, and none of the user's secrets.
    """
    variables = os.environ if environment is None else environment
    return {name: variables[name] for name in ("LD_LIBRARY_PATH", "TZ") if name in variables}
