"""One engine of `peers.py` in a process of its own: moesaic. Speaks JSON lines on stdin and stdout."""

from __future__ import annotations

import json
import resource
import sys
import time
from typing import Any

import torch

from moesaic import LLM, SamplingParams
from moesaic.experts.client import DirectExperts, Ticket
from moesaic.kernels.weights import ExpertWeights
from moesaic.policy.brain.actions import Action, Emit, Event


class Counting(DirectExperts):
    """Adds up the bytes of the distinct experts that each call reads."""

    bytes_read = 0

    def submit(self, layer: int, hidden: torch.Tensor, expert_ids: torch.Tensor) -> Ticket:
        weights: ExpertWeights = self._weights[layer]
        for expert in expert_ids.unique().tolist():
            Counting.bytes_read += sum(tensor.nbytes for tensor in weights.of(expert))
        return super().submit(layer, hidden, expert_ids)


class Stopwatch:
    """A journal that notes when every request of a run has its first token."""

    def __init__(self) -> None:
        self.start(0)

    def start(self, requests: int) -> None:
        self.waited_for, self.seen, self.first = requests, set[int](), 0.0

    def __call__(self, event: Event, now: float, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Emit) and not self.first:
                self.seen.update(action.request_ids)
                self.first = now if len(self.seen) == self.waited_for else 0.0


def run(llm: LLM, stopwatch: Stopwatch, prompts: list[list[int]], new: int) -> dict[str, Any]:
    """Prefill all prompts, then decode `new` tokens of each; seconds of both, and the tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
    stopwatch.start(len(prompts))
    started = time.monotonic()
    results = llm.generate(prompts, params)
    ended = time.monotonic()
    return {
        "prefill_s": stopwatch.first - started,
        "decode_s": ended - stopwatch.first,
        "tokens": [result.outputs[0].token_ids for result in results],
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def bytes_per_step(llm: LLM, stopwatch: Stopwatch, prompts: list[list[int]], new: int) -> float:
    """Mean bytes of weights that one decode step reads, counted from the real routing."""
    executor = llm._worker._executor
    direct = executor._experts
    executor._experts = Counting(direct._weights, direct._kernels)  # type: ignore[attr-defined]
    Counting.bytes_read = 0
    run(llm, stopwatch, prompts, 1)
    prefill = Counting.bytes_read
    run(llm, stopwatch, prompts, new)
    executor._experts = direct
    routed = (Counting.bytes_read - 2 * prefill) / (new - 1)
    model = executor._model
    all_experts = sum(t.nbytes for w in model.experts.values() for e in w.held for t in w.of(e))
    return routed + model.num_bytes - all_experts - model.embedding.nbytes


def main() -> None:
    stopwatch = Stopwatch()
    settings = {"threads": int(sys.argv[2]), "enable_prefix_caching": False, "max_model_len": 1024}
    llm = LLM(sys.argv[1], journal=stopwatch, **settings)
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "bytes":
            answer: dict[str, Any] = {"bytes": bytes_per_step(llm, stopwatch, order["prompts"], 8)}
        else:
            answer = run(llm, stopwatch, order["prompts"], order["new"])
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
