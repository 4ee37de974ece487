"""Computes the bytes that a policy takes in the memory of both levels."""

from __future__ import annotations

import math

from moesaic.cost.hardware import GIB, Hardware, Level
from moesaic.cost.sizes import ModelSizes
from moesaic.policy.offloading.policies import PREFILL_ROW_SHARES, Policy, Workload

PREFILL_ROWS = 8192
"""Maximum number of rows of a micro-batch in prefill, unless one prompt is longer. So many rows are
compute-bound."""


class Footprint:
    """Computes footprints for one model, machine and workload."""

    def __init__(self, model: ModelSizes, hardware: Hardware, workload: Workload) -> None:
        self.model, self.hardware, self.workload = model, hardware, workload
        self._token = model.cache(1, workload.cache_number)
        self._expert = model.expert_bytes
        attention = model.attention.query + model.attention.cache_width + model.attention.output
        expert_numbers, kept_numbers = _count_row_numbers(model)
        feed_forward_numbers = max(expert_numbers, 2 * model.shared_width, 2 * model.dense_width)
        self._row = (attention + feed_forward_numbers + kept_numbers) * model.row_number
        """Maximum bytes of one row between the operations of a layer.

        The memory that attention used is kept for the next layer.
        """

    def fast(self, policy: Policy) -> dict[str, float]:
        """Maximum bytes on the fast level in prefill or decode, by content."""
        model, num_streamed = self.model, self.model.experts - policy.static_experts
        requests = self.prefill_requests(policy)
        cache = self.workload.cache_tokens * self._token * (1 - policy.slow_cache)
        moving = 2 * max(requests, 0 if policy.slow_attention else policy.micro_batch)
        kept_requests = policy.batch if policy.fast_residual else 2 * requests
        prompts = kept_requests * self.workload.prompt * model.hidden * model.row_number
        return {
            "all but routed experts": model.other_bytes,
            "static experts": policy.static_experts * self._expert * model.moe_layers,
            "two layers of streamed experts": 2 * num_streamed * model.largest_expert_bytes,
            **({"an expert as it is read": model.staging} if model.staging else {}),
            "cache": cache * policy.batch * model.layers
            + moving * self.workload.cache_tokens * self._token * policy.slow_cache,
            **({"states": policy.batch * (model.page + model.seat)} if model.page else {}),
            "rows": max(prompts, 2 * policy.batch * model.hidden * model.row_number),
            "workspace": self._workspace(policy),
        }

    def slow(self, policy: Policy) -> dict[str, float]:
        """Maximum bytes on the slow level, by content."""
        model, expert = self.model, self._expert if policy.computes_there else self.model.read_bytes
        streamed_bytes = (model.experts - policy.static_experts) * expert
        cache = self.workload.cache_tokens * self._token * policy.slow_cache
        rows = 0 if policy.fast_residual else policy.batch * self.workload.prompt
        return {
            "experts": streamed_bytes * model.moe_layers,
            "pinned pages": round_pinned(streamed_bytes) if self.hardware.link.staging is not None else 0.0,
            "cache": cache * policy.batch * model.layers,
            "rows": rows * model.hidden * model.row_number,
        }

    def fits(self, policy: Policy) -> bool:
        fast, slow = self.hardware.fast.room, self.hardware.slow.room
        return sum(self.fast(policy).values()) <= fast and sum(self.slow(policy).values()) <= slow

    def prefill_requests(self, policy: Policy) -> int:
        """Maximum number of requests of one micro-batch in prefill.

        A single request may exceed its share of memory.
        """
        rows = min(PREFILL_ROWS, self._prefill_rows(policy.prefill_share))
        return max(1, min(policy.batch, int(rows // self.workload.prompt)))

    @property
    def prefill_shares(self) -> tuple[float, ...]:
        """The PREFILL_ROW_SHARES that differ in effect, so that a search should try them.

        If the first one has room for PREFILL_ROWS, no other is needed. If several shares allow equally many
        prompts at once, one of them is enough.
        """
        if self._prefill_rows(PREFILL_ROW_SHARES[0]) >= PREFILL_ROWS:
            return PREFILL_ROW_SHARES[:1]
        sizes = {
            max(1, int(self._prefill_rows(one) // self.workload.prompt)): one
            for one in PREFILL_ROW_SHARES[::-1]
        }
        return tuple(sorted(sizes.values(), reverse=True))

    def _prefill_rows(self, share: float) -> float:
        return share * self.hardware.fast.room / self._row

    def _workspace(self, policy: Policy) -> float:
        """Bytes of rows between operations, for the larger micro-batch of prefill and decode, and of
        logits."""
        requests = self.prefill_requests(policy)
        rows = max(requests * self.workload.prompt, policy.micro_batch)
        return rows * self._row + max(requests, policy.micro_batch) * self.model.vocab * 4


def _count_row_numbers(model: ModelSizes) -> tuple[float, float]:
    """How many numbers one row has at most inside its experts, and how many outside them.

    A rank of a group may compute the experts of all pairs, with the input and the answer of each. It also
    has the answers to its own rows, which may be all rows, and sums.
    """
    if model.ranks == 1:
        return model.top_k * (model.hidden + 2 * model.expert_width), 2 * model.hidden
    pairs = model.top_k * model.ranks
    return pairs * 2 * (model.hidden + model.expert_width), (6 + pairs) * model.hidden


def round_pinned(size: float) -> float:
    """Bytes that pinned memory of this size really takes: torch rounds up to a power of two."""
    return 2.0 ** math.ceil(math.log2(size)) if size > 0 else 0.0


def explain_misfit(model: ModelSizes, hardware: Hardware, workload: Workload) -> str:
    """A message that names the smallest policy's needs and the level where it does not fit."""
    slow = hardware.slow.processor is not None
    policy = Policy("cgopipe", 1, 1, slow, slow_cache=float(slow), fast_residual=not slow)
    footprint = Footprint(model, hardware, workload)
    problems = []
    for level, contents in ((hardware.fast, footprint.fast(policy)), (hardware.slow, footprint.slow(policy))):
        need = sum(contents.values())
        if need > level.room:
            problems.append(_describe_shortage(level, need, contents))
    return f"{model.name} does not fit on {hardware.name}: " + (
        "; ".join(problems) or "no policy that was searched does"
    )


def _describe_shortage(level: Level, need: float, contents: dict[str, float]) -> str:
    largest = max(contents, key=lambda name: contents[name])
    return (
        f"one request needs {_size(need)} of {level.name} ({largest}: {_size(contents[largest])}), "
        f"and {_size(level.room)} of it is usable"
    )


def _size(count: float) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{1024 * count / GIB:.1f} MiB"
