"""Keeps a limited number of requests in flight. The input is read as answers arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

from moesaic.core.errors import ConnectionLost, EngineDeadError, MoesaicError
from moesaic.jobs.batch.lines import BadLine, Job, encode, error_code, make_bad_line_result, make_result
from moesaic.jobs.batch.output import Output
from moesaic.server.client import Client, Reply

_BUSY = (429, 503)
_MAX_ATTEMPTS = 12
_MAX_WAIT = 30.0


class GaveUp(MoesaicError):
    """The server stayed busy or away. Unfinished lines are left for the next run."""


@dataclass
class Tally:
    """Counts of this run."""

    num_completed: int = 0
    num_failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    retries: int = 0


@dataclass
class Window:
    """Passes jobs to `client` and results to `output`.

    sleep: waits for a number of seconds. new_id: makes the ids of results. on_result: called after each
    result.
    """

    client: Client
    output: Output
    sleep: Callable[[float], Awaitable[None]]
    new_id: Callable[[], str]
    on_result: Callable[[Tally], None]
    tally: Tally = field(default_factory=Tally)

    async def run(self, items: Iterator[Job | BadLine], size: int) -> None:
        """Run all `items`, `size` at a time. The first error that is not the error of one job ends the
        run."""
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(size):
                    group.create_task(self._lane(items))
        except BaseExceptionGroup as errors:
            raise _first(errors) from errors

    async def _lane(self, items: Iterator[Job | BadLine]) -> None:
        """Run one job after another. All lanes share the iterator."""
        for item in items:
            if isinstance(item, BadLine):
                self.output.append(encode(make_bad_line_result(item, self.new_id())))
                self.tally.num_failed += 1
            else:
                self._finish(item, await self._answer(item))
            self.on_result(self.tally)

    async def _answer(self, job: Job) -> Reply:
        """The final answer of a job. A server that is busy or away is asked again; a dead engine ends the
        run."""
        for attempt in range(_MAX_ATTEMPTS):
            requested_seconds = None
            try:
                reply = await self.client.post(job.url, job.body)
            except ConnectionLost as error:  # a server that is restarted
                reason = str(error)
            else:
                if reply.status not in _BUSY:
                    return reply
                # The server answers 503 also when its engine has died, and then no attempt can succeed.
                if error_code(reply) == "engine_dead":
                    raise EngineDeadError(str(reply.body["error"]["message"]))
                reason, requested_seconds = f"HTTP {reply.status}", reply.retry_after
            self.tally.retries += 1
            await self.sleep(retry_delay(attempt, requested_seconds))
        raise GaveUp(f"line {job.line}: {reason} at the last of {_MAX_ATTEMPTS} attempts")

    def _finish(self, job: Job, reply: Reply) -> None:
        self.output.append(encode(make_result(job, reply, self.new_id())))
        if reply.status != 200:
            self.tally.num_failed += 1
            return
        self.tally.num_completed += 1
        match reply.body:
            case {"usage": {"prompt_tokens": int(prompt), "completion_tokens": int(completion)}}:
                self.tally.prompt_tokens += prompt
                self.tally.completion_tokens += completion


def retry_delay(attempt: int, requested_seconds: float | None) -> float:
    """Seconds to wait before attempt + 1: what the server asks for; at least 0.1 s, doubled with each
    attempt, at most 30 s.

    Example: attempts 0, 1, 2 without a request of the server -> 0.1, 0.2, 0.4; with 1 s requested -> 1, 1,
    1.
    """
    return min(_MAX_WAIT, max(0.1 * 2.0**attempt, requested_seconds or 0.0))


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that ended the group. The later ones are its consequences."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
