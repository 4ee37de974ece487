"""`moesaic doctor`: prints what this machine has, what moesaic will use, and what could be better."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moesaic import __version__
from moesaic.commands import schedule_curves
from moesaic.commands.machine import Machine, examine
from moesaic.commands.schedule_curves import Schedule
from moesaic.commands.units import in_bytes
from moesaic.kernels import table
from moesaic.planning.hardware.kernel_speeds import ROWS, KernelSpeed, measure_kernels

GIB = 2**30
KERNELS_OF = {
    "avx512": "avx512",
    "avx512_bf16": "avx512_bf16",
    "avx512_vnni": "avx512_int8",
    "avx_vnni": "avx2_vnni_int8",
    "amx_bf16": "amx_bf16",
    "amx_int8": "amx_int8",
}
"""Instruction set, as `machine.py` names it -> kernels that every CPU with it can run."""


@dataclass(frozen=True)
class Choice:
    """The values that moesaic chooses on this machine for settings that are auto or None."""

    device: str
    kernels: str
    dtype: str
    threads: int


def run(as_json: bool) -> int:
    """Print the report. Returns the exit code."""
    machine = examine()
    choice = choose(machine)
    notes = warnings(machine, choice)
    gpu = machine.gpus[0].name if machine.gpus else None
    speeds = [] if machine.gpus else measure_kernels(machine.threads)
    schedule = schedule_curves.find(gpu, machine.threads)
    if as_json:
        report = {
            "version": __version__,
            "machine": asdict(machine),
            "choice": asdict(choice),
            "kernels": [asdict(speed) for speed in speeds],
            "schedule": asdict(schedule),
            "warnings": notes,
        }
        print(json.dumps(report))
    else:
        _print(machine, choice, speeds, schedule, notes)
    return 0


def choose(machine: Machine) -> Choice:
    """The settings that `moesaic serve` uses without flags."""
    device = "cuda" if machine.gpus else "cpu"
    kernels = table.pick(device)
    has_native = machine.gpus or table.instruction_sets()
    dtype = "the checkpoint's own" if has_native else "float32"
    return Choice(device, kernels.name, dtype, machine.threads)


def warnings(machine: Machine, choice: Choice) -> list[str]:
    """Problems of speed and likely failures, one line each, with what to do about it."""
    notes = []
    if choice.device == "cpu" and machine.nvidia_driver:
        build = f"torch {machine.torch} (build: {machine.torch_build})"
        notes.append(f"there is an NVIDIA driver, but {build} sees no GPU: install a CUDA build of torch")
    if len(machine.gpus) > 1:
        notes.append(f"moesaic uses one of the {len(machine.gpus)} GPUs: choose it with CUDA_VISIBLE_DEVICES")
    if choice.device == "cpu" and not table.instruction_sets():
        notes.append(
            "moesaic was installed without its native kernels and uses the slow torch reference: install "
            "a C++17 compiler (Debian: apt install g++), then reinstall moesaic"
        )
    if choice.device == "cpu" and table.instruction_sets():
        notes += _list_missing_kernels(machine)
    if (
        choice.device == "cpu"
        and machine.torch_cpu_capability == "DEFAULT"
        and "avx2" in table.instruction_sets()
    ):
        notes.append(
            "torch computes without AVX2, although this CPU has it: /proc/cpuinfo cannot be read, or "
            "ATEN_CPU_CAPABILITY is set. Log-probabilities may differ in their last bits from other machines"
        )
    instruction_sets = {
        *machine.instruction_sets,
        *table.instruction_sets(),
    }  # without /proc only the kernels know
    if choice.device == "cpu" and not {"avx2", "neon"} & instruction_sets:
        notes.append("this CPU has neither AVX2 nor NEON: moesaic will be very slow on it")
    if machine.memory_available < 2 * GIB:
        free = in_bytes(machine.memory_available)
        notes.append(
            f"only {free} of memory are available, and a model needs at least the size of its weights"
        )
    if machine.hub_cache is None:
        notes.append("this user has no home directory: set HF_HOME to a directory for downloaded models")
    elif machine.hub_cache_free < 20 * GIB:
        free = in_bytes(machine.hub_cache_free)
        notes.append(
            f"only {free} are free on the disk of {machine.hub_cache}: set HF_HOME to a directory on a "
            "larger disk"
        )
    return notes


def _list_missing_kernels(machine: Machine) -> list[str]:
    """A line that names the CPU's instructions whose kernels are not installed, if there are any."""
    installed_kernels = table.instruction_sets()
    missing = [
        name
        for name, kernels in KERNELS_OF.items()
        if name in machine.instruction_sets and kernels not in installed_kernels
    ]
    if not missing:
        return []
    note = (
        f"this CPU has {', '.join(missing)}, but moesaic was installed without the kernels for it: the "
        "compiler does not know the instructions, or the system withholds them. Reinstall moesaic with "
        "GCC 12 or newer"
    )
    return [note]


