"""What launches on a device need to ask expert servers and to take their answers, without the host.

There are two sets of launches. Those of `gpu.triton.exchange` write into memory that servers of the same
host see. Those of `gpu.triton.nvshmem_exchange` send to servers of any host. Addresses are all that both
know of a server.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from moesaic.kernels.table import Kernels

LEAST_SLOTS = 32
"""Slots are at least one warp's threads: then each word is read and written by one thread."""
LIVE, FAILURE = 0, 1
"""Places in `Exchange.step`."""
REQUEST, REQUEST_WORD, ANSWER_WORD, ANSWERS = range(4)
"""Rows of `Exchange.addresses`: of the request, of the words with the numbers of the last request and of the
last answer, and of the answer rows."""
PE, REMOTE_REQUEST, REMOTE_WORD, HOST_HEADER, HOST_ANSWER, HOST_DOUBT = range(4, 10)
"""Further ones with NVSHMEM: the number of the server's process, where it gets the request and its number,
and memory of the host that is told the header, the answer's number, and whether the server had doubts. There
REQUEST_WORD is memory of the host too, which is only told."""
ADDRESSES = 10
ALIGNMENT = 256
"""Rows begin at a multiple of so many bytes behind their request with NVSHMEM. So do all other places."""


@dataclass(frozen=True)
class Exchange:
    """Memory on the device that the launches read. The host writes it between steps.

    s: slots, one for each server. A power of two, and at least LEAST_SLOTS.
    """

    addresses: torch.Tensor
    """[ADDRESSES, s] int64, see REQUEST and PE. A slot without a request's address is asked nothing."""
    table: torch.Tensor
    """[layers, E] int32 slot of each expert, -1 for none."""
    headers: torch.Tensor
    """[layers, w] int32 header of a request of each layer, at most 8 words."""
    rows_at: int
    """Word of the header that has the number of rows."""
    pairs_at: int
    """Word of the header that has the number of pairs."""
    rows: torch.Tensor
    """[n, h] float32 hidden rows, which all servers of the host see. [0, h] with NVSHMEM."""
    lines: torch.Tensor
    """[s, n + 1] int32 with NVSHMEM: the line of each row among those that a slot gets, and their number."""
    step: torch.Tensor
    """[2] int32 rows of the step that are not padded, and whether the step has failed."""
    sequence: torch.Tensor
    """[1] int64 the last number that was posted."""
    pair_counts: torch.Tensor
    """[layers, s] int32 pairs of each slot in this step."""
    abort: torch.Tensor
    """[1] int64 address of a word of 8 bytes. The host writes 1 there to end the step."""

    @property
    def slots(self) -> int:
        return self.addresses.shape[1]


class ExchangeOperations(Protocol):
    """The launches of a layer, in this order. index: place of the layer among those with routed experts."""

    def dispatch(
        self, exchange: Exchange, index: int, hidden: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        """Write the rows and the requests of a layer. Nobody is told yet.

        hidden: [n, h] float32. ids: [n, k] int64. Returns [n * k] int64: the address of each pair's answer
        row, 0 for none.
        """
        ...

    def post(self, exchange: Exchange, index: int) -> None:
        """Tell the servers that have pairs of this layer."""
        ...

    def wait(self, exchange: Exchange, index: int, polls: int) -> None:
        """Wait for the answers. polls: how often it looks before the step has failed."""
        ...

    def collect(self, sources: torch.Tensor, top_k: int, width: int) -> torch.Tensor:
        """The answers [n, k, h] float32 of all pairs: 0 where nobody was asked. sources: as of `dispatch`."""
        ...


@dataclass(frozen=True)
class GraphKernels(Kernels):
    """Kernels whose graphs can ask expert servers."""

    exchange: ExchangeOperations | None = None
    nvshmem_exchange: ExchangeOperations | None = None
    """Launches that ask expert servers and take their answers. None: not possible."""
