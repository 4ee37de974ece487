"""Compares answers with those of one process."""

from __future__ import annotations

from itertools import pairwise

from tests.support.cluster_driver import Answer

TOLERANCE = 1e-3
"""Tolerance of log-probabilities, and of a near-tie, for kernels whose results depend on the batch."""


def difference(expected: Answer, got: Answer, length: int | None, exact: bool) -> str | None:
    """What is wrong with `got`, for a person; None: nothing.

    length: of a finished answer; None: it was cancelled and may be shorter. exact: bit by bit; else
    log-probabilities may differ by TOLERANCE, and behind a near-tie all may be different.
    Example: ([5, 6], [-1.0, -0.5]) expected, ([5, 7], [-1.0, -0.5]) got -> "token 1: 7 in place of 6".
    """
    tokens, logprobs = got
    if len(logprobs) != len(tokens):
        return f"{len(tokens)} tokens with {len(logprobs)} log-probabilities"
    if length is not None and len(tokens) != length:
        return f"{len(tokens)} tokens in place of {length}"
    if len(tokens) > len(expected[0]):
        return f"{len(tokens)} tokens, more than there are: {len(expected[0])}"
    for at, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
        should, close = expected[0][at], abs(logprob - expected[1][at]) < TOLERANCE
        if token != should:
            return None if close and not exact else f"token {at}: {token} in place of {should}"
        if logprob != expected[1][at] and (exact or not close):
            return f"log-probability {at}: {logprob!r} in place of {expected[1][at]!r}"
    return None


def spanning_gap(times: list[float], moment: float) -> float:
    """Seconds between the two tokens before and after `moment`; 0 where there are none.

    Example: tokens at 1, 2 and 5 s: at 3 s the gap is 3.
    """
    return max((b - a for a, b in pairwise(times) if a <= moment < b), default=0.0)
