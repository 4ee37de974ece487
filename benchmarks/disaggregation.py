"""What it costs and gains to have the experts in processes of their own.

    python benchmarks/disaggregation.py one /tmp/qwen             a worker and a server against one process
    python benchmarks/disaggregation.py colocated                 two ranks, by schedule and skew
    python benchmarks/disaggregation.py kill demo --svg kill.svg  tokens/s while an expert server is killed
    python benchmarks/disaggregation.py queues demo --svg q.svg   arrivals near saturation, by queue policy
    python benchmarks/disaggregation.py affinity demo --profile p.npz --prompts a.jsonl b.jsonl
                                                                  two ranks, by dispatch and placement
    python benchmarks/disaggregation.py prefill /tmp/qwen --trace azure.csv
                                                                  prefill apart against chunked prompts
    python benchmarks/disaggregation.py ranks /tmp/qwen           two ranks with servers against two without

Shown are medians of interleaved rounds: what is compared takes turns, and stays loaded meanwhile. Every
process of a cluster has one thread, in `one` --threads. --quick: a look at whether it works. Checkpoints come
from `make_checkpoint.py`; `colocated` writes its own.
"""

from __future__ import annotations

import argparse
from types import ModuleType

from disaggregated import affinity, colocated, kill, one, prefill, queues, ranks
from parts import run

PARTS = {"one": one, "colocated": colocated, "kill": kill, "queues": queues, "affinity": affinity}
PARTS |= {"prefill": prefill, "ranks": ranks}


def model(command: argparse.ArgumentParser, part: ModuleType) -> None:
    """The checkpoint. `colocated` writes its own."""
    if part is not colocated:
        command.add_argument("model", nargs="?", default="demo", help="a Hugging Face directory, or demo")


if __name__ == "__main__":
    run(__doc__, PARTS, 140, model)
