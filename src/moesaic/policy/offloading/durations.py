"""Predicts the duration of each task of a schedule, by the roofline of its memory level or by its link.

Tables map (kind, lane) to the seconds of one task. All micro-batches have one size, and so have all pages.
"""

from __future__ import annotations

import math

from moesaic.core.curves import Curve
from moesaic.core.offload import SplitPrices
from moesaic.cost import ops
from moesaic.cost.hardware import Hardware, Level
from moesaic.cost.ops import Work
from moesaic.cost.roofline import attention_seconds, seconds, seconds_with_experts
from moesaic.cost.sizes import ModelSizes
from moesaic.policy.offloading.policies import Policy, Workload
from moesaic.policy.offloading.splitting import experts_to_load
from moesaic.policy.offloading.tasks import LANES, Kind, Lane

NOTHING = Work()
Table = dict[tuple[Kind, Lane], float]
TENSORS = {Kind.SAVE_QKV: 3, Kind.LOAD_CACHE: 2, Kind.SAVE_CACHE: 2}
"""Number of transfers of tasks that have several: query, key and value; or key and value."""
PRICED_ROWS = tuple(2**power for power in range(13))
"""Numbers of rows at which an expert is priced."""


class Durations:
    """Predicts durations for one model on one machine, for requests of one kind."""

    def __init__(self, model: ModelSizes, hardware: Hardware, workload: Workload) -> None:
        self._model, self._hardware, self._workload = model, hardware, workload
        self._token = model.cache(1, workload.cache_number)
        self._splits: dict[tuple[int, int], float] = {}

    def decode(self, policy: Policy, dense: bool = False) -> Table:
        """Durations of a micro-batch's tasks in one layer of a decode step, at the mean context.

        dense: the layer has no routed experts, and all its weights are on the fast level.
        """
        model, rows = self._model, policy.micro_batch
        attention_sizes = model.attention
        context = self._workload.prompt + self._workload.generate / 2
        attention_work = ops.attention(model, rows, context, self._workload.cache_number)
        projection_work = ops.output_projection(model, rows)
        fast, slow = self._hardware.fast, self._hardware.slow
        other_work = (
            ops.dense(model, rows) if dense else ops.gate(model, rows) + ops.shared_experts(model, rows)
        )
        expert_work = NOTHING if dense else ops.routed_experts(model, rows)
        slow_share = self._share_there(policy)
        fast_expert_work = ops.routed_experts(model, rows, 1 - slow_share if policy.computes_there else 1.0)
        # One row for each pair: the sum then has the same bits wherever an expert is computed.
        answers = rows * model.top_k * slow_share
        table = {
            (Kind.PRE, Lane.FAST): self._compute_seconds(fast, ops.query_key_value(model, rows)),
            (Kind.ATTENTION, Lane.FAST): _add_launch(attention_seconds(attention_work, fast), fast),
            (Kind.POST_WITH_EXPERTS, Lane.FAST): self._compute_seconds(
                fast, projection_work + other_work, expert_work, rows
            ),
            (Kind.POST_WITHOUT_EXPERTS, Lane.FAST): self._compute_seconds(fast, projection_work + other_work),
            (Kind.EXPERTS, Lane.FAST): self._compute_seconds(fast, NOTHING, fast_expert_work, rows),
            **_fast(Kind.HEAD, ops.head(model, rows), fast),
            (Kind.SYNC, Lane.FAST): 0.0,
            (Kind.SPLIT, Lane.FAST): 0.0,
            **self._move(
                Kind.SAVE_QKV, rows * (attention_sizes.query + attention_sizes.cache_width) * model.row_number
            ),
            **self._move(Kind.LOAD_ROWS, rows * attention_sizes.output * model.row_number),
            **self._move(Kind.SAVE_ROWS, rows * model.hidden * model.row_number),
            **self._move(Kind.LOAD_ANSWERS, answers * model.hidden * model.row_number),
            **self._gather_seconds(Kind.LOAD_CACHE, rows * context * self._token * policy.slow_cache),
            **self._move(Kind.SAVE_CACHE, rows * self._token * policy.slow_cache),
            **self._load(Kind.LOAD_CHOSEN, self._num_loaded_experts(policy)),
            **self._load(Kind.LOAD_LIKELY, policy.likely_experts),
            **self._pages(policy, policy.pages),
        }
        if slow.processor is not None:
            table[Kind.ATTENTION, Lane.SLOW] = _add_launch(attention_seconds(attention_work, slow), slow)
            slow_expert_work = ops.routed_experts(model, rows, slow_share)
            table[Kind.EXPERTS, Lane.SLOW] = self._compute_seconds(slow, NOTHING, slow_expert_work, rows)
        return table

    def prefill(self, policy: Policy, requests: float, pages: int, dense: bool = False) -> Table:
        """Durations of one layer's tasks in prefill, for a micro-batch of `requests` prompts."""
        model, prompt, fast = self._model, self._workload.prompt, self._hardware.fast
        rows = requests * prompt
        attention_work = ops.causal_attention(model, requests, prompt, self._workload.cache_number)
        other_work = (
            ops.dense(model, rows) if dense else ops.gate(model, rows) + ops.shared_experts(model, rows)
        )
        other_work += ops.query_key_value(model, rows) + attention_work + ops.output_projection(model, rows)
        expert_work = NOTHING if dense else ops.routed_experts(model, rows)
        efficiency = fast.processor.prefill if fast.processor else 1.0
        between_work = ops.between_products(model, rows, 0 if dense else model.top_k)
        prompt_seconds = self._compute_seconds(fast, other_work, expert_work, rows, efficiency) + seconds(
            between_work, fast
        )
        return {
            (Kind.PROMPT, Lane.FAST): prompt_seconds,
            **_fast(Kind.HEAD, ops.head(model, requests), fast),
            **self._move(Kind.SAVE_CACHE, rows * self._token * policy.slow_cache),
            **self._move(Kind.SAVE_ROWS, rows * model.hidden * model.row_number),
            **self._move(Kind.LOAD_ANSWERS, rows * model.hidden * model.row_number),
            **self._pages(policy, pages),
        }

    def first_layer(self, policy: Policy) -> float:
        """Seconds to load the streamed experts of one layer while nothing else runs."""
        pages = self._pages(policy, 1)
        staging_seconds = (
            pages[Kind.STAGE_PAGE, Lane.STAGING] if self._hardware.link.staging is not None else 0.0
        )
        return staging_seconds + pages[Kind.LOAD_PAGE, Lane.LINK_DOWN]

    def slow_memory(self, policy: Policy, lane_seconds: dict[Lane, float]) -> float:
        """Seconds that the slow level's memory is busy in a layer: with its processor's reads and all
        copies.

        lane_seconds: busy seconds of each lane in that layer. A copy into pinned memory both reads and
        writes.
        """
        link, level = self._hardware.link, self._hardware.slow
        copied_bytes = (
            lane_seconds[Lane.LINK_DOWN] * link.down_bandwidth * self._reading
            + lane_seconds[Lane.LINK_UP] * link.up_bandwidth
        )
        copied_bytes += 2 * lane_seconds[Lane.STAGING] * (link.staging or 0.0)
        return copied_bytes / level.bandwidth + self._slow_read_seconds(policy, lane_seconds)

    def _slow_read_seconds(self, policy: Policy, lane_seconds: dict[Lane, float]) -> float:
        """Seconds in which the slow level's processor reads memory in a layer."""
        if not lane_seconds[Lane.SLOW]:
            return 0.0
        model, rows, level = self._model, policy.micro_batch, self._hardware.slow
        context = self._workload.prompt + self._workload.generate / 2
        read = 0.0
        if policy.slow_attention:
            read += ops.attention(model, rows, context, self._workload.cache_number).bytes
        if policy.computes_there:
            read += ops.routed_experts(model, rows, self._share_there(policy)).bytes
        return policy.micro_batches * read / level.bandwidth

    def likely_experts(self, policy: Policy) -> int:
        """How many experts the on-demand schedule loads in decode before the layer's gate has chosen.

        The link can load them between a layer's chosen experts and the next layer's gates. Their number
        grows by the share of all experts that is chosen, so that the link never waits for the gates. It is
        0 if the link also transfers other things than experts.
        """
        if policy.slow_attention or policy.slow_cache:
            return 0
        model, table = self._model, self.decode(policy)
        kinds = (Kind.EXPERTS, Kind.PRE, Kind.ATTENTION, Kind.POST_WITHOUT_EXPERTS)
        idle = policy.micro_batches * sum(table[kind, Lane.FAST] for kind in kinds)
        num_loadable = idle * (1 + ops.distinct(model, policy.batch) / model.experts)
        num_streamed = model.experts - policy.static_experts
        return int(min(num_streamed, num_loadable / self._expert_seconds))

    def _num_chosen_experts(self, policy: Policy) -> float:
        """Expected number of the streamed experts that a whole batch chooses in one layer.

        Experts that were loaded before are left out. They are assumed to be chosen as often as any others.
        """
        model = self._model
        streamed_share = 1 - (policy.static_experts + policy.likely_experts) / model.experts
        return ops.distinct(model, policy.batch) * streamed_share

    def split_prices(self) -> SplitPrices:
        """What an expert costs on either level, for the schedule that splits by it. Both must compute."""
        return SplitPrices(
            self._expert_seconds + self._hardware.link.latency,
            self._curve(self._hardware.fast),
            self._curve(self._hardware.slow),
        )

    def _curve(self, level: Level) -> Curve:
        """Seconds of one expert by its rows, without a launch, which all experts of a task share."""
        dtype = self._model.quantized_dtype
        works = [(rows, ops.one_expert(self._model, rows)) for rows in PRICED_ROWS]
        return Curve(
            tuple(
                (rows, seconds_with_experts(NOTHING, work, rows, level, 1.0, dtype)) for rows, work in works
            )
        )

    def _num_loaded_experts(self, policy: Policy) -> float:
        """Expected number of experts that a layer of a decode step loads, once its gates have chosen."""
        num_chosen = self._num_chosen_experts(policy)
        return num_chosen * self._split(policy) if policy.schedule == "split" else num_chosen

    def _share_there(self, policy: Policy) -> float:
        """Share of the choices of a decode step that the slow processor computes if it computes any."""
        streamed_share = 1 - policy.static_experts / self._model.experts
        return streamed_share * (1 - self._split(policy)) if policy.schedule == "split" else streamed_share

    def _split(self, policy: Policy) -> float:
        """Share of the chosen experts that are not on the fast level that `split` loads."""
        key = policy.batch, policy.static_experts
        if key not in self._splits:
            missing = round(self._num_chosen_experts(policy))
            rows = round(ops.rows_each(self._model, policy.batch))
            num_resident = round(ops.distinct(self._model, policy.batch)) - missing
            rows_of_missing = dict.fromkeys(range(missing), rows)
            num_loaded = len(experts_to_load(self.split_prices(), rows_of_missing, [rows] * num_resident))
            self._splits[key] = num_loaded / max(missing, 1)
        return self._splits[key]

    @property
    def read_seconds(self) -> float:
        """Seconds to read one expert and to convert it, alone."""
        return self._expert_seconds + self._hardware.link.latency

    @property
    def _expert_seconds(self) -> float:
        """Seconds to read one expert and to convert it, without the latency of a transfer."""
        link, size = self._hardware.link, self._model.read_bytes
        rate = dict(link.conversions).get(self._model.conversion or "", math.inf)
        return size / link.down_bandwidth + size / rate

    @property
    def _reading(self) -> float:
        """The share of the link's time that is no conversion. Where experts are converted, only they move."""
        return self._model.read_bytes / self._hardware.link.down_bandwidth / self._expert_seconds

    def _load(self, kind: Kind, experts: float) -> Table:
        """Durations of loading a number of experts, which need not be whole."""
        return {(kind, LANES[kind]): experts * self._expert_seconds + self._hardware.link.latency}

    def _compute_seconds(
        self,
        level: Level,
        other_work: Work,
        expert_work: Work = NOTHING,
        rows: float = 0.0,
        efficiency: float = 1.0,
    ) -> float:
        """Seconds of a task on a level.

        expert_work: work of experts that get `rows` rows in all. other_work: all other work of the task.
        """
        rows_per_expert = ops.rows_each(self._model, rows)
        return _add_launch(
            seconds_with_experts(
                other_work, expert_work, rows_per_expert, level, efficiency, self._model.quantized_dtype
            ),
            level,
        )

    def _pages(self, policy: Policy, pages: int) -> Table:
        """Durations of loading one page.

        A page has whole rows of the experts' matrices. The last page may have fewer.
        """
        model = self._model
        rows = 3 * (model.experts - policy.static_experts) * model.expert_width
        page = math.ceil(rows / max(pages, 1)) / (3 * model.expert_width)
        return {**self._load(Kind.LOAD_PAGE, page), **self._move(Kind.STAGE_PAGE, page * model.read_bytes)}

    def _gather_seconds(self, kind: Kind, size: float) -> Table:
        """Durations of moving cache blocks.

        They are first gathered in pinned memory, if there is any, then copied.
        """
        [(key, took)] = self._move(kind, size).items()
        return {key: took + size / (self._hardware.link.staging or math.inf)}

    def _move(self, kind: Kind, size: float) -> Table:
        link, lane = self._hardware.link, LANES[kind]
        speed = {
            Lane.LINK_DOWN: link.down_bandwidth,
            Lane.LINK_UP: link.up_bandwidth,
            Lane.STAGING: link.staging or math.inf,
        }[lane]
        return {(kind, lane): size / speed + TENSORS.get(kind, 1) * link.latency}


def _fast(kind: Kind, work: Work, level: Level) -> Table:
    return {(kind, Lane.FAST): seconds(work, level)}


def _add_launch(took: float, level: Level) -> float:
    """Seconds of a task including the launch time of its level."""
    return took + (level.processor.launch if level.processor else 0.0)
