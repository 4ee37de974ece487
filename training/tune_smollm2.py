"""Tunes the gates and factors of all layers of a split model together, so that it predicts as the dense one.

The loss is the divergence of its predictions from those of the dense model. Matrices other than gates stay as
they are.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div, log_softmax, rms_norm, silu
from transformers import PreTrainedModel

from smollm2_experts import SCALE, Routing, Split, encode_rows

SEED = 1
REPORT = 5
"""Windows after which the mean loss is printed, and the state is kept."""
FACTOR_RATE = 3e-3
NORM_RATE = 1e-3
GATE_RATE = 0.02
"""Learning rate of a gate, beside the root mean square of its numbers."""


class TunedNorm(nn.Module):
    """A norm whose weight is in float32."""

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        super().__init__()
        self.dense = weight.detach().float()
        self.factors = nn.Parameter(torch.ones_like(self.dense))
        self.epsilon = epsilon

    def forward(self, rows: Tensor) -> Tensor:
        """Scales each row to unit root mean square."""
        weight = self.dense * self.factors
        return rms_norm(rows.float(), weight.shape, weight, self.epsilon).to(rows.dtype)


class SplitMlp(nn.Module):
    """An MLP whose neurons count as much as the gate says of their experts."""

    def __init__(self, dense: nn.Module, routing: Routing, top_k: int) -> None:
        super().__init__()
        self.dense, self.top_k = dense, top_k
        self.experts, self.bias = routing.experts, routing.bias
        self.gate = nn.Parameter(routing.gate)
        self.factors = nn.Parameter(routing.factors.clone())

    def forward(self, rows: Tensor) -> Tensor:
        """Returns the output of the chosen experts and of the shared ones."""
        scores = (rows.float() @ self.gate.T).sigmoid()
        chosen = (scores + self.bias).topk(self.top_k, dim=-1).indices
        mask = torch.zeros_like(scores).scatter(-1, chosen, SCALE)
        weights = torch.cat([scores * mask, torch.ones_like(scores[..., :1])], dim=-1)
        neurons = weights[..., self.experts] * self.factors
        activations = silu(self.dense.gate_proj(rows)) * self.dense.up_proj(rows)
        output: Tensor = self.dense.down_proj(activations * neurons.to(rows.dtype))
        return output


def prepare(model: PreTrainedModel, split: Split) -> tuple[list[TunedNorm], list[SplitMlp]]:
    """Puts gates and tuned norms into the dense model, and returns the norms and the MLPs by layer.

    The last norm comes after the two of each layer.
    """
    model.requires_grad_(False)
    epsilon = model.config.rms_norm_eps
    norms, mlps = [], []
    for layer, routing in zip(model.model.layers, split.layers, strict=True):
        layer.input_layernorm = TunedNorm(layer.input_layernorm.weight, epsilon)
        layer.post_attention_layernorm = TunedNorm(layer.post_attention_layernorm.weight, epsilon)
        layer.mlp = SplitMlp(layer.mlp, routing, split.shape.top_k)
        norms += [layer.input_layernorm, layer.post_attention_layernorm]
        mlps.append(layer.mlp)
    model.model.norm = TunedNorm(model.model.norm.weight, epsilon)
    return [*norms, model.model.norm], mlps


class State:
    """What a tuning run changes, and the file that keeps it."""

    def __init__(self, file: Path, norms: list[TunedNorm], mlps: list[SplitMlp], steps: int) -> None:
        self.file = file
        gates = [
            {"params": [mlp.gate], "lr": GATE_RATE * mlp.gate.detach().square().mean().sqrt().item()}
            for mlp in mlps
        ]
        groups = [
            {"params": [mlp.factors for mlp in mlps], "lr": FACTOR_RATE},
            {"params": [norm.factors for norm in norms], "lr": NORM_RATE},
            *gates,
        ]
        self.optimizer = torch.optim.Adam(groups, betas=(0.9, 0.95))
        rates = [group["lr"] for group in groups]
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, rates, total_steps=steps, pct_start=0.1
        )
        self.losses: list[float] = []

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The tensors that are tuned."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def save(self) -> None:
        """Writes the file."""
        parts: dict[str, Any] = {"parameters": self.parameters, "losses": self.losses}
        parts |= {"optimizer": self.optimizer.state_dict(), "schedule": self.schedule.state_dict()}
        fresh = self.file.with_suffix(".new")
        torch.save(parts, fresh)
        fresh.replace(self.file)

    def read(self) -> None:
        """Reads the file, if there is one."""
        if not self.file.is_file():
            return
        parts = torch.load(self.file, weights_only=True)
        with torch.no_grad():
            for parameter, stored in zip(self.parameters, parts["parameters"], strict=True):
                parameter.copy_(stored)
        self.losses = parts["losses"]
        self.optimizer.load_state_dict(parts["optimizer"])
        self.schedule.load_state_dict(parts["schedule"])


def tune(
    model: PreTrainedModel, split: Split, windows: Tensor, final: Tensor, steps: int, file: Path
) -> Split:
    """Reads as many windows as `steps` says, and returns the tuned split.

    model: the dense one, which is changed. final: what its head gets for the tokens of all windows.
    file: keeps what was reached, so that the same call goes on from there.
    """
    norms, mlps = prepare(model, split)
    state = State(file, norms, mlps, steps)
    state.read()
    targets = final.view(*windows.shape, -1)
    began, first = time.monotonic(), len(state.losses)
    for step in range(first, steps):
        generator = torch.Generator().manual_seed(SEED + step // len(windows))
        order = torch.randperm(len(windows), generator=generator).tolist()
        window = order[step % len(windows)]
        with torch.no_grad():
            target = log_softmax(model.lm_head(targets[window]).float(), dim=-1)
        hidden = model.model(windows[window : window + 1], use_cache=False).last_hidden_state[0]
        predicted = log_softmax(model.lm_head(hidden).float(), dim=-1)
        loss = kl_div(predicted, target, reduction="batchmean", log_target=True)
        state.optimizer.zero_grad()
        loss.backward()
        state.optimizer.step()
        state.schedule.step()
        state.losses.append(loss.item())
        if (step + 1) % REPORT == 0:
            mean, seconds = sum(state.losses[-REPORT:]) / REPORT, time.monotonic() - began
            print(f"{step + 1} windows: divergence {mean:.4f}; {seconds:.0f} s", flush=True)
            state.save()
    return collect(split, norms, mlps)


def collect(split: Split, norms: list[TunedNorm], mlps: list[SplitMlp]) -> Split:
    """Returns the split with what was tuned."""
    factors = [norm.factors.detach() for norm in norms]
    layers = []
    for number, (routing, mlp) in enumerate(zip(split.layers, mlps, strict=True)):
        codes, scales = encode_rows(mlp.gate.detach())
        layers.append(
            replace(
                routing,
                codes=codes,
                scales=scales,
                factors=mlp.factors.detach(),
                attention_norm=factors[2 * number],
                mlp_norm=factors[2 * number + 1],
            )
        )
    return Split(split.shape, layers, factors[-1])
