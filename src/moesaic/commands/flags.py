"""Flags that several commands have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

FLAT = Parameter(name="*")
"""Makes the fields of a config flags without a prefix."""


@dataclass(frozen=True)
class Debug:
    """How a command fails."""

    debug: Annotated[bool, Parameter(negative="")] = False
    """Print a traceback with an error."""


@dataclass(frozen=True)
class Output:
    """The output of a command."""

    json: Annotated[bool, Parameter(negative="")] = False
    """Print JSON, for other programs."""
    debug: Annotated[bool, Parameter(negative="")] = False
    """Print a traceback with an error."""


@dataclass(frozen=True)
class ConfigFile:
    """Where a command's settings come from, beside its command line."""

    config: Path | None = None
    """YAML file of settings, with flags as keys, such as `max-num-seqs: 8`. Every flag is also a variable,
    such as MOESAIC_MAX_NUM_SEQS. The command line takes precedence over variables, and they over the file."""
