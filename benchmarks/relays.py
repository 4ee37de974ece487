"""Bytes that a token sends to and gets from another host, with --relay off and always.

    .venv/bin/python benchmarks/relays.py demo

The cluster is on this machine, and a file of --topology names its processes as two hosts: the attention
worker is on one of them, and half of the expert servers on each. The bytes are exact and do not depend on the
machine. "formula" is what docs/hosts.md expects of uniform routing, without headers.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.cluster.test_identity import workload
from tests.support.cluster_driver import cluster

from moesaic.core.experts import ExpertLayout
from moesaic.kernels import table
from moesaic.models import registry
from moesaic.models.files import resolve

TOPOLOGY = """
links = {{ latency_us = 100, gb_per_s = 1, inside_latency_us = 5, inside_gb_per_s = 10 }}
hosts = [{{ name = "a", workers = [0], servers = {near} }}, {{ name = "b", servers = {far} }}]
"""


def formula(servers: int, top_k: int, relay: str, combine: str) -> float:
    """Rows that a token sends to the other host and gets from it in a layer, with uniform routing."""
    far = servers // 2
    now = far * (1 - (1 - 1 / servers) ** top_k)
    once = 1 - (1 - far / servers) ** top_k
    sent = now if relay == "off" else once
    return sent + (top_k * far / servers if combine == "exact" else sent)


def measured(model: str, servers: int, relay: str, combine: str, requests: int) -> float:
    """Bytes of a token in a layer, there and back."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "hosts.toml"
        half = servers // 2
        file.write_text(TOPOLOGY.format(near=list(range(half)), far=list(range(half, servers))))
        shape = {"expert_servers": servers, "topology": str(file), "rebalance_interval": 0.0}
        with cluster(model, relay=relay, combine=combine, **shape) as served:  # type: ignore[arg-type]
            served.connected()
            for _ in range(2):  # the first time relays may not be connected yet
                before = served.stats.experts
                served.submit(*workload(requests, 32))
                served.finish()
            found = served.stats.experts
            top_k = _layout(model).top_k
            return (found.far_bytes - before.far_bytes) / ((found.pairs - before.pairs) / top_k)


def _layout(model: str) -> ExpertLayout:
    return registry.expert_layout(resolve(model), table.pick("cpu", "auto"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--servers", type=int, nargs="+", default=[4, 8], help="of both hosts together")
    parser.add_argument("--requests", type=int, default=8)
    arguments = parser.parse_args()
    layout = _layout(arguments.model)
    shown = Table("servers", "--combine", "bytes, off", "bytes, always", "saved", "formula")
    cases = [(servers, combine) for servers in arguments.servers for combine in ("exact", "partial")]
    for servers, combine in track(cases, console=Console(stderr=True)):
        off, always = (
            measured(arguments.model, servers, relay, combine, arguments.requests)
            for relay in ("off", "always")
        )
        expected = [formula(servers, layout.top_k, relay, combine) for relay in ("off", "always")]
        saved, wanted = 1 - always / off, 1 - expected[1] / expected[0]
        shown.add_row(str(servers), combine, f"{off:.0f}", f"{always:.0f}", f"{saved:.1%}", f"{wanted:.1%}")
    Console().print(shown)


if __name__ == "__main__":
    main()
