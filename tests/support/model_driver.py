"""The smallest runtime that can drive a model: a paged cache and one loop over the stages."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from moesaic.core.tokens import STATE_FIELDS, IntArray, TokenBatch
from moesaic.kernels.batch import AttentionBatch
from moesaic.kernels.cache import stored_width
from moesaic.kernels.states import CHUNK
from moesaic.models.block import GateOutput, Projections
from moesaic.models.kvcache.states import StateCache
from moesaic.models.model import Model

SEATS = 100
"""Sequences of a model with states."""


@dataclass
class Driver:
    """Sequences by index. Each has blocks of its own, in a scrambled order."""

    model: Model
    num_blocks: int = 64
    block_size: int = 4
    kv_dtype: torch.dtype = torch.float32
    lengths: dict[int, int] = field(default_factory=dict)
    tables: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        layout, layers = self.model.spec.kv, self.model.spec.num_layers
        shape = (layers, self.num_blocks, self.block_size, layout.kv_heads)
        self.keys = torch.zeros(*shape, stored_width(layout.key_width, self.kv_dtype), dtype=self.kv_dtype)
        self.values = None
        if not layout.value_in_key:
            width = stored_width(layout.value_width, self.kv_dtype)
            self.values = torch.zeros(*shape, width, dtype=self.kv_dtype)
        spec = self.model.spec
        self.states = None
        if spec.states is not None:
            count = len(spec.state_layers)
            self.states = StateCache(spec.states, count, SEATS, 0, torch.device("cpu"))
        self.free = np.random.default_rng(0).permutation(self.num_blocks).tolist()

    def step(self, rows: dict[int, list[int]]) -> torch.Tensor:
        """Computes new tokens of some sequences. Returns logits [n, V] of every row."""
        batch = self._batch(rows)
        return self._forward(batch)

    def _batch(self, rows: dict[int, list[int]]) -> TokenBatch:
        starts, positions, contexts = [0], [], []
        for index, tokens in rows.items():
            before = self.lengths.get(index, 0)
            self.lengths[index] = before + len(tokens)
            table = self.tables.setdefault(index, [])
            while len(table) * self.block_size < self.lengths[index]:
                table.append(self.free.pop())
            positions += range(before, self.lengths[index])
            contexts.append(self.lengths[index])
            starts.append(starts[-1] + len(tokens))
        tables = np.zeros((len(rows), max(len(self.tables[index]) for index in rows)), np.int64)
        for line, index in enumerate(rows):
            tables[line, : len(self.tables[index])] = self.tables[index]
        tokens = [token for part in rows.values() for token in part]
        return TokenBatch(
            token_ids=np.array(tokens), positions=np.array(positions), query_starts=np.array(starts),
            context_lens=np.array(contexts), block_tables=tables, logit_rows=np.arange(len(tokens)),
            states=self._states(rows),
        )  # fmt: skip

    def _states(self, rows: dict[int, list[int]]) -> IntArray:
        """Sequence i has seat i and page i + 1, which is written in place."""
        if self.states is None:
            return np.zeros((0, STATE_FIELDS), np.int64)
        begins = [(self.lengths[index] - len(tokens)) // CHUNK * CHUNK for index, tokens in rows.items()]
        lines = zip(rows, begins, strict=True)
        return np.array([(index + 1 if begin else 0, begin, index + 1, index) for index, begin in lines])

    @torch.no_grad()
    def _forward(self, batch: TokenBatch) -> torch.Tensor:
        model = self.model
        attention = AttentionBatch.build(batch, self.block_size)
        positions = torch.from_numpy(batch.positions)
        hidden = model.embed(torch.from_numpy(batch.token_ids))
        for layer, block in enumerate(model.blocks):
            projected = block.pre_attention(hidden, positions)
            if layer in model.spec.state_layers:
                attended = self._recurrence(layer, projected, attention)
                hidden = self._merged(layer, block.gate(hidden, block.output_projection(attended)))
                continue
            model.kernels.store(self.keys[layer], projected.key, attention.slots)
            values = None
            if self.values is not None and projected.value is not None:
                model.kernels.store(self.values[layer], projected.value, attention.slots)
                values = self.values[layer]
            attended = block.attention(projected.query, self.keys[layer], values, attention)
            hidden = self._merged(layer, block.gate(hidden, block.output_projection(attended)))
        return model.logits(hidden)

    def _recurrence(self, layer: int, rows: Projections, attention: AttentionBatch) -> torch.Tensor:
        assert self.states is not None
        states = self.states.layer(self.model.spec.state_layers.index(layer))
        return self.model.blocks[layer].recurrence(rows, states, attention)

    def _merged(self, layer: int, gated: GateOutput) -> torch.Tensor:
        model, block, routed = self.model, self.model.blocks[layer], None
        if gated.expert_ids is not None:
            routed = model.kernels.experts(model.expert_weights(layer), gated.normed_rows, gated.expert_ids)
        return block.merge(gated, block.dense(gated.normed_rows), routed)

    def prefill(self, tokens: list[int], index: int = 0, chunk: int | None = None) -> torch.Tensor:
        """Logits [length, V] of a prompt that is computed in chunks."""
        chunk = chunk or len(tokens)
        parts = [tokens[start : start + chunk] for start in range(0, len(tokens), chunk)]
        return torch.cat([self.step({index: part}) for part in parts])

    def greedy(self, tokens: list[int], count: int, chunk: int | None = None) -> list[int]:
        """The next `count` tokens, the most likely one each time."""
        out = [int(self.prefill(tokens, 0, chunk)[-1].argmax())]
        while len(out) < count:
            out.append(int(self.step({0: [out[-1]]})[-1].argmax()))
        return out
