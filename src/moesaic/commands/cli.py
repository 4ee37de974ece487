"""The `moesaic` command. Its flags are generated from the documented fields of the configs.

Only what is needed to read a command line is imported here; what a command does is imported when it
is called, so that --help and mistakes are answered at once.

Question: How is a command added?
"""

from __future__ import annotations

import errno
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

from cyclopts import App, CycloptsError, Parameter

from moesaic import __version__
from moesaic.commands import descriptors
from moesaic.commands.client_options import Chat, Top
from moesaic.commands.descriptors import replace_closed_streams, replace_stream
from moesaic.commands.flags import FLAT, ConfigFile, Debug, Output
from moesaic.commands.groups import bench, cluster, hardware, profile
from moesaic.commands.model_options import Doctor, Verify
from moesaic.commands.options import (
    Compress,
    Join,
    Place,
    Scale,
    ShowTrace,
)
from moesaic.commands.plan_options import Plan
from moesaic.commands.settings import COMMANDS, Settings
from moesaic.commands.simulate_options import Simulate
from moesaic.commands.usage import GroupedFlags, one_line
from moesaic.config import (
    CacheConfig,
    ClusterConfig,
    ConnectionConfig,
    CorsConfig,
    LogConfig,
    ModelConfig,
    OffloadConfig,
    QueueConfig,
    SchedulerConfig,
    ServerConfig,
    SeveralModelsConfig,
    TraceConfig,
    WorkerConfig,
    admin_key,
    api_key,
    parse_models,
    resolve_server,
)
from moesaic.config import settings as variables
from moesaic.core.errors import ConfigError, MoesaicError
from moesaic.core.home import expand_home
from moesaic.jobs.batch.options import RunBatch
from moesaic.jobs.quantizing.options import QuantizeOptions
from moesaic.trace.options import RecordConfig

SHORT = {"-i": "--input-file", "-o": "--output-file"}
"""Short flags. They are replaced by the long ones before the command line is parsed."""
HELP_ALL = "--help-all"
"""Flag that shows what --help shows, with every flag explained."""

INSTALL_COMPLETION = "--install-completion"
"""Flag that writes into the user's home directory."""

app = App(
    name="moesaic",
    version=__version__,
    help="Mixture-of-Experts language models, served with the experts as services.",
    help_epilogue="Flags of a command: moesaic COMMAND --help, and every flag explained: --help-all",
    help_formatter=GroupedFlags(SHORT),
    default_parameter=Parameter(consume_multiple=True, negative_iterable=()),  # --served-model-name a b
)
for group in (bench, profile, hardware, cluster):
    app.command(group)
app.register_install_completion_command(
    INSTALL_COMPLETION, help="Install completion of commands and flags for your shell."
)


@app.command
def serve(
    model: Annotated[ModelConfig, FLAT],
    loading: Annotated[SeveralModelsConfig, FLAT] = SeveralModelsConfig(),
    *,
    cache: Annotated[CacheConfig, FLAT] = CacheConfig(),
    scheduler: Annotated[SchedulerConfig, FLAT] = SchedulerConfig(),
    queues: Annotated[QueueConfig, FLAT] = QueueConfig(),
    cluster: Annotated[ClusterConfig, FLAT] = ClusterConfig(),
    offload: Annotated[OffloadConfig, FLAT] = OffloadConfig(),
    server: Annotated[ServerConfig, FLAT] = ServerConfig(),
    cors: Annotated[CorsConfig, FLAT] = CorsConfig(),
    connections: Annotated[ConnectionConfig, FLAT] = ConnectionConfig(),
    tracing: Annotated[TraceConfig, FLAT] = TraceConfig(),
    record: Annotated[RecordConfig, FLAT] = RecordConfig(),
    log: Annotated[LogConfig, FLAT] = LogConfig(),
    file: Annotated[ConfigFile, FLAT] = ConfigFile(),
    output: Annotated[Output, FLAT] = Output(),
) -> int:
    """Serve a model over an OpenAI-compatible HTTP API, or several: serve A B.

    SIGTERM and Ctrl-C finish the requests in flight; a second one stops at once.
    """
    named_models = parse_models([model.model, *loading.models])
    first = named_models[0]
    worker = WorkerConfig(
        replace(model, model=first.source),
        cache,
        scheduler,
        trace=tracing.trace,
        queues=queues,
        log_level=log.log_level,
    )
    server = resolve_server(server)
    if loading.is_wanted:
        from moesaic.commands import serve_several
        from moesaic.commands.model_settings import ServedModel

        common = ServedModel(worker, cluster, server, connections, record, offload, cors)
        return serve_several.run(named_models, loading, common, output.json)
    from moesaic.commands import serve as command

    server = replace(server, served_model_name=server.served_model_name or first.names)
    return command.run(worker, cluster, server, connections, record, output.json, cors, offload)


