"""What each kind of task does for a micro-batch: stages of a block, and copies between the levels.

Question: What does a task of an offloaded step copy or compute?
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from moesaic.core.tokens import IntArray
from moesaic.models.block import Block, Projections
from moesaic.models.model import Model
from moesaic.offload.caches import Cache
from moesaic.offload.link import Link
from moesaic.offload.parts import MicroBatch
from moesaic.offload.post_attention import PostAttention, TaskFunction
from moesaic.offload.splitting import Splitting
from moesaic.policy.offloading.prefetch import ExpertPrefetch, order_guesses
from moesaic.policy.offloading.residency import HotExperts
from moesaic.policy.offloading.tasks import Kind, Lane, Task


class Loads(Protocol):
    """Loads routed experts to the fast level; implemented in offload.weights."""

    def stage_page(self, layer: int, page: int, pages: int) -> int: ...

    def load_page(self, count: int, layer: int, page: int, pages: int) -> int: ...

    def load_chosen(self, count: int, layer: int, experts: Sequence[int]) -> int: ...


class Exchanges(Protocol):
    """Changes which experts stay; implemented in offload.by_expert."""

    def replace_experts(
        self, layer: int, exchanges: Sequence[tuple[int, int]], count: int, loaded_experts: Collection[int]
    ) -> int: ...


NOTHING_PREFETCHED = -1, ()


class Operations:
    """Runs tasks on the micro-batches of the current pass, which `begin` sets.

    The threads of all lanes call it. Tasks on the same micro-batch run one after the other, because the list
    makes them depend on each other. A list must not contain a kind that `post_attention` does not handle.
    """

    def __init__(
        self,
        model: Model,
        experts: Loads,
        static: Mapping[int, frozenset[int]],
        load_link: Link,
        save_link: Link,
        post_attention: PostAttention,
        slow_blocks: Sequence[Block] = (),
        likely: int = 0,
        exchanges: Exchanges | None = None,
        splitting: Splitting | None = None,
        hot: HotExperts | None = None,
    ) -> None:
        """static: layer -> experts that stay on the fast level now. likely: maximum number of a layer's
        experts that are loaded before its gate has chosen. slow_blocks: the model's blocks with the slow
        processor's kernels, for attention there; empty means the blocks of the fast processor. exchanges:
        changes which experts stay; None: always the same stay. splitting: for the schedule `split`.
        hot: counts choices for `exchanges`; None: those of earlier runs are not known.
        """
        self._model = model
        self._experts, self._static = experts, static
        self._load_link, self._save_link, self._post_attention = load_link, save_link, post_attention
        self._slow_blocks = slow_blocks or model.blocks
        self._parts: Sequence[MicroBatch] = ()
        self._cache: Cache | None = None
        self.most_likely, self._likely = likely, ExpertPrefetch(model.spec.num_experts)
        self._exchanges, self._hot = exchanges, hot or HotExperts(model.spec.num_experts)
        self._splitting = splitting
        self._prefetched_experts: tuple[int, Sequence[int]] = NOTHING_PREFETCHED
        """The turn of a layer, and its experts that were loaded before its gate had chosen."""
        self._guesses: dict[int, list[torch.Tensor]] = {}
        """Layer -> ids [n, k] of micro-batches, which its gate chooses from rows of the layer before."""
        self._first_layer_turn = 0
        self._pages = 0
        self._rows_per_sequence = 1.0
        """The mean of the pass. It is above 1 if prompts are in it."""
        self.loaded_bytes = 0
        """Bytes of weights loaded so far."""
        self.num_chosen = self.num_hits = self.num_exchanged = 0
        """Chosen experts, those of them that were in memory, and exchanges, as in ResidencyStats."""
        self._functions_by_phase = self._list_functions()
        self._task_functions = self._functions_by_phase[False]

    def _list_functions(self) -> dict[bool, Mapping[Kind, TaskFunction]]:
        """Prefill -> function of each kind.

        In a pass with prompts two kinds move the residual. In a decode step they move rows and answers of
        experts on the slow level.
        """
        task_functions: dict[Kind, TaskFunction] = {
            **self._post_attention.tasks,
            Kind.POST_WITHOUT_EXPERTS: self._gate,
            Kind.PRE: self._pre,
            Kind.SAVE_QKV: self._save_qkv,
            Kind.ATTENTION: self._attention,
            Kind.LOAD_ROWS: self._load_rows,
            Kind.LOAD_CACHE: self._load_cache,
            Kind.SAVE_CACHE: self._save_cache,
            Kind.PROMPT: self._prompt,
            Kind.HEAD: self._head,
        }
        rows_move = {Kind.SAVE_ROWS: self._save_rows, Kind.LOAD_ANSWERS: self._load_rows_again}
        return {False: task_functions, True: {**task_functions, **rows_move}}

    def begin(self, parts: Sequence[MicroBatch], cache: Cache, turn: int, pages: int, prefill: bool) -> None:
        """Starts the next pass. turn: number of its first layer, counted over all passes. pages: pages per
        layer."""
        self._parts, self._cache, self._first_layer_turn, self._pages = parts, cache, turn, pages
        self._guesses.clear()
        num_rows = sum(part.batch.num_rows for part in parts)
        num_sequences = sum(part.batch.num_sequences for part in parts)
        self._rows_per_sequence = num_rows / num_sequences
        if prefill:
            self.forget_prefetched()  # the pass's first layer is loaded to the same slot
        self._task_functions = self._functions_by_phase[prefill]
        self._post_attention.begin(parts, turn, prefill)

    def forget_prefetched(self) -> None:
        """Counts no expert as loaded before its layer's gate has chosen."""
        self._prefetched_experts = NOTHING_PREFETCHED
        self._likely.forget_guesses()

    def __call__(self, task: Task) -> None:
        try:
            if task.kind is Kind.STAGE_PAGE:
                self._experts.stage_page(task.layer % len(self._model.blocks), task.micro_batch, self._pages)
            elif task.kind is Kind.LOAD_PAGE:
                self._load_page(task.layer, task.micro_batch)
            elif task.kind is Kind.SPLIT:
                self._split(task.layer)
            elif task.kind is Kind.LOAD_CHOSEN:
                self._load_chosen(task.layer)
            elif task.kind is Kind.LOAD_LIKELY:
                self._load_likely(task.layer)
            else:
                self._task_functions[task.kind](task, self._parts[task.micro_batch])
        finally:
            # A task that depends on this one may begin on another lane, so all of its work has to be done.
            self._load_link.finish()

    # ---- weights

    def _load_page(self, layer: int, page: int) -> None:
        """Loads a page. A layer number beyond the last one means a layer of the next pass."""
        layers = len(self._model.blocks)
        self.loaded_bytes += self._experts.load_page(
            self._first_layer_turn + layer, layer % layers, page, self._pages
        )

    def _split(self, layer: int) -> None:
        if self._model.blocks[layer].is_routed:
            assert self._splitting is not None
            self._splitting.split(layer, self._parts, self._hot.heat(layer))

    def _load_chosen(self, layer: int) -> None:
        if not self._model.blocks[layer].is_routed:
            return
        gate_outputs = [part.gate_output for part in self._parts]
        ids = [
            gate_output.expert_ids.cpu().numpy()
            for gate_output in gate_outputs
            if gate_output is not None and gate_output.expert_ids is not None
        ]
        pairs, (turn, prefetched) = np.concatenate(ids, axis=None), self._prefetched_experts
        chosen_experts = np.unique(pairs).tolist()
        streamed_experts = [expert for expert in chosen_experts if expert not in self._static[layer]]
        in_slot = prefetched if turn == self._first_layer_turn + layer else ()
        loaded_experts = [expert for expert in streamed_experts if expert in in_slot]
        missing_experts = [expert for expert in streamed_experts if expert not in in_slot]
        self.num_chosen += len(chosen_experts)
        self.num_hits += len(chosen_experts) - len(missing_experts)
        if self._splitting is not None:
            missing_experts = self._splitting.loaded_experts
        if self._exchanges is not None:
            missing_experts = self._exchange_experts(
                layer, pairs, chosen_experts, missing_experts, loaded_experts
            )
        self.loaded_bytes += self._experts.load_chosen(self._first_layer_turn + layer, layer, missing_experts)
        self._likely.learn(layer, pairs)

    def _exchange_experts(
        self,
        layer: int,
        pairs: IntArray,
        chosen_experts: list[int],
        missing_experts: list[int],
        loaded_experts: list[int],
    ) -> list[int]:
        """Brings experts that stay from now on. Returns those of `missing_experts` that remain to be loaded.

        loaded_experts: chosen ones that were loaded ahead. Without an exchange each step would load them.
        """
        assert self._exchanges is not None
        self._hot.learn(layer, pairs, self._rows_per_sequence)
        coming_experts = missing_experts + loaded_experts
        exchanges = self._hot.exchanges(layer, self._static[layer], coming_experts, chosen_experts)
        turn = self._first_layer_turn + layer
        self.loaded_bytes += self._exchanges.replace_experts(layer, exchanges, turn, loaded_experts)
        self.num_exchanged += len(exchanges)
        resident_experts = {new_expert for _, new_expert in exchanges}
        return [expert for expert in missing_experts if expert not in resident_experts]

    def _load_likely(self, layer: int) -> None:
        """Loads likely experts. A layer number beyond the last one means a layer of the next pass."""
        self._prefetched_experts = NOTHING_PREFETCHED  # a load that fails has already overwritten the slot
        turn, layer = self._first_layer_turn + layer, layer % len(self._model.blocks)
        guesses = order_guesses([ids.cpu().numpy() for ids in self._guesses.pop(layer, ())])
        likely = self._likely.experts(layer, self.most_likely, self._static[layer], guesses)
        self.loaded_bytes += self._experts.load_chosen(turn, layer, likely)
        self._prefetched_experts = turn, likely

    # ---- the stages of a block

    def _pre(self, task: Task, part: MicroBatch) -> None:
        if task.layer:
            self._post_attention.merge(task.layer - 1, part)
        else:
            ids = torch.from_numpy(part.batch.token_ids)
            part.hidden = self._model.embed(ids.to(part.positions.device))
        part.projections = self._model.blocks[task.layer].pre_attention(part.hidden, part.positions)

    def _gate(self, task: Task, part: MicroBatch) -> None:
        """Runs the stages up to the gate, and asks the gate of the next layer about the same rows."""
        self._post_attention.tasks[Kind.POST_WITHOUT_EXPERTS](task, part)
        following = task.layer + 1
        if self.most_likely and following < len(self._model.blocks):
            assert part.gate_output is not None
            guess = self._model.blocks[following].guess_experts(part.gate_output.residual)
            if guess is not None:
                self._guesses.setdefault(following, []).append(guess)

    def _attention(self, task: Task, part: MicroBatch) -> None:
        assert self._cache is not None
        blocks = self._slow_blocks if task.lane is Lane.SLOW else self._model.blocks
        self._cache.attend(task.layer, blocks[task.layer], part)
        part.projections = None

    def _prompt(self, task: Task, part: MicroBatch) -> None:
        self._pre(task, part)
        self._attention(task, part)
        self._task_functions[Kind.POST_WITH_EXPERTS](task, part)

    def _head(self, task: Task, part: MicroBatch) -> None:
        """Finishes the last layer. The logits of all rows are computed together after the pass."""
        self._post_attention.merge(task.layer - 1, part)

    # ---- moves

    def _save_qkv(self, task: Task, part: MicroBatch) -> None:
        rows = part.projections
        assert rows is not None
        value = None if rows.value is None else self._save_link.copy(rows.value)
        part.projections = Projections(
            self._save_link.copy(rows.query), self._save_link.copy(rows.key), value
        )

    def _load_rows(self, task: Task, part: MicroBatch) -> None:
        assert part.attention_output is not None
        part.attention_output = self._load_link.copy(part.attention_output)

    def _save_rows(self, task: Task, part: MicroBatch) -> None:
        part.hidden = self._save_link.copy(part.hidden)

    def _load_rows_again(self, task: Task, part: MicroBatch) -> None:
        part.hidden = self._load_link.copy(part.hidden)

    def _load_cache(self, task: Task, part: MicroBatch) -> None:
        assert self._cache is not None
        self._cache.load(task.layer, part)

    def _save_cache(self, task: Task, part: MicroBatch) -> None:
        assert self._cache is not None
        self._cache.save(task.layer, part)
