"""Rotary position embedding: the frequencies of a config, and the table of their cosines and sines.

default: RoFormer (Su et al. 2021). linear: position interpolation (Chen et al. 2023). yarn: Peng et al.
2023, with the mscale terms of DeepSeek-V2. llama3: the published code of Llama 3.1. dynamic (NTK): equal
to default up to max_position_embeddings. That is our maximum context length, so the table is the same.
longrope: Ding et al. 2024, with one table for all requests. It is the long one if requests may be longer than
the original context, as in vLLM. transformers takes the long one for a batch with such a request, so that a
row's table would depend on the other rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from moesaic.core.errors import CheckpointError
from moesaic.models.config import MOST_INTEGER, Fields, shorten

MOST_WIDTH = 1 << 16
"""Largest width of a head. Each pair of it has an angle, which is computed before any tensor is looked up."""
KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")


@dataclass(frozen=True)
class RopeConfig:
    """The rotary part of config.json."""

    kind: str
    theta: float
    factor: float = 1.0
    original: int = 0
    """Context length before scaling (yarn, llama3, longrope)."""
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    partial: float = 1.0
    """Fraction of each head that is rotated: its first numbers."""
    short_factors: tuple[float, ...] = ()
    """Factors of each pair's frequency (longrope), for use if no request is longer than `original` tokens."""
    long_factors: tuple[float, ...] = ()
    """The same for longer requests."""

    def count_rotated(self, width: int) -> int:
        """Returns how many of the `width` numbers of a head are rotated.

        Raises CheckpointError if these are not pairs, or are more than a head has.
        """
        count = int(width * self.partial)
        if not 2 <= count <= width or count % 2:
            raise CheckpointError(
                f"config.json: partial_rotary_factor: got {self.partial:g}; allowed: a fraction of up to 1 "
                f"that makes an even part of {width} numbers"
            )
        return count

    @property
    def reach(self) -> int:
        """Context length with scaling, in tokens; 0 if the config does not specify it."""
        return int(self.factor * self.original)

    @property
    def angle_scale(self) -> float:
        """Factor of cosine and sine (yarn, longrope)."""
        if self.kind not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.kind == "longrope":
            return math.sqrt(1.0 + math.log(max(self.factor, 1.0)) / math.log(self.original))
        if self.mscale and self.mscale_all_dim:
            return mscale(self.factor, self.mscale) / mscale(self.factor, self.mscale_all_dim)
        return mscale(self.factor, 1.0)


def mscale(factor: float, weight: float) -> float:
    """YaRN's attention temperature for a context `factor` times longer."""
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0


def read(
    fields: Fields,
    max_position: int,
    default_theta: float,
    partial: float | None = None,
    key: str = "rope_parameters",
) -> RopeConfig:
    """Reads the rotary keys in either form: rope_parameters, or rope_theta and rope_scaling.

    partial: the fraction of a head that is rotated, if rope_parameters has none; None: always the whole head.
    key: what rope_parameters is called in `fields`.
    Raises CheckpointError for an unknown kind, and for a missing or unknown key.
    """
    theta = fields.number_above("rope_theta", 1.0, default_theta)
    parts = fields.child("rope_scaling") or Fields({}, "rope_scaling.")
    newer = fields.child(key)
    if newer is not None:
        parts.refuse_unread()
        parts = newer
    theta = parts.number_above("rope_theta", 1.0, theta)
    kind = parts.raw("rope_type", parts.raw("type", "default"))
    parts.ignore("type")
    if partial is None:
        parts.require_value("partial_rotary_factor", 1.0, 1, None, reason="this model rotates whole heads")
    else:
        partial = parts.number_above("partial_rotary_factor", 0.0, partial)
    if kind not in KINDS:
        raise CheckpointError(
            f"config.json: rope_type: got {shorten(repr(kind))}; allowed: {', '.join(KINDS)}"
        )
    if kind == "longrope":
        # Many files have this key beside the others.
        top_length = fields.maybe_integer("original_max_position_embeddings", minimum=2)
        scaling_length = parts.maybe_integer("original_max_position_embeddings", minimum=2)
        scaled_config = _read_longrope(parts, theta, scaling_length or top_length, max_position)
    else:
        scaled_config = _read_scaled(parts, kind, theta, max_position)
    config = replace(scaled_config, partial=1.0 if partial is None else partial)
    parts.refuse_unread()
    if config.factor * config.original > MOST_INTEGER:
        raise CheckpointError(
            f"config.json: rope: got factor {config.factor:g} of {config.original} tokens; "
            f"allowed: a product of at most {MOST_INTEGER}"
        )
    return config


def rotary_width(name: str, width: int) -> int:
    """Returns `width`, the part of a head that is rotated.

    Raises CheckpointError unless it is even and from 2 to MOST_WIDTH.
    """
    if width % 2 or not 2 <= width <= MOST_WIDTH:
        raise CheckpointError(
            f"config.json: {name}: got {width}; allowed: an even integer from 2 to {MOST_WIDTH}, since heads "
            "are rotated in pairs"
        )
    return width


