"""The settings of `moesaic quantize`, from which its command line is generated."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from moesaic.config import KernelName, check_threads
from moesaic.core.errors import ConfigError
from moesaic.core.home import expand_home

Modules = Literal["experts", "attention", "mlp"]


@dataclass(frozen=True)
class QuantizeOptions:
    """Write a checkpoint whose routed experts are int8 or int4, in the layout of compressed-tensors."""

    model: str
    """A Hugging Face directory, a hub id, or demo. Its matrices must be in bf16, fp16, float32 or FP8."""
    directory: Path
    """Directory of the quantised checkpoint. It must not exist yet, be empty, or have been begun by the same
    command, which then goes on where it stopped."""
    _: KW_ONLY
    format: Literal["int8", "int4"]
    """Type of the quantised numbers. They have a scale for each group of a row, and no zero points."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    hf_overrides: str | None = None
    """Changes of config.json, as JSON: `{"key": null}` drops a key. The quantised checkpoint has them too.
    See `moesaic serve`."""
    group_size: int | None = None
    """Numbers of a row that share a scale: a multiple of 32 that divides the rows of all quantised matrices.
    None: for int4 the first of 128, 64 and 32 that does so, and a whole row for int8."""
    modules: tuple[Modules, ...] = ("experts",)
    """What is quantised: experts (the routed ones), attention (its projections), mlp (dense MLPs and shared
    experts). Gates, norms, the embedding, the LM head and the projections of linear attention stay as they
    are."""
    calibrate: tuple[Path, ...] = ()
    """Files of prompts, as for `moesaic profile --prompts`. Experts are rounded by GPTQ, over the inputs that
    they have in these prompts. Other modules are rounded to nearest. None: all are rounded to nearest."""
    calibration_tokens: int = 131072
    """Maximum tokens of the prompts of --calibrate, the first ones."""
    least_tokens: int = 32
    """Experts that fewer tokens of --calibrate choose are rounded to nearest, and named at the end."""
    evaluate: tuple[Path, ...] = ()
    """Files of prompts with which the result is measured beside the original. None: one of eight prompts of
    --calibrate, which is then not calibrated with, or else short texts of this package."""
    evaluation_tokens: int = 16384
    """Maximum tokens to measure with. 0: the result is not measured."""
    max_prompt_tokens: int = 2048
    """Tokens of a prompt beyond these are left out."""
    allow_growth: bool = False
    """Write the checkpoint even if it becomes larger than the original."""
    kernels: KernelName = "auto"
    """Kernels that compute the prompts, as for `moesaic serve`."""
    threads: int | None = None
    """Number of compute threads. None: one per core."""

    def __post_init__(self) -> None:
        check_threads(self.threads)
        for name, least in (
            ("group_size", 1),
            ("calibration_tokens", 2),
            ("least_tokens", 1),
            ("evaluation_tokens", 0),
            ("max_prompt_tokens", 2),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError.field(_flag(name), value, f"an integer of at least {least}")
        if not self.modules:
            raise ConfigError.field("--modules", "nothing", "experts, attention, mlp")
        for name in ("calibrate", "evaluate"):
            for file in getattr(self, name):
                if not file.is_file():
                    raise ConfigError.field(_flag(name), str(file), "an existing regular file")
        self._refuse_unused()
        if not self.target.parent.is_dir():
            raise ConfigError.field("DIRECTORY", str(self.directory), "a directory in an existing one")

    @property
    def target(self) -> Path:
        """The absolute directory, with ~ and links resolved."""
        return expand_home(self.directory).resolve()

    def _refuse_unused(self) -> None:
        """Raises ConfigError for flags that would have no effect."""
        defaults: dict[str, Any] = {field.name: field.default for field in fields(self)}
        for name in ("calibration_tokens", "least_tokens"):
            if not self.calibrate and getattr(self, name) != defaults[name]:
                raise ConfigError(f"{_flag(name)}: allowed only with --calibrate")
        if self.calibrate and "experts" not in self.modules:
            raise ConfigError("--calibrate: only experts are calibrated; allowed: with experts in --modules")
        if self.evaluate and not self.evaluation_tokens:
            raise ConfigError("--evaluate: allowed only with --evaluation-tokens above 0")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
