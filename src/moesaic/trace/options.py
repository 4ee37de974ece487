"""The settings of `serve --record-routing`, from which its flags are generated."""

from __future__ import annotations

from dataclasses import dataclass

from moesaic.config import parse_bytes
from moesaic.core.errors import ConfigError


@dataclass(frozen=True)
class RecordConfig:
    """Recording of the experts that tokens choose while they are served."""

    record_routing: str | None = None
    """File for a profile of what is served: counts, and routes of whole requests with their token ids. It
    is updated every minute and at the end. Tokens that the prefix cache provides are not recorded."""
    record_routing_share: float = 0.05
    """Share of the requests that are recorded: above 0, at most 1."""
    record_routing_memory: str = "256MiB"
    """Maximum memory for the counts and routes, in the process of the API. Counts displace routes. `moesaic
    place` needs the routes of two requests or more."""

    def __post_init__(self) -> None:
        if not 0 < self.record_routing_share <= 1:
            raise ConfigError.field(
                "--record-routing-share", self.record_routing_share, "a number above 0 and at most 1"
            )
        parse_bytes("--record-routing-memory", self.record_routing_memory)
        for name in ("record_routing_share", "record_routing_memory"):
            value, default = getattr(self, name), getattr(RecordConfig, name)
            if self.record_routing is None and value != default:
                flag = "--" + name.replace("_", "-")
                raise ConfigError.field(flag, value, f"nothing but {default} without --record-routing FILE")

    @property
    def most_bytes(self) -> int:
        """Maximum bytes for counts and routes."""
        return parse_bytes("--record-routing-memory", self.record_routing_memory)
