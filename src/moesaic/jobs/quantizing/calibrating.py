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
from moesaic.jobs.quantizing.formats import Coded
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
class Rounded:
    """An expert after its rounding."""

    matrices: tuple[Coded, Coded, Coded]
    rows: torch.Tensor | None = None
    """What it computes from its inputs [n, h]; None if that is not needed."""


class LayerRounder(Protocol):
    """Rounds the experts of one layer."""

    def expert(self, expert: int, matrices: Matrices, rounding: Rounding) -> Rounded:
        """Round an expert. Several threads may call it at once."""
        ...

    def add(self, expert: int, rounded: Rounded) -> None:
        """Take note of an expert. It is called for one after the other, in ascending order."""
        ...


class Rounder(Protocol):
    """How experts are rounded."""

    def layer(self, layer: int) -> Any:
        """A context with the LayerRounder of a layer. Layers come in ascending order."""
        ...


class Nearest:
    """Rounds each number of an expert to the nearest code."""

    @contextmanager
    def layer(self, layer: int) -> Iterator[Nearest]:
        yield self

    def expert(self, expert: int, matrices: Matrices, rounding: Rounding) -> Rounded:
        gate, up, down = (rounding.nearest(one()) for one in matrices)
        return Rounded((gate, up, down))

    def add(self, expert: int, rounded: Rounded) -> None:
        pass


class Calibrated:
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
        self._prompts = [OnePrompt(self._spec, kernels, one) for one in prompts]
        ends = np.cumsum([len(one) for one in prompts])
        self._spans = [slice(int(end) - len(one), int(end)) for end, one in zip(ends, prompts, strict=True)]
        self._longest = max(map(len, prompts))

    @property
    def tokens(self) -> int:
        """Number of tokens of all prompts."""
        return self._spans[-1].stop

    @property
    def few(self) -> list[tuple[int, int, int]]:
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
        inputs = self._gated(layer, block)
        rounder = OfLayer(inputs, self._least)
        yield rounder
        if inputs.ids is not None:
            self._note(layer, rounder.counts)
        if layer + 1 < self._spec.num_layers:
            self._merge(layer + 1, block, inputs)
        for name in ("residual", "normed", "added"):
            (self._work / name).unlink(missing_ok=True)

    def done(self, layer: int) -> None:
        """Remove what was needed to compute a layer, whose file is complete now."""
        self._hidden(layer).unlink(missing_ok=True)

    def _hidden(self, layer: int) -> Path:
        """The file of the hidden states before a layer."""
        return self._work / f"hidden-{layer}"

    def _embed(self) -> None:
        outside = registry.load_outside(self._path, self._kernels)
        self._write(0, lambda index: outside.embed(self._prompts[index].token_ids))

    def _gated(self, layer: int, block: Block) -> Inputs:
        """The rows of all prompts after the gate of a layer."""
        hidden = np.memmap(self._hidden(layer), mode="r", dtype=np.float32, shape=self._shape)
        residual, normed = self._scratch("residual"), self._scratch("normed")
        ids, weights = [], []
        for prompt, span in zip(self._prompts, self._spans, strict=True):
            gated = prompt.until_gate(layer, block, torch.from_numpy(hidden[span].copy()))
            residual[span], normed[span] = gated.residual.numpy(), gated.normed_rows.numpy()
            if not np.isfinite(normed[span]).all():
                raise ConfigError(
                    f"{self._path}: layer {layer}: the hidden states of a prompt are not finite"
                )
            if gated.expert_ids is not None and gated.weights is not None:
                ids.append(gated.expert_ids)
                weights.append(gated.weights)
        if not ids:
            return Inputs(residual, normed)
        added = self._scratch("added")
        return Inputs(residual, normed, torch.cat(ids), torch.cat(weights), added)

    def _merge(self, layer: int, block: Block, inputs: Inputs) -> None:
        """Write the hidden states before `layer`, the one after the block."""

        def merged(index: int) -> torch.Tensor:
            span = self._spans[index]
            residual, normed = (
                torch.from_numpy(one[span].copy()) for one in (inputs.residual, inputs.normed)
            )
            ones = torch.ones(len(residual), 1)
            gated = GateOutput(residual, normed, None, None)
            if inputs.added is None:
                return block.merge(gated, block.dense(normed), None)
            rows = torch.from_numpy(inputs.added[span].copy())[:, None]
            gated = replace(gated, expert_ids=ones.long(), weights=ones)
            return block.merge(gated, block.dense(normed), rows)

        self._write(layer, merged)

    def _write(self, layer: int, rows: Callable[[int], torch.Tensor]) -> None:
        """Write the hidden states before a layer. rows: number of a prompt -> its hidden states."""
        out = self._scratch("hidden")
        for index, span in enumerate(self._spans):
            out[span] = rows(index).numpy()
        out.flush()
        (self._work / "hidden").rename(self._hidden(layer))

    @property
    def _shape(self) -> tuple[int, int]:
        """Of the rows of all prompts."""
        return self.tokens, self._spec.hidden_size

    def _scratch(self, name: str) -> np.memmap[Any, np.dtype[np.float32]]:
        """A new file for rows of all prompts. Raises OSError if the disk has no space for it."""
        tokens, hidden = self._shape
        path = self._work / name
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 4 * tokens * hidden)
        return np.memmap(path, mode="r+", dtype=np.float32, shape=self._shape)

    def _counts(self) -> dict[str, list[int]]:
        file = self._work / COUNTS
        found: dict[str, list[int]] = json.loads(file.read_text()) if file.is_file() else {}
        return found

    def _note(self, layer: int, counts: list[int]) -> None:
        temporary = self._work / f"{COUNTS}.new"
        temporary.write_text(json.dumps({**self._counts(), str(layer): counts}))
        temporary.rename(self._work / COUNTS)


