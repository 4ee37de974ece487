"""`moesaic doctor MODEL`: says before a model is downloaded or loaded what it is and whether it runs here.

Question: What does `moesaic doctor MODEL` ask the loader?
"""

from __future__ import annotations

import contextlib
import json
import shlex
import tempfile
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from moesaic.commands import hardware, model_report
from moesaic.commands.machine import Machine, examine, nearest_existing
from moesaic.commands.model_options import NONE, THIS, Doctor
from moesaic.commands.model_report import ModelReport, Storage
from moesaic.commands.plan import find_hardware
from moesaic.commands.program import program
from moesaic.config import ModelConfig, SchedulerConfig
from moesaic.core.errors import CheckpointError, ConfigError, MoesaicError
from moesaic.core.text_config import TEXT
from moesaic.core.weight_types import (
    COMPRESSED_DTYPE,
    GROUP_TYPES,
    NUMBER_BYTES,
    QUANT_METHOD,
    QUANTIZATIONS,
    is_packed,
    is_unquantized,
    split_dtype,
)
from moesaic.cost.assumptions import list_assumptions
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
    type_by_config,
    without_quantization,
)
from moesaic.runtime.cache_size import AUTO_SHARE, AUTO_SHARE_CUDA
from moesaic.runtime.offloaded_worker import paged_layout
from moesaic.text.tokenizer import Tokenizer, check_files

T = TypeVar("T")
UNKNOWN_MODEL = "MODEL"
"""Stands in a command for the directory of a model of which only a config.json was given."""


def run(options: Doctor, as_json: bool) -> int:
    """Print the report on a model. Returns the exit code: 1 if the model cannot be run.

    Raises ConfigError for a model that is not found, a config.json that cannot be read, and a machine that is
    not known.
    """
    if options.hardware not in (THIS, NONE):
        find_hardware(options.hardware)
    # What is downloaded of a hub id are a config and an index, which nothing else needs.
    with tempfile.TemporaryDirectory() as folder:
        report = examine_model(options, Path(folder))
    if as_json:
        print(json.dumps(report.as_json()))
    else:
        model_report.show(report)
    return 0 if report.command is not None else 1


def examine_model(options: Doctor, folder: Path) -> ModelReport:
    """The report on a model. folder: for what is downloaded of a hub id."""
    assert options.model is not None
    source = files.find(options.model, folder, options.revision, options.hf_overrides)
    name = source.name or options.model
    links = None if options.hf_overrides is None else source.directory

    def restore_names(message: str) -> str:
        message = message if links is None else message.replace(str(links), name)
        return _restore_hub_names(message, folder, name)

    try:
        report = _report(replace(options, model=name), name, source)
    except ConfigError as error:
        raise ConfigError(restore_names(str(error))) from error
    return replace(report, problems=[restore_names(problem) for problem in report.problems])


def _restore_hub_names(message: str, folder: Path, name: str) -> str:
    """A message that has the names of files on the hub and not those of their copies in `folder`.

    >>> _restore_hub_names("/tmp/x/a.gguf: tensor b is missing", Path("/tmp/x"), "org/name:Q4_K_M")
    'org/name:a.gguf: tensor b is missing'
    """
    repository = name.partition(":")[0]
    return message.replace(f"{folder}/", f"{repository}:").replace(str(folder), repository)


def _report(options: Doctor, name: str, source: FoundModel) -> ModelReport:
    raw = source.read()
    warnings: list[str] = []
    spec, problems, chat_template = _ask_loader(source, name, raw, warnings)
    storage = _describe_storage(source, raw, spec)
    sizes = _sizes(raw, name, storage)
    machine = examine()
    warnings += registry.describe_unused(raw, _list_tensors(source))
    warnings += registry.describe_pairs(source.config)
    report = ModelReport(
        name,
        raw.get("model_type"),
        spec,
        None,
        storage,
        problems,
        warnings=warnings,
        chat_template=chat_template,
    )
    command = _Command(options, source)
    if isinstance(sizes, str):
        return report if problems else replace(report, command=command.serve(), sizes_error=sizes)
    report = replace(report, sizes=sizes)
    target = _choose_target(options, source, machine, measure=not problems)
    context = spec.max_position if spec is not None else outlook.PROMPT + outlook.GENERATE
    return _judge(report, target, context, command, machine.hub_cache_free)


