"""`moesaic plan`: finds the fastest policy for a job, predicts its speed, and says what would help.

With --cluster it searches deployments instead, and prints commands that start the best.
"""

from __future__ import annotations

import json as json_module
import tempfile
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

import moesaic
from moesaic.commands import plan_deployment_report, plan_picture, plan_report
from moesaic.commands.plan_options import THIS, Plan
from moesaic.commands.plan_report import Report
from moesaic.commands.progress import progress
from moesaic.core.errors import ConfigError
from moesaic.core.home import expand_home
from moesaic.core.profile import Profile
from moesaic.cost.assumptions import list_assumptions
from moesaic.cost.data_sheet import read_machine
from moesaic.cost.hardware import Hardware
from moesaic.cost.machines import MACHINES
from moesaic.cost.routing import Routing
from moesaic.cost.sizes import PUBLISHED_MODELS, ModelSizes
from moesaic.kernels import table
from moesaic.kernels.table import Kernels
from moesaic.models import files
from moesaic.models.files import gguf_at, is_gguf
from moesaic.planning.deployment import demand, spec
from moesaic.planning.deployment.search import Deployments, Search
from moesaic.planning.sizes import (
    decompress_sizes,
    has_weights,
    over_ram,
    read_checkpoint_sizes,
    read_config_sizes,
)
from moesaic.policy.offloading import advice, planner
from moesaic.policy.offloading.policies import Workload


def run(options: Plan, json: bool) -> int:
    """Print the plan and, if wanted, draw it. Returns the exit code.

    Raises ConfigError for an unknown model or machine, for a model that does not fit, and for a picture that
    cannot be written.
    """
    if options.cluster is not None:
        deployments = search_deployments(options)
        write_report = plan_deployment_report.as_json if json else plan_deployment_report.as_text
        print(write_report(deployments, options))
        return 0
    waiting = Console(stderr=True)
    measured_machine = _measure_now(options)
    with waiting.status("pricing policies"):
        report = plan(options, measured_machine)
        picture = plan_picture.draw(report) if options.plot is not None else None
    if options.plot is not None and picture is not None:
        _write(options.plot, picture)
    print(plan_report.as_json(report) if json else plan_report.as_text(report))
    return 0


def search_deployments(options: Plan) -> Deployments:
    """The best deployments of a model on a cluster, searched in virtual time with progress.

    Raises ConfigError for a wrong field, for a model that does not fit, and if the time is too short.
    """
    assert options.model is not None and options.cluster is not None and options.workload is not None
    machines, requests = spec.load(options.cluster), demand.load(options.workload)
    objectives = demand.parse_objectives(options.slo)
    model = find_model(options.model, hf_overrides=options.hf_overrides)
    if not model.moe_layers:
        raise ConfigError.field("MODEL", options.model, "a model with routed experts")
    seconds, seed, clock = options.time_budget, options.seed, time.monotonic
    with progress(Console(stderr=True), clock, "per s") as show:
        return Search(model, machines, requests, objectives, seconds, seed, clock, show).run()


def plan(options: Plan, measured_machine: Hardware | None = None) -> Report:
    """Search for the best policy and price it. measured_machine: this machine, if the plan measured it."""
    assert options.model is not None and options.hardware is not None
    assert options.prompt_len is not None and options.gen_len is not None
    hardware = (measured_machine or find_hardware(options.hardware)).parallel(options.gpus)
    hardware = hardware.with_slow(options.slow_memory, options.slow_bandwidth)
    has_gpu = hardware.slow.processor is not None
    model = find_model(options.model, has_gpu, options.hf_overrides)
    if options.profile is not None:
        routing = Routing.from_profile(Profile.load(options.profile), model.experts, model.top_k)
        model = replace(model, routing=routing)
    model, notes = _fit_to_machine(model, hardware)
    number = model.cache_number(options.kv_cache_dtype)
    workload = Workload(options.prompt_len, options.gen_len, number)
    if options.policy == "flexgen":
        price, flexgen_throughput = planner.by_flexgen(model, hardware, workload)
        return Report(model, hardware, workload, price, flexgen_throughput, assumptions=notes)
    price = planner.search(model, hardware, workload)
    fast_only = advice.without_offloading(model, hardware, workload)
    if fast_only is not None and price.throughput < plan_report.WORTH * fast_only.throughput:
        return Report(model, hardware, workload, price, None, fast_only=fast_only, assumptions=notes)
    helps = advice.helps(model, hardware, workload, price)
    batches = advice.by_batch(model, hardware, workload, price.policy.batch)
    return Report(model, hardware, workload, price, None, helps, batches, fast_only, notes)


