"""The demo model in plain PyTorch: a small Qwen3-style mixture of experts.

Tokens are sorted by expert, so that each expert runs one matrix product over
exactly its own rows; no row is padded and none is dropped.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class DemoShape:
    """The sizes of the model."""

    vocab: int = 4096
    hidden: int = 192
    layers: int = 6
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 32
    experts: int = 24
    top_k: int = 4
    expert_width: int = 64
    positions: int = 2048
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6

    def as_dict(self) -> dict[str, int | float]:
        """The sizes by name."""
        return asdict(self)


@dataclass
class RouterReport:
    """What the router of one layer did, or the routers of all layers in one pass."""

    balance_loss: Tensor
    z_loss: Tensor
    loads: Tensor
    """[layers, sequences, experts], how often each expert was picked. One layer's has no first dimension."""
    picks: Tensor
    """[layers, sequences, positions, top-k], the picked experts."""


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learned scale."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Scales each row to unit root mean square."""
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def rope_tables(shape: DemoShape, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines for positions 0..length-1, half-split layout."""
    half = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angles = torch.outer(torch.arange(length).float(), shape.rope_theta**-half)
    both = torch.cat((angles, angles), dim=-1)
    return both.cos(), both.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies the rotary embedding to [..., positions, head_dim]."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


class Attention(nn.Module):
    """Grouped-query attention with normalised queries and keys."""

    def __init__(self, shape: DemoShape) -> None:
        super().__init__()
        self.shape = shape
        queries = shape.heads * shape.head_dim
        keys = shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, queries, bias=False)
        self.k_proj = nn.Linear(shape.hidden, keys, bias=False)
        self.v_proj = nn.Linear(shape.hidden, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.norm_eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        """Causal self-attention over [sequences, positions, hidden], within `mask` if there is one."""
        rows, length, _ = x.shape
        split = (rows, length, -1, self.shape.head_dim)
        q = rotate(self.q_norm(self.q_proj(x).view(split)).transpose(1, 2), cos, sin)
        k = rotate(self.k_norm(self.k_proj(x).view(split)).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(split).transpose(1, 2)
        groups = self.shape.heads // self.shape.kv_heads
        k = k.repeat_interleave(groups, dim=1)
        v = v.repeat_interleave(groups, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(rows, length, -1))
        return out


class Permuted(torch.autograd.Function):
    """Rows in another order. Its gradient is a permutation too, where indexing would add row by row."""

    @staticmethod
    def forward(context: Any, rows: Tensor, order: Tensor, places: Tensor) -> Tensor:
        """Returns rows[order]. places: the inverse of order."""
        context.save_for_backward(places)
        return rows.index_select(0, order)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Puts the gradient of each row back in its place."""
        return gradients[0].index_select(0, context.saved_tensors[0]), None, None


def permute(rows: Tensor, order: Tensor, places: Tensor) -> Tensor:
    """Returns rows[order]. places: the inverse of order."""
    moved: Tensor = Permuted.apply(rows, order, places)  # type: ignore[no-untyped-call]
    return moved


class Experts(nn.Module):
    """A router and its experts; the kept routing weights sum to one."""

    def __init__(self, shape: DemoShape) -> None:
        super().__init__()
        self.shape = shape
        wide = (shape.experts, shape.expert_width, shape.hidden)
        self.router = nn.Parameter(torch.empty(shape.experts, shape.hidden))
        self.gate = nn.Parameter(torch.empty(wide))
        self.up = nn.Parameter(torch.empty(wide))
        self.down = nn.Parameter(torch.empty(shape.experts, shape.hidden, shape.expert_width))

    def forward(self, x: Tensor) -> tuple[Tensor, RouterReport]:
        """Returns the output and what the router of this layer did."""
        rows, length, hidden = x.shape
        count = self.shape.experts
        flat = x.reshape(-1, hidden)
        scores = F.linear(flat, self.router)
        shares = scores.softmax(dim=-1)
        weights, picks = shares.topk(self.shape.top_k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        order = picks.flatten().argsort(stable=True)
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order))
        counts = torch.bincount(picks.flatten(), minlength=count)
        chosen = flat.unsqueeze(1).expand(-1, self.shape.top_k, -1).reshape(-1, hidden)
        outputs = self._run(permute(chosen, order, places), counts)
        outputs = permute(outputs, places, order).view(-1, self.shape.top_k, hidden)
        mixed = (outputs * weights.unsqueeze(-1)).sum(dim=1)
        balance = count * (counts / picks.numel() * shares.mean(dim=0)).sum()
        z_loss = scores.logsumexp(dim=-1).square().mean()
        offset = torch.arange(rows).repeat_interleave(length * self.shape.top_k) * count
        loads = torch.bincount(picks.flatten() + offset, minlength=rows * count)
        picks = picks.view(rows, length, -1)
        return mixed.view_as(x), RouterReport(balance, z_loss, loads.view(rows, count), picks)

    def _run(self, rows: Tensor, counts: Tensor) -> Tensor:
        gate_up = torch.cat((self.gate, self.up), dim=1).unbind(0)
        down = self.down.unbind(0)
        outputs = []
        for expert, chunk in enumerate(torch.split(rows, counts.tolist())):
            gate, up = F.linear(chunk, gate_up[expert]).chunk(2, dim=-1)
            outputs.append(F.linear(F.silu(gate) * up, down[expert]))
        return torch.cat(outputs)


