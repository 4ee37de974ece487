"""Random checkpoints whose routing has a chosen skew: the share of the pairs that half of the experts gets.

Coordinate 0 of the hidden state is set apart. Every embedding row has 1 there, and nothing else writes to it:
row 0 of each `o_proj` and of each expert's `down_proj` is 0. Attention and head do not see it: the weights of
their norms are 0 there. So before the experts of every layer, after the norm, each token has

    x0 = 1 / rms(hidden)

there, the same up to the length of its own hidden state. The gate's column 0 is b * t, with one number t_e
for each expert (`direction`), hence

    logit_e = (what random weights make of the other coordinates) + b * x0 * t_e

and b, one for each layer, is found by bisection over the tokens of some prompts, layer after layer in one
pass (`calibrate`). What was reached is counted with the finished checkpoint (`count`).

    persistent    t = 1 for the first half of the experts, -1 for the second
    alternating   the same, and the other way round in every other layer
    exponential   t = log of exponential quantiles, dealt out anew in each layer: a few experts have most, as
                  in the routing that Asynchronous Expert Parallelism fits to a trained model; the hot half
                  is that with the highest t, on both ranks
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from checkpoint import Checkpoint

from moesaic import LLM, SamplingParams
from moesaic.experts.client import DirectExperts, ExpertRequest, RequestHandle

PATTERNS = ("persistent", "alternating", "exponential")
FINEST = 40
"""Number of halvings of the interval that contains b."""
STEEPEST = 64.0
Shares = dict[int, float]
"""Layer -> share of its pairs."""


def direction(pattern: str, layer: int, experts: int) -> np.ndarray:
    """t [E]. Example: ("alternating", 1, 4) -> [-1, -1, 1, 1]."""
    if pattern == "exponential":
        quantiles = -np.log1p(-(np.arange(experts) + 0.5) / experts)
        logs = np.log(quantiles)
        dealt = (logs - logs.mean()) / logs.std()
        order = list(range(experts))
        random.Random(layer).shuffle(order)
        return np.asarray(dealt[order])
    t = np.repeat([1.0, -1.0], [experts // 2, experts - experts // 2])
    return -t if pattern == "alternating" and layer % 2 else t


def hot(t: np.ndarray) -> np.ndarray:
    """[E] bool, the half of the experts with the highest t. Example: [-1, -1, 1, 1] -> the last two."""
    found = np.zeros(len(t), dtype=bool)
    found[np.argsort(-t, kind="stable")[: len(t) // 2]] = True
    return found


def reserve(name: str, tensor: torch.Tensor) -> None:
    """Set coordinate 0 apart in this tensor of a checkpoint, in place."""
    if name.endswith("embed_tokens.weight"):
        tensor[:, 0] = 1.0
    elif name.endswith(("o_proj.weight", "down_proj.weight", "w2.weight")):
        tensor[0, :] = 0.0
    elif name.endswith("gate.weight"):
        tensor[:, 0] = 0.0
    elif name.endswith(("input_layernorm.weight", "model.norm.weight")):
        tensor[0] = 0.0


def top_k(logits: np.ndarray, x0: np.ndarray, b: float, t: np.ndarray, k: int) -> np.ndarray:
    """[n, k] ids, best first, of logits [n, E] with b * x0 * t added; x0: [n]."""
    return np.argsort(-(logits + b * x0[:, None] * t), axis=1, kind="stable")[:, :k]


def solve(logits: np.ndarray, x0: np.ndarray, t: np.ndarray, k: int, share: float) -> float:
    """b with which `share` of the pairs go to the hot half."""
    low, high, warm = 0.0, STEEPEST, hot(t)
    for _ in range(FINEST):
        b = (low + high) / 2
        low, high = (b, high) if warm[top_k(logits, x0, b, t, k)].mean() < share else (low, b)
    return (low + high) / 2


class _Calibrating(DirectExperts):
    """Decides b at the first call of each layer, and sends the rows where that b would."""

    pattern: str
    share: float
    checkpoint: Checkpoint
    found: dict[int, float]

    def submit(self, request: ExpertRequest) -> RequestHandle:
        layer = request.layer
        gate = _gate(self.checkpoint, layer)
        rows = request.hidden.numpy()
        t, k = direction(self.pattern, layer, len(gate)), request.expert_ids.shape[1]
        logits, x0 = rows @ gate.T, rows[:, 0]
        if layer not in self.found:
            self.found[layer] = solve(logits, x0, t, k, self.share)
        ids = top_k(logits, x0, self.found[layer], t, k)
        return super().submit(replace(request, expert_ids=torch.from_numpy(ids.astype(np.int64))))


class _Counting(DirectExperts):
    """Counts the pairs of each expert."""

    pairs: dict[int, np.ndarray]

    def submit(self, request: ExpertRequest) -> RequestHandle:
        experts = self._weights[request.layer].num_experts
        counts = np.bincount(request.expert_ids.numpy().reshape(-1), minlength=experts)
        self.pairs[request.layer] = self.pairs.get(request.layer, 0) + counts
        return super().submit(request)


def calibrate(path: Path, pattern: str, share: float) -> None:
    """Write b * t into the gates of a checkpoint whose coordinate 0 is set apart."""
    checkpoint = Checkpoint(path)
    llm = _model(path)
    probe = _put(llm, _Calibrating)
    probe.pattern, probe.share, probe.checkpoint, probe.found = pattern, share, checkpoint, {}
    _generate(llm, 1)
    for layer, b in probe.found.items():
        gate = _gate(checkpoint, layer)
        gate[:, 0] = b * direction(pattern, layer, len(gate))
        stored = checkpoint.tensors[_gate_name(checkpoint, layer)]
        with stored.file.open("r+b") as file:
            file.seek(stored.start)
            file.write(torch.from_numpy(gate).to(torch.bfloat16).view(torch.int16).numpy().tobytes())


def count(path: Path, new: int = 32) -> tuple[dict[int, np.ndarray], dict[int, np.ndarray]]:
    """Pairs [E] of each layer, in prompts and in answers of `new` tokens."""
    llm = _model(path)
    probe = _put(llm, _Counting)
    probe.pairs = {}
    _generate(llm, 1)
    prompts, probe.pairs = probe.pairs, {}
    _generate(llm, new)
    return prompts, {layer: pairs - prompts[layer] for layer, pairs in probe.pairs.items()}


def shares(pairs: dict[int, np.ndarray], pattern: str) -> Shares:
    """The share of the pairs that are on the hot half. Example: [3, 1] pairs of 2 experts, persistent ->
    0.75."""
    return {
        layer: float(counts[hot(direction(pattern, layer, len(counts)))].sum() / counts.sum())
        for layer, counts in pairs.items()
    }


def busier_half(pairs: dict[int, np.ndarray]) -> Shares:
    """The share of the pairs that are on the half of the experts with the most pairs."""
    return {
        layer: float(np.sort(counts)[len(counts) // 2 :].sum() / counts.sum())
        for layer, counts in pairs.items()
    }


def report(path: Path, pattern: str) -> dict[str, Any]:
    """Write what was reached into the checkpoint's folder, and return it."""
    prompts, answers = count(path)
    found = {
        "pattern": pattern,
        "prompts": shares(prompts, pattern),
        "answers": shares(answers, pattern),
    }
    (path / "skew.json").write_text(json.dumps(found, indent=2))
    return found


