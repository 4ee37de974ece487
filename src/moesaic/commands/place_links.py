"""What `moesaic place --topology` predicts for each link, as a table or for JSON."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from moesaic.core.topology import Topology
from moesaic.policy.placement.link_prices import LinkLoads


@dataclass(frozen=True)
class LinkReport:
    """The links' loads with one solver, with attention-DP: a request stays on its rank."""

    topology: Topology
    unpriced_loads: LinkLoads
    """The loads with the solver's own placement, for which all links count alike."""
    priced_loads: LinkLoads
    """The loads with the placement that prices the links."""
    is_colocated: bool = True
    """Whether the workers are the ranks."""

    def as_json(self, row_bytes: int) -> dict[str, Any]:
        """Bytes of a token on each link, both directions together, and seconds on all links.

        They count rows if `row_bytes` is 0. See `LinkLoads` for once_per_host.
        """
        size = row_bytes or 1
        figures: dict[str, Any] = {"unit": "bytes" if row_bytes else "rows", "links": self._links(size)}
        if row_bytes:
            for name, loads in (("before", self.unpriced_loads), ("after", self.priced_loads)):
                figures[f"seconds_{name}"] = loads.seconds(self.topology.host_prices, size)
        return figures

    def _links(self, size: int) -> list[dict[str, Any]]:
        names = [host.name for host in self.topology.hosts]
        sizes = {
            "before": self.unpriced_loads.sizes(size),
            "after": self.priced_loads.sizes(size),
            "once_per_host": self.priced_loads.sizes(size, once_per_host=True),
        }
        links: list[dict[str, Any]] = []
        for index, host in enumerate(names):
            numbers = {name: float(row_sizes[index, index]) for name, row_sizes in sizes.items()}
            links.append({"hosts": [host, host], **numbers})
        for a, b in combinations(range(len(names)), 2):
            numbers = {name: float(row_sizes[a, b] + row_sizes[b, a]) for name, row_sizes in sizes.items()}
            links.append({"hosts": [names[a], names[b]], **numbers})
        return [link for link in links if any(link[name] for name in sizes)]

    def table(self, solver: str, row_bytes: int) -> Table:
        """A row for each link: what a token sends there and back, before and after."""
        unit = "bytes" if row_bytes else "rows"
        link_table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        link_table.add_column(f"{solver}: {unit} of a token")
        for name in ("links alike", "links priced", "a row once per host"):
            link_table.add_column(name, justify="right")
        for link in self._links(row_bytes or 1):
            a, b = link["hosts"]
            name = f"inside of {a}" if a == b else f"{a} - {b}"
            link_table.add_row(name, *(f"{link[key]:,.1f}" for key in ("before", "after", "once_per_host")))
        if row_bytes:
            cells = [
                f"{1e6 * loads.seconds(self.topology.host_prices, row_bytes, once_per_host):,.2f}"
                for loads, once_per_host in (
                    (self.unpriced_loads, False),
                    (self.priced_loads, False),
                    (self.priced_loads, True),
                )
            ]
            link_table.add_row("µs on all links", *cells)
        return link_table
