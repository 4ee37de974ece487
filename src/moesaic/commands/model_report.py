"""The report of `moesaic doctor MODEL`, as tables or as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moesaic.commands.units import in_bytes, in_words
from moesaic.cost.sizes import ModelSizes
from moesaic.models.config import shorten
from moesaic.models.spec import ModelSpec
from moesaic.planning.drafts import Drafts
from moesaic.planning.outlook import REQUESTS, Fit, Speed, StreamedJob, choose_lengths


@dataclass(frozen=True)
class Stored:
    """How a checkpoint is stored."""

    type: str
    """Type of its routed experts; see `core.stored.OF_EXPERTS`. Of a quantized checkpoint it is the type that
    its config.json names beside the method."""
    quantization: str | None
    """Its method of quantization. None: it is not quantized."""
    bytes: int
    """Bytes of its safetensors files; 0 if they are not known."""
    files: int
    """Number of these files."""
    download: int | None
    """Bytes that would be downloaded. None: the files are here, or nothing is known of them."""


@dataclass(frozen=True)
class ModelReport:
    """The result of `moesaic doctor MODEL`."""

    model: str
    """As the user named it."""
    model_type: object
    """As config.json has it."""
    spec: ModelSpec | None
    """None: the loader does not understand config.json."""
    sizes: ModelSizes | None
    """None: nothing is known about the sizes."""
    stored: Stored
    problems: Sequence[str]
    """What the loader would say, one line each."""
    machine: str | None = None
    memory: float = 0.0
    """Free bytes of this machine's memory."""
    fits: Sequence[Fit] = ()
    command: str | None = None
    """The command that runs the model. None: there is none."""
    speeds: Sequence[Speed] = ()
    """Predicted speeds; none without figures of the machine."""
    drafts: Sequence[Drafts] = ()
    """From which acceptance drafted tokens pay."""
    drafts_by: str | None = None
    """What the steps of `drafts` are priced by."""
    streamed: StreamedJob | None = None
    """How the model runs with --fast-memory. None: it fits, or does not run."""
    unpredicted: str | None = None
    """Why the sizes of a supported model are not known."""
    disk: int | None = None
    """Free bytes of the disk for downloads, if they are too few."""
    assumed: Sequence[str] = ()
    """What predicted speeds assume."""
    unplanned: bool = False
    """True: the model does not fit, and without figures of the machine --fast-memory was not planned."""

    @property
    def context(self) -> int | None:
        return None if self.spec is None else self.spec.max_position

    def as_json(self) -> dict[str, Any]:
        """The report as a JSON object. Units are bytes, tokens and tokens/s."""
        sizes, plan = self.sizes, self.streamed
        return {
            "model": self.model,
            "model_type": self.model_type,
            "supported": not self.problems,
            "problems": list(self.problems),
            "layers": None if sizes is None else sizes.layers,
            "moe_layers": None if sizes is None else sizes.moe_layers,
            "experts": None if sizes is None else sizes.experts,
            "top_k": None if sizes is None else sizes.top_k,
            "parameters": None if sizes is None else sizes.parameters,
            "active_parameters": None if sizes is None else sizes.active,
            "context": self.context,
            "stored": asdict(self.stored),
            "machine": self.machine,
            "memory": self.memory,
            "formats": [_fit_json(one) for one in self.fits],
            "command": self.command,
            "speeds": [asdict(one) for one in self.speeds],
            "drafts": [asdict(one) for one in self.drafts],
            "drafts_priced_by": self.drafts_by,
            "streamed": plan
            and {"fast_memory": plan.fast_memory, "tokens_per_second": plan.price.throughput},
            "notes": list(notes(self)),
        }


def _fit_json(one: Fit) -> dict[str, Any]:
    return {
        "experts_as": one.format.name,
        "loaded_as": one.loaded_type,
        "experts": one.format.expert_bytes,
        "other": one.format.other_bytes,
        "weights": one.format.weight_bytes,
        "fits": one.can_serve,
        "kv_cache": one.cache,
        "kv_cache_tokens": one.tokens,
        "longest_request": one.longest,
    }


def notes(report: ModelReport) -> Iterator[str]:
    """Sentences below the tables."""
    for problem in report.problems:
        yield f"not supported: {problem}"
    if report.problems:
        return
    if report.unpredicted is not None:
        yield f"memory and speed are not predicted: {report.unpredicted}"
    elif report.disk is not None:
        need = in_bytes(report.stored.download or 0)
        yield f"does not run here: the download of {need} does not fit on the disk ({in_bytes(report.disk)})"
    elif report.unplanned:
        yield "does not fit in memory; --hardware this plans how its experts are read from the disk"
    elif report.command is None:
        yield "does not run here: neither the model fits in memory, nor all but its routed experts"
    elif report.streamed is not None:
        yield (
            "does not fit in memory: experts are read while others are computed (--fast-memory, "
            "which moesaic serve takes too)"
        )
        better = next((one for one in report.fits if one.can_serve), None)
        if better is not None:
            yield f"with its experts in {better.format.name} it would fit"
    if report.speeds or report.streamed is not None:
        yield from report.assumed


