"""The settings of `doctor`. Its command line is generated from them."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from moesaic.core.errors import ConfigError

THIS, NONE = "this", "none"
"""Values of --hardware: this machine, measured now, or this machine without a measurement."""


@dataclass(frozen=True)
class Doctor:
    """Examine this machine, or a model before it is downloaded or loaded."""

    model: str | None = None
    """Model to examine: a Hugging Face directory, a config.json, a hub id, or `demo`. Of a hub id only its
    config.json and its index of tensors are downloaded. None: the machine alone is examined."""
    _: KW_ONLY
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    hardware: str = THIS
    """With a model, the machine to judge by. this: this machine, after a measurement of about ten seconds.
    none: the memory of this machine, and no prediction of speed. Otherwise a known machine or a file (.toml),
    as for `moesaic plan`."""

    def __post_init__(self) -> None:
        if self.model is None:
            if self.revision is not None:
                raise ConfigError.field("--revision", self.revision, "nothing without a MODEL")
            if self.hardware != THIS:
                raise ConfigError.field("--hardware", self.hardware, "nothing without a MODEL")
