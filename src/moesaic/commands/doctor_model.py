"""`moesaic doctor MODEL`: says before a model is downloaded or loaded what it is and whether it runs here.

Question: What does `moesaic doctor MODEL` ask the loader?
"""

from __future__ import annotations

import contextlib
import json
import shlex
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from moesaic.commands import hardware, model_report
from moesaic.commands.machine import Machine, examine, nearest_existing
from moesaic.commands.model_options import NONE, THIS, Doctor
from moesaic.commands.model_report import ModelReport, Stored
from moesaic.commands.plan import find_hardware
from moesaic.commands.program import program
from moesaic.config import ModelConfig, SchedulerConfig
from moesaic.core.errors import ConfigError, MoesaicError
from moesaic.core.stored import COMPRESSED, NUMBER_BYTES, QUANT_METHOD, QUANTIZED, is_packed, unquantized
from moesaic.core.text_config import TEXT
from moesaic.cost.assumed import assumed
from moesaic.cost.hardware import Hardware
from moesaic.cost.reading import number_type, read
from moesaic.cost.sizes import ModelSizes
from moesaic.kernels import table
from moesaic.models import files, registry
from moesaic.models.checkpoint import Claims, IndexClaims
from moesaic.models.files import FoundModel
from moesaic.models.spec import ModelSpec
from moesaic.planning import drafts, outlook
from moesaic.planning.outlook import Memory, StreamedJob
from moesaic.planning.sizes import (
    ROW_BYTES,
    convert_sizes,
    has_weights,
    in_format,
    read_checkpoint_sizes,
    without_quantization,
)
from moesaic.runtime.cache_size import AUTO_SHARE, AUTO_SHARE_CUDA
from moesaic.runtime.offloaded import paged_layout
from moesaic.text.tokenizer import Tokenizer, check_files

UNKNOWN_MODEL = "MODEL"
"""Stands in a command for the directory of a model of which only a config.json was given."""


def run(options: Doctor, as_json: bool) -> int:
    """Print the report on a model. Returns the exit code: 1 if the model cannot be run.

    Raises ConfigError for a model that is not found, a config.json that cannot be read, and a machine that is
    not known.
    """
    if options.hardware not in (THIS, NONE):
        find_hardware(options.hardware)
    with tempfile.TemporaryDirectory() as folder:
        report = examined(options, Path(folder))
    if as_json:
        print(json.dumps(report.as_json()))
    else:
        model_report.show(report)
    return 0 if report.command is not None else 1


def examined(options: Doctor, folder: Path) -> ModelReport:
    """The report on a model. folder: for what is downloaded of a hub id."""
    assert options.model is not None
    found = files.find(options.model, folder, options.revision)
    name = found.name or options.model
    try:
        report = _report(replace(options, model=name), name, found)
    except ConfigError as error:
        raise type(error)(_named(str(error), folder, name)) from error
    return replace(report, problems=[_named(problem, folder, name) for problem in report.problems])


def _named(message: str, folder: Path, name: str) -> str:
    """A message that has the names of files on the hub and not those of their copies in `folder`.

    >>> _named("/tmp/x/a.gguf: tensor b is missing", Path("/tmp/x"), "org/name:Q4_K_M")
    'org/name:a.gguf: tensor b is missing'
    """
    repository = name.partition(":")[0]
    return message.replace(f"{folder}/", f"{repository}:").replace(str(folder), repository)


def _report(options: Doctor, name: str, found: FoundModel) -> ModelReport:
    raw = found.read()
    spec, problems = _understood(found, name, raw)
    stored = _stored(found, raw, spec)
    sizes = _sizes(raw, name, stored)
    machine = examine()
    report = ModelReport(name, raw.get("model_type"), spec, None, stored, problems)
    command = _Command(options, found)
    if isinstance(sizes, str):
        return report if problems else replace(report, command=command.serve(), unpredicted=sizes)
    report = replace(report, sizes=sizes)
    here = _here(options, found, machine, measure=not problems)
    context = spec.max_position if spec is not None else outlook.PROMPT + outlook.GENERATE
    return _judged(report, here, context, command, machine.hub_cache_free)


def _understood(found: FoundModel, model: str, raw: dict[str, Any]) -> tuple[ModelSpec | None, list[str]]:
    """What the loader says about a model: its sizes, and the errors that it would raise."""
    problems: list[str] = []

    def tried(step: Callable[[], ModelSpec | None]) -> ModelSpec | None:
        try:
            return step()
        except ConfigError as error:
            problems.append(str(error))
            return None

    spec = tried(lambda: registry.understand(raw, found.parent))
    if spec is not None:
        tried(lambda: registry.understand(raw, found.parent, _claims(found, raw)))
    if found.directory is not None:
        directory = found.directory
        tried(lambda: Tokenizer(directory).close())
    elif found.files is not None:
        names = found.files
        tried(lambda: check_files(model, names))
    return spec, problems


