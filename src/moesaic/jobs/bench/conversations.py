"""Runs agents in a closed loop: each sends its next turn some time after the answer of the last one.

A turn's prompt is the prompt of the last turn, its answer, and a tool result. The first agent's first turn
goes alone; the others begin when it is answered. So the first turn is the only one that finds nothing.

Question: How does `bench serve` measure conversations of agents?
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from moesaic.core.errors import ConfigError
from moesaic.jobs.bench.agents import Json, Prefix, TokenScale, make_call, make_prefix, make_scale, make_text
from moesaic.jobs.bench.lengths import range_around, read_trace
from moesaic.jobs.bench.load import Clock, Outcome, Sleep, send
from moesaic.jobs.bench.options import ServeBench
from moesaic.server.client import Client

ENDPOINT = "/v1/chat/completions"
_SIZING_CHARACTERS = (300, 1500)
"""Lengths of the two prefixes whose tokens the server counts. Both have at least one tool."""
_PREFIX_STREAM, _PAUSE_STREAM, _SIZING_STREAM, _AGENT_STREAM = range(4)
"""Which random numbers are drawn from a stream of their own. Those of an agent do not depend on others."""


@dataclass(frozen=True)
class Turn:
    """A request that an agent sent, and what became of it."""

    agent: int
    number: int
    """0 for the first turn of this agent."""
    outcome: Outcome

    @property
    def kind(self) -> str:
        """cold: the first turn of the first agent. shared: the first turns of others. warm: later turns."""
        return "warm" if self.number else "shared" if self.agent else "cold"


@dataclass
class Agents:
    """The agents of a benchmark.

    body: makes the body of a request from its messages, tools and maximum tokens. on_outcome: called after
    each turn.
    """

    client: Client
    options: ServeBench
    body: Callable[[list[Json], list[Json], int], Json]
    clock: Clock
    sleep: Sleep
    on_outcome: Callable[[Outcome], None] = lambda outcome: None
    peak: int = 0
    """Maximum number of requests in flight at once."""
    _flying: int = 0
    _first_answer: asyncio.Event = field(default_factory=asyncio.Event)

    async def warm_up(self) -> tuple[list[Outcome], TokenScale]:
        """Send --num-warmups short chats, but at least the two that tell how long tokens are."""
        outcomes: list[Outcome] = []
        points: list[tuple[int, int]] = []
        for number in range(max(2, self.options.num_warmups)):
            prefix = make_prefix(_SIZING_CHARACTERS[number % 2], self._stream(_SIZING_STREAM, number))
            messages = [{"role": "system", "content": prefix.system}, {"role": "user", "content": "Begin."}]
            outcomes.append(await self._send(messages, prefix.tools, 1))
            points.append((prefix.num_characters, outcomes[-1].prompt_tokens))
        return outcomes, make_scale(points[:2])

    async def run(self, scale: TokenScale) -> list[Turn]:
        """Run all turns of all agents. An agent ends at its first failure. Sorted by agent and turn."""
        options = self.options
        assert options.num_clients is not None
        num_characters = scale.prefix_characters(options.prefix_len)
        prefix = make_prefix(num_characters, self._stream(_PREFIX_STREAM))
        pauses = draw_pauses(options, self._stream(_PAUSE_STREAM))
        turns: list[Turn] = []
        async with asyncio.TaskGroup() as group:
            for agent in range(options.num_clients):
                group.create_task(self._run_agent(agent, prefix, scale, pauses[agent], turns))
        return sorted(turns, key=lambda turn: (turn.agent, turn.number))

    async def _run_agent(
        self, agent: int, prefix: Prefix, scale: TokenScale, pauses: list[float], turns: list[Turn]
    ) -> None:
        options, rng = self.options, self._stream(_AGENT_STREAM, agent)
        input_lengths, output_lengths = (
            range_around(length, options.random_range_ratio).draw(options.max_turns, rng).tolist()
            for length in (options.random_input_len, options.random_output_len)
        )
        task = make_text(scale.characters(input_lengths[0]), rng)
        messages: list[Json] = [
            {"role": "system", "content": prefix.system},
            {"role": "user", "content": task},
        ]
        for number in range(options.max_turns):
            if agent and not number:
                await self._first_answer.wait()
            await self.sleep(pauses[number])
            outcome = await self._send(messages, prefix.tools, output_lengths[number])
            turns.append(Turn(agent, number, outcome))
            self._first_answer.set()
            self.on_outcome(outcome)
            if outcome.error is not None or number + 1 == options.max_turns:
                return
            result = make_text(scale.characters(input_lengths[number + 1]), rng)
            call = make_call(prefix, number, rng)
            messages.append({"role": "assistant", "content": outcome.content, "tool_calls": [call]})
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})

    async def _send(self, messages: list[Json], tools: list[Json], max_tokens: int) -> Outcome:
        self._flying += 1
        self.peak = max(self.peak, self._flying)
        try:
            return await send(self.client, ENDPOINT, self.body(messages, tools, max_tokens), self.clock)
        finally:
            self._flying -= 1

    def _stream(self, *numbers: int) -> np.random.Generator:
        return np.random.default_rng([self.options.seed, *numbers])


def check_conversation(options: ServeBench, max_model_len: int) -> None:
    """Raises ConfigError if the last turn exceeds the server's limit, even without what the template adds."""
    size = options.prefix_len + options.max_turns * (options.random_input_len + options.random_output_len)
    if size > max_model_len:
        raise ConfigError(
            f"lengths: got conversations of {options.prefix_len} + {options.max_turns} x "
            f"({options.random_input_len} + {options.random_output_len}) tokens; allowed: "
            f"{max_model_len} together, the server's max_model_len"
        )


def draw_pauses(options: ServeBench, rng: np.random.Generator) -> list[list[float]]:
    """The seconds that each agent waits before each of its turns; none before its first one."""
    assert options.num_clients is not None
    agents, turns = options.num_clients, options.max_turns
    if options.trace is not None:
        rows = read_trace(options.trace, agents * turns + 1, options.trace_scale)
        gaps = np.diff([row.arrival for row in rows])
        if not len(gaps):
            raise ConfigError.field("--trace", str(options.trace), "a file of at least two rows")
        pauses = rng.choice(gaps, (agents, turns))
    elif math.isinf(options.request_rate):
        pauses = np.zeros((agents, turns))
    elif options.arrivals == "fixed":
        pauses = np.full((agents, turns), 1 / options.request_rate)
    else:
        mean_gap = 1 / options.request_rate
        pauses = rng.gamma(options.burstiness, mean_gap / options.burstiness, (agents, turns))
    pauses[:, 0] = 0.0
    rows_of_pauses: list[list[float]] = pauses.tolist()
    return rows_of_pauses
