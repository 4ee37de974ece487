"""`moesaic hardware measure`: measures this machine, prints a report and writes a file for `moesaic plan`."""

from __future__ import annotations

import contextlib
import json as json_module
import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from moesaic.commands import hardware_report
from moesaic.commands.machine import examine
from moesaic.commands.options import MeasureHardware
from moesaic.commands.progress import progress
from moesaic.config import Device, ModelConfig
from moesaic.core.errors import ConfigError, MoesaicError
from moesaic.core.home import expand_home
from moesaic.core.weight_types import COMPRESSED_DTYPE, is_packed
from moesaic.cost.hardware import Hardware
from moesaic.kernels import table
from moesaic.models.files import gguf_at, is_gguf
from moesaic.planning.hardware import file
from moesaic.planning.hardware.device import find_device
from moesaic.planning.hardware.measure import FULL, SHORT, Converting, Effort, Measuring
from moesaic.planning.sizes import has_weights, read_checkpoint_sizes, read_config_sizes
from moesaic.runtime import offloaded_worker


def run(options: MeasureHardware, json: bool) -> int:
    """Measure, write the file, and print the report. Returns the exit code.

    Raises ConfigError for a missing device, a disk that cannot be measured, and a file that cannot be
    written.
    """
    if options.output_file is not None:
        file.check(options.output_file)
    hardware = measure(options, FULL)
    if options.output_file is not None:
        file.save(hardware, options.output_file)
    if json:
        print(json_module.dumps(hardware.to_tables()))
    else:
        print(hardware_report.as_text(hardware, options.output_file))
    return 0


def now(model: str, device: Device = "auto") -> Hardware:
    """A short measurement for `moesaic plan MODEL --hardware this`. It measures the disk of the model.

    device: cpu for plans that a CPU executes, even if there is a GPU.
    Raises ConfigError for a disk that cannot be measured.
    """
    path = expand_home(model)
    path = path if path.is_dir() or is_gguf(path) else path.parent
    try:
        hardware = measure(MeasureHardware(path=path, device=device), SHORT)
    except ConfigError as error:
        advice = "choose a disk with moesaic hardware measure --path"
        raise ConfigError(f"--hardware this: {error}; {advice}") from error
    line = f"{hardware.name}: {hardware.source}; `moesaic hardware measure` is more exact and writes a file"
    Console(stderr=True).print(line, soft_wrap=True, highlight=False, markup=False)
    return hardware


def measure(options: MeasureHardware, effort: Effort) -> Hardware:
    """Measure the two memory levels of this machine: GPU memory and RAM if there is a GPU, else RAM and disk.

    Raises ConfigError for a missing device and a disk that cannot be measured.
    """
    device = None if options.device == "cpu" else find_device()
    if options.device == "cuda" and device is None:
        raise ConfigError.field("--device", "cuda", "auto, cpu: torch sees no GPU")
    path = expand_home(options.path)
    effort = _on_experts_of(path if path.is_dir() or is_gguf(path) else path.parent, effort)
    with progress(Console(stderr=True), time.monotonic, None) as show:
        measuring = Measuring(effort, show, options.threads)
        if device is not None:
            return measuring.gpu_over_ram(device, options.name or device.title)
        return measuring.ram_over_disk(path.parent if is_gguf(path) else path, options.name or examine().cpu)


def _on_experts_of(path: Path, effort: Effort) -> Effort:
    """`effort` with matrix products of the sizes of the checkpoint at `path`, if there is one."""
    try:
        path = gguf_at(path) or path
        model = (
            read_checkpoint_sizes(path, str(path), table.pick("cpu"))
            if is_gguf(path)
            else read_config_sizes(
                json_module.loads((path / "config.json").read_text(encoding="utf-8")), str(path)
            )
        )
    except (OSError, ValueError, MoesaicError):
        return effort  # without a model, products of the usual sizes are measured
    packed_type = COMPRESSED_DTYPE if model.has_compressed_experts else model.quantized_dtype
    packed_type = packed_type if packed_type is not None and is_packed(packed_type) else None
    sizes = effort.products.with_experts(model.hidden, model.expert_width, round(model.top_k), packed_type)
    converting = None
    with contextlib.suppress(MoesaicError):  # a checkpoint that cannot be streamed
        converting = (
            offloaded_worker.find_conversion(ModelConfig(str(path), device="cpu"))
            if has_weights(path)
            else None
        )
    return replace(effort, products=sizes, converting=None if converting is None else Converting(*converting))
