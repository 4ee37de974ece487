"""Another engine in a process of its own: `python peer.py ENGINE MODEL DEVICE HOW`. Speaks JSON lines.

It needs nothing of moesaic, so any environment with the engine can run it. Each line names prompts and the
number of greedy tokens for each; the answer has the seconds that they took.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Libraries of some engines look for optional packages, and would find a file of that name in this folder.
sys.path[:] = [entry for entry in sys.path if Path(entry).absolute() != Path(__file__).absolute().parent]
LONGEST = 1024
"""Maximum number of tokens of a request."""
Generate = Callable[[list[list[int]], int], object]


def transformers(model: str, device: str, how: str) -> tuple[Generate, str]:
    """A static batch: no padding, no sampling code. how: its implementation of experts."""
    import torch
    import transformers as library

    loaded: Any = library.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    loaded.eval().to(device).set_experts_implementation(how)

    @torch.inference_mode()
    def generate(prompts: list[list[int]], tokens: int) -> object:
        cache = library.DynamicCache(config=loaded.config)
        step, out = torch.tensor(prompts, device=device), []
        for _ in range(tokens):
            logits = loaded(step, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            step = logits[:, -1:].argmax(dim=-1)
            out.append(step)
        return torch.cat(out, 1).tolist()

    return generate, library.__version__


def vllm(model: str, device: str, how: str) -> tuple[Generate, str]:
    """vLLM's own defaults, without its prefix cache."""
    os.environ |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    import vllm as library  # type: ignore[import-not-found]

    settings = {"max_model_len": LONGEST, "enable_prefix_caching": False, "disable_log_stats": True}
    llm = library.LLM(model, dtype="bfloat16", **settings)

    def generate(prompts: list[list[int]], tokens: int) -> object:
        params = library.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        return llm.generate([{"prompt_token_ids": one} for one in prompts], params, use_tqdm=False)

    return generate, library.__version__


def sglang(model: str, device: str, how: str) -> tuple[Generate, str]:
    """SGLang's own defaults, without its prefix cache."""
    import sglang as library  # type: ignore[import-not-found]

    settings = {"context_length": LONGEST, "disable_radix_cache": True, "log_level": "error"}
    engine = library.Engine(model_path=model, dtype="bfloat16", **settings)

    def generate(prompts: list[list[int]], tokens: int) -> object:
        params = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
        return engine.generate(input_ids=prompts, sampling_params=params)

    return generate, library.__version__


ENGINES = {"transformers": transformers, "vllm": vllm, "sglang": sglang}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print
    name, *rest = sys.argv[1:]
    generate, version = ENGINES[name](*rest)
    for line in sys.stdin:
        order = json.loads(line)
        started = time.perf_counter()
        generate(order["prompts"], order["tokens"])
        seconds = time.perf_counter() - started
        print(json.dumps({"seconds": seconds, "version": version}), file=answers, flush=True)


if __name__ == "__main__":
    main()
