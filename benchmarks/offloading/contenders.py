"""The contenders: for each, its command, the settings that it alone gets, and the files that it reads."""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import engines
from checkpoint import Checkpoint

from offloading.accelerated import DONE

SCHEDULES = ("cgopipe", "on-demand", "serial", "s4")


@dataclass(frozen=True)
class Contender:
    """One way to run a job."""

    name: str
    command: list[str]
    reads: tuple[Path, ...]
    """Files and folders that must not be in the page cache when the contender starts."""
    order: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


def contenders(arguments: argparse.Namespace, hardware: Path) -> list[Contender]:
    """moesaic's schedules first, then the peers that were asked for. Writes the files that they need."""
    found = [ours(schedule, arguments, hardware) for schedule in arguments.schedules]
    if arguments.compressed:
        found += [compressed(one, arguments.compressed) for one in found]
    if arguments.pad:
        found.append(padded(arguments, hardware))
    if arguments.accelerate:
        found.append(accelerate(arguments))
    if arguments.llama:
        found.append(llama(arguments))
    return found


def ours(schedule: str, arguments: argparse.Namespace, hardware: Path) -> Contender:
    """The planner's policy with this schedule."""
    environment = {"OMP_WAIT_POLICY": "passive"}  # as `moesaic` starts its workers
    command = [sys.executable, "-m", "offloading.ours"]
    order = ordered(schedule, arguments, hardware)
    return Contender(f"moesaic {schedule}", command, (arguments.model,), order, environment)


def ordered(schedule: str, arguments: argparse.Namespace, hardware: Path) -> dict[str, Any]:
    """The inputs of a plan besides the job."""
    return {
        "schedule": schedule,
        "hardware": str(hardware),
        "kv_cache_dtype": arguments.kv_cache_dtype,
        "profile": arguments.profile and str(arguments.profile),
    }


def compressed(one: Contender, folder: Path) -> Contender:
    """The same contender, from the checkpoint that `moesaic compress` made."""
    order = one.order | {"model": str(folder)}
    return replace(one, name=f"{one.name}, compressed", reads=(folder,), order=order)


def padded(arguments: argparse.Namespace, hardware: Path) -> Contender:
    """MoE-Lightning(p): the first schedule again, with every prompt padded to the longest."""
    one = ours((arguments.schedules or ["auto"])[0], arguments, hardware)
    return replace(one, name="moesaic padded", order=one.order | {"pad": True})


def accelerate(arguments: argparse.Namespace) -> Contender:
    """transformers with accelerate's hooks. As many layers' experts are in memory as fit under the cap."""
    python = engines._python(arguments.accelerate)
    if Checkpoint(arguments.model).config["model_type"] != "qwen3_moe":
        raise SystemExit("--accelerate: knows checkpoints of model_type qwen3_moe")
    folder = (arguments.work or arguments.model.parent) / f"{arguments.model.name}-experts"
    if not _newer(folder / DONE, arguments.model):
        command = [python, "-m", "offloading.accelerated", str(arguments.model), str(folder)]
        subprocess.run(command, check=True, stdout=sys.stderr, cwd=engines.HERE)
    dtype = arguments.accelerate_dtype
    order = {"folder": str(folder), "dtype": dtype, "experts": arguments.accelerate_experts}
    command = [python, "-m", "offloading.accelerated"]
    environment = {
        "MALLOC_MMAP_THRESHOLD_": str(1 << 20)
    }  # freed weights go back at once: less memory at worst
    return Contender(f"accelerate {dtype}", command, (arguments.model, folder), order, environment)


def llama(arguments: argparse.Namespace) -> Contender:
    """llama.cpp with a file that is mapped, not loaded."""
    python = engines._python(arguments.llama)
    file = engines._gguf(python, arguments.model, arguments.work, "bf16")
    order = {"file": str(file), "rows": arguments.llama_rows}
    return Contender("llama.cpp mmap", [python, "-m", "offloading.llama"], (file,), order)


def cache_numbers(model: Path) -> int:
    """Number of keys and values that a token has in the caches of all layers."""
    checkpoint = Checkpoint(model)
    heads = checkpoint.setting("num_attention_heads")
    width = checkpoint.config.get("head_dim") or checkpoint.config["hidden_size"] // heads
    layers = checkpoint.config["num_hidden_layers"]
    return int(layers * 2 * checkpoint.setting("num_key_value_heads") * width)


def _newer(file: Path, model: Path) -> bool:
    return file.exists() and file.stat().st_mtime >= (model / "config.json").stat().st_mtime