@app.command
def scale(
    *,
    options: Annotated[Scale, FLAT] = Scale(),
    output: Annotated[Output, FLAT] = Output(),
) -> int:
    """Add or remove expert servers and attention workers of a running server, while it serves."""
    from moesaic.commands import scale as command

    given = options.admin_key or options.api_key
    return command.run(replace(options, admin_key=given or admin_key() or api_key()), output.json)


@app.command
def join(options: Annotated[Join, FLAT], *, output: Annotated[Output, FLAT] = Output()) -> int:
    """Start a process that joins a running cluster: join HOST:PORT --secret-file FILE.

    When it ends, other processes take its experts and its requests. See docs/hosts.md.
    """
    from moesaic.commands import join as command

    return command.run(options, output.json)


@app.command
def run_batch(
    *,
    options: Annotated[RunBatch, FLAT],
    model: Annotated[ModelConfig | None, FLAT] = None,
    cache: Annotated[CacheConfig, FLAT] = CacheConfig(),
    scheduler: Annotated[SchedulerConfig, FLAT] = SchedulerConfig(),
    queues: Annotated[QueueConfig, FLAT] = QueueConfig(),
    cluster: Annotated[ClusterConfig, FLAT] = ClusterConfig(),
    offload: Annotated[OffloadConfig, FLAT] = OffloadConfig(),
    tracing: Annotated[TraceConfig, FLAT] = TraceConfig(),
    record: Annotated[RecordConfig, FLAT] = RecordConfig(),
    log: Annotated[LogConfig, FLAT] = LogConfig(),
    file: Annotated[ConfigFile, FLAT] = ConfigFile(),
    output: Annotated[Output, FLAT] = Output(),
) -> int:
    """Answer a file of OpenAI batch lines: run-batch -i in.jsonl -o out.jsonl --model MODEL, or --base-url of
    a server that runs already.

    After a crash the same command continues where it stopped.
    """
    from moesaic.commands import run_batch as command

    if options.base_url is not None:
        settings = (model, cache, scheduler, queues, cluster, offload, tracing, record)
        return command.run_remote(
            replace(options, api_key=options.api_key or api_key()), settings, log.log_level, output.json
        )
    if model is None:
        raise ConfigError("--model: got nothing; allowed: a checkpoint, or --base-url of a running server")
    worker = WorkerConfig(
        model,
        cache,
        scheduler,
        cluster.parallel,
        trace=tracing.trace,
        queues=queues,
        log_level=log.log_level,
    )
    return command.run(options, worker, cluster, offload, record, output.json)


@app.command
def chat(options: Annotated[Chat, FLAT] = Chat(), *, output: Annotated[Debug, FLAT] = Debug()) -> int:
    """Talk to a model in the terminal: chat MODEL, or chat URL for any OpenAI-compatible server.

    Without a terminal the standard input is one message, and its answer is printed.
    """
    from moesaic.commands import chat as command

    return command.run(replace(options, api_key=options.api_key or api_key()))


@app.command
def top(options: Annotated[Top, FLAT] = Top(), *, output: Annotated[Output, FLAT] = Output()) -> int:
    """Watch a running server: throughput, requests, KV cache, processes and failures. Ctrl-C ends."""
    from moesaic.commands import top as command

    given = options.api_key or admin_key() or api_key()
    return command.run(replace(options, api_key=given), output.json)


@app.command
def place(
    options: Annotated[Place, FLAT],
    *,
    output: Annotated[Output, FLAT] = Output(),
) -> int:
    """Solve for a placement of experts on ranks: place profile.npz --ranks 8 -o placement.json.

    It is measured first, on requests that the solver does not see. moesaic serve --placement reads it.
    """
    from moesaic.commands import place as command

    return command.run(options, output.json)


@app.command
def plan(
    options: Annotated[Plan | None, FLAT] = None,
    *,
    output: Annotated[Output, FLAT] = Output(),
) -> int:
    """Plan how to run a model larger than the fast memory, and predict its speed: plan MODEL --hardware NAME
    --prompt-len S --gen-len N. Or plan how to serve it on a cluster: plan MODEL --cluster 8xh100 --workload
    FILE --slo ttft=2s,itl=50ms.
    """
    from moesaic.commands import plan as command

    return command.run(options or Plan(), output.json)


