"""The settings of `moesaic profile show`; the command line is generated from here."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from moesaic.core.errors import ConfigError


@dataclass(frozen=True)
class ShowProfile:
    """Say how skewed and how predictable a model's routing is."""

    file: Path
    """What `moesaic profile` wrote."""
    _: KW_ONLY
    plot: Path | None = None
    """Draw the statistics into this file, an SVG."""
    ranks: int = 8
    """Ranks whose consecutive ranges of experts a token's place is predicted among; fewer where the model has
    fewer experts."""
    profile_share: float = 0.2
    """Share of the requests that predictions are learned from; they are asked about the others."""
    tokens: int = 100_000
    """Most tokens of the recorded requests that are looked at; counts are of all."""
    seed: int = 0
    """Which requests are learned from."""

    def __post_init__(self) -> None:
        if self.plot is not None and self.plot.suffix.lower() != ".svg":
            raise ConfigError.field("--plot", str(self.plot), "a file that ends in .svg")
        if self.ranks < 1:
            raise ConfigError.field("--ranks", self.ranks, "an integer of at least 1")
        if not 0 < self.profile_share < 1:
            raise ConfigError.field("--profile-share", self.profile_share, "a number between 0 and 1")
        if self.tokens < 1:
            raise ConfigError.field("--tokens", self.tokens, "an integer of at least 1")
        if self.seed < 0:
            raise ConfigError.field("--seed", self.seed, "an integer of at least 0")