def _claims(found: FoundModel, raw: dict[str, Any]) -> Claims | None:
    """The tensors of a checkpoint, from the headers of its files or from its index.

    An index does not say which matrices are quantised, so it is not used for a quantised checkpoint.
    """
    if found.directory is not None:
        return Claims(found.directory)
    configs = [one for one in (raw, raw.get(TEXT)) if isinstance(one, dict)]
    if found.index is None or not all(map(unquantized, configs)):
        return None
    return IndexClaims(found.index.parent)


def _stored(found: FoundModel, raw: dict[str, Any], spec: ModelSpec | None) -> Stored:
    """How the checkpoint is stored: by its files if they are here, else by its config.json."""
    inner = raw.get(TEXT)
    told = raw.get(
        "quantization_config", inner.get("quantization_config") if isinstance(inner, dict) else None
    )
    method = None if told is None else str(told.get("quant_method") if isinstance(told, dict) else told)
    kind, sizes = COMPRESSED if method == QUANT_METHOD else number_type(raw), found.files
    with contextlib.suppress(MoesaicError):  # already a line of the report
        kind = registry.quantised_type(raw) or kind
    if found.directory is not None:
        here = (file for file in files.model_files(found.directory) if file.suffix in files.WEIGHTS)
        sizes = {file.name: file.stat().st_size for file in here}
        with contextlib.suppress(MoesaicError):  # already a line of the report
            if spec is not None:
                kind = registry.stored_type(raw, found.directory, Claims(found.directory))
    weights = [size for name, size in (sizes or {}).items() if name.endswith(files.WEIGHTS)]
    download = None if found.files is None else sum(found.files.values())
    return Stored(kind, method, sum(weights), len(weights), download)


def _sizes(raw: dict[str, Any], name: str, stored: Stored) -> ModelSizes | str:
    """The sizes that cost memory and time, or why they are not known."""
    try:
        sizes = read(without_quantization(raw), name)
    except ConfigError as error:
        return str(error)
    return in_format(sizes, stored.type, gpu=False)


@dataclass(frozen=True)
class Here:
    """The machine that a model is judged by."""

    name: str
    memory: float
    """Free bytes of the memory that the model is loaded into."""
    gpu: bool
    hardware: Hardware | None
    """Its figures. None: they were not measured."""

    @property
    def device(self) -> str:
        return "cuda" if self.gpu else "cpu"

    def cache_number(self, loaded: str) -> float:
        """Bytes of a cached number with --kv-cache-dtype auto. loaded: type of the experts in memory."""
        return float(NUMBER_BYTES.get(loaded, NUMBER_BYTES["bfloat16"])) if self.gpu else ROW_BYTES


def _here(options: Doctor, found: FoundModel, machine: Machine, measure: bool) -> Here:
    figures = None
    if options.hardware not in (THIS, NONE):
        figures = find_hardware(options.hardware)
    elif options.hardware == THIS and measure:
        own = found.directory if found.has_weights else None
        directory = nearest_existing(Path(machine.hub_cache)) if own is None else own
        directory = directory if directory.is_dir() else directory.parent
        figures = hardware.now(str(directory))
    if figures is not None:
        return Here(figures.name, figures.fast.memory, figures.slow.processor is not None, figures)
    if machine.gpus:
        return Here(machine.gpus[0].name, machine.gpus[0].free, True, None)
    return Here(machine.cpu, machine.memory_available, False, None)


@dataclass(frozen=True)
class _Command:
    """Writes the commands that run a model."""

    options: Doctor
    found: FoundModel

    @property
    def _model(self) -> str:
        assert self.options.model is not None
        only_config = self.found.directory is None and self.found.files is None
        return UNKNOWN_MODEL if only_config else shlex.quote(self.options.model)

    @property
    def _revision(self) -> str:
        revision = self.options.revision
        return "" if revision is None else f" --revision {shlex.quote(revision)}"

    def serve(self, shorter: int | None = None) -> str:
        """shorter: maximum tokens of a request. None: the model's own."""
        length = "" if shorter is None else f" --max-model-len {shorter}"
        return f"{program()} serve {self._model}{self._revision}{length}"

    def stream(self, plan: StreamedJob) -> str:
        model = f"--model {self._model}{self._revision}"
        return f"{program()} run-batch -i in.jsonl -o out.jsonl {model} --fast-memory {plan.fast_memory}"


