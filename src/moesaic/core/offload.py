"""The settings of a worker that runs a model larger than its fast memory, as the planner chose them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moesaic.core.curves import Curve

AUTO_LIST, NO_LIST = "auto", "off"
"""Values of `Offload.hot_experts` that are no file."""


@dataclass(frozen=True)
class Choice:
    """A way to compute decode steps, and its price at several loads."""

    schedule: str
    micro_batch: int
    """Requests of a micro-batch."""
    likely_experts: int
    """Experts of each layer that are loaded before its gate has run, as in `Offload.likely_experts`."""
    seconds: tuple[float, ...]
    """Predicted seconds of a decode step at each load of `Offload.loads`."""


@dataclass(frozen=True)
class Load:
    """Requests that are computed together."""

    requests: int
    context: int
    """Mean tokens that a request has in the cache."""


@dataclass(frozen=True)
class SplitPrices:
    """What the experts of a layer cost on either level. By it they are split between two processors."""

    load: float
    """Seconds to bring one expert to the fast level."""
    fast: Curve
    """Seconds in which the fast processor computes an expert, by its rows."""
    slow: Curve
    """The same of the slow processor."""

    @classmethod
    def from_json(cls, parts: Mapping[str, Any]) -> SplitPrices:
        """Prices from parsed JSON."""
        fast, slow = (parts[level] for level in ("fast", "slow"))
        return cls(
            parts["load"],
            *(Curve(tuple(map(tuple, one["points"])), one["per_expert"]) for one in (fast, slow)),
        )


@dataclass(frozen=True)
class Division:
    """How memory is divided between experts that stay on the fast level and the KV cache."""

    residents: int
    """Experts of each layer that may stay."""
    num_blocks: int
    """Blocks of the KV cache."""


@dataclass(frozen=True)
class DivisionPrices:
    """Predictions that decide how memory is divided anew while a server runs."""

    requests: tuple[int, ...]
    """Numbers of requests, ascending."""
    compute_seconds: tuple[float, ...]
    """Predicted seconds of a decode step of so many requests that reads no expert."""
    read_seconds: float
    """Predicted seconds to read one expert."""
    layers: int
    """Layers with routed experts."""
    num_experts: int
    """Experts of each of them."""
    top_k: float
    """Experts that a row chooses in each of them, in the mean."""

    @classmethod
    def from_json(cls, parts: Mapping[str, Any]) -> DivisionPrices:
        """Prices from parsed JSON."""
        pairs = {name: tuple(parts[name]) for name in ("requests", "compute_seconds")}
        return cls(**{**parts, **pairs})


@dataclass(frozen=True)
class ExpertReads:
    """What reading experts costs now, as the steps of a worker measured it."""

    seconds: float
    """Seconds to read one expert."""
    shares: tuple[float, ...]
    """[E] share of choices that the hottest, the second and so on expert of a layer has; mean of layers."""


@dataclass(frozen=True)
class BlockNeeds:
    """KV blocks that requests need now and for their next tokens."""

    running: tuple[int, ...] = ()
    """Blocks of each request that runs, in order of arrival. A block that several share counts for each."""
    running_blocks: int = 0
    """Blocks of all of them together. A shared block counts once."""
    waiting: tuple[int, ...] = ()
    """Blocks of each request that waits and may be admitted, in order of arrival."""
    used_end: int = 0
    """Number of the highest block that is used, plus one. A smaller cache would lose that block."""


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
    """Maximum experts of each layer that the schedule on-demand loads before the layer's gate has run."""
    slow_attention: bool = False
    """Whether attention runs on the slow processor."""
    slow_cache: float = 0.0
    """Share of the KV cache on the slow level, 0 to 1."""
    fast_residual: bool = True
    """Whether rows stay on the fast level between the layers of a pass with prompts."""
    padded_prompt_len: int | None = None
    """Number of tokens to which each prompt is padded. None means no padding."""
    logit_rows: int | None = None
    """Maximum number of rows whose logits are in memory at once. None means all rows of a step."""
    link: float | None = None
    """Speed of the link in bytes/s in each direction, or None."""
    hot: bool = False
    """Whether an expert that is chosen often takes the place of one that stays and is chosen less often."""
    hot_experts: str = NO_LIST
    """File of the model's hot experts, which chooses those that stay first. `auto`: the one in the cache
    folder; `off`: none. With `hot` it is also written."""
    prices: SplitPrices | None = None
    """The prices by which the schedule `split` decides who computes an expert. The others have none."""
    loads: tuple[Load, ...] = ()
    """The loads for which `choices` have prices. Empty: all decode steps are computed as above."""
    choices: tuple[Choice, ...] = ()
    """Ways to compute decode steps, of which the load decides. All of them fit into the memory."""
    division: DivisionPrices | None = None
    """Predictions that decide how memory is divided anew between steps. None: it stays as planned."""

    @classmethod
    def from_json(cls, parts: Mapping[str, Any]) -> Offload:
        """Settings from parsed JSON."""
        loads = tuple(Load(**one) for one in parts["loads"])
        choices = tuple(Choice(**one | {"seconds": tuple(one["seconds"])}) for one in parts["choices"])
        prices = None if parts["prices"] is None else SplitPrices.from_json(parts["prices"])
        division = None if parts["division"] is None else DivisionPrices.from_json(parts["division"])
        return cls(**{**parts, "loads": loads, "choices": choices, "prices": prices, "division": division})

    @property
    def batch(self) -> int:
        """Requests of a batch."""
        return self.micro_batch * self.micro_batches