def _read_scaled(parts: Fields, kind: str, theta: float, max_position: int) -> RopeConfig:
    if kind == "default":
        return RopeConfig(kind, theta)
    if kind in ("linear", "dynamic"):
        return RopeConfig(kind, theta, parts.number_above("factor", 0.0))
    original = parts.integer("original_max_position_embeddings", max_position)
    if kind == "llama3":
        low, high = (parts.number_above(name, 0.0) for name in ("low_freq_factor", "high_freq_factor"))
        factor = parts.number_above("factor", 0.0)
        return RopeConfig(kind, theta, factor, original, low_freq_factor=low, high_freq_factor=high)
    return RopeConfig(
        kind,
        theta,
        parts.maybe_number("factor") or max_position / original,
        original,
        attention_factor=parts.maybe_number("attention_factor"),
        beta_fast=parts.maybe_number("beta_fast") or 32.0,
        beta_slow=parts.maybe_number("beta_slow") or 1.0,
        mscale=parts.maybe_number("mscale") or 0.0,
        mscale_all_dim=parts.maybe_number("mscale_all_dim") or 0.0,
        truncate=parts.flag("truncate", True),
    )


def _read_longrope(parts: Fields, theta: float, original: int | None, max_position: int) -> RopeConfig:
    if original is None:
        raise CheckpointError("config.json: original_max_position_embeddings is missing, for longrope")
    return RopeConfig(
        "longrope",
        theta,
        parts.maybe_number("factor") or max_position / original,
        original,
        attention_factor=parts.maybe_number("attention_factor"),
        short_factors=parts.positive_numbers("short_factor"),
        long_factors=parts.positive_numbers("long_factor"),
    )


def frequencies(config: RopeConfig, width: int, positions: int = 0) -> torch.Tensor:
    """Returns [width / 2] radians per token, float32. positions: maximum tokens of a request (longrope)."""
    powers = config.theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    plain = 1.0 / powers
    if config.kind == "longrope":
        factors = config.long_factors if positions > config.original else config.short_factors
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * powers)
    if config.kind == "linear":
        return plain / config.factor
    if config.kind == "llama3":
        return _llama3(config, plain)
    if config.kind == "yarn":
        keep = 1.0 - _ramp(config, width)
        return (1.0 / (config.factor * powers)) * (1.0 - keep) + plain * keep
    return plain


def _check_frequencies(config: RopeConfig, width: int, positions: int) -> torch.Tensor:
    """Returns the frequencies [width / 2]. Raises CheckpointError if one, or the angles' scale, is not
    finite.

    It also raises it if longrope has factors for another number of pairs.
    """
    for name, factors in (("short_factor", config.short_factors), ("long_factor", config.long_factors)):
        if len(factors) not in (0, width // 2):
            raise CheckpointError(
                f"config.json: {name}: got {len(factors)} numbers; allowed: {width // 2}, one for each pair"
            )
    try:
        rates = frequencies(config, width, positions)
        good = bool(rates.isfinite().all()) and math.isfinite(config.angle_scale)
    except (ArithmeticError, ValueError):
        good = False
    if not good:
        raise CheckpointError(f"config.json: rope: got {config}; allowed: values that give finite angles")
    return rates


def _ramp(config: RopeConfig, width: int) -> torch.Tensor:
    """Returns [width / 2] fractions of interpolation: 0 for fast pairs, 1 for slow ones."""

    def pair_of(turns: float) -> float:
        """Returns the index of the pair that makes this many turns over the original context."""
        return width * math.log(config.original / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = pair_of(config.beta_fast), pair_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    high = high + 0.001 if high == low else high
    ramp = (torch.arange(width // 2, dtype=torch.float32) - low) / (high - low)
    return ramp.clamp(0.0, 1.0)


def _llama3(config: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    wavelength = 2 * math.pi / plain
    low, high = config.low_freq_factor, config.high_freq_factor
    slow = wavelength > config.original / low
    fast = wavelength < config.original / high
    smooth = (config.original / wavelength - low) / (high - low)
    interpolation = (1 - smooth) * plain / config.factor + smooth * plain
    return torch.where(slow, plain / config.factor, torch.where(fast, plain, interpolation))


@dataclass(frozen=True)
class RopeTable:
    """Cosine and sine of every position, shared by all layers."""

    cosine: torch.Tensor
    """[positions, width / 2] float32."""
    sine: torch.Tensor

    @classmethod
    def build(cls, config: RopeConfig, width: int, positions: int, device: str) -> RopeTable:
        """Computes the table for positions 0 .. positions - 1 and heads of `width` numbers.

        It is computed by NumPy in double precision, then rounded. torch is not used because of a bug: if
        several threads first compute a cosine at the same time, one may get another kernel of MKL, which is
        wrong from the fourth digit on. So about one process in a hundred would produce tokens with other bits
        (github.com/pytorch/pytorch/issues/188792).
        """
        angles = (
            np.arange(positions, dtype=np.float32)[:, None]
            * _check_frequencies(config, width, positions).numpy()
        )
        cosine = np.cos(angles, out=np.empty_like(angles), dtype=np.float64, casting="same_kind")
        sine = np.sin(angles, out=angles, dtype=np.float64, casting="same_kind")
        for table in (cosine, sine):
            table *= np.float32(config.angle_scale)
        return cls(torch.from_numpy(cosine).to(device), torch.from_numpy(sine).to(device))