def _model(path: Path) -> LLM:
    return LLM(str(path), threads=2, enable_prefix_caching=False, enforce_eager=True, max_model_len=256)


def _put(llm: LLM, kind: Any) -> Any:
    """An instance of `kind` in place of the model's experts."""
    runner, model = llm._worker._executor._runner, llm._worker._executor._model
    runner.experts = kind(model.experts, model.kernels, runner.experts._rows)
    return runner.experts


def _generate(llm: LLM, new: int) -> None:
    rng = random.Random(1)
    prompts = [[rng.randrange(3, 1000) for _ in range(32)] for _ in range(32)]
    llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True))


def _gate_name(checkpoint: Checkpoint, layer: int) -> str:
    ends = f"layers.{layer}.mlp.gate.weight", f"layers.{layer}.block_sparse_moe.gate.weight"
    return next(name for name in checkpoint.tensors if name.endswith(ends))


def _gate(checkpoint: Checkpoint, layer: int) -> np.ndarray:
    """[E, h] float32."""
    stored = checkpoint.tensors[_gate_name(checkpoint, layer)]
    raw = np.fromfile(stored.file, dtype=np.uint16, count=int(np.prod(stored.shape)), offset=stored.start)
    wide = (raw.astype(np.uint32) << 16).view(np.float32)
    return np.array(wide.reshape(stored.shape))