class Block(nn.Module):
    """Attention, then experts, each behind a norm and a residual sum."""

    def __init__(self, shape: DemoShape) -> None:
        super().__init__()
        self.input_norm = RMSNorm(shape.hidden, shape.norm_eps)
        self.attention = Attention(shape)
        self.expert_norm = RMSNorm(shape.hidden, shape.norm_eps)
        self.experts = Experts(shape)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, RouterReport]:
        """Returns the new hidden states and what the router did."""
        x = x + self.attention(self.input_norm(x), cos, sin, mask)
        mixed, report = self.experts(self.expert_norm(x))
        return x + mixed, report


class DemoModel(nn.Module):
    """The whole language model with tied input and output embeddings."""

    def __init__(self, shape: DemoShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Parameter(torch.empty(shape.vocab, shape.hidden))
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.final_norm = RMSNorm(shape.hidden, shape.norm_eps)
        self._start()

    def _start(self) -> None:
        for name, weight in self.named_parameters():
            if weight.dim() < 2:
                continue
            spread = 0.02 if name == "embedding" else weight.shape[-1] ** -0.5 * 0.6
            if name.endswith(("o_proj.weight", "down")):
                spread /= (2 * self.shape.layers) ** 0.5
            nn.init.normal_(weight, std=spread)

    def forward(
        self, tokens: Tensor, documents: Tensor | None = None, wanted: Tensor | None = None
    ) -> tuple[Tensor, RouterReport]:
        """Returns logits and the router report.

        tokens: [sequences, positions]. documents: the number of each token's document, of that shape;
        attention stays within one. wanted: a mask of that shape. The logits are [wanted positions, vocab],
        or without a mask [sequences, positions, vocab].
        """
        cos, sin = rope_tables(self.shape, tokens.shape[1])
        mask = None
        if documents is not None:
            mask = (documents.unsqueeze(1) == documents.unsqueeze(2)).tril().unsqueeze(1)
        x = F.embedding(tokens, self.embedding)
        reports = []
        for block in self.blocks:
            x, report = block(x, cos, sin, mask)
            reports.append(report)
        x = x if wanted is None else x[wanted]
        logits = F.linear(self.final_norm(x), self.embedding)
        return logits, RouterReport(
            balance_loss=torch.stack([report.balance_loss for report in reports]).mean(),
            z_loss=torch.stack([report.z_loss for report in reports]).mean(),
            loads=torch.stack([report.loads for report in reports]),
            picks=torch.stack([report.picks for report in reports]),
        )
