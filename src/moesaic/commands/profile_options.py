"""The settings of `moesaic profile show`, from which its command line is generated."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from moesaic.core.errors import ConfigError


@dataclass(frozen=True)
class ShowProfile:
    """Show how skewed and how predictable a model's routing is."""

    file: Path
    """Profile that `moesaic profile` wrote."""
    _: KW_ONLY
    plot: Path | None = None
    """Draw the statistics into this SVG file."""
    ranks: int = 8
    """Number of ranks for the prediction of a token's rank. Each rank has a consecutive range of experts. A
    model with fewer experts has fewer ranks."""
    profile_share: float = 0.2
    """Share of the requests from which predictions are learned. They are tested on the other requests."""
    tokens: int = 100_000
    """Maximum number of tokens of recorded requests that are examined. Counts include all tokens."""
    seed: int = 0
    """Seed that chooses the requests for learning."""

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
