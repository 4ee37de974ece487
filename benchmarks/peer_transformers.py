"""One engine of `peers.py` in a process of its own: transformers in float32. Speaks JSON lines."""

from __future__ import annotations

import json
import resource
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache


def run(model: Any, prompts: list[list[int]], new: int) -> dict[str, Any]:
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
    return {
        "prefill_s": first - started,
        "decode_s": ended - first,
        "tokens": [list(column) for column in zip(*tokens, strict=True)],
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def main() -> None:
    torch.set_num_threads(int(sys.argv[2]))
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    model.eval()
    for line in sys.stdin:
        order = json.loads(line)
        model.set_experts_implementation(order["experts"])
        print(json.dumps(run(model, order["prompts"], order["new"])), flush=True)


if __name__ == "__main__":
    main()
