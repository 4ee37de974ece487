"""Models larger than the fast memory, on real hierarchies of this machine.

    python benchmarks/make_checkpoint.py qwen3-moe-2.6b /tmp/big
    benchmarks/setup_peer.sh llama /tmp/llama
    python -m venv /tmp/accelerate && /tmp/accelerate/bin/pip install torch transformers accelerate
    python benchmarks/offload.py disk /tmp/big --prompts question.jsonl \\
        --llama /tmp/llama --accelerate /tmp/accelerate
    python benchmarks/offload.py serve /tmp/big --llama /tmp/llama
    python benchmarks/offload.py cores --svg gantt.svg --json cores.json
    python benchmarks/offload.py latency --svg latency.svg
    python benchmarks/offload.py memory
    python benchmarks/offload.py replay demo

`disk`: RAM over the disk, beside llama.cpp and accelerate. `serve`: the same as servers, beside llama.cpp's.
`cores`: two cores as two levels, every schedule beside its price. `latency`: what a layer takes there, by
micro-batch and context. `memory`: the peaks of workers beside their caps. `replay`: hit rates of policies
on recorded routes. --quick: does it work?
"""

from __future__ import annotations

from offloading import cores, disk, latency, memory, replay, serve
from parts import run

PARTS = {"disk": disk, "serve": serve, "cores": cores, "latency": latency, "memory": memory, "replay": replay}

if __name__ == "__main__":
    run(__doc__, PARTS, 160)
