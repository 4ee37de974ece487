"""The operations a model needs, and which implementation carries them out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from moesaic.core.errors import ConfigError
from moesaic.kernels.batch import AttentionBatch
from moesaic.kernels.reference import attention, dense, experts
from moesaic.kernels.weights import ExpertWeights


class Linear(Protocol):
    def __call__(
        self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor: ...


class Rope(Protocol):
    def __call__(
        self, rows: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, interleaved: bool = False
    ) -> torch.Tensor: ...


class PagedAttention(Protocol):
    def __call__(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor | None,
        batch: AttentionBatch,
        scale: float,
        sliding_window: int | None = None,
        value_width: int | None = None,
    ) -> torch.Tensor: ...


class Experts(Protocol):
    def __call__(
        self,
        weights: ExpertWeights,
        hidden: torch.Tensor,
        expert_ids: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor: ...


@dataclass(frozen=True)
class Kernels:
    """One implementation of every operation. Shapes stand at the reference of each."""

    name: str
    """For people: what was picked."""
    linear: Linear
    head_linear: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    rope: Rope
    gated_mlp: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    paged_attention: PagedAttention
    experts: Experts


REFERENCE = Kernels(
    name="reference (torch float32)",
    linear=dense.linear,
    head_linear=dense.head_linear,
    rms_norm=dense.rms_norm,
    rope=dense.rope,
    gated_mlp=dense.gated_mlp,
    paged_attention=attention.paged_attention,
    experts=experts.experts,
)


def pick(device: str) -> Kernels:
    """The kernels for "cpu", "cuda" or "cuda:N". Raises ConfigError for any other device."""
    if device.partition(":")[0] in ("cpu", "cuda"):
        return REFERENCE
    raise ConfigError.field("device", device, "cpu, cuda, cuda:N")
