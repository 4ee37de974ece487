"""The metadata of a model in a GGUF file. Every key of its architecture is understood, or refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from moesaic.core.errors import CheckpointError
from moesaic.models.config import shorten
from moesaic.models.known_keys import is_neutral

_REQUIRED = object()
IGNORED = (
    "vocab_size",  # the embedding has as many rows
    "rope.scaling.finetuned",
    "attention.causal",
    "attention.layer_norm_epsilon",
    "tensor_data_layout",
    "rope.dimension_sections",  # angles of images; text has the same in all
)
"""Keys after the architecture that do not matter."""
NEUTRAL = {
    "rope.scale_linear": 1.0,
    "rope.scaling.factor": 1.0,
    "rope.scaling.attn_factor": 1.0,
    "attention.scale_factor": 1.0,
    "logit_scale": 1.0,
    "residual_scale": 1.0,
    "embedding_scale": 1.0,
    "expert_weights_scale": 1.0,
    "expert_group_count": 1,
    "expert_group_used_count": 1,
    "interleave_moe_layer_step": 1,
}
"""Keys that change nothing with this value. So does any key that is null, false, zero or empty."""


def shortest(value: float) -> float:
    """The shortest decimal number with the same value in float32.

    >>> shortest(9.999999974752427e-07)
    1e-06
    """
    return float(str(np.float32(value)))


class Metadata:
    """The keys `ARCHITECTURE.KEY` of a file. `done` refuses those that were not read.

    Numbers are those that config.json had: see `shortest`.
    Each method raises CheckpointError that names the key, its value and what is allowed.
    """

    def __init__(self, file: object, architecture: str, metadata: Mapping[str, Any]) -> None:
        """file: for messages."""
        self._file, self._front, self._metadata = file, f"{architecture}.", metadata
        self._read_keys = {f"{self._front}{name}" for name in IGNORED}

    def raw(self, name: str, default: Any = _REQUIRED) -> Any:
        """A value without checks."""
        key = self._front + name
        self._read_keys.add(key)
        value = self._metadata.get(key, default)
        if value is _REQUIRED:
            raise CheckpointError(f"{self._file}: {key} is missing")
        return value

    def integer(self, name: str, default: Any = _REQUIRED) -> int:
        """An integer of at least 0."""
        value = self.raw(name, default)
        if type(value) is not int or value < 0:
            raise self.make_error(name, value, "an integer of at least 0")
        return value

    def maybe_integer(self, name: str) -> int | None:
        """An integer of at least 0, or None if there is no such key."""
        return None if self.raw(name, None) is None else self.integer(name)

    def number(self, name: str, default: Any = _REQUIRED) -> float:
        """A finite number."""
        value = self.raw(name, default)
        if type(value) not in (int, float) or not np.isfinite(value):
            raise self.make_error(name, value, "a number")
        return shortest(value)

    def maybe_number(self, name: str) -> float | None:
        """A finite number, or None if there is no such key."""
        return None if self.raw(name, None) is None else self.number(name)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.raw(name, default)
        if type(value) is not bool:
            raise self.make_error(name, value, "true, false")
        return value

    def require_value(self, name: str, *allowed_values: Any) -> None:
        """Refuses any value but these. There may be no such key."""
        value = self.raw(name, allowed_values[0])
        if value not in allowed_values:
            raise self.make_error(name, value, ", ".join(map(str, allowed_values)))

    def make_error(self, name: str, value: Any, allowed_values: str) -> CheckpointError:
        return CheckpointError(
            f"{self._file}: {self._front}{name}: got {shorten(repr(value))}; allowed: {allowed_values}"
        )

    def refuse_unread(self) -> None:
        """Raises CheckpointError for the first key of the architecture that was not read."""
        left = sorted(
            key
            for key, value in self._metadata.items()
            if key.startswith(self._front)
            and key not in self._read_keys
            and not is_neutral(value)
            and value != NEUTRAL.get(key.removeprefix(self._front))
        )
        if left:
            raise CheckpointError(
                f"{self._file}: {shorten(left[0])}: got {shorten(repr(self._metadata[left[0]]))}; "
                "allowed: keys that are known for this architecture"
            )
