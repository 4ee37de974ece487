"""The settings of `moesaic run-batch`; the command line is generated from here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moesaic.core.errors import ConfigError


@dataclass(frozen=True)
class RunBatch:
    """Answer a file of OpenAI batch lines. Run again after a crash, it goes on where it stopped."""

    input_file: Path
    """Batch lines: {"custom_id", "method": "POST", "url": "/v1/chat/completions" or "/v1/completions",
    "body": what the endpoint takes}."""
    output_file: Path
    """Results, one line each, in the order in which they finish. An existing one is continued."""
    served_model_name: str | None = None
    """Name that the lines' bodies give as their model; None: MODEL as given."""
    chat_template: Path | None = None
    """File with a Jinja chat template to use in place of the checkpoint's own."""
    max_in_flight: int | None = None
    """Most requests handed to the engine at a time; None: twice --max-num-seqs."""
    seed: int | None = None
    """Of the seeds of requests that bring none. Which request gets which depends on their order."""

    def __post_init__(self) -> None:
        if self.max_in_flight is not None and self.max_in_flight < 1:
            raise ConfigError.field("--max-in-flight", self.max_in_flight, "an integer of at least 1")
        if not self.input_file.is_file():
            raise ConfigError.field("--input-file", str(self.input_file), "an existing regular file")
        if self.output_file.exists() and self.output_file.samefile(self.input_file):
            raise ConfigError.field("--output-file", str(self.output_file), "another file than the input")
