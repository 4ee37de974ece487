"""One engine of `peers.py` in a process of its own: moesaic. Speaks JSON lines on stdin and stdout."""

from __future__ import annotations

import json
import sys
import time

import torch
from protocol import Answer, Order, private_stdout, serve, timed

from moesaic import LLM, SamplingParams
from moesaic.experts.client import DirectExperts, ExpertRequest, RequestHandle
from moesaic.kernels.weights import ExpertWeights
from moesaic.policy.scheduling.schedulers.actions import Action, Emit, Event
from moesaic.runtime.step.eager import EagerRunner


class Counting(DirectExperts):
    """Adds up the weights of the distinct experts that each call reads."""

    numbers_read = bytes_read = 0

    def submit(self, request: ExpertRequest) -> RequestHandle:
        weights: ExpertWeights = self._weights[request.layer]
        for expert in torch.unique(request.expert_ids).tolist():
            gate, _, down = matrices = weights.matrices_of(expert)
            Counting.numbers_read += 3 * len(gate) * len(down)
            Counting.bytes_read += sum(tensor.nbytes for tensor in matrices)
        return super().submit(request)


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


def run(llm: LLM, stopwatch: Stopwatch, prompts: list[list[int]], new: int) -> Answer:
    """Prefill all prompts, then decode `new` tokens of each; seconds of both, and the tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
    stopwatch.start(len(prompts))
    started = time.monotonic()
    results = llm.generate(prompts, params)
    ended = time.monotonic()
    tokens = [list(result.outputs[0].token_ids) for result in results]
    return timed(started, stopwatch.first, ended, tokens)


def reads_per_step(llm: LLM, stopwatch: Stopwatch, prompts: list[list[int]], new: int) -> Answer:
    """Mean weights that one decode step reads, as numbers and in bytes, counted from the real routing."""
    executor, model = llm._worker._executor, llm._worker._executor._model
    recorded, eager = executor._runner, executor._runner._eager
    counting = Counting(model.experts, model.kernels, eager.experts._rows)
    executor._runner = EagerRunner(eager.stages, counting)  # recorded steps do not pass through Python
    Counting.numbers_read = Counting.bytes_read = 0
    run(llm, stopwatch, prompts, 1)
    prefill_numbers, prefill_bytes = Counting.numbers_read, Counting.bytes_read
    run(llm, stopwatch, prompts, new)
    executor._runner = recorded
    numbers = (Counting.numbers_read - 2 * prefill_numbers) / (new - 1)
    read = (Counting.bytes_read - 2 * prefill_bytes) / (new - 1)
    held = [
        weights.matrices_of(expert) for weights in model.experts.values() for expert in weights.resident_ids
    ]
    numbers += model.num_parameters - sum(3 * len(gate) * len(down) for gate, _, down in held)
    read += model.num_bytes - sum(tensor.nbytes for matrices in held for tensor in matrices)
    if model.head is not model.embedding:
        numbers, read = numbers - model.embedding.numel(), read - model.embedding.nbytes
    return {"numbers": numbers, "bytes": read}


def main() -> None:
    """Arguments: the model, the number of threads, and perhaps more settings of `LLM` as JSON."""
    answers = private_stdout()
    stopwatch = Stopwatch()
    settings = {"threads": int(sys.argv[2]), "enable_prefix_caching": False}
    settings |= json.loads(sys.argv[3]) if len(sys.argv) > 3 else {}
    llm = LLM(sys.argv[1], journal=stopwatch, **settings)

    def obey(order: Order) -> Answer:
        if order["do"] == "count":
            return reads_per_step(llm, stopwatch, order["prompts"], 8)
        return run(llm, stopwatch, order["prompts"], order["new"])

    serve(answers, obey)


if __name__ == "__main__":
    main()
