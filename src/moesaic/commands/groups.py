"""Commands of two words: `bench ...`, `profile ...`, `hardware ...` and `cluster ...`.

As in `cli`, only what is needed to read a command line is imported here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from cyclopts import App, Parameter

from moesaic.commands.flags import FLAT, Output
from moesaic.commands.import_options import ImportProfile
from moesaic.commands.options import ExportProfile, InitCluster, KernelsBench, MeasureHardware, ShowProfile
from moesaic.config import (
    CacheConfig,
    ModelConfig,
    SchedulerConfig,
    TraceConfig,
    WorkerConfig,
    api_key,
)
from moesaic.jobs.bench.options import ServeBench, ThroughputBench
from moesaic.jobs.profiling.options import ProfileOptions

bench = App(
    name="bench",
    help="Measure a server, or the engine in this process.",
    default_parameter=Parameter(consume_multiple=True),  # --goodput ttft:500 tpot:50
)
profile = App(
    name="profile",
    help="Record which experts tokens choose, and show what that says.",
    default_parameter=Parameter(consume_multiple=True, negative_iterable=()),  # --prompts a.jsonl b.jsonl
)
hardware = App(name="hardware", help="Measure this machine.")
cluster = App(name="cluster", help="Prepare a cluster of several hosts.")


@profile.default
def profile_model(
    model: Annotated[ModelConfig, FLAT],
    *,
    options: Annotated[ProfileOptions, FLAT],
    output: Annotated[Output, FLAT] = Output(),
) -> int:
    """Run prompts through a model in this process and record which experts their tokens choose:
    profile MODEL --prompts FILE -o profile.npz.
    """
    from moesaic.commands import profile as command

    return command.run(options, model, output.json)


@profile.command(name="import")
def profile_import(
    options: Annotated[ImportProfile, FLAT],
    *,
    output: Annotated[Output, FLAT] = Output(),
) -> int:
    """Make a profile of routing that SGLang, vLLM or a fork of llama.cpp recorded:
    profile import FILES --from sglang --model MODEL -o profile.npz.
    """
    from moesaic.commands import profile_import as command

    return command.run(options, output.json)


@profile.command(name="export")
def profile_export(
    options: Annotated[ExportProfile, FLAT],
    *,
    output: Annotated[Output, FLAT] = Output(),
) -> int:
    """Write hot experts for engines that keep some in faster memory:
    profile export profile.npz --to llama-moe-trace -o trace.csv.
    """
    from moesaic.commands import profile_export as command

    return command.run(options, output.json)


@profile.command(name="show")
def profile_show(
    options: Annotated[ShowProfile, FLAT],
    *,
    output: Annotated[Output, FLAT] = Output(),
) -> int:
    """Print how skewed and how predictable a model's routing is."""
    from moesaic.commands import profile_show as command

    return command.show(options, output.json)


@hardware.command(name="measure")
def hardware_measure(
    *,
    options: Annotated[MeasureHardware | None, FLAT] = None,
    output: Annotated[Output, FLAT] = Output(),
) -> int:
    """Measure memory, disk or link, and products in under a minute, for moesaic plan: -o this.toml."""
    from moesaic.commands import hardware as command

    return command.run(options or MeasureHardware(), output.json)


@cluster.command(name="init")
def cluster_init(
    options: Annotated[InitCluster | None, FLAT] = None,
    *,
    output: Annotated[Output, FLAT] = Output(),
) -> int:
    """Make the secret that all processes of a cluster must know: cluster init FILE.

    It prints the commands that start the cluster with it.
    """
    from moesaic.commands import cluster_init as command

    return command.run(options or InitCluster(), output.json)


@bench.command(name="serve")
def bench_serve(
    *,
    options: Annotated[ServeBench, FLAT] = ServeBench(),
    output: Annotated[Output, FLAT] = Output(),
) -> int:
    """Load any OpenAI-compatible server and measure its latencies and throughput."""
    from moesaic.commands import bench as command

    return command.measure_server(replace(options, api_key=options.api_key or api_key()), output.json)


@bench.command(name="throughput")
def bench_throughput(
    model: Annotated[ModelConfig, FLAT],
    *,
    options: Annotated[ThroughputBench, FLAT] = ThroughputBench(),
    cache: Annotated[CacheConfig, FLAT] = CacheConfig(),
    scheduler: Annotated[SchedulerConfig, FLAT] = SchedulerConfig(),
    tracing: Annotated[TraceConfig, FLAT] = TraceConfig(),
    output: Annotated[Output, FLAT] = Output(),
) -> int:
    """Complete random prompts with a model in this process, all submitted at once, and measure."""
    from moesaic.commands import bench as command

    worker = WorkerConfig(model, cache, scheduler, trace=tracing.trace)
    return command.measure_engine(options, worker, output.json)


@bench.command(name="kernels")
def bench_kernels(
    options: Annotated[KernelsBench | None, FLAT] = None,
    *,
    output: Annotated[Output, FLAT] = Output(),
) -> int:
    """Time each operation of a model's layer on this CPU, and show which share of the machine's memory
    bandwidth or computing speed it reaches: bench kernels MODEL. No weights are read.
    """
    from moesaic.commands import bench_kernels as command

    return command.run(options or KernelsBench(), output.json)
