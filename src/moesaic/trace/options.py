"""The settings of `serve --record-routing`; the command line is generated from here."""

from __future__ import annotations

from dataclasses import dataclass

from moesaic.config import parse_bytes
from moesaic.core.errors import ConfigError


@dataclass(frozen=True)
class RecordConfig:
    """Which experts tokens choose while they are served, as a profile."""

    record_routing: str | None = None
    """File for a profile of what is served, brought up to date every minute and at the end: counts, and
    routes of whole requests, which hold their token ids. Rows that the prefix cache spares are not in it."""
    record_routing_share: float = 0.05
    """Of the requests, how many are recorded: above 0, at most 1."""
    record_routing_memory: str = "256MiB"
    """Most memory that the counts and routes take, in the process of the API; routes make room for counts.
    `moesaic place` needs the routes of two requests or more."""

    def __post_init__(self) -> None:
        if not 0 < self.record_routing_share <= 1:
            raise ConfigError.field(
                "--record-routing-share", self.record_routing_share, "a number above 0 and at most 1"
            )
        parse_bytes("--record-routing-memory", self.record_routing_memory)
        for name in ("record_routing_share", "record_routing_memory"):
            given, default = getattr(self, name), getattr(RecordConfig, name)
            if self.record_routing is None and given != default:
                flag = "--" + name.replace("_", "-")
                raise ConfigError.field(flag, given, f"nothing but {default} without --record-routing FILE")

    @property
    def most_bytes(self) -> int:
        """Of counts and routes."""
        return parse_bytes("--record-routing-memory", self.record_routing_memory)