@dataclass(frozen=True)
class Inputs:
    """The rows of all prompts [N, h] between a layer's gate and its experts."""

    residual: Floats
    normed: Floats
    ids: torch.Tensor | None = None
    """[N, k]; None in a layer without routed experts."""
    weights: torch.Tensor | None = None
    """[N, k]"""
    added: Floats | None = None
    """What the rounded experts add to each row."""


class OfLayer:
    """Rounds the experts of one layer."""

    def __init__(self, inputs: Inputs, least: int) -> None:
        self._inputs, self._least = inputs, least
        self.counts: list[int] = []
        """Tokens of each expert."""

    def expert(self, expert: int, matrices: Matrices, rounding: Rounding) -> Rounded:
        """As `LayerRounder.expert`. Down is rounded by what the rounded gate and up compute."""
        tokens, weights = self._chosen(expert)
        rows = torch.from_numpy(self._inputs.normed[tokens.numpy()])
        gate, up, down = (one() for one in matrices)
        few = len(rows) < self._least
        both = rounding.nearest_or_gptq(torch.cat([gate, up]), None if few else _hessian(rows, weights))
        gate_up = rounding.numbers(both) @ rows.T
        wide = activate(SILU, *gate_up.T.contiguous().chunk(2, dim=1))
        last = rounding.nearest_or_gptq(down, None if few else _hessian(wide, weights))
        width = len(gate)
        first = Coded(both.codes[:width], both.scales[:width])
        second = Coded(both.codes[width:], both.scales[width:])
        return Rounded((first, second, last), wide @ rounding.numbers(last).T)

    def add(self, expert: int, rounded: Rounded) -> None:
        """As `LayerRounder.add`: adds what the expert computes to its tokens' rows."""
        assert self._inputs.added is not None and rounded.rows is not None
        tokens, weights = self._chosen(expert)
        self._inputs.added[tokens.numpy()] += (rounded.rows * weights[:, None]).numpy()
        self.counts.append(len(tokens))

    def _chosen(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens that chose an expert, and its weights."""
        assert self._inputs.ids is not None and self._inputs.weights is not None
        tokens, places = (self._inputs.ids == expert).nonzero(as_tuple=True)
        return tokens, self._inputs.weights[tokens, places]


def _hessian(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The sum over rows x [n, c] of x x^T, each by the square of its weight [n]."""
    weighted = rows * weights[:, None]
    return weighted.T @ weighted
