"""One step through the model: the stages of every block, in order, layer after layer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from moesaic.core.tokens import TokenBatch
from moesaic.experts.client import RoutedExperts
from moesaic.kernels.batch import AttentionBatch
from moesaic.kernels.table import Recorder, Recording
from moesaic.kvcache.paged import PagedKV
from moesaic.models.model import Model

RECORDED_ROWS = 64
"""Decode steps of more rows are not recorded: Python's share of their time is small."""


class Forward:
    """Walks the stages: operation by operation, or, for decode steps, by replaying a recorded walk.

    A recording holds the native operations of this process and nothing else: record only where the experts
    are answered by a direct call.
    """

    def __init__(
        self,
        model: Model,
        experts: RoutedExperts,
        kv: PagedKV,
        block_size: int,
        device: torch.device,
        recorded_blocks: int = 0,
    ) -> None:
        """recorded_blocks: KV blocks of the longest sequence, to record decode steps for; 0: never record."""
        self._model = model
        self._experts = experts
        self._kv = kv
        self._block_size = block_size
        self._device = device
        self._width = recorded_blocks
        make = model.kernels.recorder if recorded_blocks else None
        self._recorder: Recorder | None = None if make is None else make()
        self._decodes: dict[int, _Decode] = {}

    def __call__(self, batch: TokenBatch) -> torch.Tensor:
        """Hidden states [m, h] of the batch's logit_rows after the last block, before the final norm.

        Writes the keys and values of all rows into the cache. The result holds until the next call.
        """
        rows = batch.num_rows
        decode = rows == batch.num_sequences == len(batch.logit_rows)
        if self._recorder is not None and decode and rows <= RECORDED_ROWS:
            return self._replay(batch, self._recorder)
        attention = AttentionBatch.build(batch, self._block_size, self._device)
        positions = torch.from_numpy(batch.positions).to(self._device)
        hidden = self._walk(torch.from_numpy(batch.token_ids).to(self._device), positions, attention)
        return hidden[torch.from_numpy(batch.logit_rows).to(self._device)]

    def _walk(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionBatch
    ) -> torch.Tensor:
        """Hidden states [n, h] of all rows."""
        hidden = self._model.embed(token_ids)
        for layer, block in enumerate(self._model.blocks):
            rows = block.pre_attention(hidden, positions)
            self._kv.write(layer, rows.key, rows.value, attention.slots)
            keys, values = self._kv.keys(layer), self._kv.values(layer)
            gated = block.gate(
                hidden, block.output_projection(block.attention(rows.query, keys, values, attention))
            )
            if gated.expert_ids is None:
                hidden = block.merge(gated, block.dense(gated.normed), None)
                continue
            ticket = self._experts.submit(layer, gated.normed, gated.expert_ids)
            dense = block.dense(gated.normed)
            answer = self._experts.poll(ticket)
            while answer is None:
                answer = self._experts.poll(ticket)
            hidden = block.merge(gated, dense, answer)
        return hidden

    def _replay(self, batch: TokenBatch, recorder: Recorder) -> torch.Tensor:
        """A decode step. The first one of its size is recorded."""
        decode = self._decodes.get(batch.num_rows)
        if decode is not None:
            decode.fill(batch)
            return decode.recording.run()
        attention = AttentionBatch.of_decode(batch, self._block_size, self._width)
        inputs = attention.batch
        token_ids, positions = torch.from_numpy(inputs.token_ids), torch.from_numpy(inputs.positions)
        recording = recorder(lambda: self._walk(token_ids, positions, attention))
        self._decodes[batch.num_rows] = _Decode(attention, recording)
        return recording.result


@dataclass(frozen=True)
class _Decode:
    """A recorded decode step and the arrays it reads."""

    attention: AttentionBatch
    recording: Recording

    def fill(self, batch: TokenBatch) -> None:
        """Put another step's rows where the recording reads."""
        inputs = self.attention.batch
        np.copyto(inputs.token_ids, batch.token_ids)
        np.copyto(inputs.positions, batch.positions)
        np.copyto(inputs.context_lens, batch.context_lens)
        inputs.block_tables[:, : batch.block_tables.shape[1]] = batch.block_tables
        self.attention.fill_slots()
