"""What it costs to have the processes of a cluster on several hosts.

    python benchmarks/cluster.py ray demo        start and steady state on a Ray cluster against this host
    python benchmarks/cluster.py hosts           throughput of 1 to 8 hosts with modelled devices
    python benchmarks/cluster.py loss demo       tokens/s over time while one of three hosts dies

--quick: a look at whether it works. Checkpoints come from `make_checkpoint.py`.
"""

from __future__ import annotations

import argparse
from types import ModuleType

from clusters import loss, on_hosts, on_ray
from parts import run

PARTS = {"ray": on_ray, "hosts": on_hosts, "loss": loss}


def model(command: argparse.ArgumentParser, part: ModuleType) -> None:
    if part is not on_hosts:
        command.add_argument("model", nargs="?", default="demo", help="a Hugging Face directory, or demo")


if __name__ == "__main__":
    run(__doc__, PARTS, 120, model)
