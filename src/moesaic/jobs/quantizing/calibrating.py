"""Rounds a model's experts by their own inputs: prompts go through the model, one layer at a time.

A layer gets what the layers before it compute once they are quantised. The hidden states before a layer are
in a file, so that a run that was killed goes on with them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from moesaic.core.errors import ConfigError
from moesaic.core.experts import SILU
from moesaic.jobs.quantizing.formats import QuantizedMatrix
from moesaic.jobs.quantizing.rounding import Rounding
from moesaic.kernels.reference.experts import activate
from moesaic.kernels.table import Kernels
from moesaic.models import registry
from moesaic.models.block import Block, GateOutput
from moesaic.runtime.step.one_prompt import OnePrompt

COUNTS = "tokens.json"
"""File of how many tokens each expert saw."""
Read = Callable[[], torch.Tensor]
Matrices = tuple[Read, Read, Read]
"""What reads gate [w, h], up [w, h] and down [h, w] of an expert as float32."""
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class RoundedExpert:
    """An expert after its rounding."""

    matrices: tuple[QuantizedMatrix, QuantizedMatrix, QuantizedMatrix]
    rows: torch.Tensor | None = None
    """What it computes from its inputs [n, h]; None if that is not needed."""


class LayerRounder(Protocol):
    """Rounds the experts of one layer."""

    def expert(self, expert: int, matrices: Matrices, rounding: Rounding) -> RoundedExpert:
        """Round an expert. Several threads may call it at once."""
        ...

    def add(self, expert: int, rounded_expert: RoundedExpert) -> None:
        """Take note of an expert. It is called for one after the other, in ascending order."""
        ...


class Rounder(Protocol):
    """How experts are rounded."""

    def layer(self, layer: int) -> Any:
        """A context with the LayerRounder of a layer. Layers come in ascending order."""
        ...


class NearestRounder:
    """Rounds each number of an expert to the nearest code."""

    @contextmanager
    def layer(self, layer: int) -> Iterator[NearestRounder]:
        yield self

    def expert(self, expert: int, matrices: Matrices, rounding: Rounding) -> RoundedExpert:
        gate, up, down = (rounding.nearest(read_matrix()) for read_matrix in matrices)
        return RoundedExpert((gate, up, down))

    def add(self, expert: int, rounded_expert: RoundedExpert) -> None:
        pass


class CalibratedRounder:
    """Rounds experts by GPTQ over the inputs that they have in prompts."""

    def __init__(
        self,
        path: Path,
        kernels: Kernels,
        prompts: Sequence[Sequence[int]],
        work: Path,
        least: int,
    ) -> None:
        """path: the model. work: a folder for hidden states. least: experts with fewer tokens are rounded to
        nearest."""
        self._path, self._kernels, self._work, self._least = path, kernels, work, least
        self._spec = registry.read_spec(path)
        self._prompts = [OnePrompt(self._spec, kernels, prompt) for prompt in prompts]
        ends = np.cumsum([len(prompt) for prompt in prompts])
        self._spans = [
            slice(int(end) - len(prompt), int(end)) for end, prompt in zip(ends, prompts, strict=True)
        ]
        self._longest = max(map(len, prompts))

    @property
    def tokens(self) -> int:
        """Number of tokens of all prompts."""
        return self._spans[-1].stop

    @property
    def rarely_chosen(self) -> list[tuple[int, int, int]]:
        """Layer, expert and tokens of the experts that were rounded to nearest."""
        return [
            (int(layer), expert, count)
            for layer, counts in sorted(self._counts().items(), key=lambda item: int(item[0]))
            for expert, count in enumerate(counts)
            if count < self._least
        ]

    @contextmanager
    def layer(self, layer: int) -> Iterator[LayerRounder]:
        """The prompts go through the layer's attention before, and through its rounded experts after."""
        if layer == 0:
            self._embed()
        block, _ = registry.load_layer(self._path, self._kernels, layer, self._longest, with_experts=False)
        inputs = self._run_gate(layer, block)
        rounder = CalibratedLayerRounder(inputs, self._least)
        yield rounder
        if inputs.topk_ids is not None:
            self._note(layer, rounder.counts)
        if layer + 1 < self._spec.num_layers:
            self._merge(layer + 1, block, inputs)
        for name in ("residual", "normed", "added"):
            (self._work / name).unlink(missing_ok=True)

    def remove_hidden(self, layer: int) -> None:
        """Remove what was needed to compute a layer, whose file is complete now."""
        self._hidden(layer).unlink(missing_ok=True)

    def _hidden(self, layer: int) -> Path:
        """The file of the hidden states before a layer."""
        return self._work / f"hidden-{layer}"

    def _embed(self) -> None:
        outer_layers = registry.load_outside(self._path, self._kernels)
        self._write(0, lambda index: outer_layers.embed(self._prompts[index].token_ids))

    def _run_gate(self, layer: int, block: Block) -> Inputs:
        """The rows of all prompts after the gate of a layer."""
        hidden = np.memmap(self._hidden(layer), mode="r", dtype=np.float32, shape=self._shape)
        residual, normed_hidden = self._scratch("residual"), self._scratch("normed")
        ids, weights = [], []
        for prompt, span in zip(self._prompts, self._spans, strict=True):
            gate_output = prompt.until_gate(layer, block, torch.from_numpy(hidden[span].copy()))
            residual[span], normed_hidden[span] = (
                gate_output.residual.numpy(),
                gate_output.normed_rows.numpy(),
            )
            if not np.isfinite(normed_hidden[span]).all():
                raise ConfigError(
                    f"{self._path}: layer {layer}: the hidden states of a prompt are not finite"
                )
            if gate_output.expert_ids is not None and gate_output.weights is not None:
                ids.append(gate_output.expert_ids)
                weights.append(gate_output.weights)
        if not ids:
            return Inputs(residual, normed_hidden)
        expert_sums = self._scratch("added")
        return Inputs(residual, normed_hidden, torch.cat(ids), torch.cat(weights), expert_sums)

    def _merge(self, layer: int, block: Block, inputs: Inputs) -> None:
        """Write the hidden states before `layer`, the one after the block."""

        def merge_prompt(index: int) -> torch.Tensor:
            span = self._spans[index]
            residual, normed_hidden = (
                torch.from_numpy(array[span].copy()) for array in (inputs.residual, inputs.normed_hidden)
            )
            unit_weights = torch.ones(len(residual), 1)
            gate_output = GateOutput(residual, normed_hidden, None, None)
            if inputs.expert_sums is None:
                return block.merge(gate_output, block.dense(normed_hidden), None)
            rows = torch.from_numpy(inputs.expert_sums[span].copy())[:, None]
            gate_output = replace(gate_output, expert_ids=unit_weights.long(), weights=unit_weights)
            return block.merge(gate_output, block.dense(normed_hidden), rows)

        self._write(layer, merge_prompt)

    def _write(self, layer: int, rows: Callable[[int], torch.Tensor]) -> None:
        """Write the hidden states before a layer. rows: number of a prompt -> its hidden states."""
        hidden = self._scratch("hidden")
        for index, span in enumerate(self._spans):
            hidden[span] = rows(index).numpy()
        hidden.flush()
        (self._work / "hidden").rename(self._hidden(layer))

    @property
    def _shape(self) -> tuple[int, int]:
        """The shape of the rows of all prompts."""
        return self.tokens, self._spec.hidden_size

    def _scratch(self, name: str) -> np.memmap[Any, np.dtype[np.float32]]:
        """A new file for rows of all prompts. Raises OSError if the disk has no space for it."""
        tokens, hidden = self._shape
        path = self._work / name
        with path.open("wb") as file:
            # A full disk is an error here, and not a signal when a mapped page is written.
            os.posix_fallocate(file.fileno(), 0, 4 * tokens * hidden)
        return np.memmap(path, mode="r+", dtype=np.float32, shape=self._shape)

    def _counts(self) -> dict[str, list[int]]:
        file = self._work / COUNTS
        counts: dict[str, list[int]] = json.loads(file.read_text()) if file.is_file() else {}
        return counts

    def _note(self, layer: int, counts: list[int]) -> None:
        temporary = self._work / f"{COUNTS}.new"
        temporary.write_text(json.dumps({**self._counts(), str(layer): counts}))
        temporary.rename(self._work / COUNTS)


