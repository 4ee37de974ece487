"""How a worker runs a model that is larger than its fast memory: a planned policy, as settings."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Offload:
    """A policy of `policy.offloading.policies` and the levels that it is carried out on.

    On a GPU the fast level is its memory, over RAM and the CPU. On a CPU without a link the fast level is
    memory of this process and the slow one the checkpoint's disk. With one both are memory of this machine:
    one core is the fast processor, another the slow one, and what goes between them is copied at the link's
    speed.
    """

    fast_memory: int
    """Bytes of weights, cache and rows on the fast level, at most."""
    schedule: str
    micro_batch: int
    """Requests."""
    micro_batches: int
    prefill_rows: int
    """Rows of a micro-batch in a pass with prompts, at most."""
    static_experts: int = 0
    """Of each layer, always on the fast level."""
    likely_experts: int = 0
    """on-demand: of each layer, that come before its gates have spoken, at most."""
    slow_attention: bool = False
    slow_cache: float = 0.0
    """Share of the cache on the slow level."""
    fast_residual: bool = True
    """Rows stay on the fast level between the layers of a pass with prompts."""
    padded: int | None = None
    """Tokens that each prompt is padded to; None: nothing is."""
    logit_rows: int | None = None
    """Rows whose logits are in memory at one time, at most; None: all of a step's."""
    link: float | None = None
    """Bytes/s in each direction."""

    @property
    def batch(self) -> int:
        """Requests."""
        return self.micro_batch * self.micro_batches