def _print(
    machine: Machine, choice: Choice, speeds: list[KernelSpeed], schedule: Schedule, notes: list[str]
) -> None:
    console = Console(highlight=False)
    console.print(_table("This machine", _facts(machine)))
    choices = {name: str(value) for name, value in asdict(choice).items()}
    if choice.device == "cpu":
        choices["kernels"] += f", torch {machine.torch_cpu_capability}"
    choices["threads"] += ", or 1 for a model of less than 256 MiB"
    console.print(_table("moesaic will use", choices))
    if speeds:
        console.print(speeds_table(speeds))
        console.print("Where rows are rounded, answers may differ from those of transformers.")
    console.print(_table("With expert servers and --schedule async", schedule_curves.facts(schedule)))
    for note in notes:
        console.print(f"[yellow]warning[/]: {escape(note)}", soft_wrap=True)
    if not notes:
        console.print("no warnings")


def _facts(machine: Machine) -> dict[str, str]:
    quota = limit = ""
    if machine.cpu_quota is not None:
        cpu_time, source = machine.cpu_quota.amount, machine.cpu_quota.source
        quota = f", limited to the time of {cpu_time:.1f} cores by {source}"
    if machine.memory_limit is not None:
        limit = f", limited to {in_bytes(machine.memory_limit.amount)} by {machine.memory_limit.source}"
    gpus = [
        f"{gpu.name}, {in_bytes(gpu.free)} of {in_bytes(gpu.memory)} free, capability {gpu.capability}"
        for gpu in machine.gpus
    ]
    nodes = "" if machine.numa_nodes == 1 else f", on {machine.numa_nodes} NUMA nodes"
    cache = f"{machine.hub_cache}, {in_bytes(machine.hub_cache_free)} free" if machine.hub_cache else "none"
    free, total = in_bytes(machine.memory_available), in_bytes(machine.memory_total)
    return {
        "system": machine.system,
        "CPU": machine.cpu,
        "cores": f"{machine.cores} of {machine.cores_online}{nodes}{quota}",
        "instructions": " ".join(machine.instruction_sets) or "none that moesaic uses",
        "memory": f"{free} of {total} available{limit}",
        "GPUs": "\n".join(gpus) or "none visible to torch",
        "Python": machine.python,
        "torch": f"{machine.torch}, {machine.torch_build} build, CPU code for {machine.torch_cpu_capability}",
        "model cache": cache,
        "moesaic": __version__,
    }


def _table(title: str, rows: dict[str, str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None)
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, escape(value))
    return table


def speeds_table(speeds: list[KernelSpeed]) -> Table:
    """A row for each of the kernels, and the ratio to those of `auto`."""
    speed_table = Table(
        title="Kernels: Gflops/s of experts, by rows of each",
        title_justify="left",
        title_style="bold",
        box=None,
    )
    for column in ("--kernels", "weights", "rounds rows to", "1 row", "64 rows"):
        speed_table.add_column(column, justify="right" if column[0].isdigit() else "left")
    first_speeds: dict[str, KernelSpeed] = {}
    for speed in speeds:
        first = first_speeds.setdefault(speed.weights, speed)
        name = f"auto ({speed.kernels})" if speed is first else speed.kernels
        ratios = [
            f" ({speed.gflops[rows] / first.gflops[rows]:.2f}x)" * (speed is not first) for rows in ROWS
        ]
        figures = [f"{speed.gflops[rows]:.3g}{ratio}" for rows, ratio in zip(ROWS, ratios, strict=True)]
        speed_table.add_row(name, speed.weights, speed.rounds_to or "nothing", *figures)
    return speed_table