def _ask_loader(
    source: FoundModel, model: str, raw: dict[str, Any], warnings: list[str]
) -> tuple[ModelSpec | None, list[str], list[str]]:
    """What the loader says about a model: its sizes, the errors that it would raise, and what its chat
    template makes of messages.

    warnings: gets what a user should know of a model that it loads.
    """
    problems: list[str] = []

    def try_step(step: Callable[[], T]) -> T | None:
        try:
            return step()
        except ConfigError as error:
            problems.append(str(error))
            return None

    spec = try_step(lambda: registry.understand(raw, source.parent))
    if spec is not None:
        try_step(lambda: registry.understand(raw, source.parent, _claims(source, raw)))
    if source.directory is not None:
        directory = source.directory
        return spec, problems, try_step(lambda: _read_tokenizer(directory, warnings)) or []
    if source.files is not None:
        names = source.files
        try_step(lambda: check_files(model, names))
        try_step(lambda: _check_weights(model, names))
    return spec, problems, []


def _check_weights(model: str, names: Collection[str]) -> None:
    """Raises CheckpointError for a model on the hub without weights that are read."""
    problem = files.describe_missing_weights(names)
    if problem is not None:
        raise CheckpointError(f"{model}: {problem}")


def _read_tokenizer(directory: Path, warnings: list[str]) -> list[str]:
    """What the chat template of a checkpoint makes of messages, one sentence each.

    warnings: gets a sentence if no token ends an answer.
    """
    with contextlib.closing(Tokenizer(directory)) as tokenizer:
        if not files.generation_defaults(directory).join_ends(tokenizer.end_token_ids):
            warnings.append(
                "no token ends an answer, so each one goes on to its limit: name one as eos_token_id in "
                "generation_config.json, or as eos_token in tokenizer_config.json"
            )
        return [] if tokenizer.arrivals is None else tokenizer.arrivals.describe()


def _list_tensors(source: FoundModel) -> Collection[str]:
    """The names of the tensors of a checkpoint; empty if they are not known."""
    with contextlib.suppress(MoesaicError):  # already a line of the report
        if source.directory is not None:
            return Claims(source.directory).names
        if source.index is not None:
            return IndexClaims(source.index.parent).names
    return ()


def _claims(source: FoundModel, raw: dict[str, Any]) -> Claims | None:
    """The tensors of a checkpoint, from the headers of its files or from its index.

    An index does not say which matrices are quantised, so it is not used for a quantised checkpoint.
    """
    if source.directory is not None:
        return Claims(source.directory)
    configs = [config for config in (raw, raw.get(TEXT)) if isinstance(config, dict)]
    if source.index is None or not all(map(is_unquantized, configs)):
        return None
    return IndexClaims(source.index.parent)


def _describe_storage(source: FoundModel, raw: dict[str, Any], spec: ModelSpec | None) -> Storage:
    """How the checkpoint is stored: by its files if they are here, else by its config.json."""
    inner = raw.get(TEXT)
    quantization = raw.get(
        "quantization_config", inner.get("quantization_config") if isinstance(inner, dict) else None
    )
    method = (
        None
        if quantization is None
        else str(quantization.get("quant_method") if isinstance(quantization, dict) else quantization)
    )
    kind, sizes = COMPRESSED_DTYPE if method == QUANT_METHOD else number_type(raw), source.files
    with contextlib.suppress(MoesaicError):  # already a line of the report
        if spec is not None:
            kind = type_by_config(raw, spec.hidden_size, spec.expert_width) or kind
    if source.directory is not None:
        weight_files = (file for file in files.model_files(source.directory) if file.suffix in files.WEIGHTS)
        sizes = {file.name: file.stat().st_size for file in weight_files}
        with contextlib.suppress(MoesaicError):  # already a line of the report
            if spec is not None:
                kind = registry.stored_type(raw, source.directory, Claims(source.directory))
    weights = [size for name, size in (sizes or {}).items() if name.endswith(files.WEIGHTS)]
    download = None if source.files is None else sum(source.files.values())
    return Storage(kind, method, sum(weights), len(weights), download)


