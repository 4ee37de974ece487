"""The setting --speculative-config: how a request's next tokens are drafted. Its names are those of vLLM."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from moesaic.core.errors import ConfigError

METHODS = ("ngram", "mtp")
OTHER_NAMES = {"deepseek_mtp": "mtp", "glm4_moe_mtp": "mtp"}
"""Older names of methods."""
MAX_DRAFT_TOKENS = 32
"""Maximum of num_speculative_tokens."""
LOOKUP = 5
"""prompt_lookup_max and prompt_lookup_min where neither is given."""
FLAG = "--speculative-config"
MAX_CHECKED_ROWS = 32
"""Rows of a step, at most, when it checks drafts. Steps of so many rows are recorded. Larger ones are not,
and drafts gained nothing there when they were measured."""
REQUESTS = (1, 8, 16)
"""Numbers of requests in a step for which it is said when drafts pay."""
COUNTS = tuple(
    (requests, tokens)
    for requests in REQUESTS
    for tokens in (1, 2, 4, 8)
    if requests * (1 + tokens) <= MAX_CHECKED_ROWS
)
"""(requests in a step, drafted tokens of each) for which it is said when drafts pay."""


@dataclass(frozen=True)
class SpeculativeConfig:
    """How tokens are drafted that a step then checks together.

    Raises ConfigError, naming the field, when a value is not allowed.
    """

    method: str
    """ngram: the tokens that followed the last ones where these stood before, in the prompt or the answer.
    mtp: a token of the model's own layer for the token after the next one (multi-token prediction)."""
    num_speculative_tokens: int
    """Maximum number of drafted tokens of one request in a step."""
    prompt_lookup_max: int | None = None
    """Maximum length of the last tokens that are looked up. None: prompt_lookup_min, or else 5."""
    prompt_lookup_min: int | None = None
    """Minimum length of the tokens that are looked up. None: prompt_lookup_max, or else 5."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "method", OTHER_NAMES.get(str(self.method), self.method))
        if self.method not in METHODS:
            raise ConfigError.field(f"{FLAG}: method", self.method, ", ".join(METHODS))
        for name in ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"):
            value, maximum = (
                getattr(self, name),
                MAX_DRAFT_TOKENS if name == "num_speculative_tokens" else 1 << 20,
            )
            if value is None and name != "num_speculative_tokens":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= maximum:
                raise ConfigError.field(f"{FLAG}: {name}", value, f"an integer from 1 to {maximum}")
        if self.method == "mtp":
            self._check_mtp()
        shortest, longest = self.lookup
        if shortest > longest:
            allowed = f"at most prompt_lookup_max, {longest}"
            raise ConfigError.field(f"{FLAG}: prompt_lookup_min", shortest, allowed)

    def _check_mtp(self) -> None:
        if self.num_speculative_tokens != 1:
            raise ConfigError.field(
                f"{FLAG}: num_speculative_tokens", self.num_speculative_tokens, "1 with mtp"
            )
        for name in ("prompt_lookup_max", "prompt_lookup_min"):
            if getattr(self, name) is not None:
                raise ConfigError.field(f"{FLAG}: {name}", getattr(self, name), "nothing with mtp")

    @property
    def lookup(self) -> tuple[int, int]:
        """The minimum and the maximum number of tokens that are looked up.

        >>> SpeculativeConfig("ngram", 4, prompt_lookup_max=3).lookup
        (3, 3)
        """
        shortest = self.prompt_lookup_min or self.prompt_lookup_max or LOOKUP
        return shortest, self.prompt_lookup_max or shortest

    def to_json(self) -> str:
        """The setting as JSON, as --speculative-config takes it."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, setting: object) -> SpeculativeConfig:
        """The setting from a mapping, or from its JSON. Raises ConfigError."""
        value: Any = setting
        if isinstance(setting, str):
            try:
                value = json.loads(setting)
            except ValueError:
                value = setting
        names = [field.name for field in fields(cls)]
        if not isinstance(value, Mapping):
            raise ConfigError.field(FLAG, setting, f"a JSON object with {', '.join(names)}")
        for name in value:
            if name not in names:
                raise ConfigError(f"{FLAG}: unknown key {name!r}; allowed: {', '.join(names)}")
        for name in names[:2]:
            if name not in value:
                raise ConfigError(f"{FLAG}: {name} is missing")
        return cls(**value)


def break_even(price: float, num_draft_tokens: int) -> float | None:
    """The acceptance from which steps pay that check so many drafted tokens of each request. None: never.

    acceptance: the probability a that a drafted token is right if those before it were. price: of such a
    step over that of a step without drafts. Solves 1 + a + ... + a^num_draft_tokens = price for a.

    >>> round(break_even(1.75, 2), 2)
    0.5
    """
    if price > 1 + num_draft_tokens:
        return None
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        is_reached = sum(middle**place for place in range(1 + num_draft_tokens)) >= price
        low, high = (low, middle) if is_reached else (middle, high)
    return high
