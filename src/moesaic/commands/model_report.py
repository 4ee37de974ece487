"""The report of `moesaic doctor MODEL`, as tables or as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moesaic.commands.tables import print_whole
from moesaic.commands.units import in_bytes, in_words
from moesaic.cost.sizes import ModelSizes
from moesaic.models.config import shorten
from moesaic.models.spec import ModelSpec
from moesaic.planning.drafts import Drafts
from moesaic.planning.outlook import REQUESTS, Fit, Speed, StreamedJob, choose_groups, choose_lengths
from moesaic.planning.sizes import IN_COLUMNS


@dataclass(frozen=True)
class Storage:
    """How a checkpoint is stored."""

    type: str
    """Type of its routed experts; see `core.weight_types.NATIVE_DTYPES`. Of a quantized checkpoint it is
    the type that its config.json names beside the method."""
    quantization: str | None
    """The method of its quantization. None: it is not quantized."""
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
    """The model, as the user named it."""
    model_type: object
    """The model_type of config.json."""
    spec: ModelSpec | None
    """None: the loader does not understand config.json."""
    sizes: ModelSizes | None
    """None: nothing is known about the sizes."""
    storage: Storage
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
    """The acceptance from which drafted tokens pay, for several requests and drafts."""
    drafts_by: str | None = None
    """What the steps of `drafts` are priced by."""
    streamed_job: StreamedJob | None = None
    """How the model runs with --fast-memory. None: it fits, or does not run."""
    sizes_error: str | None = None
    """Why the sizes of a supported model are not known."""
    disk: int | None = None
    """Free bytes of the disk for downloads, if they are too few."""
    assumptions: Sequence[str] = ()
    """What predicted speeds assume, one sentence each."""
    warnings: Sequence[str] = ()
    """What a user of the model should know, one sentence each."""
    chat_template: Sequence[str] = ()
    """What the chat template makes of messages, one sentence each. Empty without the checkpoint's files."""
    is_unplanned: bool = False
    """True: the model does not fit, and without figures of the machine --fast-memory was not planned."""

    @property
    def context(self) -> int | None:
        return None if self.spec is None else self.spec.max_position

    def as_json(self) -> dict[str, Any]:
        """The report as a JSON object. Units are bytes, tokens and tokens/s."""
        sizes, plan = self.sizes, self.streamed_job
        return {
            "model": self.model,
            "model_type": self.model_type,
            "verdict": judge(self),
            "supported": not self.problems,
            "problems": list(self.problems),
            "chat_template": list(self.chat_template),
            "layers": None if sizes is None else sizes.layers,
            "moe_layers": None if sizes is None else sizes.moe_layers,
            "experts": None if sizes is None else sizes.experts,
            "top_k": None if sizes is None else sizes.top_k,
            "parameters": None if sizes is None else sizes.parameters,
            "active_parameters": None if sizes is None else sizes.active,
            "context": self.context,
            "stored": asdict(self.storage),
            "machine": self.machine,
            "memory": self.memory,
            "formats": [_fit_json(item) for item in self.fits],
            "command": self.command,
            "speeds": [asdict(item) for item in self.speeds],
            "drafts": [asdict(item) for item in self.drafts],
            "drafts_priced_by": self.drafts_by,
            "streamed": plan
            and {"fast_memory": plan.fast_memory, "tokens_per_second": plan.price.throughput},
            "notes": list(list_notes(self)),
        }


def _fit_json(fit: Fit) -> dict[str, Any]:
    return {
        "experts_as": fit.format.name,
        "loaded_as": fit.loaded_type,
        "experts": fit.format.expert_bytes,
        "other": fit.format.other_bytes,
        "weights": fit.format.weight_bytes,
        "fits": fit.can_serve,
        "kv_cache": fit.cache,
        "kv_cache_tokens": fit.tokens,
        "longest_request": fit.longest,
    }


def list_notes(report: ModelReport) -> Iterator[str]:
    """What a user should know of a model and of this machine, in sentences."""
    yield from _list_problems(report)
    if report.problems:
        return
    yield from report.warnings
    if report.speeds or report.streamed_job is not None:
        yield from report.assumptions


def _list_versions(report: ModelReport) -> dict[str, str]:
    """Types of experts in which versions of a model may be had -> how these are called, or made.

    The report for people lists them and the model's own type.
    """
    if report.model_type in IN_COLUMNS:
        return {"bfloat16": ""}
    versions = {"bfloat16": "", "compressed": "moesaic compress", "fp8": ""}
    if report.sizes is not None:
        versions[choose_groups(report.sizes, 8) or "int8"] = "GPTQ in 8 bits"
        versions[choose_groups(report.sizes, 4) or "int4"] = "GPTQ, AWQ"
    return versions


def judge(report: ModelReport) -> str:
    """The verdict in one line: whether the model runs here, and by which command or why not."""
    problem = next(_list_problems(report), None)
    if report.command is None:
        return problem if report.problems and problem else f"supported, but {problem or 'does not run here'}"
    return f"runs here: {report.command}" + ("" if problem is None else f" ({problem})")


def _list_problems(report: ModelReport) -> Iterator[str]:
    for problem in report.problems:
        yield f"not supported: {problem}"
    if report.problems:
        return
    if report.sizes_error is not None:
        yield f"memory and speed are not predicted: {report.sizes_error}"
    elif report.disk is not None:
        need = in_bytes(report.storage.download or 0)
        yield f"does not run here: the download of {need} does not fit on the disk ({in_bytes(report.disk)})"
    elif report.is_unplanned:
        yield "does not fit in memory; --hardware this plans how its experts are read from the disk"
        yield from _list_smaller(report)
    elif report.command is None:
        yield "does not run here: neither the model fits in memory, nor all but its routed experts"
    elif report.streamed_job is not None:
        yield (
            "does not fit in memory: experts are read while others are computed (--fast-memory, "
            "which moesaic serve takes too)"
        )
        yield from _list_smaller(report)


