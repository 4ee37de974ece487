"""One engine of `peers.py` in a process of its own: transformers in float32. Speaks JSON lines."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from protocol import Answer, Order, private_stdout, serve, timed
from transformers import AutoModelForCausalLM, DynamicCache


def run(model: Any, prompts: list[list[int]], new: int) -> Answer:
    """A static batch: prefill, then greedy decoding with a KV cache, no padding, no sampling code."""
    ids = torch.tensor(prompts)
    cache = DynamicCache(config=model.config)
    started = time.perf_counter()
    with torch.inference_mode():
        logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        token = logits[:, -1].argmax(dim=-1)
        tokens = [token.tolist()]
        first = time.perf_counter()
        for _ in range(new - 1):
            logits = model(token[:, None], past_key_values=cache, use_cache=True).logits
            token = logits[:, -1].argmax(dim=-1)
            tokens.append(token.tolist())
    ended = time.perf_counter()
    return timed(started, first, ended, [list(column) for column in zip(*tokens, strict=True)])


def main() -> None:
    answers = private_stdout()
    torch.set_num_threads(int(sys.argv[2]))
    model: Any = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    model.eval()

    def obey(order: Order) -> Answer:
        model.set_experts_implementation(order["experts"])
        return run(model, order["prompts"], order["new"])

    serve(answers, obey)


if __name__ == "__main__":
    main()
