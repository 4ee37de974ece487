"""FlexGen's policy search: a linear program for each micro-batch size and number of micro-batches.

The source is Sheng et al., FlexGen, section 4.3, as in its public code, without the disk. The Mixtral
variant is that of MoE-Lightning's comparison: a layer's weights are those of all experts, its flops those
of one. A step first loads and then computes: Tgen = load + max(store, compute).

The constants fitted to a machine are known to three digits. The loss of small micro-batches, 0.7 % of the
flops for each halving below 64, is known to one digit. Two of the twelve published settings compare
policies that differ by 0.01 % under it. A loss of 0.69 % puts all twelve in their published order; 0.70 %
and 0.68 % put eleven.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from moesaic.core.errors import ConfigError
from moesaic.cost.hardware import GIB, Hardware
from moesaic.cost.sizes import GroupedQuery, ModelSizes
from moesaic.policy.offloading.policies import Workload

SHARE = 0.8
"""Usable share of each memory."""
HALVING = 0.0069
"""Share of flops lost for each halving of a micro-batch below 64."""


@dataclass(frozen=True)
class Constants:
    """The constants that FlexGen fits to a machine: bytes, bytes/s, flops/s."""

    gpu_memory: float
    cpu_memory: float
    load: float
    """Bytes/s from RAM to GPU."""
    store: float
    """Bytes/s from GPU to RAM."""
    prefill: float
    """Flops/s of products in prefill, on the GPU."""
    decode: float
    prefill_attention: float
    decode_attention: float
    cpu_attention: float

    @classmethod
    def from_hardware(cls, hardware: Hardware, flops_per_byte: float) -> Constants:
        """The constants from a machine's peaks.

        flops_per_byte: flops of attention for each byte of cache that it reads. Raises ConfigError if no
        processor computes beside the slow level.
        """
        fast, slow = hardware.fast, hardware.slow
        if fast.processor is None or slow.processor is None:
            raise ConfigError.field(
                "--policy", "flexgen", "moe-lightning where the slow level cannot compute"
            )
        return cls(
            gpu_memory=fast.memory,
            cpu_memory=slow.memory,
            load=hardware.link.down_bandwidth,
            store=hardware.link.up_bandwidth,
            prefill=fast.processor.flops * fast.processor.prefill,
            decode=fast.processor.flops,
            prefill_attention=fast.processor.flops * fast.processor.prefill,
            decode_attention=min(fast.processor.flops, fast.bandwidth * flops_per_byte),
            cpu_attention=min(slow.processor.flops, slow.bandwidth * flops_per_byte),
        )


def _make_constants(gpu: float, load: float, *rates: float) -> Constants:
    return Constants(gpu * GIB, 192 * GIB, load * GIB, 2.015 * GIB, *(rate * 1e12 for rate in rates))


FITTED_CONSTANTS = {
    "t4": _make_constants(16, 5.43, 3.51, 1.48, 1.34, 0.93, 4.50),
    "l4": _make_constants(24, 5.44, 0.651, 0.603, 0.633, 0.563, 3.79),
}
"""The constants that MoE-Lightning's authors fitted.

