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
    before: LinkLoads
    """With the solver's own placement, where all links count alike."""
    after: LinkLoads
    """With the placement that prices the links."""
    beside: bool = True
    """Whether the workers are the ranks."""

    def as_json(self, row_bytes: int) -> dict[str, Any]:
        """Bytes of a token on each link, both directions together, and seconds on all links.

        They count rows if `row_bytes` is 0. See `LinkLoads` for once_per_host.
        """
        size = row_bytes or 1
        found: dict[str, Any] = {"unit": "bytes" if row_bytes else "rows", "links": self._links(size)}
        if row_bytes:
            for name, loads in (("before", self.before), ("after", self.after)):
                found[f"seconds_{name}"] = loads.seconds(self.topology.host_prices, size)
        return found

    def _links(self, size: int) -> list[dict[str, Any]]:
        names = [host.name for host in self.topology.hosts]
        sizes = {
            "before": self.before.sizes(size),
            "after": self.after.sizes(size),
            "once_per_host": self.after.sizes(size, once=True),
        }
        found: list[dict[str, Any]] = []
        for at, host in enumerate(names):
            numbers = {name: float(sent[at, at]) for name, sent in sizes.items()}
            found.append({"hosts": [host, host], **numbers})
        for a, b in combinations(range(len(names)), 2):
            numbers = {name: float(sent[a, b] + sent[b, a]) for name, sent in sizes.items()}
            found.append({"hosts": [names[a], names[b]], **numbers})
        return [one for one in found if any(one[name] for name in sizes)]

    def table(self, solver: str, row_bytes: int) -> Table:
        """A row for each link: what a token sends there and back, before and after."""
        unit = "bytes" if row_bytes else "rows"
        shown = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        shown.add_column(f"{solver}: {unit} of a token")
        for name in ("links alike", "links priced", "a row once per host"):
            shown.add_column(name, justify="right")
        for one in self._links(row_bytes or 1):
            a, b = one["hosts"]
            name = f"inside of {a}" if a == b else f"{a} - {b}"
            shown.add_row(name, *(f"{one[key]:,.1f}" for key in ("before", "after", "once_per_host")))
        if row_bytes:
            cells = [
                f"{1e6 * loads.seconds(self.topology.host_prices, row_bytes, once):,.2f}"
                for loads, once in ((self.before, False), (self.after, False), (self.after, True))
            ]
            shown.add_row("µs on all links", *cells)
        return shown