def show(report: ModelReport) -> None:
    """Print the report for people."""
    console = Console(highlight=False)
    console.print(_pairs(report.model, _facts(report)))
    if report.fits:
        console.print(_formats(report))
    here = _here(report)
    if here:
        console.print(_pairs(report.machine or "this machine", here))
    if report.drafts:
        console.print(_drafts(report))
    for note in notes(report):
        colour = "red" if note.startswith(("not supported", "does not run")) else "yellow"
        console.print(f"[{colour}]{escape(note)}[/]", soft_wrap=True)


def _facts(report: ModelReport) -> dict[str, str]:
    sizes, stored = report.sizes, report.stored
    rows = {"family": shorten(str(report.model_type))}
    if sizes is not None:
        dense = sizes.layers - sizes.moe_layers
        rows["layers"] = f"{sizes.layers}, {f'{dense} of them' if dense else 'none'} without routed experts"
        rows["experts"] = f"{sizes.experts} in each layer, {sizes.top_k:g} of them for a token"
        active = in_words(sizes.active)
        rows["parameters"] = f"{in_words(sizes.parameters)}, {active} of them for a token"
    if report.context is not None:
        rows["context"] = f"{report.context} tokens"
    method = "" if stored.quantization is None else f", quantization {shorten(stored.quantization)}"
    size = f", {in_bytes(stored.bytes)} in {_files(stored.files)}" if stored.files else ""
    rows["stored"] = f"{shorten(stored.type)}{method}{size}"
    if stored.download is not None:
        rows["download"] = in_bytes(stored.download)
    return rows


def _files(count: int) -> str:
    return "1 file" if count == 1 else f"{count} files"


def _formats(report: ModelReport) -> Table:
    table = Table(
        title="Memory by the type of the experts", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    table.add_column("experts in")
    for name in ("experts", "the rest", "together", "KV cache"):
        table.add_column(name, justify="right")
    table.add_column("fits here")
    for one in report.fits:
        own = " (this one)" if one.format.name == report.stored.type and not report.problems else ""
        sizes = (one.format.expert_bytes, one.format.other_bytes, one.format.weight_bytes)
        cache = in_bytes(one.cache) if one.can_serve else ""
        table.add_row(f"{one.format.name}{own}", *map(in_bytes, sizes), cache, _fits(one, report.context))
    return table


def _fits(one: Fit, context: int | None) -> str:
    other = "" if one.loaded_type == one.format.name else f", loaded as {one.loaded_type}"
    if not one.can_serve:
        return f"no{other}"
    whole = context is None or one.longest == context
    return f"yes{other}" if whole else f"up to {one.longest} tokens a request{other}"


def _here(report: ModelReport) -> dict[str, str]:
    rows = {} if report.machine is None else {"memory": f"{in_bytes(report.memory)} free"}
    if report.command is not None:
        rows["command"] = report.command
    for speed in report.speeds:
        who = "1 request" if speed.requests == 1 else f"{speed.requests} requests at once"
        rows[f"speed, {who}"] = f"{speed.answers:.1f} tokens/s; prompts {speed.prompts:.0f} tokens/s"
    if report.streamed is not None:
        rows["speed"] = f"{report.streamed.price.throughput:.1f} tokens/s for a file of {REQUESTS} requests"
    if report.speeds or report.streamed:
        prompt, generate = choose_lengths(report.context or 0)
        rows["predicted for"] = f"{prompt} prompt tokens and {generate} generated tokens a request"
    return rows


def _drafts(report: ModelReport) -> Table:
    """The acceptance from which drafts pay, by drafted tokens (rows) and requests (columns)."""
    table = Table(
        title="Acceptance from which drafted tokens pay (--speculative-config), and the price of their step "
        f"beside one without. Priced by {report.drafts_by}: no step was measured",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    found = {(one.tokens, one.requests): one for one in report.drafts}
    requests = sorted({one.requests for one in report.drafts})
    table.add_column("drafted tokens")
    for count in requests:
        table.add_column("1 request" if count == 1 else f"{count} requests", justify="right")
    for tokens in sorted({one.tokens for one in report.drafts}):
        table.add_row(str(tokens), *(_pays(found.get((tokens, count))) for count in requests))
    return table


def _pays(one: Drafts | None) -> str:
    if one is None:
        return "not drafted"
    return f"{'never' if one.acceptance is None else f'{one.acceptance:.2f}'} (x{one.price:.2f})"


def _pairs(title: str, rows: dict[str, str]) -> Table:
    table = Table(title=escape(title), title_justify="left", title_style="bold", show_header=False, box=None)
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, escape(value))
    return table
