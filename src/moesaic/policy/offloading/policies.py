"""A job and a policy for it: which processor computes what, and which level has which data.

A policy has only whole experts, whole pages and whole cache blocks, so what is priced can be run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from moesaic.core.errors import ConfigError
from moesaic.policy.offloading.pipeline import Schedule
from moesaic.policy.offloading.tasks import Shape

PREFILL_ROW_SHARES = (1 / 8, 1 / 32)
"""Shares of the fast level that the rows of a prefill micro-batch may take, unless one prompt needs more.

A smaller share leaves more for cache and experts. A larger one makes matrix products larger and faster.
"""
BLOCK = 16
"""Tokens in one block of the cache. A block is on one level."""


CHOSEN_SHARE = 0.8
"""Maximum share of a layer's experts that is loaded by choice in a pass with prompts."""


@dataclass(frozen=True)
class Workload:
    """A job: requests that all have the same lengths."""

    prompt: int
    """Tokens of each prompt."""
    generate: int
    cache_number: float = 2.0
    """Bytes of one cached number: 2 for bf16, a little over 1 for int8 and over 0.5 for int4, with their
    scales."""
    unfilled: int = 0
    """Mean number of unused tokens in a request's last cache block."""

    def __post_init__(self) -> None:
        for name in ("prompt", "generate"):
            if getattr(self, name) < 1:
                raise ConfigError.field(name, getattr(self, name), "an integer of at least 1")

    @property
    def context(self) -> int:
        """Final length of a request in tokens."""
        return self.prompt + self.generate

    @property
    def cache_tokens(self) -> int:
        """Tokens of cache that a request takes at the end, including unused ones."""
        return self.context + self.unfilled

    @property
    def blocks(self) -> int:
        """Cache blocks of a request at the end."""
        return math.ceil(self.context / BLOCK)


@dataclass(frozen=True)
class Policy:
    """A policy: MoE-Lightning's (N, mu, A_g, F_g, r_w, r_c), rounded to what can be run."""

    schedule: Schedule
    micro_batch: int
    """Number of requests in a micro-batch: mu."""
    micro_batches: int
    slow_attention: bool
    """True: attention runs on the slow level's processor, and all of the cache is there (A_g = 0)."""
    static_experts: int = 0
    """Number of experts of each layer that are always on the fast level: r_w in whole experts."""
    slow_cache: float = 1.0
    """Share of each request's cache on the slow level, in whole blocks: 1 - r_c."""
    fast_residual: bool = True
    """True: the rows of all prompts stay on the fast level between the layers of prefill."""
    likely_experts: int = 0
    """Maximum number of each layer's experts that the on-demand schedule loads before the gate has chosen."""
    prefill_share: float = PREFILL_ROW_SHARES[0]
    """Share of the fast level for the rows of a prefill micro-batch; one of PREFILL_ROW_SHARES."""

    @property
    def batch(self) -> int:
        """Number of requests in a batch: N."""
        return self.micro_batch * self.micro_batches

    @property
    def in_place(self) -> bool:
        """True if experts on the slow level are computed there in decode: F_g = 0."""
        return self.schedule == "in-place"

    @property
    def computes_there(self) -> bool:
        """True if the slow processor computes experts in decode, all on its level or some."""
        return self.schedule in ("in-place", "split")

    @property
    def pages(self) -> int:
        """Number of pages of a layer's streamed weights: one for each micro-batch with CGOPipe, otherwise
        one."""
        return self.micro_batches if self.schedule == "cgopipe" else 1


def shape_of(policy: Policy, experts: int, layers: int, count: int, prompts: bool = False) -> Shape:
    """The shape of a pass of `count` micro-batches over layers that all have `experts` routed experts.

    Both the planner and the executor use it. prompts: True for prefill, where each micro-batch loads one
    page.
    """
    away = experts - policy.static_experts
    streams = away > 0 and (prompts or policy.schedule not in ("in-place", "on-demand", "split"))
    paged = count if prompts or policy.schedule == "cgopipe" else 1
    return Shape(
        layers=layers,
        micro_batches=count,
        pages=paged if streams else 0,
        slow_attention=policy.slow_attention,
        cache_moves=policy.slow_cache > 0,
        slow_experts=away > 0,
        fast_experts=policy.static_experts > 0,
        guesses=policy.likely_experts > 0 and not prompts,
    )


def max_rows_by_choice(num_experts: int, top_k: int) -> int:
    """Maximum rows of a pass that loads the experts that its gates choose, and not all of each layer.

    Rows that choose evenly then need at most CHOSEN_SHARE of the experts. Real ones need fewer. With more
    rows all experts are loaded, because that does not wait for the gates.

    Example: 8 of 128 experts. 24 rows choose 79 % of them.
    """
    if top_k >= num_experts:
        return 0
    return int(math.log(1 - CHOSEN_SHARE) / math.log(1 - top_k / num_experts))


def slow_share(workload: Workload, fast: float) -> float:
    """The share of the cache that stays on the slow level, in whole blocks, if a share `fast` fits on the
    fast one.

    Example: of 104 tokens half fits. 3 of 7 blocks, 48 tokens, are on the fast level, so 0.538 stay.
    """
    tokens = min(math.floor(fast * workload.blocks) * BLOCK, workload.context)
    return 1 - tokens / workload.context
