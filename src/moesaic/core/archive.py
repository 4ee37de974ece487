"""Files of arrays: NumPy archives (`.npz`) without pickled objects."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from tokenize import TokenError
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from moesaic.core.errors import ConfigError

T = TypeVar("T")
Arrays = dict[str, npt.NDArray[Any]]

DAMAGE_ERRORS = (
    *(ValueError, TypeError, EOFError, IndexError, RuntimeError, SyntaxError, MemoryError, OverflowError),
    *(zipfile.BadZipFile, zlib.error, TokenError),
)
"""What NumPy and `zipfile` raise for damaged files."""


def save(path: Path, arrays: Mapping[str, Any], compress: bool = True) -> None:
    """Write the file. After a failure the old file is unchanged."""
    temporary = path.with_name(path.name + ".tmp")
    # A rename is atomic, so a reader never sees half of a file.
    with temporary.open("wb") as file:
        (np.savez_compressed if compress else np.savez)(file, **arrays)
    temporary.replace(path)


def load(path: Path, kind: str, make: Callable[[Arrays], T]) -> T:
    """Read the file and return `make(arrays)`.

    `make` raises KeyError for a missing array and ValueError for a wrong one. kind: the kind of file, with
    its article. Raises ConfigError with one line that names the file.
    """
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        return make(arrays)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or f'not {kind}'}") from error
    except KeyError as error:
        raise ConfigError(f"{path}: not {kind}: it has no {error.args[0]!r}") from error
    except DAMAGE_ERRORS as error:
        raise ConfigError(f"{path}: not {kind}: {error}") from error
