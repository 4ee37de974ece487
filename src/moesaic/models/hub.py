"""Models on a Hugging Face hub: those of the local cache, downloads, and small parts of what is not here.

huggingface_hub reads its own settings (HF_ENDPOINT, HF_HUB_OFFLINE, HF_HOME, HF_TOKEN).
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from moesaic.config.environment import hub_cache
from moesaic.core.errors import CheckpointError, ConfigError
from moesaic.models.gguf.header import SUFFIX
from moesaic.models.gguf.hub import HubFile, read_header

PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.model", "tokenizer*", "vocab*", "merges.txt"]
"""Files to download from a hub: weights as safetensors, never pickles or code."""
IGNORED = [
    *(f"*/{pattern}" for pattern in PATTERNS if pattern != "*.jinja"),
    *("tokenizer*/*", "vocab*/*", "consolidated*"),
]
"""Copies of the weights in other layouts, which some repositories have beside the one that is read. Chat
templates may be in a folder."""
CONFIG = "config.json"
SECONDS = 30.0
"""How long a request for a part of a file may wait for bytes. A hub answers in less than one."""


def download(model: str, revision: str | None, allowed_names: str) -> Path:
    """The directory of a model with safetensors, downloaded unless the cache has it.

    allowed_names: what the name of a model can be, for a message. Raises ConfigError in one line, as each
    function.
    """
    from huggingface_hub import snapshot_download

    hub_cache()  # refused here, since the library takes "~" for a folder's name
    with translate_errors(model, revision, allowed_names):
        return Path(
            snapshot_download(model, revision=revision, allow_patterns=PATTERNS, ignore_patterns=IGNORED)
        )


def find_cached(repository: str, revision: str | None) -> Path | None:
    """What the local cache has of a repository."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    hub_cache()
    try:
        return Path(snapshot_download(repository, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def gguf_in_cache(file: HubFile, revision: str | None) -> Path | None:
    """The first file of a model in the local cache. None unless the cache has all of them."""
    folder = find_cached(file.repository, revision)
    if folder is None:
        return None
    names = {str(path.relative_to(folder)) for path in folder.rglob(f"*{SUFFIX}")}
    try:
        first_files = file.files(names)
    except ConfigError:
        return None
    return folder / first_files[0] if set(first_files) <= names else None


def download_gguf(file: HubFile, revision: str | None, allowed_names: str) -> Path:
    """The first file of a model, downloaded with the others that it is split over."""
    from huggingface_hub import hf_hub_download

    hub_cache()
    with translate_errors(file.name, revision, allowed_names):
        names = file.files(_list_files(file.repository, revision).names)
        paths = [hf_hub_download(file.repository, name, revision=revision) for name in names]
    return Path(paths[0])


def small_files(
    model: str, revision: str | None, folder: Path, more_files: Mapping[str, int], allowed_names: str
) -> dict[str, int]:
    """Downloads config.json and the files beside it into `folder`.

    more_files: names of those files -> most bytes of one that are read. Returns the bytes of each file that a
    download would bring.
    """
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.hf_api import RepoFile

    with translate_errors(model, revision, allowed_names):
        hf_hub_download(model, CONFIG, revision=revision, local_dir=folder)
        tree = HfApi().list_repo_tree(model, revision=revision)
        sizes = {entry.path: entry.size for entry in tree if isinstance(entry, RepoFile)}
        files = {name: size for name, size in sizes.items() if _is_downloaded(name)}
        for name, max_bytes in more_files.items():
            if files.get(name, max_bytes + 1) <= max_bytes:
                hf_hub_download(model, name, revision=revision, local_dir=folder)
    return files


def headers_of_gguf(file: HubFile, revision: str | None, folder: Path, allowed_names: str) -> dict[str, int]:
    """Puts the files of a model into `folder`, as long as on the hub, but only with their headers.

    Returns the bytes of each by its name, the first file first. The weights stay on the hub, and the files
    are sparse: they take the space of their headers.
    """
    with translate_errors(file.name, revision, allowed_names):
        commit, names = _list_files(file.repository, revision)
        return {name: _header(file.repository, commit, name, folder) for name in file.files(names)}


def only_gguf(repository: str, revision: str | None, allowed_names: str) -> HubFile | None:
    """The model of a repository that has GGUF files and no safetensors; None for another repository.

    Raises ConfigError for one with several models, which lists them.
    """
    with translate_errors(repository, revision, allowed_names):
        names = _list_files(repository, revision).names
    if not any(name.endswith(SUFFIX) for name in names) or any(map(_is_safetensors, names)):
        return None
    return HubFile(repository, HubFile(repository, "").files(names)[0])


class _Listing(NamedTuple):
    commit: str | None
    names: Collection[str]


def _list_files(repository: str, revision: str | None) -> _Listing:
    """All files of a repository, and the commit that a revision stands for now."""
    from huggingface_hub import HfApi

    info = HfApi().model_info(repository, revision=revision)
    return _Listing(info.sha, {sibling.rfilename for sibling in info.siblings or ()})


def _is_safetensors(name: str) -> bool:
    return name.endswith(".safetensors") and _is_downloaded(name)


def _is_downloaded(name: str) -> bool:
    """Whether `download` brings this file of a hub."""
    return any(fnmatch(name, pattern) for pattern in PATTERNS) and not any(
        fnmatch(name, pattern) for pattern in IGNORED
    )


def _header(repository: str, commit: str | None, name: str, folder: Path) -> int:
    """Writes one file with nothing but its header. Returns its bytes on the hub."""
    # The hub's name becomes a path on this machine, so it must stay in the folder.
    if ".." in PurePosixPath(name).parts or name.startswith("/"):
        raise CheckpointError(f"model: {repository}: got a file {name!r}; allowed: names inside a repository")
    from huggingface_hub import hf_hub_url

    url, hub_name = hf_hub_url(repository, name, revision=commit), f"{repository}:{name}"
    try:
        with translate_errors(hub_name, commit, "", name):
            header, size = read_header(partial(_range, url))
    except ValueError as error:
        raise CheckpointError(f"{hub_name}: {error}") from error
    path = folder / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(header)
        os.truncate(path, size)
    except OSError as error:
        raise CheckpointError(
            f"{path}: a sparse file of {size} bytes cannot be written ({error.strerror}); allowed: a TMPDIR "
            "on a filesystem that has them"
        ) from error
    return size


def _range(url: str, begin: int, end: int) -> tuple[bytes, int]:
    """Bytes [begin, end) of a file on a hub, or those that it has of them, and the bytes of the whole file.

    Raises ValueError for a server that sends anything else. It reads no more than was asked for.
    """
    from huggingface_hub import get_session
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

    headers = {**build_hf_headers(), "Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
    with get_session().stream("GET", url, headers=headers, timeout=SECONDS) as answer:
        content_range = str(answer.headers.get("Content-Range", ""))
        if answer.status_code == 416 and re.fullmatch(r"bytes \*/0", content_range):
            return b"", 0
        hf_raise_for_status(answer)
        match = re.fullmatch(r"bytes (\d{1,15})-(\d{1,15})/(\d{1,15})", content_range)
        if answer.status_code != 206 or match is None:
            raise ValueError("its header cannot be read alone: the server does not send ranges of a file")
        first, last, size = map(int, match.groups())
        if (first, last) != (begin, min(end, size) - 1):
            raise ValueError(f"got bytes {first} to {last} of {size}; asked for {begin} to {end - 1}")
        data = bytearray()
        for piece in answer.iter_bytes():
            data += piece
            if len(data) > last + 1 - first:
                break
    if len(data) != last + 1 - first:
        raise ValueError(f"got another number of bytes than {last + 1 - first} from byte {first}")
    return bytes(data), size


@contextmanager
def translate_errors(
    model: str, revision: str | None, allowed_names: str, file: str = CONFIG
) -> Generator[None]:
    """Turns the errors of the hub's library into ConfigError, in one line.

    allowed_names: what the name of a model can be. file: the file that is asked for.
    """
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    out_of_reach = f"model: {model!r} is not in the local cache and the hub is out of reach"
    network: Any = HfHubHTTPError.__bases__[0]  # the base of all errors of its HTTP library
    try:
        yield
    except HFValidationError as error:
        raise ConfigError.field("model", model, allowed_names) from error
    except GatedRepoError as error:
        raise ConfigError(f"model: {model!r} is gated: accept its licence and log in to the hub") from error
    except RepositoryNotFoundError as error:
        raise ConfigError(f"model: {model!r} is neither a directory nor a model on the hub") from error
    except RevisionNotFoundError as error:
        raise ConfigError(f"model: {model!r} has no revision {revision!r} on the hub") from error
    except LocalEntryNotFoundError as error:
        raise ConfigError(out_of_reach) from error
    except EntryNotFoundError as error:
        raise CheckpointError(f"model: {model}: no {file} in this repository") from error
    except HfHubHTTPError as error:
        raise ConfigError(f"model: {model!r}: the hub answered {error.response.status_code}") from error
    except (network, ConnectionError) as error:
        raise ConfigError(out_of_reach) from error
