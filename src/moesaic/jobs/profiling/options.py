"""The settings of `moesaic profile`, from which its command line is generated."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moesaic.config import parse_bytes
from moesaic.core.errors import ConfigError


@dataclass(frozen=True)
class ProfileOptions:
    """Record which experts the tokens of prompts choose."""

    prompts: list[Path]
    """Files of prompts. In *.jsonl each line is an object. Its prompt is "prompt" (text or token ids),
    "question", "text" or "turns" (the first turn); its topic is "topic", "category" or "domain". Without
    a topic, or with several files, the file's name is the topic. In other files each line is a prompt."""
    output_file: Path
    """File for the profile (.npz)."""
    max_prompts: int | None = None
    """Maximum number of prompts of each file, the first ones. None: all."""
    max_tokens: int = 0
    """Number of tokens that are generated for each prompt and recorded as well; 0: prompts only."""
    max_memory: str = "1GiB"
    """Maximum memory for counts and routes. Beyond it, requests are counted and their routes dropped.
    `moesaic place` needs the routes of two or more."""
    seed: int = 0
    """Seed of the generated tokens, and of which routes are dropped."""

    def __post_init__(self) -> None:
        if not self.prompts:
            raise ConfigError.field("--prompts", "nothing", "at least one file")
        for file in self.prompts:
            if not file.is_file():
                raise ConfigError.field("--prompts", str(file), "an existing regular file")
        if self.max_prompts is not None and self.max_prompts < 1:
            raise ConfigError.field("--max-prompts", self.max_prompts, "an integer of at least 1")
        if self.max_tokens < 0:
            raise ConfigError.field("--max-tokens", self.max_tokens, "an integer of at least 0")
        parse_bytes("--max-memory", self.max_memory)
        if not self.output_file.absolute().parent.is_dir() or self.output_file.is_dir():
            raise ConfigError.field("--output-file", str(self.output_file), "a file in an existing directory")

    @property
    def most_bytes(self) -> int:
        """Maximum bytes for counts and routes."""
        return parse_bytes("--max-memory", self.max_memory)
