"""Engines whose requests run side by side: what is compared takes turns, decode step by decode step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from moesaic import LLM, RequestOutput, SamplingParams
from moesaic.core.offload import Offload, SplitPrices
from moesaic.core.routing import Rows
from moesaic.cost.routing import Routing
from moesaic.policy.offloading.pipeline import Schedule
from moesaic.policy.offloading.policies import Policy
from moesaic.policy.offloading.tasks import Task
from moesaic.policy.offloading.timeline import Timeline

FLOAT32 = 4
"""Bytes of a cached number."""


@dataclass(frozen=True)
class Job:
    """Requests that all have the same lengths."""

    micro_batch: int
    micro_batches: int
    context: int
    """Number of tokens of a prompt."""
    generate: int
    prefill_rows: int

    @property
    def requests(self) -> int:
        return self.micro_batch * self.micro_batches

    @property
    def prompts(self) -> list[list[int]]:
        return self.drawn(seed=0)

    def drawn(self, seed: int) -> list[list[int]]:
        """Prompts of random bytes."""
        drawn = np.random.default_rng(seed).integers(1, 255, (self.requests, self.context))
        return [prompt.tolist() for prompt in drawn]

    def policy(self, schedule: Schedule, static_experts: int = 0) -> Policy:
        """The policy. s4 has attention on the fast level, all other schedules on the slow one beside the
        cache."""
        slow = schedule != "s4"
        return Policy(schedule, self.micro_batch, self.micro_batches, slow, static_experts)

    def settings(self, token_bytes: int) -> dict[str, Any]:
        """The settings of an LLM. token_bytes: bytes of a token in the cache of all layers."""
        longest = self.context + self.generate
        tokens = self.requests * (longest + 32)
        return {
            "max_num_seqs": self.requests,
            "max_num_batched_tokens": self.requests * self.context,
            "max_model_len": longest + 1,
            "kv_cache_memory": str(tokens * token_bytes),
            "enable_prefix_caching": False,
        }


def offload(policy: Policy, job: Job, speed: float, prices: SplitPrices | None = None) -> Offload:
    """The policy as a worker carries it out, with one core for each level. prices: of split."""
    return Offload(
        fast_memory=1 << 40,
        schedule=policy.schedule,
        micro_batch=policy.micro_batch,
        micro_batches=policy.micro_batches,
        prefill_rows=job.prefill_rows,
        static_experts=policy.static_experts,
        slow_attention=policy.slow_attention,
        slow_cache=policy.slow_cache,
        fast_residual=policy.fast_residual,
        link=speed,
        prices=prices,
    )


@dataclass(frozen=True)
class Pass:
    """One pass over the layers, as it was carried out."""

    tasks: Sequence[Task]
    times: Timeline


@dataclass
class Session:
    """Requests of one job under one policy, from their prompts to their last token."""

    policy: Policy
    llm: LLM
    job: Job
    passes: list[Pass] = field(default_factory=list)
    _batch: Any = None

    @classmethod
    def begin(
        cls,
        model: str,
        policy: Policy,
        job: Job,
        speed: float,
        token_bytes: int,
        prices: SplitPrices | None = None,
    ) -> Session:
        settings = job.settings(token_bytes)
        llm = LLM(model, threads=1, offload=offload(policy, job, speed, prices), **settings)
        session = cls(policy, llm, job)
        session._made.observe = lambda tasks, times: session.passes.append(Pass(tasks, times))
        session._batch = llm._submit(list(job.prompts), sampling(job))
        return session

    def step(self, speed: float | None = None) -> Pass:
        """Run the next pass over a link of this speed in bytes/s. None: the speed of the pass before."""
        if speed is not None:
            for link in (self._made._operations._load_link, self._made._operations._save_link):
                link._speed = speed
        before = len(self.passes)
        while len(self.passes) == before:
            self.llm._run_worker_once()
        return self.passes[-1]

    def finish(self) -> list[Any]:
        """Finish all requests. Returns their tokens and log-probabilities to the last digit."""
        return floats(list(self.llm._outputs(self._batch)))

    @property
    def _made(self) -> Any:
        """The object that makes the session's passes."""
        return self.llm._worker._executor._runner.passes  # type: ignore[attr-defined]


def sampling(job: Job) -> list[SamplingParams]:
    """Samples instead of greedy decoding. A random model has few likeliest tokens, which choose few
    experts."""
    return [
        SamplingParams(max_tokens=job.generate, temperature=1.0, seed=seed, logprobs=1, ignore_eos=True)
        for seed in range(job.requests)
    ]


def routing(model: str, job: Job, token_bytes: int, experts: int, steps: int = 8) -> Routing:
    """The routing of decode steps of other prompts with these lengths, computed in memory."""
    seen: list[Rows] = []
    other = replace(job, generate=steps + 1)
    settings = other.settings(token_bytes) | {"max_num_batched_tokens": 2048}
    llm = LLM(model, routing=lambda rows: seen.append(rows.copy()), **settings)
    for _ in llm._outputs(llm._submit(list(other.drawn(seed=1)), sampling(other))):
        pass
    rows = np.concatenate(seen)
    rows = rows[rows["position"] >= job.context]
    return Routing.from_rows(
        [rows["experts"][rows["request"] == one] for one in np.unique(rows["request"])], experts
    )


def in_memory(model: str, job: Job, token_bytes: int) -> list[Any]:
    """The same results, from an engine that has all weights in its memory."""
    llm = LLM(model, **job.settings(token_bytes) | {"max_num_batched_tokens": 2048})
    return floats(list(llm._outputs(llm._submit(list(job.prompts), sampling(job)))))


def floats(pieces: Sequence[RequestOutput]) -> list[Any]:
    """(token id, log-probability) of each token by request, in order."""
    found: dict[int, list[Any]] = {}
    for piece in pieces:
        mine = found.setdefault(piece.request_id, [])
        mine += [(one.token_id, one.logprob) for one in piece.logprobs or () if one is not None]
    return [found[number] for number in sorted(found)]