@dataclass(frozen=True)
class Inputs:
    """The rows of all prompts [N, h] between a layer's gate and its experts."""

    residual: Floats
    normed_hidden: Floats
    topk_ids: torch.Tensor | None = None
    """[N, k]; None in a layer without routed experts."""
    topk_weights: torch.Tensor | None = None
    """[N, k]"""
    expert_sums: Floats | None = None
    """What the rounded experts add to each row."""


class CalibratedLayerRounder:
    """Rounds the experts of one layer."""

    def __init__(self, inputs: Inputs, least: int) -> None:
        self._inputs, self._least = inputs, least
        self.counts: list[int] = []
        """Tokens of each expert."""

    def expert(self, expert: int, matrices: Matrices, rounding: Rounding) -> RoundedExpert:
        """Round an expert. Down is rounded by what the rounded gate and up compute."""
        tokens, weights = self._select_tokens(expert)
        rows = torch.from_numpy(self._inputs.normed_hidden[tokens.numpy()])
        gate, up, down = (read_matrix() for read_matrix in matrices)
        is_rare = len(rows) < self._least
        gate_up_matrix = rounding.nearest_or_gptq(
            torch.cat([gate, up]), None if is_rare else _hessian(rows, weights)
        )
        gate_up = rounding.numbers(gate_up_matrix) @ rows.T
        wide = activate(SILU, *gate_up.T.contiguous().chunk(2, dim=1))
        last = rounding.nearest_or_gptq(down, None if is_rare else _hessian(wide, weights))
        width = len(gate)
        first = QuantizedMatrix(gate_up_matrix.codes[:width], gate_up_matrix.scales[:width])
        second = QuantizedMatrix(gate_up_matrix.codes[width:], gate_up_matrix.scales[width:])
        return RoundedExpert((first, second, last), wide @ rounding.numbers(last).T)

    def add(self, expert: int, rounded_expert: RoundedExpert) -> None:
        """Add what the expert computes to its tokens' rows."""
        assert self._inputs.expert_sums is not None and rounded_expert.rows is not None
        tokens, weights = self._select_tokens(expert)
        self._inputs.expert_sums[tokens.numpy()] += (rounded_expert.rows * weights[:, None]).numpy()
        self.counts.append(len(tokens))

    def _select_tokens(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens that chose an expert, and its weights."""
        assert self._inputs.topk_ids is not None and self._inputs.topk_weights is not None
        tokens, places = (self._inputs.topk_ids == expert).nonzero(as_tuple=True)
        return tokens, self._inputs.topk_weights[tokens, places]


def _hessian(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The sum over rows x [n, c] of x x^T, each by the square of its weight [n]."""
    weighted_rows = rows * weights[:, None]
    return weighted_rows.T @ weighted_rows