def _sizes(raw: dict[str, Any], name: str, storage: Storage) -> ModelSizes | str:
    """The sizes that cost memory and time, or why they are not known."""
    try:
        sizes = read(without_quantization(raw), name)
    except ConfigError as error:
        return str(error)
    return in_format(sizes, storage.type, gpu=False)


@dataclass(frozen=True)
class TargetMachine:
    """The machine that a model is judged by."""

    name: str
    memory: float
    """Free bytes of the memory that the model is loaded into."""
    gpu: bool
    hardware: Hardware | None
    """The figures of the machine. None: they were not measured."""

    @property
    def device(self) -> str:
        return "cuda" if self.gpu else "cpu"

    def cache_number(self, loaded_type: str) -> float:
        """Bytes of a cached number with --kv-cache-dtype auto. loaded_type: type of the experts in memory."""
        return float(NUMBER_BYTES.get(loaded_type, NUMBER_BYTES["bfloat16"])) if self.gpu else ROW_BYTES


def _choose_target(options: Doctor, source: FoundModel, machine: Machine, measure: bool) -> TargetMachine:
    figures = None
    if options.hardware not in (THIS, NONE):
        figures = find_hardware(options.hardware)
    elif options.hardware == THIS and measure:
        local_directory = source.directory if source.has_weights else None
        directory = (
            nearest_existing(Path(machine.hub_cache or ".")) if local_directory is None else local_directory
        )
        directory = directory if directory.is_dir() else directory.parent
        figures = hardware.now(str(directory))
    if figures is not None:
        return TargetMachine(figures.name, figures.fast.memory, figures.slow.processor is not None, figures)
    if machine.gpus:
        return TargetMachine(machine.gpus[0].name, machine.gpus[0].free, True, None)
    return TargetMachine(machine.cpu, machine.memory_available, False, None)


@dataclass(frozen=True)
class _Command:
    """Writes the commands that run a model."""

    options: Doctor
    source: FoundModel

    @property
    def _model(self) -> str:
        assert self.options.model is not None
        only_config = self.source.directory is None and self.source.files is None
        return UNKNOWN_MODEL if only_config else shlex.quote(self.options.model)

    @property
    def _revision(self) -> str:
        revision = self.options.revision
        return "" if revision is None else f" --revision {shlex.quote(revision)}"

    @property
    def _changes(self) -> str:
        changes = self.options.hf_overrides
        return "" if changes is None else f" --hf-overrides {shlex.quote(changes)}"

    def serve(self, shorter: int | None = None) -> str:
        """The command that serves the model. shorter: maximum tokens of a request. None: the model's own."""
        length = "" if shorter is None else f" --max-model-len {shorter}"
        return f"{program()} serve {self._model}{self._revision}{self._changes}{length}"

    def stream(self, plan: StreamedJob) -> str:
        model = f"--model {self._model}{self._revision}{self._changes}"
        return f"{program()} run-batch -i in.jsonl -o out.jsonl {model} --fast-memory {plan.fast_memory}"