FlexGen's measured throughput was 1 to 10 times off these predictions.
"""


@dataclass(frozen=True)
class FlexGenPolicy:
    """FlexGen's policy. `weights`, `cache` and `hidden` are shares on the GPU; the rest is in RAM.

    Seconds are those of one layer.
    """

    micro_batch: int
    micro_batches: int
    weights: float
    cache: float
    hidden: float
    prefill_seconds: float
    decode_seconds: float
    throughput: float
    """Tokens/s, including prefill."""

    @property
    def batch(self) -> int:
        return self.micro_batch * self.micro_batches


def price(
    model: ModelSizes, machine: Constants, workload: Workload, mu: int, count: int
) -> FlexGenPolicy | None:
    """The policy with the best shares for `count` micro-batches of `mu` requests, or None if nothing fits.

    Example: Mixtral 8x7B on the T4 as fitted, with 418 prompt and 32 generated tokens. 40 micro-batches of
    32 give 13.3 tokens/s, with a share of 0.07 of the weights on the GPU.
    """
    from scipy.optimize import linprog

    job, generate = _Job(model, workload, mu, mu * count), workload.generate
    bounds = np.array([*_times(job, machine), *_memory(job, machine)])
    bounds /= np.abs(bounds[:, :5]).max(axis=1, keepdims=True)
    cost = [0, 0, 0, model.layers, model.layers * (generate - 1)]
    limits = [(0, 1)] * 3 + [(0, None)] * 2
    solved = linprog(cost, bounds[:, :5], -bounds[:, 5], bounds=limits, method="highs")
    if solved.status != 0:
        return None
    weights, cache, hidden, before, step = (float(value) for value in solved.x)
    throughput = mu * count * generate / float(solved.fun)
    return FlexGenPolicy(mu, count, weights, cache, hidden, before, step, throughput)


def search(model: ModelSizes, machine: Constants, workload: Workload, walk: bool = False) -> FlexGenPolicy:
    """The best policy with micro-batches of 1, 2, 3, 4, 8, 16, ... requests.

    Of equal policies the first wins. Each size has its best number of micro-batches. walk: increase that
    number one by one until the throughput falls, as FlexGen does. Otherwise bisection finds that point,
    since the throughput rises up to it. Raises ConfigError if nothing fits.
    """
    best: FlexGenPolicy | None = None
    for mu in _grid():

        def price_count(count: int, mu: int = mu) -> FlexGenPolicy | None:
            return price(model, machine, workload, mu, count)

        policy = _walk(price_count) if walk else _climb(price_count)
        if policy is None:
            break
        if best is None or policy.throughput > best.throughput:
            best = policy
    if best is None:
        raise ConfigError(f"{model.name} does not fit on this machine by FlexGen's model")
    return best


def _grid() -> Iterator[int]:
    yield from (1, 2, 3)
    yield from (4 << power for power in itertools.count())


def _walk(price_count: Callable[[int], FlexGenPolicy | None]) -> FlexGenPolicy | None:
    best = None
    for count in itertools.count(1):
        policy = price_count(count)
        if policy is None or (best is not None and policy.throughput < best.throughput):
            return best
        best = policy
    raise AssertionError


def _climb(price_count: Callable[[int], FlexGenPolicy | None]) -> FlexGenPolicy | None:
    """The price of the last count that is no worse than the count before it, found by bisection."""
    best = price_count(1)
    if best is None:
        return None
    low, high = 1, 2
    while (policy := _better(price_count, high)) is not None:
        low, high, best = high, 2 * high, policy
    while high - low > 1:
        middle = (low + high) // 2
        policy = _better(price_count, middle)
        if policy is None:
            high = middle
        else:
            low, best = middle, policy
    return best


def _better(price_count: Callable[[int], FlexGenPolicy | None], count: int) -> FlexGenPolicy | None:
    """The price of `count`, or None if it does not fit or is worse than that of one less."""
    policy, previous_policy = price_count(count), price_count(count - 1)
    is_better = (
        policy is not None and previous_policy is not None and policy.throughput >= previous_policy.throughput
    )
    return policy if is_better else None


# ---- the linear program: rows of factors of (weights, cache, hidden, Tpre, Tgen) and a constant, sum <= 0


class _Job:
    """The bytes and flops of one layer."""

    def __init__(self, model: ModelSizes, workload: Workload, mu: int, batch: int) -> None:
        if not isinstance(model.attention, GroupedQuery):
            raise ConfigError(f"{model.name}: FlexGen's model covers only grouped-query attention")
        attention, s, n = model.attention, workload.prompt, workload.generate
        self.model, self.heads, self.prompt, self.generate = model, attention.heads, s, n
        self.mu, self.batch = mu, batch
        projections = sum(attention.projection_sizes(model.hidden))
        self.weights = model.number * projections + model.experts * model.expert_bytes
        self.token_flops = 2.0 * (projections + model.expert)
        self.number = model.row_number
        """Bytes of one number of a row."""
        self.row = self.number * model.hidden
        """Bytes of one token's hidden state."""
        self.cache_bytes = model.cache(1, workload.cache_number)
        """Bytes of one token's keys and values."""
        self.prefill_attention = 4.0 * batch * s * s * model.hidden
        self.decode_attention = 4.0 * batch * (s + n / 2) * model.hidden
        self.speed = max(0.1, 1 - HALVING * max(0.0, math.log2(64 / mu)))


Row = tuple[float, float, float, float, float, float]


def _times(job: _Job, machine: Constants) -> Iterator[Row]:
    """Constraints on time: Tpre >= load, store and compute; Tgen >= load + store and load + compute."""
    weights, prompts = job.weights, job.row * job.prompt * job.batch
    cache, rows = job.cache_bytes * (job.prompt + 1) * job.batch, job.row * job.batch
    load, store = machine.load, machine.store
    compute = job.batch * job.prompt * job.token_flops / machine.prefill
    compute += job.prefill_attention / machine.prefill_attention
    yield -weights / load, 0, -prompts / load, -1, 0, (weights + prompts) / load
    yield 0, -cache / store, -prompts / store, -1, 0, (cache + prompts) / store
    yield 0, 0, 0, -1, 0, compute / job.speed
    step = job.batch * job.token_flops / machine.decode / job.speed
    gpu = job.decode_attention / machine.decode_attention / job.speed
    cpu = job.decode_attention / machine.cpu_attention / job.speed
    load_seconds, store_seconds = (weights + rows) / load, rows / store
    yield -weights / load, 0, -rows / load - store_seconds, 0, -1, load_seconds + store_seconds
    yield -weights / load, gpu - cpu, -rows / load, 0, -1, load_seconds + step + cpu


def _memory(job: _Job, machine: Constants) -> Iterator[Row]:
    """Constraints on memory: the peak of both memories in prefill, and of RAM in decode."""
    model, mu, s, n, layers = job.model, job.mu, job.prompt, job.generate, job.model.layers
    weights, batch_rows = job.weights, job.row * s * mu
    prompts, rows = job.row * s * job.batch, job.row * job.batch
    cache, prompt_cache = (job.cache_bytes * tokens * job.batch * layers for tokens in (s + n, s))
    scores = job.number * job.heads * mu
    workspace = 9 * batch_rows + scores * s * s + job.number * mu * s * model.expert_width
    gpu, cpu = machine.gpu_memory * SHARE, machine.cpu_memory * SHARE
    yield (
        weights * (layers - 2),
        cache,
        prompts - batch_rows,
        0,
        0,
        2 * weights + batch_rows + workspace - gpu,
    )
    cpu_bytes = weights * (layers + 1) + prompts + batch_rows
    yield -weights * (layers + 1), -prompt_cache, -prompts - batch_rows, 0, 0, cpu_bytes + prompt_cache - cpu
    cpu_bytes = weights * layers + rows + cache + scores * (s + n) + job.row * mu
    yield -weights * layers, -cache, -rows, 0, 0, cpu_bytes - cpu
