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


class Counting(DirectExperts):
    """Adds up the bytes of the distinct experts that each call reads."""

    bytes_read = 0

    def submit(self, layer: int, hidden: torch.Tensor, expert_ids: torch.Tensor) -> Ticket:
        weights: ExpertWeights = self._weights[layer]
        for expert in expert_ids.unique().tolist():
            Counting.bytes_read += sum(tensor.nbytes for tensor in weights.of(expert))
        return super().submit(layer, hidden, expert_ids)


def run(llm: LLM, prompts: list[list[int]], new: int) -> dict[str, Any]:
    """Prefill all prompts, then decode `new` tokens of each; seconds of both, and the tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
    tokens: dict[int, list[int]] = {}
    started = time.perf_counter()
    first = 0.0
    for request_id, token in outputs(llm, prompts, params):
        tokens.setdefault(request_id, []).append(token)
        if not first and len(tokens) == len(prompts):
            first = time.perf_counter()
    ended = time.perf_counter()
    return {
        "prefill_s": first - started,
        "decode_s": ended - first,
        "tokens": [tokens[key] for key in sorted(tokens)],
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def outputs(llm: LLM, prompts: list[list[int]], params: SamplingParams):  # type: ignore[no-untyped-def] # noqa: ANN201
    """(request, token) as they come."""
    jobs = llm._submit(list(prompts), params)
    for output in llm._outputs(jobs):
        yield output.request_id, output.token_ids[0]


def bytes_per_step(llm: LLM, prompts: list[list[int]], new: int) -> float:
    """Mean bytes of weights that one decode step reads, counted from the real routing."""
    executor = llm._worker._executor
    direct = executor._experts
    executor._experts = Counting(direct._weights, direct._kernels)  # type: ignore[attr-defined]
    Counting.bytes_read = 0
    run(llm, prompts, 1)
    prefill = Counting.bytes_read
    run(llm, prompts, new)
    executor._experts = direct
    routed = (Counting.bytes_read - 2 * prefill) / (new - 1)
    model = executor._model
    all_experts = sum(t.nbytes for w in model.experts.values() for e in w.held for t in w.of(e))
    return routed + model.num_bytes - all_experts - model.embedding.nbytes


def main() -> None:
    llm = LLM(sys.argv[1], threads=int(sys.argv[2]), enable_prefix_caching=False, max_model_len=1024)
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "bytes":
            answer: dict[str, Any] = {"bytes": bytes_per_step(llm, order["prompts"], 8)}
        else:
            answer = run(llm, order["prompts"], order["new"])
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
