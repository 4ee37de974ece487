"""What links cost: how much a (token, expert) pair counts by where it is computed, and the rows on each link.

A (token, expert) pair that the token's own rank computes crosses no link. Another one costs the seconds that
its bytes take on the link to its server's host. So every objective that counts local pairs becomes one that
counts seconds: a pair counts by its *worth*, which is 1 on the own rank and 0 over the slowest link. Where
all links are alike, that is the number of local pairs again.

This is the two-level machine of Speculative MoE (nodes with fast links inside, slow ones between), with any
number of levels.

Question: What does a link between hosts cost, and how does a placement follow it?
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moesaic.core.profile import SmallArray

FloatArray = npt.NDArray[np.float64]


def worth_of(prices: FloatArray) -> FloatArray:
    """[S, W] worth, 0 to 1, of a pair that server s computes for a token of worker w.

    prices: [W, S] seconds of a byte from each worker to each server. With ranks, worker i is rank i.

    Example: prices 0, 1, 4 from worker 0 to servers 0, 1, 2 -> worth 1, 0.75, 0.
    """
    worth: FloatArray = 1.0 - prices.T / max(float(prices.max()), 1e-300)
    return worth


@dataclass(frozen=True)
class LinkLoads:
    """What a token sends from host to host, over all layers. The diagonal counts links inside of a host."""

    pairs: FloatArray
    """[H, H] mean (token, expert) pairs of tokens on host g that another rank's server on host h computes."""
    rows: FloatArray
    """[H, H] mean rows from host g to host h, if a row goes once to each server."""
    rows_once_per_host: FloatArray
    """[H, H] mean rows from host g to host h, if a row goes once to each other host and is sent on there.

    The diagonal is that of `rows`.
    """

    def sizes(self, row_bytes: float, once_per_host: bool = False) -> FloatArray:
        """[H, H] bytes that host g sends to host h for a token: rows, and answers to the pairs of h's tokens.

        once_per_host: a row goes once to each host. Answers are one row for each pair.

        Example: a token on host 0 sends one row of 8 bytes to host 1, which computes 2 pairs -> 8 bytes from
        0 to 1, and 16 from 1 to 0.
        """
        num_bytes: FloatArray = (
            (self.rows_once_per_host if once_per_host else self.rows) + self.pairs.T
        ) * row_bytes
        return num_bytes

    def seconds(self, prices: FloatArray, row_bytes: float, once_per_host: bool = False) -> float:
        """Seconds that a token's bytes take on all links together. prices: [H, H] seconds of a byte."""
        return float((self.sizes(row_bytes, once_per_host) * prices).sum())


@dataclass(frozen=True)
class HostMap:
    """Where workers and servers are, and what the links between them cost."""

    prices: FloatArray
    """[W, S] seconds of a byte from each worker to each server."""
    workers: npt.NDArray[np.integer]
    """[W] index of the host of each worker."""
    servers: npt.NDArray[np.integer]
    """[S] index of the host of each server."""
    count: int
    """Number of hosts."""
    workers_are_ranks: bool
    """Whether worker i is rank i, whose own server is server i."""

    @property
    def alike(self) -> bool:
        """Whether all processes are on one host."""
        return len({*self.workers.tolist(), *self.servers.tolist()}) == 1


def link_loads(pair_servers: SmallArray, token_workers: SmallArray, host_map: HostMap) -> LinkLoads:
    """The loads of the links for some tokens, at least one.

    pair_servers: [t, layers, k] server of each pair. token_workers: [t, layers] worker of each token.

    Example: a token on rank 0 has experts on ranks 0, 2, 3, 3. Ranks 2 and 3 are on host 1. Then 3 pairs and
    2 rows go from host 0 to host 1, and with `once` 1 row.
    """
    tokens, layers, _ = pair_servers.shape
    num_pairs = np.zeros((tokens, layers, len(host_map.servers)), dtype=np.int64)
    token, layer = np.arange(tokens)[:, None, None], np.arange(layers)[None, :, None]
    np.add.at(num_pairs, (token, layer, pair_servers), 1)
    if host_map.workers_are_ranks:
        np.put_along_axis(num_pairs, token_workers[:, :, None].astype(np.int64), 0, axis=2)
    one_hot = np.eye(host_map.count)
    on_own_host, on_host = one_hot[host_map.workers[token_workers]], one_hot[host_map.servers]
    pairs, rows = num_pairs @ on_host, (num_pairs > 0) @ on_host
    host_rows = np.where(on_own_host > 0, rows, rows > 0)
    return LinkLoads(
        *(np.einsum("tlg,tlh->gh", on_own_host, each) / tokens for each in (pairs, rows, host_rows))
    )
