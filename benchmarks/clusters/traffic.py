"""Requests without a pause, to a cluster that processes of other hosts have joined."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.support.joined_cluster import JoinedCluster

from moesaic import SamplingParams


def keep_busy(joined: JoinedCluster, arguments: argparse.Namespace, until: float) -> None:
    """Keep `arguments.concurrency` requests of `arguments.gen_len` tokens open, until that time."""
    served = joined.served
    params = SamplingParams(max_tokens=arguments.gen_len, temperature=0.0, ignore_eos=True)
    while time.monotonic() < until:
        while len(served.running.unfinished) < arguments.concurrency:
            number = len(served.running.answers)
            served.submit([[3 + (number * 7 + place) % 800 for place in range(16)]], [params])
        served.take(0.02)
