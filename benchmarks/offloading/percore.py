"""Two cores as two levels, measured one at a time by what the executor computes with: no schedule is run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch

from moesaic.config import ModelConfig
from moesaic.core.tokens import TokenBatch
from moesaic.cost import ops
from moesaic.cost.hardware import Hardware, Level, Link, Processor
from moesaic.cost.roofline import seconds
from moesaic.cost.sizes import ModelSizes
from moesaic.kernels import table
from moesaic.kernels.batch import AttentionBatch
from moesaic.kernels.weights import ExpertWeights
from moesaic.models import registry
from moesaic.models.kvcache.paged_kv import PagedKV
from moesaic.offload import link as links
from moesaic.offload.caches import MovingCache, ResidentCache
from moesaic.offload.lanes import Lanes
from moesaic.offload.parts import MicroBatch
from moesaic.planning.hardware import memory, products
from moesaic.planning.hardware.timing import Stopwatch
from moesaic.policy.offloading.tasks import Kind, Lane, Task
from moesaic.runtime import memory_levels
from moesaic.runtime.machine import allowed_cpus, available_memory
from moesaic.runtime.model_loading import LoadedModel, load_model

BLOCK = 16
BEYOND_CACHES = 256 << 20
"""Bytes that are gone through before the same ones come again."""
PACE = 1e9
"""Bytes/s of the link whose latency is measured: it sleeps, as a slow link does."""
HANDOVERS = 100
ROWS = (1, 2, 4, 8, 16, 32, 64, 256, 1024)
"""Numbers of rows of a matrix product."""
EACH = (1, 2, 4, 8, 16, 32, 64, 256)
"""Numbers of rows of each expert."""


def cores() -> tuple[int, int]:
    """The CPUs of the fast and of the slow level, as the executor has them."""
    cpus = allowed_cpus()
    return cpus[0], cpus[-1]


@dataclass(frozen=True)
class Bench:
    """A checkpoint's operations, one at a time."""

    path: Path
    loaded: LoadedModel
    watch: Stopwatch

    @classmethod
    def of(cls, path: Path, seconds: float) -> Bench:
        """seconds: duration of the measurement of each figure."""
        layout = registry.expert_layout(path, table.pick("cpu"), "cpu", "auto")
        loaded = load_model(ModelConfig(str(path), threads=1), None, layout)
        return cls(path, loaded, Stopwatch(seconds))

    def machine(self, sizes: ModelSizes, requests: int, context: int) -> Hardware:
        """Both levels, for micro-batches of so many requests; whoever knows the link's speed puts it in."""
        fast, slow = (self._level(cpu, sizes, requests, context) for cpu in cores())
        launch = self.launch()
        fast, slow = (
            replace(one, processor=one.processor and replace(one.processor, launch=launch))
            for one in (fast, slow)
        )
        link = Link(1.0, 1.0, latency=self.latency(requests * sizes.hidden), handover=self.handover())
        return Hardware("two cores", fast, slow, link)

    def latency(self, numbers: int) -> float:
        """Seconds of a short transfer besides its bytes."""
        link, rows = links.Link(PACE), _random(numbers)
        return max(self.watch.seconds(lambda: link.copy(rows)) - rows.nbytes / PACE, 0.0)

    def handover(self) -> float:
        """Seconds from the end of a task until one of another lane begins."""
        lanes = (Lane.FAST, Lane.SLOW)
        tasks = [Task(Kind.PRE, lanes[at % 2], 0, 0, (at - 1,) if at else ()) for at in range(HANDOVERS)]
        return self._listed(tasks, lambda task: None) / HANDOVERS

    def launch(self) -> float:
        """Seconds of a task that computes next to nothing, while the other core has such tasks too.

        Both lanes share the interpreter. Tasks are one row's gate, and attention to one token.
        """
        model, parts = self.loaded.model, _Turns(self, 1, 1)
        gate, part = next(block for block in model.blocks if block.is_routed), parts.part
        parts.resident.attend(0, model.blocks[0], part)
        assert part.attention_output is not None
        projected = gate.output_projection(part.attention_output)

        def do(task: Task) -> None:
            if task.lane is Lane.SLOW:
                parts.resident.attend(0, model.blocks[0], part)
            else:
                gate.gate(part.hidden, projected)

        kinds = ((Kind.POST_WITHOUT_EXPERTS, Lane.FAST), (Kind.ATTENTION, Lane.SLOW))
        tasks = [Task(kind, lane, 0, 0, ()) for _ in range(HANDOVERS) for kind, lane in kinds]
        return self._listed(tasks, do) / HANDOVERS

    def _listed(self, tasks: Sequence[Task], do: Callable[[Task], None]) -> float:
        """Seconds of a task list on the two cores."""
        one_core = self.loaded.kernels.one_core
        assert one_core is not None
        fast, slow = cores()
        setup = partial(memory_levels.on_core, allowed_cpus(), partial(one_core, slow))
        with Lanes(setup) as found, one_core(fast):
            return self.watch.seconds(lambda: found.run(tasks, do))

    def experts(self, rows: int) -> float:
        """Flops/s of all experts of a layer with so many rows each, in the checkpoint's mapped files."""
        model = self.loaded.model
        layers = [layer for layer, block in enumerate(model.blocks) if block.is_routed]
        held, count = self._held, model.spec.num_experts
        ids = torch.arange(count).repeat(rows)[:, None]
        states, turns = _random(len(ids), model.embedding.shape[1]), itertools.cycle(layers)
        took = self.watch.seconds(lambda: self.loaded.kernels.experts(held[next(turns)], states, ids))
        gate = held[layers[0]].matrices_of(0)[0]
        return 6.0 * len(ids) * gate.numel() / took

    def attention(self, requests: int, context: int, rows: int = 1) -> float:
        """Seconds of a layer's attention of the last `rows` tokens to caches on the same level."""
        block, parts = self.loaded.model.blocks[0], _Turns(self, requests, context, rows)
        return self.watch.seconds(lambda: parts.resident.attend(parts.layer(), block, parts.part))

    def transfer(self, requests: int, context: int, speed: float) -> float:
        """Seconds until a micro-batch's cache of a layer has come over the link."""
        parts = _Turns(self, requests, context)
        moving = parts.moving(speed)

        def bring() -> None:
            layer = parts.layer()
            moving.load(layer, parts.part)
            moving.take_back(parts.part.local.pop(layer))

        return self.watch.seconds(bring)

    def feed_forward(self, requests: int) -> float:
        """Seconds of a layer after attention: projection, gate and all experts that the rows choose."""
        model, held = self.loaded.model, self._held
        layers = [layer for layer, block in enumerate(model.blocks) if block.is_routed]
        decode = _Turns(self, requests, BLOCK)
        decode.resident.attend(0, model.blocks[0], decode.part)
        turns = itertools.cycle(layers)
        return self.watch.seconds(lambda: self._after(next(turns), decode.part, held))

    @cached_property
    def _held(self) -> dict[int, ExpertWeights]:
        """All experts, in the checkpoint's mapped files."""
        spec = self.loaded.model.spec
        layers = {layer: range(spec.num_experts) for layer in spec.moe_layers}
        return registry.load_experts(self.path, self.loaded.kernels, layers)

    def _after(self, layer: int, part: MicroBatch, held: dict[int, ExpertWeights]) -> None:
        block = self.loaded.model.blocks[layer]
        assert part.attention_output is not None
        gated = block.gate(part.hidden, block.output_projection(part.attention_output))
        assert gated.expert_ids is not None
        answers = self.loaded.kernels.experts(held[layer], gated.normed_rows, gated.expert_ids)
        block.merge(gated, block.dense(gated.normed_rows), answers)

    def _level(self, cpu: int, sizes: ModelSizes, requests: int, context: int) -> Level:
        kernels, dtype = self.loaded.kernels, products.dtype_name(self.loaded.dtype)
        assert kernels.one_core is not None
        shape = products.Sizes(sizes.hidden, sizes.expert_width, min(sizes.experts, 64), ROWS, 8192, 1)
        with kernels.one_core(cpu):
            bandwidth = memory.read(kernels, self.loaded.dtype, BEYOND_CACHES, self.watch)
            found = products.measure_rates(kernels, [self.loaded.dtype], shape, self.watch, lambda *_: None)
            decode, prompt = self.attention(requests, context), self.attention(1, context, context)
            experts = tuple((float(rows), self.experts(rows)) for rows in EACH)
        overlap = products.compute_overlap(found, dtype, bandwidth)
        peak = Processor(products.find_peak(found, dtype), overlap=overlap)
        level = Level(f"CPU {cpu}, {kernels.name}", available_memory(), bandwidth, peak)
        share = seconds(ops.attention(sizes, requests, context, 4.0), level) / decode
        long = _prompts(sizes, context, prompt, peak.flops * products.prefill_efficiency(found, dtype))
        prefill = min(long / peak.flops, 1.0)
        return replace(level, processor=replace(peak, attention=share, prefill=prefill, experts=experts))


