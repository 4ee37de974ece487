"""MoE-Lightning's own policy search, which produced its published policies.

The paper calls it a mixed-integer program. It enumerates micro-batch sizes mu and their number. With both
fixed, only w is free: the share of expert weights that stays on the GPU. It has a closed form. Attention
runs on the CPU and everything else on the GPU. Prefill is not part of the objective. The paper's
simplifications are kept:

- Hidden states and the projections around attention cost nothing. A micro-batch reads all experts.
- The CPU's attention counts the flops of scores at the full context s + n, and not those of the weighted
  sum.
- Tensor parallelism multiplies memory, bandwidth and flops of the GPU, but not the link.
- w is a real number. The engine keeps int(experts * w) whole experts; for Mixtral that is none below 1/8.

"GB" means 2^30 bytes, and numbers are fp16. moesaic itself plans with `policy.offloading.planner`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from moesaic.core.errors import ConfigError
from moesaic.cost.hardware import GIB, Hardware
from moesaic.cost.sizes import GroupedQuery, ModelSizes

GPU_SHARE, CPU_SHARE, WORKSPACE = 0.86, 0.8, 1.2
"""The usable shares of GPU and CPU memory, and the factor for workspaces."""
EQUAL = 1 - 1e-9
"""Throughputs count as equal if their ratio is above this."""


@dataclass(frozen=True)
class Setting:
    """The input of a search. The GPU of `hardware` is one of `gpus` equal ones."""

    model: ModelSizes
    hardware: Hardware
    prompt: int
    generate: int
    gpus: int = 1
    residual_offloaded: bool = False
    """True: the residuals of all prompts are not kept on the GPU. The padded L4 policies come from this
    variant."""


@dataclass(frozen=True)
class Priced:
    """A policy with the prediction of the published model.

    Seconds are those of one layer, bytes are peaks.
    """

    micro_batch: int
    micro_batches: int
    static: float
    """Share of the expert weights that stays on the GPU."""
    link: float
    gpu: float
    cpu: float
    gpu_bytes: float
    cpu_bytes: float
    throughput: float
    """Generated tokens/s in decode, without prefill."""
    fits: bool

    @property
    def batch(self) -> int:
        return self.micro_batch * self.micro_batches

    @property
    def layer_seconds(self) -> float:
        return max(self.link, self.gpu, self.cpu)

    @property
    def bottleneck(self) -> str:
        named = {"link": self.link, "GPU": self.gpu, "CPU": self.cpu}
        return max(named, key=lambda name: named[name])


def price(setting: Setting, mu: int, count: int) -> Priced:
    """Predict `count` micro-batches of `mu` requests with the best w.

    If nothing fits, w is clipped to 0 .. 1.

    Example: Mixtral 8x7B on the L4 with s = 77, n = 32 and 14 micro-batches of 324. w is 0.0559, a layer
    takes 0.1549 s, and decode reaches 944.66 tokens/s.
    """
    model, hardware = setting.model, setting.hardware
    layers, batch = model.layers, mu * count
    experts = _experts(model)
    fixed, kept = _gpu_fixed(setting, mu, batch), _cpu_kept(setting, batch)
    most = (GPU_SHARE * hardware.fast.memory * setting.gpus - fixed - 2 * experts) / (experts * (layers - 2))
    least = 1 - (CPU_SHARE * hardware.slow.memory - kept) / (experts * (layers + 2))
    static = min(max(most, 0.0), 1.0)
    link = experts * (1 - static) / hardware.link.down_bandwidth
    gpu, cpu = count * _gpu_seconds(setting, mu), count * _cpu_seconds(setting, mu)
    steps = (setting.generate - 1) * layers * max(link, gpu, cpu)
    return Priced(
        micro_batch=mu,
        micro_batches=count,
        static=static,
        link=link,
        gpu=gpu,
        cpu=cpu,
        gpu_bytes=fixed + experts * (layers * static + 2 * (1 - static)),
        cpu_bytes=kept + experts * (layers + 2) * (1 - static),
        throughput=batch * setting.generate / steps,
        fits=most >= 0 and least <= static,
    )


def grid() -> Iterator[int]:
    """The micro-batch sizes of the search: 1, 2, 3, 4, then 36, 68, 100, ..."""
    yield from range(1, 4)
    yield from itertools.count(4, 32)


def search(setting: Setting) -> Priced:
    """Find the best policy. Raises ConfigError if nothing fits.

    For each size of the grid, the number of micro-batches grows until nothing fits or the throughput falls.
    Of equal policies the first wins. In the published code the last wins. If the GPU is the limit there,
    equal policies differ by rounding errors, so its result is any policy of a `plateau`.
    """
    best: Priced | None = None
    for mu in grid():
        previous = 0.0
        for count in itertools.count(1):
            found = price(setting, mu, count)
            if not found.fits or found.throughput < previous * EQUAL:
                break
            previous = found.throughput
            if best is None or found.throughput * EQUAL > best.throughput:
                best = found
        if not previous:  # Not even one micro-batch fits, so no larger one does.
            break
    if best is None:
        raise ConfigError(
            f"{setting.model.name} does not fit on {setting.hardware.name}: its published model needs "
            f"at least {price(setting, 1, 1).gpu_bytes / GIB:.1f} GiB of GPU memory"
        )
    return best


def plateau(setting: Setting, found: Priced) -> int:
    """The largest number of micro-batches that fits and has the same predicted throughput."""
    count = found.micro_batches
    while True:
        more = price(setting, found.micro_batch, count + 1)
        if not more.fits or abs(more.throughput / found.throughput - 1) > 1 - EQUAL:
            return count
        count += 1


def prefill_seconds(setting: Setting, batch: int) -> float:
    """Seconds of prefill for the whole batch, by the same simplifications.

    The published search leaves prefill out. Weights cross the link once a layer. Each token passes top_k
    experts on the GPU, which reaches its `prefill` share of the peak. Example: Mixtral 8x7B on the T4 with
    504 prompts of 418 tokens takes 73 s.
    """
    model, processor = setting.model, setting.hardware.fast.processor
    assert processor is not None
    flops = 2.0 * batch * setting.prompt * model.top_k * model.expert
    compute = flops / (processor.flops * processor.prefill * setting.gpus)
    return model.layers * max(compute, _experts(model) / setting.hardware.link.down_bandwidth)


def with_prefill(setting: Setting, found: Priced) -> float:
    """Generated tokens/s over prefill and decode. This is what the paper measured."""
    tokens = found.batch * setting.generate
    return tokens / (prefill_seconds(setting, found.batch) + tokens / found.throughput)


def _experts(model: ModelSizes) -> float:
    """Bytes of one layer's experts in fp16."""
    return 2.0 * model.experts * model.expert


