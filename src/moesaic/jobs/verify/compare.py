"""Compares two implementations of a model, part by part. Both sides get the same input to each layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from moesaic.core.errors import ConfigError
from moesaic.jobs.verify.reference import Reference
from moesaic.kernels.table import Kernels
from moesaic.models import registry
from moesaic.models.spec import ModelSpec
from moesaic.runtime.step.one_prompt import OnePrompt

EMBEDDING, LOGITS = "embedding", "logits"
Show = Callable[[str, int, int], None]
"""Reports progress: (name of the work, parts done, parts in total)."""


class MoesaicSide:
    """moesaic's side: the stages of a worker's step, on the CPU, with one layer in memory at a time.

    Hidden states go in and out as the model defines them. Blocks may compute with smaller ones, by a factor.
    """

    def __init__(self, path: Path, spec: ModelSpec, kernels: Kernels, tokens: list[int]) -> None:
        self._path, self._kernels = path, kernels
        self._residual = registry.residual(path)
        self._prompt = OnePrompt(spec, kernels, tokens)

    def embed(self) -> torch.Tensor:
        """Returns the embeddings [n, h] of the prompt."""
        outer_layers = registry.load_outside(self._path, self._kernels)
        return outer_layers.embed(self._prompt.token_ids) * self._residual

    def layer(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, h] before a layer -> [n, h] after it."""
        block, experts = registry.load_layer(self._path, self._kernels, layer, len(hidden))
        gate_output = self._prompt.until_gate(layer, block, hidden / self._residual)
        rows = None
        if experts is not None and gate_output.expert_ids is not None:
            rows = self._kernels.experts(experts, gate_output.normed_rows, gate_output.expert_ids)
        return block.merge(gate_output, block.dense(gate_output.normed_rows), rows) * self._residual

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, h] after the last layer -> logits [n, V]."""
        return registry.load_outside(self._path, self._kernels).logits(hidden / self._residual)


class Side(Protocol):
    """An implementation of a model. Shapes are [n, h] for hidden states and [n, V] for logits."""

    def embed(self) -> torch.Tensor: ...

    def layer(self, layer: int, hidden: torch.Tensor) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class PartError:
    """How far the two sides are apart after one part of the model."""

    part: str
    """`embedding`, `layer N` or `logits`."""
    absolute: float
    """Largest difference of two numbers."""
    relative: float
    """Largest difference of a row / largest number that the part adds to this row."""
    different: bool
    """Whether the relative error is above the tolerance."""


@dataclass(frozen=True)
class Verdict:
    """The result of a comparison."""

    parts: tuple[PartError, ...]
    tolerance: float
    argmax_differs: tuple[int, ...]
    """Positions of the prompt after which the two sides choose another token. Where the reference's two
    logits are as near as the tolerance, both choices count as equal."""

    @property
    def first(self) -> str | None:
        """The first part that differs; None if none does."""
        return next((part.part for part in self.parts if part.different), None)

    @property
    def equal(self) -> bool:
        return self.first is None and not self.argmax_differs


def verify(path: Path, kernels: Kernels, tokens: list[int], tolerance: float, show: Show) -> Verdict:
    """Compare the model in a directory with transformers, for one prompt.

    Of a quantised model, transformers computes with the numbers that moesaic reads in its files, but it reads
    experts in MXFP4 itself.
    Raises ConfigError for tokens that the model does not have, and where transformers cannot compute it.
    """
    spec = registry.read_spec(path)
    for token in tokens:
        if not 0 <= token < spec.vocab_size:
            raise ConfigError.field("--prompt-tokens", token, f"0 to {spec.vocab_size - 1}")
    if not 1 <= len(tokens) <= spec.max_position:
        raise ConfigError.field(
            "--prompt-tokens", f"{len(tokens)} tokens", f"1 to {spec.max_position} tokens"
        )
    with torch.inference_mode():
        sides = MoesaicSide(path, spec, kernels, tokens), Reference(path, tokens)
        return compare(*sides, spec.num_layers, tolerance, show)


def compare(actual: Side, reference: Side, layers: int, tolerance: float, show: Show) -> Verdict:
    """Compare two sides. The input of a layer is what our side had after the layer before."""
    parts: list[PartError] = []
    outputs = _outputs(actual, reference, layers)
    actual_output = reference_output = torch.empty(0)
    for num_done, (part, layer_input, actual_output, reference_output) in enumerate(outputs, 1):
        parts.append(_error(part, layer_input, actual_output, reference_output, tolerance))
        show("comparing", num_done, layers + 2)
    return Verdict(
        tuple(parts), tolerance, _find_argmax_differences(actual_output, reference_output, tolerance)
    )


Output = tuple[str, torch.Tensor | None, torch.Tensor, torch.Tensor]
"""Name of a part, the hidden states to which it adds, our result, the reference's result."""


def _outputs(actual: Side, reference: Side, layers: int) -> Iterator[Output]:
    hidden = actual.embed()
    yield EMBEDDING, None, hidden, reference.embed()
    for layer in range(layers):
        reference_hidden = reference.layer(layer, hidden)
        # A layer may write into its input, which the comparison still needs.
        actual_hidden = actual.layer(layer, hidden.clone())
        yield f"layer {layer}", hidden, actual_hidden, reference_hidden
        hidden = actual_hidden
    yield LOGITS, None, actual.logits(hidden), reference.logits(hidden)


def _error(
    part: str,
    layer_input: torch.Tensor | None,
    actual: torch.Tensor,
    reference: torch.Tensor,
    tolerance: float,
) -> PartError:
    difference = (actual.double() - reference.double()).abs().amax(dim=-1)
    contribution = reference.double() if layer_input is None else reference.double() - layer_input.double()
    # A row to which the part adds nothing has no size to divide by.
    size = contribution.abs().amax(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
    relative = float((difference / size).max())
    # "not <=" also finds a relative error that is NaN.
    return PartError(part, float(difference.max()), relative, not relative <= tolerance)


def _find_argmax_differences(
    actual: torch.Tensor, reference: torch.Tensor, tolerance: float
) -> tuple[int, ...]:
    """actual, reference: logits [n, V]."""
    actual_choice, best = actual.argmax(dim=-1, keepdim=True), reference.amax(dim=-1, keepdim=True)
    margin = tolerance * reference.abs().amax(dim=-1, keepdim=True)
    differs = ~(best - reference.gather(-1, actual_choice) <= margin)
    return tuple(int(position) for position in differs.flatten().nonzero().flatten())
