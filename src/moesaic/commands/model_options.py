"""The settings of `doctor` and `verify`. Their command lines are generated from them."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Literal

from cyclopts import Parameter

from moesaic.config import KernelName, check_threads
from moesaic.core.errors import ConfigError

THIS, NONE = "this", "none"
"""Values of --hardware: this machine, measured now, or this machine without a measurement."""


@dataclass(frozen=True)
class Doctor:
    """Examine this machine, or a model before it is downloaded or loaded."""

    model: str | None = None
    """Model to examine: a Hugging Face directory, a config.json, a GGUF file, a hub id, or `demo`.

    Of a hub id only its config.json and its index of tensors are downloaded. None: the machine alone is
    examined."""
    _: KW_ONLY
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    hf_overrides: str | None = None
    """Changes of config.json, as JSON: `{"key": null}` drops a key. See `moesaic serve`."""
    hardware: str = THIS
    """The machine to judge a model by. this: this machine, after a measurement of about ten seconds.
    none: the memory of this machine, and no prediction of speed. Otherwise a known machine or a file (.toml),
    as for `moesaic plan`."""

    def __post_init__(self) -> None:
        if self.model is None:
            if self.revision is not None:
                raise ConfigError.field("--revision", self.revision, "nothing without a MODEL")
            if self.hf_overrides is not None:
                raise ConfigError.field("--hf-overrides", self.hf_overrides, "nothing without a MODEL")
            if self.hardware != THIS:
                raise ConfigError.field("--hardware", self.hardware, "nothing without a MODEL")


PROMPT = (
    "The quick brown fox jumps over the lazy dog. 1 + 2 = 3, and 10 * 12 = 120. def add(a, b): return a + b"
)
"""Text with which a model is compared if no prompt is given."""


@dataclass(frozen=True)
class Verify:
    """Compare a model with transformers, layer by layer."""

    model: str
    """A Hugging Face directory, a GGUF file, a hub id, or `demo`."""
    _: KW_ONLY
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    hf_overrides: str | None = None
    """Changes of config.json, as JSON: `{"key": null}` drops a key. See `moesaic serve`."""
    against: Literal["transformers"] = "transformers"
    """The other implementation. transformers computes each layer in float32; it must be installed."""
    prompt: str | None = None
    """Text of the prompt. None: a short text with words, numbers and code."""
    prompt_tokens: Annotated[tuple[int, ...], Parameter(consume_multiple=True, negative_iterable=())] = ()
    """Token ids of the prompt, in place of a text."""
    tolerance: float = 1e-3
    """Largest relative error with which a layer counts as equal: the largest difference of a token's row,
    divided by the largest number that the layer adds to this row."""
    kernels: KernelName = "auto"
    """Kernels that compute moesaic's side, as for `moesaic serve`."""
    threads: int | None = None
    """Number of compute threads. None: one per core."""

    def __post_init__(self) -> None:
        check_threads(self.threads)
        if self.prompt is not None and self.prompt_tokens:
            raise ConfigError("--prompt: allowed only without --prompt-tokens")
        if self.prompt == "":
            raise ConfigError.field("--prompt", "", "a text of at least one token")
        if not 0 < self.tolerance < 1:
            raise ConfigError.field("--tolerance", self.tolerance, "a number between 0 and 1")
