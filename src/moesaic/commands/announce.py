"""What `moesaic serve` prints while it loads and once it serves."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, Task, TextColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from moesaic.commands.processes import as_lines, in_text
from moesaic.commands.progress import RemainingTime
from moesaic.commands.units import in_bytes, in_words
from moesaic.core.cluster_status import ClusterStatus
from moesaic.core.messages import Loading, Message, Ready
from moesaic.core.worker_info import WorkerInfo
from moesaic.policy.scheduling.minimum_batch import MAX_THRESHOLD
from moesaic.text.parsers.table import Formats


class BytesColumn(DownloadColumn):
    """Bytes read and in total, once the total is known."""

    def render(self, task: Task) -> Text:
        """Example: 1.2/4.8 GiB."""
        return super().render(task) if task.total else Text()


class SpeedColumn(TransferSpeedColumn):
    """Bytes read per second, once some were read."""

    def render(self, task: Task) -> Text:
        """Example: 1.2 GB/s."""
        return super().render(task) if task.speed else Text()


class Announcer:
    """Shows a progress bar until the worker is ready, then prints the chosen settings and the address.

    The bar goes to stderr, if that is a terminal. The rest goes to stdout: tables, or one line of JSON.
    """

    def __init__(
        self,
        name: str,
        url: str,
        as_json: bool,
        formats: Formats,
        messages: Sequence[str] = (),
        cluster: Callable[[], ClusterStatus] | None = None,
        admin_key: str | None = None,
    ) -> None:
        """formats: which parsers read the answers. messages: what becomes of messages that the chat template
        would not take, one sentence each. cluster: returns the status of the processes. None if one
        worker process does everything.

        admin_key: a key to print, since nobody else knows it. None prints none.
        """
        self._cluster = cluster
        self._admin_key = admin_key
        self._formats = formats
        self._messages = list(messages)
        self._has_announced = False
        self._name = name
        self._url = url
        self._as_json = as_json
        errors = Console(stderr=True)
        self._bar = Progress(
            TextColumn("loading {task.description}"),
            BarColumn(),
            BytesColumn(binary_units=True),
            SpeedColumn(),
            RemainingTime(),
            console=errors,
            transient=True,
            disable=not errors.is_terminal,
        )
        self._task = self._bar.add_task(name, total=None)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        self._bar.stop()

    def observe(self, message: Message) -> None:
        """Handle one message of the worker."""
        match message:
            case Loading():
                self._bar.update(self._task, completed=message.bytes_read, total=message.total_bytes)
            case Ready() if not self._has_announced:
                self._has_announced = True
                self._bar.stop()
                self._announce(message.info)

    def _announce(self, info: WorkerInfo) -> None:
        url = self._url
        status = None if self._cluster is None else asdict(self._cluster())
        if self._as_json:
            record = as_record(self._name, url, info)
            record |= {"tool_call_parser": self._formats.calls, "reasoning_parser": self._formats.reasoning}
            record |= {"messages": self._messages}
            record |= {} if status is None else {"cluster": status}
            record |= {} if self._admin_key is None else {"admin_key": self._admin_key}
            text = json.dumps(record)
        else:
            parts = [in_text(as_table(self._name, info)), parsers_line(self._formats)]
            parts += [f"Chat template: {sentence}" for sentence in self._messages]
            parts += [*rounding_lines(info), capacity_line(info), *schedule_lines(info)]
            parts += [] if status is None else as_lines(status)
            if self._admin_key is not None:
                parts.append(f"Admin key, which moesaic scale --admin-key needs: {self._admin_key}")
            key_fragment = "" if self._admin_key is None else f"#key={self._admin_key}"
            # The key is in the fragment, which a browser does not send, so no log has it.
            parts.append(f"Page with a chat and a live view: {url}/{key_fragment}")
            text = "\n".join([*parts, f"Serving {self._name} at {url}"])
        try:
            print(text, flush=True)
        except OSError as error:  # a full disk or a closed pipe must not keep the server from serving
            with contextlib.suppress(OSError):  # stderr may be on the same disk
                print(f"moesaic: stdout: {error.strerror}; serving {self._name} at {url}", file=sys.stderr)
            sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115  later writes must not fail again


def requests_of_maximum_length(info: WorkerInfo) -> int:
    """Number of requests of the maximum length that the KV cache, and the states, hold at once."""
    max_requests = info.num_blocks // -(-info.max_model_len // info.block_size)
    return min(max_requests, info.state_seats) if info.state_seats else max_requests


def capacity_line(info: WorkerInfo) -> str:
    """The line about the capacity of the KV cache, in tokens and in requests."""
    max_requests, size = requests_of_maximum_length(info), in_bytes(info.kv_request_bytes)
    states = ""
    if info.state_seats:
        states = f"; states of {info.state_seats} requests and {info.state_snapshots} prefixes"
    requests = f"{max_requests} requests of the maximum length of {size} each"
    return f"KV cache holds {info.kv_tokens} tokens, {requests}{states}"


def rounding_lines(info: WorkerInfo) -> list[str]:
    """The line about kernels that are faster and round, if this CPU has some for these weights."""
    if not info.rounding_kernels:
        return []
    name = info.rounding_kernels[0]
    rows = "bf16, as in vLLM and llama.cpp" if name.endswith("_bf16") else "int8, as in llama.cpp"
    line = f"These kernels compute in float32. --kernels {name} is faster for prompts and many requests: "
    line += f"it rounds rows to {rows}, so answers may differ (moesaic doctor measures both)"
    return [line]


def schedule_lines(info: WorkerInfo) -> list[str]:
    """The warning that --schedule async has no effect with so few requests, if that is so."""
    if info.least_rows <= info.max_num_seqs:
        return []
    needs = (
        "no number of rows is enough on this device"
        if info.least_rows >= MAX_THRESHOLD
        else f"that takes at least {info.least_rows} rows in flight on this device"
    )
    rows = f"no part of the {info.max_num_seqs} rows of --max-num-seqs ever runs alone"
    return [f"--schedule async computes as lockstep does: {rows}, since {needs}"]


def parsers_line(formats: Formats) -> str:
    """The line about the parsers of tool calls and of reasoning."""
    calls = formats.calls if formats.calls and formats.takes_tools else "none"
    return f"Parsers: {calls} for tool calls, {formats.reasoning or 'none'} for reasoning"


def as_record(name: str, url: str, info: WorkerInfo) -> dict[str, object]:
    """The announcement as JSON: event, model, URL, the fields of WorkerInfo and the KV cache's capacity."""
    sizes = {"kv_tokens": info.kv_tokens, "kv_requests": requests_of_maximum_length(info)}
    sizes["kv_request_bytes"] = info.kv_request_bytes
    return {"event": "serving", "model": name, "url": url} | asdict(info) | sizes


