"""The settings of `moesaic profile import`, from which its command line is generated."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from moesaic.core.errors import ConfigError


@dataclass(frozen=True)
class ImportProfile:
    """Make a profile of routing that another server recorded."""

    files: list[Path]
    """Files of one recording. sglang: *.pt of its expert distribution recorder, one of each rank. vllm: .json
    or .jsonl with answers of a server with --enable-return-routed-experts, to requests with
    return_token_ids. llama-moe-trace: CSV of that tool of a fork of llama.cpp, which has no token ids."""
    _: KW_ONLY
    source: Annotated[Literal["sglang", "vllm", "llama-moe-trace"], Parameter(name="--from")]
    """Program that wrote the files."""
    model: str
    """The model that was served: a Hugging Face directory, a hub id, or demo. Its sizes are compared with the
    files, and the profile names its weights."""
    output_file: Path
    """File for the profile (.npz)."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    hf_overrides: str | None = None
    """Changes of config.json, as JSON: `{"key": null}` drops a key. See `moesaic serve`."""

    @property
    def model_source(self) -> tuple[str, str | None, str | None]:
        """What `models.files.resolve` takes to find the model."""
        return self.model, self.revision, self.hf_overrides

    def __post_init__(self) -> None:
        if not self.files:
            raise ConfigError.field("FILES", "nothing", "at least one file")
        for file in self.files:
            if not file.is_file():
                raise ConfigError.field("FILES", str(file), "existing regular files")
        if not self.output_file.absolute().parent.is_dir() or self.output_file.is_dir():
            raise ConfigError.field("--output-file", str(self.output_file), "a file in an existing directory")
