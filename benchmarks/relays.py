"""Bytes that a token sends to and gets from another host, with --relay off and always.

    .venv/bin/python benchmarks/relays.py demo
    sudo .venv/bin/python benchmarks/relays.py /tmp/qwen --rate 1gbit 200mbit     tokens/s over a slow link

The cluster is on this machine, and a file of --topology names its processes as two hosts: the attention
worker is on one of them, and half of the expert servers on each. The bytes are exact and do not depend on the
machine. "formula" is what docs/hosts.md expects of uniform routing, without headers.

With --rate the hosts are Linux namespaces of this machine, which needs root, and the link between them is
limited to each of these rates in turn. Then the columns are tokens/s, the best of --rounds.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.cluster.test_identity import workload
from tests.support.cluster_driver import Cluster, cluster
from tests.support.hosts import Hosts, missing
from tests.support.joined_cluster import SERVER, joined_cluster

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


def speeds(arguments: argparse.Namespace, servers: int, relay: str, combine: str) -> list[float]:
    """Tokens/s over each of the rates."""
    shape = {"expert_servers": servers // 2, "rebalance_interval": 0.0, "max_model_len": 512}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        given = [folder] if arguments.model == "demo" else [folder, Path(arguments.model)]
        with (
            Hosts(2, given) as hosts,
            hosts[0].entered(),
            joined_cluster(
                hosts, folder, model=arguments.model, relay=relay, combine=combine, **shape
            ) as joined,
        ):
            joined.bring(hosts[1], [SERVER] * (servers // 2))
            joined.served.connected()
            found = []
            for rate in arguments.rate:
                hosts[1].limit(rate)
                found.append(max(speed(joined.served, arguments) for _ in range(arguments.rounds)))
            hosts[1].limit(None)
            return found


def speed(served: Cluster, arguments: argparse.Namespace) -> float:
    before, begun = served.running.tokens, time.perf_counter()
    served.submit(*workload(arguments.requests, arguments.new))
    served.finish()
    return (served.running.tokens - before) / (time.perf_counter() - begun)


def over_links(arguments: argparse.Namespace, cases: list[tuple[int, str]]) -> Table:
    """Tokens/s with --relay off and always, for each rate."""
    shown = Table("servers", "--combine", "rate", "tokens/s, off", "tokens/s, always", "ratio")
    for servers, combine in track(cases, console=Console(stderr=True)):
        off, always = (speeds(arguments, servers, relay, combine) for relay in ("off", "always"))
        for rate, without, through in zip(arguments.rate, off, always, strict=True):
            ratio = f"{through / without:.2f}x"
            shown.add_row(str(servers), combine, rate, f"{without:.1f}", f"{through:.1f}", ratio)
    return shown


def _layout(model: str) -> ExpertLayout:
    return registry.expert_layout(resolve(model), table.pick("cpu", "auto"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--servers", type=int, nargs="+", default=[4, 8], help="of both hosts together")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--new", type=int, default=32, help="tokens of an answer, with --rate")
    parser.add_argument("--combine", nargs="+", choices=("exact", "partial"), default=["exact", "partial"])
    parser.add_argument("--rate", nargs="+", help="of the link, as tc takes it, such as 200mbit")
    parser.add_argument("--rounds", type=int, default=3, help="of each rate")
    arguments = parser.parse_args()
    cases = [(servers, combine) for servers in arguments.servers for combine in arguments.combine]
    if arguments.rate:
        if missing():
            raise SystemExit(missing())
        Console().print(over_links(arguments, cases))
        return
    layout = _layout(arguments.model)
    shown = Table("servers", "--combine", "bytes, off", "bytes, always", "saved", "formula")
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
