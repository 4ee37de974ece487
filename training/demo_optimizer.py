"""The demo model's optimizers: orthogonalised momentum for matrices, Adam for the rest.

Each hidden matrix moves along its momentum with all singular values brought
close to one, found by a few steps of a quintic Newton-Schulz iteration.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalised(stack: Tensor, steps: int = 5) -> Tensor:
    """Brings the singular values of [count, rows <= columns] matrices near one."""
    a, b, c = NEWTON_SCHULZ
    x: Tensor = stack / (stack.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = torch.bmm(x, x.transpose(1, 2))
        x = a * x + torch.bmm(b * gram + c * torch.bmm(gram, gram), x)
    return x


class MatrixMomentum:
    """Nesterov momentum with orthogonalised updates for stacks of matrices."""

    def __init__(self, weights: list[nn.Parameter], momentum: float, decay: float) -> None:
        self._weights = weights
        self._momentum = momentum
        self._decay = decay
        self._states = [torch.zeros_like(weight) for weight in weights]

    def zero_grad(self) -> None:
        """Forgets the gradients."""
        for weight in self._weights:
            weight.grad = None

    def state_dict(self) -> list[Tensor]:
        """The momentum of each matrix."""
        return self._states

    def load_state_dict(self, states: list[Tensor]) -> None:
        """Takes the momentum that `state_dict` gave."""
        for state, saved in zip(self._states, states, strict=True):
            state.copy_(saved)

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Applies one update; matrices of one size are handled together."""
        groups: dict[tuple[int, int], list[tuple[nn.Parameter, Tensor]]] = {}
        for weight, state in zip(self._weights, self._states, strict=True):
            if weight.grad is None:
                continue
            state.mul_(self._momentum).add_(weight.grad)
            update = weight.grad.add(state, alpha=self._momentum)
            rows, columns = update.shape[-2:]
            flat = update.view(-1, rows, columns)
            flat = flat.transpose(1, 2) if rows > columns else flat
            groups.setdefault((flat.shape[1], flat.shape[2]), []).append((weight, flat))
        for members in groups.values():
            solved = orthogonalised(torch.cat([flat for _, flat in members]))
            at = 0
            for weight, flat in members:
                rows, columns = weight.shape[-2:]
                part = solved[at : at + flat.shape[0]]
                at += flat.shape[0]
                part = part.transpose(1, 2) if rows > columns else part
                scale = max(1.0, rows / columns) ** 0.5
                weight.mul_(1 - rate * self._decay)
                weight.add_(part.reshape(weight.shape), alpha=-rate * scale)


class DemoOptimizer:
    """Both optimizers behind one learning-rate factor."""

    def __init__(self, model: nn.Module, matrix_rate: float, other_rate: float) -> None:
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, weight in model.named_parameters():
            hidden = weight.dim() >= 2 and not name.endswith(("embedding", "router"))
            (matrices if hidden else others).append(weight)
        self._matrix_rate = matrix_rate
        self._other_rate = other_rate
        self._matrix = MatrixMomentum(matrices, momentum=0.95, decay=0.05)
        self._adam = torch.optim.AdamW(others, lr=other_rate, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0)

    def step(self, factor: float) -> None:
        """Updates all weights with both rates multiplied by `factor`."""
        self._matrix.step(self._matrix_rate * factor)
        for group in self._adam.param_groups:
            group["lr"] = self._other_rate * factor
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        self._matrix.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs of both optimizers."""
        return {"matrix": self._matrix.state_dict(), "adam": self._adam.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what `state_dict` gave."""
        self._matrix.load_state_dict(state["matrix"])
        self._adam.load_state_dict(state["adam"])
