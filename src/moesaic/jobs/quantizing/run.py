"""Writes a quantised checkpoint, layer by layer, and measures it beside the original."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moesaic.core.errors import ConfigError
from moesaic.core.text_config import TEXT
from moesaic.jobs.quantizing import plan as planning
from moesaic.jobs.quantizing import writing
from moesaic.jobs.quantizing.calibrating import CalibratedRounder, NearestRounder
from moesaic.jobs.quantizing.directory import Directory
from moesaic.jobs.quantizing.formats import Format, choose_format
from moesaic.jobs.quantizing.measuring import measure
from moesaic.jobs.quantizing.options import QuantizeOptions
from moesaic.jobs.quantizing.plan import Plan
from moesaic.jobs.quantizing.texts import Reader, Texts, Tokens
from moesaic.kernels import table
from moesaic.kernels.table import Kernels
from moesaic.models import files, fingerprint, registry
from moesaic.runtime.machine import cores

MB = 10**6
QUANTIZATION = "quantization_config"
ROOM = 16 << 20
"""Bytes left for headers and small files when the free space of the disk is checked."""
TokenCounts = list[tuple[int, int, int]]
"""Layer, expert and tokens of experts."""
Show = Callable[[str, int, int], None]
"""Reports progress: (name of the work, units done, units in total)."""


@dataclass(frozen=True)
class Cost:
    """What the quantisation costs. Perplexities and agreement are None if nothing was measured."""

    format: str
    group_size: int | None
    calibration_tokens: int
    bytes_before: int
    bytes_after: int
    matrices: int
    """Number of quantised matrices."""
    few_tokens: TokenCounts
    """Experts that too few tokens of --calibrate chose. They were rounded to nearest."""
    evaluation_tokens: int = 0
    perplexity_before: float | None = None
    perplexity_after: float | None = None
    agreement: float | None = None
    """Share of the positions at which both models choose the same token."""


@dataclass(frozen=True)
class _Job:
    path: Path
    plan: Plan
    form: Format
    texts: Texts
    kernels: Kernels
    options: QuantizeOptions
    show: Show

    def settings(self) -> dict[str, Any]:
        """What decides about the bytes of the result."""
        all_settings: dict[str, Any] = {
            "model": fingerprint.compute_fingerprint(self.path),
            "--format": self.form.name,
            "--group-size": self.form.group,
            "--modules": sorted(self.options.modules),
        }
        if self.texts.calibrating:
            all_settings |= {
                "--calibrate": _digest(self.texts.calibrating),
                "--least-tokens": self.options.least_tokens,
                "--kernels": self.kernels.name,
            }
        return all_settings

    def write(self, directory: Directory) -> TokenCounts:
        """Write what is left. Returns the experts that too few tokens chose."""
        if directory.is_finished:
            directory.clear()
            return [(layer, expert, count) for layer, expert, count in directory.read_note("few_tokens", [])]
        layers = registry.read_spec(self.path).num_layers
        calibrated_rounder = self._make_rounder(directory) if self.texts.calibrating else None
        shards_left = [
            (name, shard)
            for name, shard in zip(writing.file_names(self.plan), self.plan.shards, strict=True)
            if not directory.has_file(name)
        ]
        total = sum(shard.bytes_before for _, shard in shards_left)
        writer = writing.Writer(
            self.form,
            directory,
            calibrated_rounder or NearestRounder(),
            self.options.threads or cores(),
            lambda bytes_done: self.show("quantising", bytes_done // MB, total // MB),
        )
        for name, shard in shards_left:
            writer.write(name, shard, layers)
            if calibrated_rounder is not None and shard.layer is not None:
                calibrated_rounder.remove_hidden(shard.layer)
        rarely_chosen = [] if calibrated_rounder is None else calibrated_rounder.rarely_chosen
        directory.note({"few_tokens": rarely_chosen})
        shards = {
            name: shard.tensors(self.form)
            for name, shard in zip(writing.file_names(self.plan), self.plan.shards, strict=True)
        }
        directory.finish(self.path, self._config(), shards)
        return rarely_chosen

    def add_measurements(self, cost: Cost, result: Path) -> Cost:
        """The same with what both models say about the texts."""
        texts = self.texts.measuring
        original_reading, result_reading = (
            measure(path, self.kernels, texts, partial(self._show_share, f"reading {name}", size // MB))
            for path, name, size in (
                (self.path, "the original", cost.bytes_before),
                (result, "the result", cost.bytes_after),
            )
        )
        return replace(
            cost,
            evaluation_tokens=sum(map(len, texts)),
            perplexity_before=original_reading.perplexity,
            perplexity_after=result_reading.perplexity,
            agreement=original_reading.agreement(result_reading),
        )

    def _show_share(self, name: str, size: int, units_done: int, total: int) -> None:
        self.show(name, size * units_done // total, size)

    def _make_rounder(self, directory: Directory) -> CalibratedRounder:
        prompts, work = self.texts.calibrating, directory.work
        return CalibratedRounder(self.path, self.kernels, prompts, work, self.options.least_tokens)

    def _config(self) -> dict[str, Any]:
        config = files.read_config(self.path)
        inner = config.get(TEXT)
        if isinstance(inner, dict):  # which may say that it is in FP8
            config = {**config, TEXT: {key: value for key, value in inner.items() if key != QUANTIZATION}}
        return {**config, QUANTIZATION: self.form.config(self.plan.modules_to_ignore)}


def run(options: QuantizeOptions, show: Show) -> Cost:
    """Write the checkpoint, or what is left of it, and measure it.

    Raises ConfigError for a model that cannot be quantised so, for a directory that is not empty, and for a
    disk that is too small. Raises OSError if a file cannot be read or written.
    """
    path = files.resolve(options.model, options.revision, options.hf_overrides)
    files.refuse_gguf(path, "quantize")
    plan = planning.make(path, options.modules)
    form = choose_format(options.format, options.group_size, plan.columns)
    cost = Cost(
        format=form.name,
        group_size=form.group,
        calibration_tokens=0,
        bytes_before=sum(shard.bytes_before for shard in plan.shards),
        bytes_after=sum(shard.bytes_after(form) for shard in plan.shards),
        matrices=sum(1 for shard in plan.shards for _ in shard.weights),
        few_tokens=[],
    )
    if cost.bytes_after >= cost.bytes_before and not options.allow_growth:
        growth = f"{cost.bytes_after} bytes in place of {cost.bytes_before}"
        raise ConfigError(
            f"{options.model}: the result would have {growth}; allowed: fewer, or --allow-growth"
        )
    texts = _texts(path, options)
    kernels = table.pick("cpu", options.kernels)
    kernels.set_threads(options.threads or cores(), False)
    job = _Job(path, plan, form, texts, kernels, options, show)
    directory = Directory(options.target, job.settings())
    _check_space(options.target, job, cost)
    with directory, torch.inference_mode():
        rarely_chosen = job.write(directory)
        cost = replace(cost, few_tokens=rarely_chosen, calibration_tokens=sum(map(len, texts.calibrating)))
        return job.add_measurements(cost, directory.path) if texts.measuring else cost


def _texts(path: Path, options: QuantizeOptions) -> Texts:
    if not options.calibrate and not options.evaluation_tokens:
        return Texts([], [])
    spec = registry.read_spec(path)
    reader = Reader(path, spec.vocab_size, min(options.max_prompt_tokens, spec.max_position))
    return reader.read(
        options.calibrate, options.evaluate, options.calibration_tokens, options.evaluation_tokens
    )


def _check_space(target: Path, job: _Job, cost: Cost) -> None:
    """Raises ConfigError if the disk has no space for what is left."""
    written_bytes = (
        sum(file.stat().st_size for file in target.glob("*.safetensors")) if target.is_dir() else 0
    )
    # Hidden states before and after a layer, and three files of rows between, each in float32.
    rows = 4 * registry.read_spec(job.path).hidden_size * sum(map(len, job.texts.calibrating))
    needed_bytes = cost.bytes_after - written_bytes + 5 * rows + ROOM
    free = shutil.disk_usage(target.parent).free
    if needed_bytes > free:
        raise ConfigError(
            f"DIRECTORY: {target}: {needed_bytes} bytes are needed, and {free} are free on this disk"
        )


def _digest(prompts: Tokens) -> str:
    return hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16]