def as_table(name: str, info: WorkerInfo) -> Table:
    """A table of the loaded model and the chosen settings."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    experts = f"{info.num_experts} experts, {info.top_k} per token"
    per_rank = "" if info.ranks == 1 else f" on each of {info.ranks} ranks"
    rows = {
        "model": name,
        "type": f"{info.model_type}, {info.num_layers} layers, {experts}",
        "parameters": f"{in_words(info.num_parameters)}, {in_bytes(info.weight_bytes)}" + per_rank,
        "device": info.device,
        "kernels": info.kernels + (f", torch {info.torch_code}" if info.torch_code else ""),
        "dtype": f"{info.dtype}, KV cache {info.kv_dtype}",
        "threads": str(info.threads) + per_rank,
        **({"collectives": info.collectives} if info.ranks > 1 else {}),
        "context length": f"{info.max_model_len} tokens",
        "batch": f"{info.max_num_seqs} requests, {info.max_num_batched_tokens} tokens per step",
        **({"drafts": info.speculation} if info.speculation else {}),
        "KV cache": f"{in_bytes(info.kv_bytes)}, {info.kv_bytes // info.kv_tokens} bytes for each token",
        **({"states": in_bytes(info.state_bytes)} if info.state_bytes else {}),
    }
    for label, value in rows.items():
        table.add_row(label, value)
    return table
