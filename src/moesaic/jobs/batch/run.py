"""Runs `moesaic run-batch`: compares the two files, then answers what is missing."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass

from rich.console import Console

from moesaic.config import ClusterConfig, WorkerConfig
from moesaic.core.errors import ConfigError, EngineDeadError
from moesaic.core.metrics import PassStats
from moesaic.jobs.batch.lines import ID_PREFIX, BadLine, Job, Key, read
from moesaic.jobs.batch.local import ModelService, serving
from moesaic.jobs.batch.options import RunBatch
from moesaic.jobs.batch.output import ExistingResults, Output
from moesaic.jobs.batch.show import Summary, progress
from moesaic.jobs.batch.window import GaveUp, Tally, Window
from moesaic.server.client import Client
from moesaic.trace.options import RecordConfig

IDLE_SECONDS, IDLE_LOOKS = 0.01, 50
"""Seconds between two checks whether the worker is idle, and the maximum number of checks."""
REMOTE_WINDOW = 128
"""Requests in flight to a server that runs already, unless the options say."""
Service = AbstractAsyncContextManager[ModelService]
"""The service that answers. It is entered only if a result is missing."""


def run(
    options: RunBatch,
    worker: WorkerConfig,
    cluster: ClusterConfig | None = None,
    record: RecordConfig = RecordConfig(),
    console: Console | None = None,
) -> Summary:
    """Answer the lines without results and return a summary. Progress goes to `console` (stderr).

    cluster: the processes that serve; None: one worker. Raises ConfigError for bad settings and files,
    OutputError if results cannot be written, and EngineDeadError if the worker dies. The output file is
    complete in every case.
    """
    names = options.served_model_name or (worker.model.model,)
    service = serving(
        worker,
        names,
        cluster,
        chat_template=options.chat_template,
        special_tokens_in_content=options.allow_special_tokens_in_content,
        parsers=(options.tool_call_parser, options.reasoning_parser),
        strict_fields=options.strict_fields,
        seed=options.seed,
        record=record,
    )
    workers = 1 if cluster is None else cluster.resolve().attention_workers
    return run_with(service, names[0], options, 2 * worker.scheduler.max_num_seqs * workers, console)


def run_remote(
    options: RunBatch, base_url: str, api_key: str | None, console: Console | None = None
) -> Summary:
    """`run`, but the server at `base_url` answers. Each line names its model.

    Raises also ConnectionLost and ApiError if the server does not answer at the start, and GaveUp if it
    stays away later.
    """
    return run_with(remote(base_url, api_key), None, options, REMOTE_WINDOW, console)


def run_with(
    service: Service,
    model_name: str | None,
    options: RunBatch,
    window: int,
    console: Console | None = None,
) -> Summary:
    """`run` with a given service. window: requests in flight, unless the options say.

    model_name: name in every answer. None: the lines name their models.
    """
    terminal = console or Console(stderr=True)
    with Output(options.output_file, time.monotonic) as output:
        results = output.recover()
        total = _survey(options, model_name, results)
        tally, seconds, stop_signal = Tally(), 0.0, None
        passes: tuple[PassStats, ...] = ()
        if total > len(results.keys):
            batch_run = _BatchRun(options, output, results.keys, total, tally, terminal)
            seconds, stop_signal = asyncio.run(
                batch_run.until_signal(service, options.max_in_flight or window)
            )
            passes = batch_run.passes
        return Summary(
            output=str(options.output_file),
            total=total,
            done_before=len(results.keys),
            failed_before=results.num_failed,
            completed=tally.num_completed,
            failed=tally.num_failed,
            unfinished=total - len(results.keys) - tally.num_completed - tally.num_failed,
            prompt_tokens=tally.prompt_tokens,
            completion_tokens=tally.completion_tokens,
            seconds=seconds,
            interrupted_by=stop_signal,
            passes=passes,
        )


def _survey(options: RunBatch, model_name: str | None, results: ExistingResults) -> int:
    """The number of lines. Raises ConfigError if the output belongs to other lines or another model."""
    total, found_keys = 0, set[Key]()
    for item in read(options.input_file):
        total += 1
        if item.key in results.keys:
            found_keys.add(item.key)
    # Results of lines that the input lacks mean that the two files do not belong together.
    unknown_keys = results.keys - found_keys
    if unknown_keys:
        contents = f"a result of {next(iter(unknown_keys))!r}, which {options.input_file} does not have"
        raise ConfigError(f"--output-file: {options.output_file} holds {contents}")
    other_models = set() if model_name is None else results.models - {model_name}
    if other_models:
        contents = f"answers of model {min(other_models)!r}, not of {model_name!r}"
        raise ConfigError(f"--output-file: {options.output_file} holds {contents}")
    return total


@dataclass
class _BatchRun:
    """Answers the lines that have no result yet."""

    options: RunBatch
    output: Output
    answered_keys: set[Key]
    total: int
    tally: Tally
    console: Console
    seconds: float = 0.0
    passes: tuple[PassStats, ...] = ()

    async def until_signal(self, service: Service, window: int) -> tuple[float, int | None]:
        """Run until all is done or a signal arrives. Requests in flight at a signal are dropped.

        Returns the seconds of work, and the signal that stopped it or None.
        """
        with _catch_signals() as signals:
            try:
                await self._work(service, window)
            except asyncio.CancelledError:
                if not signals:
                    raise
            except (EngineDeadError, GaveUp) as error:
                num_results = len(self.answered_keys) + self.tally.num_completed + self.tally.num_failed
                count_text = f"{num_results} of {self.total} results are in {self.options.output_file}"
                advice = "run the same command again to continue"
                raise type(error)(f"{error}; {count_text}; {advice}") from error
        return self.seconds, signals[0] if signals else None

    async def _work(self, service: Service, window: int) -> None:
        name, num_answered = self.options.input_file, len(self.answered_keys)
        async with service as model_service, model_service.client as client:
            if model_service.description is not None:
                self.console.print(model_service.description, soft_wrap=True, highlight=False)
            start = time.monotonic()
            try:
                with progress(self.console, name, self.total, num_answered, time.monotonic) as show:
                    lanes = Window(client, self.output, asyncio.sleep, _new_id, show, self.tally)
                    await lanes.run(self._missing(), min(window, self.total - num_answered))
                self.seconds = time.monotonic() - start
                await _wait_idle(model_service)
            finally:
                self.seconds = self.seconds or time.monotonic() - start
                self.passes = model_service.stats().experts.passes if model_service.stats else ()

    def _missing(self) -> Iterator[Job | BadLine]:
        return (item for item in read(self.options.input_file) if item.key not in self.answered_keys)


async def _wait_idle(service: ModelService) -> None:
    """Wait until the worker has reported its last step, which it does after that step's tokens."""
    if service.stats is None:
        return
    for _ in range(IDLE_LOOKS):
        stats = service.stats()
        if stats.steps and not stats.running and not stats.waiting:
            return
        await asyncio.sleep(IDLE_SECONDS)


