"""What the collectives of attention under tensor parallelism cost, alone and in a served model.

    python benchmarks/collectives.py latency               each collective, by rows and local share; gloo's
    python benchmarks/collectives.py ablation profile.npz  an exchange, without one of its four savings each
    python benchmarks/collectives.py serve /tmp/qwen       the four forms against one process

Every rank is a process of its own with one thread. What is compared takes turns: in `latency` and `ablation`
the same processes do all of it, in `serve` all engines stay loaded. Times are those of the slowest rank,
bytes what the transport counted. --quick: a look at whether it works. Profiles come from `moesaic profile` or
from `routings.py`, checkpoints from `make_checkpoint.py`.
"""

from __future__ import annotations

from grouped import ablation, latency, serve
from parts import run

PARTS = {"latency": latency, "ablation": ablation, "serve": serve}

if __name__ == "__main__":
    run(__doc__, PARTS, 150)
