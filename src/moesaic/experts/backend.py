"""The interface between an expert server and the kernels that compute its experts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from moesaic.core.tokens import IntArray


@dataclass(frozen=True)
class CallPairs:
    """Pairs of one call.

    The arrays are views, for example of memory shared with the client, and are not copied. In a call whose
    rows stay on GPUs, `hidden` and `results` are tensors on the backend's GPU.
    """

    hidden: Any
    """[m, h] float32 hidden states, an array or a tensor."""
    rows: IntArray
    """[p] row of `hidden` of each pair."""
    experts: IntArray
    """[p] expert of each pair."""
    results: Any
    """[q, h] float32 results, as `hidden`."""
    result_rows: IntArray
    """[p] row of `out` that receives each pair's result."""


class ExpertBackend(Protocol):
    """The weights of a server's experts and the kernel that computes them."""

    @property
    def name(self) -> str:
        """Name of the chosen kernels, for logs and status pages."""
        ...

    @property
    def device_name(self) -> str:
        """The name that a driver gives the GPU that computes. Empty on a CPU."""
        ...

    @property
    def resident_experts(self) -> dict[int, list[int]]:
        """Layer -> the experts whose weights are loaded."""
        ...

    def load(self, experts_by_layer: Mapping[int, Iterable[int]]) -> None:
        """Load these experts too. experts_by_layer: layer -> expert ids."""
        ...

    def keep_only(self, experts_by_layer: Mapping[int, Iterable[int]]) -> None:
        """Drop all experts except these. experts_by_layer: layer -> expert ids."""
        ...

    def run(self, layer: int, parts: Sequence[CallPairs]) -> None:
        """Compute all pairs of all parts as one batch, without gate weights.

        Results on a GPU are there once its stream was waited for. Raises KeyError for an expert that is not
        loaded. Then nothing is written.
        """
        ...