def _prompts(sizes: ModelSizes, prompt: int, attention: float, rate: float) -> float:
    """Flops/s of all but experts over a prompt: products reach `rate`, attention takes so many seconds."""
    attended = ops.causal_attention(sizes, 1, prompt, 4.0)
    work = ops.query_key_value(sizes, prompt) + ops.output_projection(sizes, prompt)
    work += ops.gate(sizes, prompt) + ops.shared_experts(sizes, prompt)
    return (work + attended).flops / (work.flops / rate + attention)


class _Turns:
    """A micro-batch with `rows` of each request, and more layers of cache than a processor's cache holds."""

    def __init__(self, bench: Bench, requests: int, context: int, rows: int = 1) -> None:
        self._bench = bench
        layout, kernels = bench.loaded.model.spec.kv, bench.loaded.kernels
        blocks = requests * math.ceil(context / BLOCK)
        token = 4 * layout.kv_heads * (layout.key_width + layout.value_width * (not layout.value_in_key))
        self._layers = min(64, max(2, math.ceil(BEYOND_CACHES / (blocks * BLOCK * token))))
        cpu, dtype = torch.device("cpu"), torch.float32
        self._kv = PagedKV(layout, self._layers, blocks, BLOCK, dtype, cpu, kernels)
        for layer in range(self._layers):
            self._kv.keys(layer).fill_(0.01)
            self._kv.values(layer).fill_(0.01)
        self.resident = ResidentCache(self._kv, BLOCK)
        self.part = self._part(requests, context, rows)
        self._turn = 0

    def layer(self) -> int:
        """The number of the next layer."""
        self._turn = (self._turn + 1) % self._layers
        return self._turn

    def moving(self, speed: float) -> MovingCache:
        down = links.Link(speed)
        layout, kernels = self._bench.loaded.model.spec.kv, self._bench.loaded.kernels
        return MovingCache(self._kv, layout, BLOCK, kernels, down, down)

    def _part(self, requests: int, context: int, rows: int) -> MicroBatch:
        wide, count = math.ceil(context / BLOCK), requests * rows
        batch = TokenBatch(
            token_ids=np.zeros(count, np.int64),
            positions=np.tile(np.arange(context - rows, context), requests),
            query_starts=np.arange(requests + 1) * rows,
            context_lens=np.full(requests, context),
            block_tables=np.arange(requests * wide).reshape(requests, wide),
            logit_rows=np.arange(count),
        )
        model = self._bench.loaded.model
        hidden, positions = _random(count, model.embedding.shape[1]), torch.from_numpy(batch.positions)
        part = MicroBatch(batch, np.arange(count), AttentionBatch.build(batch, BLOCK), positions, hidden)
        part.projections = model.blocks[0].pre_attention(hidden, positions)
        return part


def on_core(kernels: table.Kernels, cpu: int, run: Callable[[], float]) -> float:
    """The result of `run`, called on this core."""
    assert kernels.one_core is not None
    with kernels.one_core(cpu):
        return run()


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))
