"""What a model says about texts: its perplexity, and the token that it would choose at each position.

One layer is in memory at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from moesaic.kernels.table import Kernels
from moesaic.models import registry
from moesaic.models.model import Model
from moesaic.runtime.step.one_prompt import OnePrompt

ROWS = 256
"""Positions whose logits are in memory at once."""


@dataclass(frozen=True)
class Reading:
    """What a model says about texts."""

    perplexity: float
    """Perplexity of every token but the first one of each text."""
    choices: torch.Tensor
    """[N] int64, the most likely token after each token of the texts."""

    def agreement(self, reading: Reading) -> float:
        """Share of the positions at which both choose the same token."""
        return float((self.choices == reading.choices).double().mean())


def measure(
    path: Path, kernels: Kernels, texts: Sequence[Sequence[int]], show: Callable[[int, int], None]
) -> Reading:
    """Read texts, of at least two tokens each, with the model at `path`.

    show: called with layers done and their number.
    """
    spec = registry.read_spec(path)
    prompts = [OnePrompt(spec, kernels, text) for text in texts]
    longest = max(map(len, texts))
    with torch.inference_mode():
        outer_layers = registry.load_outside(path, kernels)
        hidden = [outer_layers.embed(prompt.token_ids) for prompt in prompts]
        for layer in range(spec.num_layers):
            block, experts = registry.load_layer(path, kernels, layer, longest)
            for index, prompt in enumerate(prompts):
                gate_output = prompt.until_gate(layer, block, hidden[index])
                rows = None
                if experts is not None and gate_output.expert_ids is not None:
                    rows = kernels.experts(experts, gate_output.normed_rows, gate_output.expert_ids)
                hidden[index] = block.merge(gate_output, block.dense(gate_output.normed_rows), rows)
            show(layer + 1, spec.num_layers)
        read = [_read(outer_layers, *pair) for pair in zip(hidden, texts, strict=True)]
    num_predicted = sum(len(text) - 1 for text in texts)
    nats = sum(loss for loss, _ in read) / num_predicted
    # math.exp raises OverflowError above 709.
    return Reading(math.exp(nats) if nats < 700 else math.inf, torch.cat([choices for _, choices in read]))


def _read(outer_layers: Model, hidden: torch.Tensor, text: Sequence[int]) -> tuple[float, torch.Tensor]:
    """The loss of a text in nats, and the most likely token after each of its tokens."""
    nats, choices = 0.0, []
    for begin in range(0, len(text), ROWS):
        logits = outer_layers.logits(hidden[begin : begin + ROWS])
        choices.append(logits.argmax(dim=-1))  # also after the last token, where no loss is known
        following = torch.tensor(text[begin + 1 : begin + 1 + len(logits)])
        chances = logits[: len(following)].double().log_softmax(dim=-1)
        nats -= float(chances.gather(1, following[:, None]).sum())
    return nats, torch.cat(choices)
