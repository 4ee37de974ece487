"""The settings of a worker that runs a model larger than its fast memory, as the planner chose them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Offload:
    """A policy of `policy.offloading.policies`, and the memory levels that run it.

    On a GPU the fast level is its memory, and the slow level is RAM with the CPU. On a CPU without `link` the
    fast level is memory of this process, and the slow one is the checkpoint's disk. On a CPU with `link` both
    are memory of this machine. Then one core is the fast processor and another the slow one. Data is copied
    between them at the link's speed.
    """

    fast_memory: int
    """Maximum bytes of weights, cache and rows on the fast level."""
    schedule: str
    micro_batch: int
    """Requests of a micro-batch."""
    micro_batches: int
    """Number of micro-batches in a batch."""
    prefill_rows: int
    """Maximum rows of a micro-batch in a pass with prompts."""
    static_experts: int = 0
    """Experts of each layer that stay on the fast level."""
    likely_experts: int = 0
    """For on-demand: maximum experts of each layer that are loaded before its gate has run."""
    slow_attention: bool = False
    """Whether attention runs on the slow processor."""
    slow_cache: float = 0.0
    """Share of the KV cache on the slow level, 0 to 1."""
    fast_residual: bool = True
    """Whether rows stay on the fast level between the layers of a pass with prompts."""
    padded: int | None = None
    """Number of tokens to which each prompt is padded. None means no padding."""
    logit_rows: int | None = None
    """Maximum number of rows whose logits are in memory at once. None means all rows of a step."""
    link: float | None = None
    """Speed of the link in bytes/s in each direction, or None."""

    @property
    def batch(self) -> int:
        """Requests of a batch."""
        return self.micro_batch * self.micro_batches