def _gpu_fixed(setting: Setting, mu: int, batch: int) -> float:
    """Bytes on the GPU besides experts: projections, rows of the phase that needs more, and the workspace
    of prefill."""
    model, gpus, s = setting.model, setting.gpus, setting.prompt
    attention, hidden = _grouped(model), model.hidden
    other = 2.0 * model.layers * sum(attention.projection_sizes(hidden))
    decode = 4.0 * hidden * batch * gpus
    rows = (
        8.0 * hidden * mu * s
        if setting.residual_offloaded
        else 4.0 * hidden * mu * s + 2.0 * hidden * batch * s
    )
    prefill = rows * (1 if setting.residual_offloaded else gpus) + 4.0 * s * attention.cache_width * mu
    workspace = WORKSPACE * 2 * mu * model.top_k * s * (hidden * gpus + 3 * model.expert_width)
    return other + max(decode, prefill) + workspace


def _cpu_kept(setting: Setting, batch: int) -> float:
    """Bytes in RAM besides experts: the cache, and the hidden states of all prompts."""
    s, cached = setting.prompt, _grouped(setting.model).cache_width
    cache = 2.0 * cached * (s + setting.generate) * batch * setting.model.layers
    return cache + 2.0 * setting.model.hidden * batch * s * setting.gpus


def _gpu_seconds(setting: Setting, mu: int) -> float:
    """Seconds of a micro-batch's experts in one layer.

    Output rows count the experts' inner width, as in the published code.
    """
    model, level = setting.model, setting.hardware.fast
    assert level.processor is not None
    flops = 2.0 * mu * model.top_k * model.expert
    moved = 2.0 * mu * (model.hidden + model.expert_width) + _experts(model)
    return max(flops / level.processor.flops, moved / level.bandwidth) / setting.gpus


def _cpu_seconds(setting: Setting, mu: int) -> float:
    """Seconds of a micro-batch's attention in one layer."""
    attention, level = _grouped(setting.model), setting.hardware.slow
    assert level.processor is not None
    context = setting.prompt + setting.generate
    flops = mu * context * attention.heads * (2 * attention.width + 2)
    moved = 2.0 * mu * (2 * attention.query + context * attention.cache_width)
    return max(flops / level.processor.flops, moved / level.bandwidth)


def _grouped(model: ModelSizes) -> GroupedQuery:
    if not isinstance(model.attention, GroupedQuery):
        raise ConfigError(f"{model.name}: the published model covers only grouped-query attention")
    return model.attention