@app.command
def simulate(options: Annotated[Simulate, FLAT], *, output: Annotated[Output, FLAT] = Output()) -> int:
    """Run a cluster in virtual time, with the schedulers of `serve` and modelled devices:
    simulate SCENARIO.toml.
    """
    from moesaic.commands import simulate as command

    return command.run(options, output.json)


@app.command
def trace(options: Annotated[ShowTrace, FLAT], *, output: Annotated[Output, FLAT] = Output()) -> int:
    """Sum up what `--trace` wrote, and write it as a page that opens offline: trace FILE --html PAGE."""
    from moesaic.commands import trace as command

    return command.run(options, output.json)


@app.command
def compress(options: Annotated[Compress, FLAT], *, output: Annotated[Output, FLAT] = Output()) -> int:
    """Write a checkpoint whose routed experts take 12 bits a number in place of 16, without loss:
    compress MODEL DIRECTORY.
    """
    from moesaic.commands import compress as command

    return command.run(options, output.json)


@app.command
def quantize(options: Annotated[QuantizeOptions, FLAT], *, output: Annotated[Output, FLAT] = Output()) -> int:
    """Write a checkpoint whose routed experts are int8 or int4, in a layout that other programs read, and
    measure what that costs: quantize MODEL DIRECTORY --format int4 --calibrate PROMPTS.

    A run that was stopped is continued by the same command.
    """
    from moesaic.commands import quantize as command

    return command.run(options, output.json)


@app.command
def doctor(
    options: Annotated[Doctor | None, FLAT] = None,
    *,
    output: Annotated[Output, FLAT] = Output(),
) -> int:
    """Show what this machine has and what moesaic will use. doctor MODEL: whether that model is supported and
    fits, the command that runs it, and the speed to expect, before anything is downloaded or loaded.
    """
    if options is not None and options.model is not None:
        from moesaic.commands import doctor_model

        return doctor_model.run(options, output.json)
    from moesaic.commands import doctor as command

    return command.run(output.json)


@app.command
def verify(options: Annotated[Verify, FLAT], *, output: Annotated[Output, FLAT] = Output()) -> int:
    """Compare a model with transformers, one layer at a time: verify MODEL. Exit code 1 if they differ.

    Both sides get the same input to each layer, so the first layer that differs is the one at fault. Only one
    layer is in memory at a time.
    """
    from moesaic.commands import verify as command

    return command.run(options, output.json)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line. Returns the exit code: 0, 1 if it failed, 2 if a setting is wrong."""
    given = [SHORT.get(word, word) for word in (sys.argv[1:] if arguments is None else arguments)]
    replace_closed_streams()
    explain_all = HELP_ALL in given
    app.help_formatter = GroupedFlags(SHORT, explain_all)
    given = ["--help" if word == HELP_ALL else word for word in given]
    settings = Settings(variables(), app, _say)
    for name in COMMANDS:
        app[name].config = settings
    try:
        if INSTALL_COMPLETION in given:
            expand_home("~")  # raises ConfigError for a user who has none
        command, bound, _ = app.parse_args(given, exit_on_error=False, print_error=False)
        if getattr(bound.arguments.get("output"), "debug", False):
            given = [*given, "--debug"]  # from a variable or a file
        settings_line = settings.line()
        if settings_line is not None:
            _say(settings_line)
        # A closed pipe or a full disk shows at the flush, and not only when the interpreter exits.
        code = int(command(*bound.args, **bound.kwargs) or 0)
        sys.stdout.flush()
        return code
    except CycloptsError as error:
        return _fail(one_line(error, app), 2, given)
    except ConfigError as error:
        return _fail(settings.name_source(str(error)), 2, given)
    except MoesaicError as error:
        return _fail(str(error), 1, given)
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        if error.errno in descriptors.EXHAUSTED_ERRNOS:
            return _fail(descriptors.describe_exhaustion(), 1, given)
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) and error.filename is not None:
            return _fail(f"{error.filename}: {error.strerror}", 1, given)
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        replace_stream("stdout")  # what the old one still holds would fail again at exit
        return _fail(f"cannot write: {error.strerror}", 1, given)


def _say(line: str) -> None:
    print(f"moesaic: {line}", file=sys.stderr, flush=True)


def _fail(message: str, code: int, arguments: Sequence[str]) -> int:
    if "--debug" in arguments:
        traceback.print_exc()
    print(f"moesaic: {' '.join(message.split())}", file=sys.stderr)
    return code