def _fit_to_machine(model: ModelSizes, hardware: Hardware) -> tuple[ModelSizes, list[str]]:
    """The sizes of a model as the machine's fast level computes it, and what the plan assumes."""
    if hardware.slow.processor is not None and model.has_compressed_experts:
        model = decompress_sizes(model)
    if hardware.slow.processor is None or model.conversion is None:
        return model, list_assumptions(model, hardware)
    model = over_ram(model)
    notes = list_assumptions(model, hardware)
    if model.quantized_dtype is not None:
        notes.append("Assumed: --kernels triton. With the reference, quantised experts become bf16 on a GPU.")
    return model, notes


def _measure_now(options: Plan) -> Hardware | None:
    """This machine, measured now, for `--hardware this`; else None. Checks the model before it measures."""
    if options.hardware != THIS or options.model is None:
        return None
    from moesaic.commands import hardware

    # An unknown model is an error at once, and not after ten seconds of measuring.
    find_model(options.model, hf_overrides=options.hf_overrides)
    return hardware.now(options.model)


def find_model(name: str, gpu: bool = False, hf_overrides: str | None = None) -> ModelSizes:
    """The sizes of a model: a known name, `demo`, a checkpoint's directory, a GGUF file, or a
    config.json.

    gpu: whether the fast level is a GPU, whose kernels read no weights in blocks. hf_overrides: changes of
    its config.json. Raises ConfigError if there is no such model.
    """
    kernels = table.pick("cpu")
    kernels = replace(kernels, can_use_blocks=kernels.can_use_blocks and not gpu)
    if name in PUBLISHED_MODELS:
        if hf_overrides is not None:
            raise ConfigError.field(
                "--hf-overrides", hf_overrides, f"none for {name}, which has no config.json"
            )
        return PUBLISHED_MODELS[name]
    path = Path(moesaic.__file__).parent / "demo" if name == "demo" else expand_home(name)
    if path.is_dir() or is_gguf(path):
        path = gguf_at(path) or path
    if hf_overrides is None:
        return _read_sizes(path, name, kernels)
    with tempfile.TemporaryDirectory() as folder:
        source = files.find(str(path), Path(folder), None, hf_overrides)
        return _read_sizes(source.directory or source.config, name, kernels)


def _read_sizes(path: Path, name: str, kernels: Kernels) -> ModelSizes:
    """Reads the sizes of a directory, a GGUF file or a config.json. name: the model as it was typed."""
    if is_gguf(path):
        return read_checkpoint_sizes(path, name, kernels)
    raw = _read_config(path, name)
    if path.is_dir() and has_weights(path):
        return read_checkpoint_sizes(path, name, kernels)
    return read_config_sizes(raw, name)


def _read_config(path: Path, name: str) -> dict[str, Any]:
    """Reads a config.json, or that of a directory. name: the model as on the command line."""
    file = path / "config.json" if path.is_dir() else path
    try:
        raw: Any = json_module.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        allowed_values = (
            f"a directory with config.json, a config.json, a GGUF file, {', '.join(PUBLISHED_MODELS)}"
        )
        raise ConfigError.field("model", name, allowed_values) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: not a JSON file: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{file}: not a JSON object")
    return raw


def find_hardware(name: str) -> Hardware:
    """The figures of a known machine, or of a .toml file. Raises ConfigError if there are none."""
    if name in MACHINES:
        return MACHINES[name]
    if not name.endswith(".toml"):
        raise ConfigError.field("--hardware", name, ", ".join((*MACHINES, THIS, "a .toml file")))
    try:
        return read_machine(tomllib.loads(Path(name).read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError.field("--hardware", name, f"a file to read ({error.strerror})") from error
    except ValueError as error:
        raise ConfigError(f"{name}: not a TOML file: {error}") from error


def _write(path: Path, picture: str) -> None:
    try:
        path.write_text(picture, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--plot: cannot write {path}: {error.strerror}") from error