@contextmanager
def _catch_signals() -> Iterator[list[int]]:
    """SIGINT and SIGTERM cancel the running task and are listed in order of arrival."""
    arrived_signals: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield arrived_signals  # only the main thread can handle signals
        return
    loop, task = asyncio.get_running_loop(), asyncio.current_task()

    def on_signal(signum: int) -> None:
        arrived_signals.append(signum)
        if task is not None:
            task.cancel()

    signals = (signal.SIGINT, signal.SIGTERM)
    for signum in signals:
        loop.add_signal_handler(signum, on_signal, signum)
    try:
        yield arrived_signals
    finally:
        for signum in signals:
            loop.remove_signal_handler(signum)


def _new_id() -> str:
    return ID_PREFIX + uuid.uuid4().hex


@asynccontextmanager
async def remote(base_url: str, api_key: str | None) -> AsyncIterator[ModelService]:
    """The OpenAI-compatible server at `base_url`, asked for its models first.

    Raises ConnectionLost if nothing answers there, and ApiError if the server refuses, as for a wrong key.
    """
    async with Client(base_url, api_key=api_key) as client:
        names = [str(model.get("id")) for model in await client.models()]
    yield ModelService(Client(base_url, api_key=api_key), f"{base_url} serves {', '.join(names)}")
