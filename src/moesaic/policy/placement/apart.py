"""Chooses two workers for a request: one that computes its prompt, and one that generates its answer.

Prefill and decode on different workers is the idea of DistServe (Zhong et al. 2024) and Splitwise (Patel et
al. 2024): a long prompt then delays no other request's next token.

Question: Which worker computes a prompt, and which one goes on (`--prefill-workers`)?
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moesaic.policy.placement.dispatch import Dispatch, WorkerLoad, least_loaded

SHORT = 16
"""A prompt of fewer tokens is computed by the worker that generates: it adds few rows to a step."""


@dataclass(frozen=True)
class Places:
    """The workers of one request."""

    decode: int
    """Generates the answer."""
    prefill: int | None
    """Computes the prompt. None: the same worker does."""


def choose(
    dispatch: Dispatch,
    workers: Mapping[int, WorkerLoad],
    prefill_workers: Mapping[int, WorkerLoad],
    known: Sequence[int],
    blocks: int,
) -> Places | None:
    """The workers of a request. known: its prompt and what it has generated, which take so many blocks.

    `dispatch` chooses the worker that generates. The prefill worker is the one whose open prompts have the
    fewest blocks. Without prefill workers, and for a short prompt, there is none.

    A prompt waits, and None is returned, until a worker has room for its KV. Otherwise prefill workers would
    run ahead, and KV without a place in the cache would fill the memory.

    Example: prefill workers 7 and 8 have 100 blocks each, of which 40 and 30 are used. A prompt of 15 tokens
    goes to none of them, one of 16 tokens to 8. Raises ValueError if there are no workers at all.
    """
    if not prefill_workers or len(known) < SHORT:
        return Places(dispatch(workers, known), None)
    roomy = {key: load for key, load in workers.items() if not load.requests or load.free_blocks >= blocks}
    if not roomy:
        return None
    return Places(dispatch(roomy, known), least_loaded(prefill_workers))
