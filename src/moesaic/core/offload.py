"""How a worker computes a model that is larger than its fast memory: a planned policy, as settings."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Offload:
    """A policy of `policy.offloading.policies` and the memory levels that it uses.

    On a GPU the fast level is its memory; the slow level is RAM with the CPU. On a CPU without a link the
    fast level is memory of this process, and the slow level is the checkpoint's disk. With a link both
    levels are memory of this machine: one core is the fast processor, another core is the slow one, and
    copies between the levels run at the link's speed.
    """

    fast_memory: int
    """Maximum bytes of weights, cache and activations on the fast level."""
    schedule: str
    micro_batch: int
    """Requests in a micro-batch."""
    micro_batches: int
    prefill_rows: int
    """Maximum number of rows of a micro-batch in a pass with prompts."""
    static_experts: int = 0
    """Experts of each layer that are always on the fast level."""
    likely_experts: int = 0
    """on-demand: maximum number of each layer's experts that are loaded before its gate has chosen."""
    slow_attention: bool = False
    slow_cache: float = 0.0
    """Share of the cache on the slow level."""
    fast_residual: bool = True
    """True: rows stay on the fast level between the layers of a pass with prompts."""
    padded: int | None = None
    """Length that each prompt is padded to; None: no padding."""
    logit_rows: int | None = None
    """Maximum number of rows whose logits are in memory at one time; None: all rows of a step."""
    link: float | None = None
    """Speed of the link in each direction, in bytes/s; None: there is no link."""

    @property
    def batch(self) -> int:
        """Requests in a batch."""
        return self.micro_batch * self.micro_batches