def _list_smaller(report: ModelReport) -> Iterator[str]:
    """Says in which type of experts the model would fit in memory, if there is one."""
    versions = _list_versions(report)
    smaller = next((fit for fit in report.fits if fit.can_serve and fit.format.name in versions), None)
    if smaller is not None:
        name = smaller.format.name
        form = name.partition("_")[0]
        command = f" (moesaic quantize --format {form})" if form in ("int8", "int4") else ""
        yield f"with its experts in {name} it would fit: take such a version{command}"


def show(report: ModelReport) -> None:
    """Print the report for people."""
    console = Console(highlight=False)
    verdict = judge(report)
    colour = "green" if report.command is not None else "red"
    console.print(f"[{colour}]{escape(verdict)}[/]", soft_wrap=True)
    console.print(_pairs(report.model, _facts(report)))
    if report.fits:
        print_whole(console, _formats(report))
    machine_facts = _machine_facts(report)
    if machine_facts:
        console.print(_pairs(report.machine or "this machine", machine_facts))
    if report.drafts:
        print_whole(console, _drafts(report))
    for note in list_notes(report):
        if note in verdict:
            continue
        colour = "red" if note.startswith(("not supported", "does not run")) else "yellow"
        console.print(f"[{colour}]{escape(note)}[/]", soft_wrap=True)


def _facts(report: ModelReport) -> dict[str, str]:
    sizes, storage = report.sizes, report.storage
    rows = {"family": shorten(str(report.model_type))}
    if sizes is not None:
        num_sparse = "all" if sizes.moe_layers == sizes.layers else f"{sizes.moe_layers} of them"
        rows["layers"] = f"{sizes.layers}, {num_sparse} with routed experts"
        rows["experts"] = f"{sizes.experts} in each layer, {sizes.top_k:g} of them for a token"
        active = in_words(sizes.active)
        rows["parameters"] = f"{in_words(sizes.parameters)}, {active} of them for a token"
    if report.context is not None:
        rows["context"] = f"{report.context} tokens"
    size = f", {in_bytes(storage.bytes)} in {_files(storage.files)}" if storage.files else ""
    rows["stored"] = f"{_describe_storage(report)}{size}"
    if storage.download is not None:
        rows["download"] = in_bytes(storage.download)
    if report.chat_template:
        rows["messages"] = "; ".join(report.chat_template)
    return rows


def _describe_storage(report: ModelReport) -> str:
    """The type of the weights in the files, and the method that quantised them."""
    kind, method = shorten(report.storage.type), report.storage.quantization
    if method is None or method == kind:
        return kind
    # Of a method that is not read, the config says no type: it names that of the other weights.
    return f"quantization {shorten(method)}" if report.problems else f"{kind}, quantization {shorten(method)}"


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
    versions = _list_versions(report)
    for fit in report.fits:
        is_this_type = fit.format.name == report.storage.type
        if fit.format.name not in versions and not is_this_type:
            continue
        version = versions.get(fit.format.name, "")
        mark = " (this one)" if is_this_type and not report.problems else f" ({version})" if version else ""
        sizes = (fit.format.expert_bytes, fit.format.other_bytes, fit.format.weight_bytes)
        cache = in_bytes(fit.cache) if fit.can_serve else ""
        table.add_row(f"{fit.format.name}{mark}", *map(in_bytes, sizes), cache, _fits(fit, report.context))
    return table


def _fits(fit: Fit, context: int | None) -> str:
    loaded_as = "" if fit.loaded_type == fit.format.name else f", loaded as {fit.loaded_type}"
    if not fit.can_serve:
        return f"no{loaded_as}"
    is_full_context = context is None or fit.longest == context
    return f"yes{loaded_as}" if is_full_context else f"up to {fit.longest} tokens a request{loaded_as}"


def _machine_facts(report: ModelReport) -> dict[str, str]:
    rows = {} if report.machine is None else {"memory": f"{in_bytes(report.memory)} free"}
    if report.command is not None:
        rows["command"] = report.command
    for speed in report.speeds:
        load = "1 request" if speed.requests == 1 else f"{speed.requests} requests at once"
        rows[f"speed, {load}"] = f"{speed.answers:.1f} tokens/s; prompts {speed.prompts:.0f} tokens/s"
    if report.streamed_job is not None:
        rows["speed"] = (
            f"{report.streamed_job.price.throughput:.1f} tokens/s for a file of {REQUESTS} requests"
        )
    if report.speeds or report.streamed_job:
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
    drafts_by_counts = {(drafts.tokens, drafts.requests): drafts for drafts in report.drafts}
    requests = sorted({drafts.requests for drafts in report.drafts})
    table.add_column("drafted tokens")
    for count in requests:
        table.add_column("1 request" if count == 1 else f"{count} requests", justify="right")
    for tokens in sorted({drafts.tokens for drafts in report.drafts}):
        table.add_row(
            str(tokens), *(_format_acceptance(drafts_by_counts.get((tokens, count))) for count in requests)
        )
    return table


def _format_acceptance(drafts: Drafts | None) -> str:
    if drafts is None:
        return "not drafted"
    return f"{'never' if drafts.acceptance is None else f'{drafts.acceptance:.2f}'} (x{drafts.price:.2f})"


def _pairs(title: str, rows: dict[str, str]) -> Table:
    table = Table(title=escape(title), title_justify="left", title_style="bold", show_header=False, box=None)
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, escape(value))
    return table
