"""The device's memory of an exchange, and what the host writes there and reads back between steps."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from moesaic.core.experts import ExpertLayout
from moesaic.core.tokens import IntArray
from moesaic.experts import wire
from moesaic.gpu.exchange.exchange_launches import ADDRESSES, FAILURE, LEAST_SLOTS, Exchange
from moesaic.gpu.exchange.mailbox import PAGE
from moesaic.gpu.ipc.device_sharing import DeviceSharing
from moesaic.kernels.moving import move_array

Result = TypeVar("Result")


class DeviceMemory:
    """Used by one thread. Nothing here waits for the device."""

    def __init__(
        self,
        layout: ExpertLayout,
        sharing: DeviceSharing,
        device: torch.device,
        rows: int,
        worker: int,
        shared_rows: torch.Tensor,
    ) -> None:
        """rows: most rows of a step. worker: the number by which servers know it. shared_rows: see
        `Exchange.rows`."""
        layers, slots, experts = len(layout.layers), LEAST_SLOTS, layout.num_experts
        page = np.frombuffer(mmap.mmap(-1, PAGE), np.uint8)
        self._abort: npt.NDArray[np.int64] = page.view(np.int64)[:1]
        self._words = sharing.map_host(page)
        self._report_here = torch.zeros(2 + layers * slots, dtype=torch.int32, pin_memory=True)
        self._report = torch.zeros(2 + layers * slots, dtype=torch.int32, device=device)
        self._event: torch.cuda.Event | None = None
        self._live = torch.zeros(2, dtype=torch.int32, pin_memory=True)
        self._no_rows = torch.zeros(2, dtype=torch.int32, pin_memory=True)
        """Pinned once: the driver may wait for a graph when it allocates such memory."""
        headers = np.stack([wire.header(layer, layout.hidden, worker) for layer in layout.layers])
        self.exchange = Exchange(
            addresses=torch.zeros(ADDRESSES, slots, dtype=torch.int64, device=device),
            table=torch.full((layers, experts), -1, dtype=torch.int32, device=device),
            headers=move_array(headers, device),
            rows_at=wire.ROWS_WORD,
            pairs_at=wire.PAIRS_WORD,
            rows=shared_rows,
            lines=torch.zeros(slots, rows + 1, dtype=torch.int32, device=device),
            step=self._report[:2],
            sequence=torch.zeros(1, dtype=torch.int64, device=device),
            pair_counts=self._report[2:].view(layers, slots),
            abort=move_array(np.array([self._words.tensor.data_ptr()]), device),
        )

    def place(self, addresses: IntArray, table: npt.NDArray[np.int32]) -> None:
        """Write which server has which expert. No graph is under way. As of `Exchange`."""
        device = self.exchange.table.device
        self.exchange.addresses.copy_(move_array(addresses, device))
        self.exchange.table.copy_(move_array(table, device))

    def abort(self) -> None:
        """The step ends as a failed one as soon as it waits for answers."""
        self._abort[0] = 1

    def launch(self, live: int, replay: Callable[[], Result]) -> Result:
        """Launch a graph, by `replay`, for a step of so many rows. The graph before has ended.

        At any other time a step has no rows, so what is launched then asks nobody.
        """
        self._abort[0] = 0
        self._live[0] = live  # the step before, which read it, has ended
        self.exchange.step.copy_(self._live, non_blocking=True)
        result = replay()
        self._report_here.copy_(self._report, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(self._report.device))
        self.exchange.step.copy_(self._no_rows, non_blocking=True)
        return result

    @property
    def has_ended(self) -> bool:
        """Whether the step's graph has ended."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def result(self) -> tuple[bool, npt.NDArray[np.int32]]:
        """Whether the last step has failed, and the pairs [layers, s] of each slot."""
        report = self._report_here.numpy()
        return bool(report[FAILURE]), report[2:].reshape(self.exchange.pair_counts.shape)

    def close(self) -> None:
        """Give back memory of the host. No graph is under way."""
        self._words.close()