def _judged(report: ModelReport, here: Here, context: int, command: _Command, disk: int) -> ModelReport:
    """The report with what the model takes on this machine, how to run it, and how fast."""
    assert report.sizes is not None
    sizes, stored = report.sizes, report.stored.type
    loads = partial(registry.type_in_memory, device=here.device, kernels=table.pick(here.device))
    number = here.cache_number(loads(stored))
    memory = Memory(here.memory, AUTO_SHARE_CUDA if here.gpu else AUTO_SHARE, number)
    known = stored if stored in NUMBER_BYTES else COMPRESSED
    model = _in_memory(sizes, loads(stored), here, command.found)
    fits = []
    for one in outlook.list_formats(sizes, known, stored):
        loaded = loads(one.name)
        exact = one.name == stored == loaded and model.conversion is not None
        one = outlook.format_of(model, one.name) if exact else one
        held = model if exact else in_format(sizes, loaded, gpu=False)
        fits.append(outlook.fit(held, one, loaded, memory, context))
    report = replace(report, machine=here.name, memory=here.memory, fits=fits)
    if report.problems:
        return report
    own = next(one for one in fits if one.format.name == stored)
    report = replace(report, assumed=[] if here.hardware is None else assumed(model, here.hardware))
    if report.stored.download is not None and report.stored.download > disk:
        return replace(report, disk=disk)
    if own.can_serve:
        counts = (1, SchedulerConfig.max_num_seqs)
        fast = (
            []
            if here.hardware is None
            else outlook.predict_speeds(model, here.hardware, number, context, counts)
        )
        shorter = None if own.longest == context else own.longest
        report = _with_drafts(report, model, here, number, context)
        return replace(report, command=command.serve(shorter), speeds=fast)
    return _too_large(
        report, here, own.loaded_type, command, partial(outlook.plan_streamed_job, model, context=context)
    )


def _with_drafts(
    report: ModelReport, model: ModelSizes, here: Here, number: float, context: int
) -> ModelReport:
    """The report with the acceptance from which drafted tokens pay. number: bytes of a cached number."""
    if here.hardware is None:
        return replace(
            report, drafts=drafts.list_drafts(drafts.price_by_bytes(model)), drafts_by="bytes of weights"
        )
    price = drafts.price_by_machine(model, here.hardware, number, context)
    return replace(report, drafts=drafts.list_drafts(price), drafts_by="the machine's figures")


def _in_memory(sizes: ModelSizes, loaded: str, here: Here, found: FoundModel) -> ModelSizes:
    """The sizes of a model as it is computed here. Files that are here say what quantised experts take."""
    directory = found.directory
    if here.gpu:
        return in_format(sizes, loaded, gpu=True)
    with contextlib.suppress(MoesaicError):  # already a line of the report
        if directory is not None and has_weights(directory):
            model = read_checkpoint_sizes(directory, sizes.name, table.pick("cpu"))
            if model.conversion == "columns":  # in_format says the type that they get in memory
                plain, staging = in_format(sizes, loaded, gpu=False), model.staging
                return replace(plain, conversion="columns", read=model.read, staging=staging)
            if model.conversion is not None:
                return replace(model, computed=ROW_BYTES)
    return (
        convert_sizes(sizes, loaded, found.read())
        if loaded in QUANTIZED
        else in_format(sizes, loaded, gpu=False)
    )


def _too_large(
    report: ModelReport,
    here: Here,
    loaded: str,
    command: _Command,
    plan: Callable[[Hardware, float], StreamedJob | None],
) -> ModelReport:
    """The report on a model that does not fit: with --fast-memory, if its experts can be streamed."""
    if here.hardware is None:
        return replace(report, unplanned=True)
    try:
        if command.found.directory is not None:
            paged_layout(ModelConfig(str(command.found.directory)))
        elif loaded != report.stored.type and not is_packed(report.stored.type):
            raise ConfigError(
                f"--fast-memory: the experts are stored as {report.stored.type} and computed from as "
                f"{loaded}; allowed: experts that are computed from as they are stored"
            )
    except ConfigError as error:
        return replace(report, problems=[*report.problems, str(error)])
    streamed = plan(here.hardware, here.cache_number(loaded))
    if streamed is None:
        return report
    return replace(report, command=command.stream(streamed), streamed=streamed)