def _judge(
    report: ModelReport, target: TargetMachine, context: int, command: _Command, disk: int
) -> ModelReport:
    """The report with what the model takes on this machine, how to run it, and how fast."""
    assert report.sizes is not None
    sizes, stored_type = report.sizes, report.storage.type
    loads = partial(registry.type_in_memory, device=target.device, kernels=table.pick(target.device))
    number = target.cache_number(loads(stored_type))
    memory = Memory(target.memory, AUTO_SHARE_CUDA if target.gpu else AUTO_SHARE, number)
    plain_type = stored_type if stored_type in NUMBER_BYTES else COMPRESSED_DTYPE
    model = _in_memory(sizes, loads(stored_type), target, command.source)
    fits = []
    for candidate in outlook.list_formats(sizes, plain_type, stored_type):
        loaded_type = loads(candidate.name)
        exact = candidate.name == stored_type == loaded_type
        candidate = outlook.format_of(model, candidate.name) if exact else candidate
        sizes_in_memory = model if exact else in_format(sizes, loaded_type, gpu=False)
        fits.append(outlook.fit(sizes_in_memory, candidate, loaded_type, memory, context))
    report = replace(report, machine=target.name, memory=target.memory, fits=fits)
    if report.problems:
        return report
    own_fit = next(candidate for candidate in fits if candidate.format.name == stored_type)
    report = replace(
        report, assumptions=[] if target.hardware is None else list_assumptions(model, target.hardware)
    )
    if report.storage.download is not None and report.storage.download > disk:
        return replace(report, disk=disk)
    if own_fit.can_serve:
        counts = (1, SchedulerConfig.max_num_seqs)
        fast = (
            []
            if target.hardware is None
            else outlook.predict_speeds(model, target.hardware, number, context, counts)
        )
        shorter = None if own_fit.longest == context else own_fit.longest
        report = _with_drafts(report, model, target, number, context)
        return replace(report, command=command.serve(shorter), speeds=fast)
    return _too_large(
        report,
        target,
        own_fit.loaded_type,
        command,
        partial(outlook.plan_streamed_job, model, context=context),
    )


def _with_drafts(
    report: ModelReport, model: ModelSizes, target: TargetMachine, number: float, context: int
) -> ModelReport:
    """The report with the acceptance from which drafted tokens pay. number: bytes of a cached number."""
    if target.hardware is None:
        return replace(
            report, drafts=drafts.list_drafts(drafts.price_by_bytes(model)), drafts_by="bytes of weights"
        )
    price = drafts.price_by_machine(model, target.hardware, number, context)
    return replace(report, drafts=drafts.list_drafts(price), drafts_by="the machine's figures")


def _in_memory(sizes: ModelSizes, loaded_type: str, target: TargetMachine, source: FoundModel) -> ModelSizes:
    """The sizes of a model as it is computed here. Files that are here say what quantised experts take."""
    directory = source.directory
    if target.gpu:
        return in_format(sizes, loaded_type, gpu=True)
    with contextlib.suppress(MoesaicError):  # already a line of the report
        if directory is not None and has_weights(directory):
            model = read_checkpoint_sizes(directory, sizes.name, table.pick("cpu"))
            if model.conversion == "columns":  # in_format says the type that they get in memory
                plain, staging = in_format(sizes, loaded_type, gpu=False), model.staging
                return replace(plain, conversion="columns", read=model.read, staging=staging)
            if _is_counted(model):
                return replace(model, activation_number=ROW_BYTES)
    # Blocks of a GGUF file are not converted.
    if split_dtype(loaded_type)[0] in (*QUANTIZATIONS, *GROUP_TYPES):
        return convert_sizes(sizes, loaded_type, source.read())
    return in_format(sizes, loaded_type, gpu=False)


def _is_counted(model: ModelSizes) -> bool:
    """Whether the files said what quantised experts take."""
    return model.conversion is not None or model.mean_expert is not None


def _too_large(
    report: ModelReport,
    target: TargetMachine,
    loaded_type: str,
    command: _Command,
    plan: Callable[[Hardware, float], StreamedJob | None],
) -> ModelReport:
    """The report on a model that does not fit: with --fast-memory, if its experts can be streamed."""
    if target.hardware is None:
        return replace(report, is_unplanned=True)
    try:
        if command.source.directory is not None:
            paged_layout(ModelConfig(str(command.source.directory)))
        elif loaded_type != report.storage.type and not is_packed(report.storage.type):
            raise ConfigError(
                f"--fast-memory: the experts are stored as {report.storage.type} and computed from as "
                f"{loaded_type}; allowed: experts that are computed from as they are stored"
            )
    except ConfigError as error:
        return replace(report, problems=[*report.problems, str(error)])
    streamed_job = plan(target.hardware, target.cache_number(loaded_type))
    if streamed_job is None:
        return report
    return replace(report, command=command.stream(streamed_job), streamed_job=streamed_job)
