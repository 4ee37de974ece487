"""One engine of `peers.py` in a process of its own: vLLM's CPU build. Speaks JSON lines.

Runs in the environment that `setup_peer.sh vllm` makes.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from protocol import Answer, Order, private_stdout, serve, timed

KV_GIB = 1
"""Room for keys and values; pages that nothing touches take no memory."""
DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}


def prepare(threads: int) -> None:
    """What has to be in the environment before vLLM and torch are imported."""
    os.environ |= {
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        # One process. With several, vLLM keeps a core free of computation for those that compute nothing.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }


def run(engine: Any, params: Any, prompts: list[list[int]]) -> Answer:
    """Step the engine until all prompts are answered; note when each of them had its first token."""
    tokens: dict[str, list[int]] = {}
    first, done = 0.0, 0
    started = time.perf_counter()
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
    while done < len(prompts):
        for output in engine.step():
            tokens[output.request_id] = list(output.outputs[0].token_ids)
            done += output.finished
        if not first and len(tokens) == len(prompts):
            first = time.perf_counter()
    ended = time.perf_counter()
    return timed(started, first, ended, [tokens[str(index)] for index in range(len(prompts))])


def main() -> None:
    answers = private_stdout()
    prepare(int(sys.argv[2]))
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    llm = LLM(
        sys.argv[1],
        dtype=DTYPES[sys.argv[3]],
        max_model_len=int(sys.argv[4]),
        enable_prefix_caching=False,
        disable_log_stats=True,
        use_tqdm_on_load=False,
    )

    def obey(order: Order) -> Answer:
        params = SamplingParams(temperature=0.0, max_tokens=order["new"], ignore_eos=True, detokenize=False)
        return run(llm.llm_engine, params, order["prompts"])

    serve(answers, obey)


if __name__ == "__main__":
    main()
