"""Samples tokens from logits, for a whole batch at once.

The order is vLLM's: logit bias, penalties and min_tokens, and then for rows that are not greedy temperature,
min-p, top-k and top-p. Log-probabilities are those of the logits before all of this. The mask of a request
with a structured output follows min_tokens. It changes that request's row and no other.

Sampling noise depends on (seed, position) and on nothing else. So a request's tokens never depend on its
batch, on preemption, or on the worker that computes it.

A row with a logit that is NaN or infinite gets NO_TOKEN. This is checked before bans and penalties change any
logit, and it costs one sum over the row. The other rows are sampled as they would be without it.

Question: How is a token sampled, and where does its noise come from?
Question: What happens when logits are NaN?
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from moesaic.core.request import NO_ALLOWED_TOKEN, NO_TOKEN, Request, TokenLogprob
from moesaic.core.tokens import IntArray
from moesaic.kernels.moving import move_array
from moesaic.runtime.sampling.penalties import Adjustment, adjust
from moesaic.text.structured.constraints import Constraint, Constraints

LARGEST = 1e30
"""Largest logit that is sampled from. Divided by the smallest temperature it is still a finite float32."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


@dataclass
class _Row:
    """What sampling keeps of one request in the batch."""

    request: Request
    length: int
    """Number of tokens in the prompt and the answer so far."""
    adjustment: Adjustment | None
    """How the request changes its logits. None where it does not change them."""
    constraint: Constraint | None
    """What a structured output allows next. None for every other request."""


class Sampler:
    """Keeps the requests in the batch and samples their next tokens."""

    def __init__(self, constraints: Constraints | None = None) -> None:
        """constraints: of requests with structured outputs. None: no request has one."""
        self._constraints = constraints
        self._rows: dict[int, _Row] = {}
        self._nonfinite_requests: set[int] = set()
        """Requests with logits of their prompt that were not finite."""

    def admit(self, request: Request, generated_tokens: list[int]) -> None:
        """A request enters the batch. generated_tokens: its tokens from before a preemption."""
        adjustment = Adjustment(request, generated_tokens) if Adjustment.is_needed(request.params) else None
        length = len(request.prompt_token_ids) + len(generated_tokens)
        constraint = (
            None if self._constraints is None else self._constraints.constrain(request, generated_tokens)
        )
        self._rows[request.request_id] = _Row(request, length, adjustment, constraint)

    def release(self, request_id: int, is_preempted: bool = False) -> None:
        """Forget a request. Ids of requests that were never admitted are ignored.

        is_preempted: the request will be admitted again.
        """
        self._rows.pop(request_id, None)
        if not is_preempted:
            self._nonfinite_requests.discard(request_id)

    def give_up(self, request_id: int) -> None:
        """Logits of the request's prompt were not finite: its next token is NO_TOKEN."""
        self._nonfinite_requests.add(request_id)

    def request(self, request_id: int) -> Request:
        return self._rows[request_id].request

    def needs_order(self, request_id: int) -> bool:
        """Whether a token of this request depends on more than its row, its seed and its position."""
        row = self._rows[request_id]
        return (
            row.adjustment is not None or row.constraint is not None or request_id in self._nonfinite_requests
        )

    def sample_ahead(
        self, request_ids: Sequence[int], offsets: Sequence[int], logits: torch.Tensor
    ) -> tuple[IntArray, list[TokenLogprob | None]]:
        """Sample tokens at `offsets` positions behind the next one of each request, which `advance` counts.

        Raises ValueError if `needs_order` is true of one of them.
        """
        if any(map(self.needs_order, request_ids)):
            raise ValueError(f"requests {list(request_ids)}: one needs its tokens in order")
        rows = [
            replace(self._rows[request_id], length=self._rows[request_id].length + offset)
            for request_id, offset in zip(request_ids, offsets, strict=True)
        ]
        raw = _log_softmax_where(logits, [row.request.params.logprobs is not None for row in rows])
        result = _choose_tokens(logits, rows, _finite(logits))
        bad = (
            find_nonfinite_rows(logits)
            if logits.device.type == "cpu"
            else np.flatnonzero(result == NO_TOKEN).tolist()
        )
        report = _report(raw, rows, result, bad)
        result[bad] = NO_TOKEN
        return result, report

    def advance(self, request_id: int, count: int) -> None:
        """Count tokens of `sample_ahead` that the request got."""
        self._rows[request_id].length += count

    def sample(
        self, request_ids: IntArray, logits: torch.Tensor
    ) -> tuple[IntArray, list[TokenLogprob | None]]:
        """The next token of each request, and their log-probabilities.

        The second list is empty if no request wants log-probabilities. logits: [p, vocab] float32, row i for
        request_ids[i]. They may be changed in place. A row that is not finite gets NO_TOKEN and no
        log-probabilities. A row for which no token is allowed gets NO_ALLOWED_TOKEN.
        """
        rows = [self._rows[int(request_id)] for request_id in request_ids]
        finite = _finite(logits)
        bad = set(find_nonfinite_rows(logits)) if finite is None else set[int]()
        if self._nonfinite_requests:
            bad.update(np.flatnonzero(np.isin(request_ids, list(self._nonfinite_requests))).tolist())
        if bad:
            return self._sample_others(request_ids, logits, bad)
        raw = _log_softmax_where(logits, [row.request.params.logprobs is not None for row in rows])
        adjustments = {line: row.adjustment for line, row in enumerate(rows) if row.adjustment is not None}
        if adjustments:
            adjust(logits, list(adjustments), list(adjustments.values()))
        bound = {line: row.constraint for line, row in enumerate(rows) if row.constraint is not None}
        if self._constraints is not None and bound:
            self._constraints.apply(logits, list(bound), list(bound.values()))
        result = _choose_tokens(logits, rows, finite)
        unfit = np.flatnonzero(result == NO_TOKEN).tolist()
        report = _report(raw, rows, result, unfit)
        for line in unfit:
            bound.pop(line, None)
        for row, token in zip(rows, result, strict=True):
            if token == NO_TOKEN:
                continue
            row.length += 1
            if row.adjustment is not None:
                row.adjustment.append(int(token))
        if self._constraints is not None and bound:
            result[self._constraints.accept(bound, result, logits)] = NO_ALLOWED_TOKEN
        return result, report

    def _sample_others(
        self, request_ids: IntArray, logits: torch.Tensor, bad: set[int]
    ) -> tuple[IntArray, list[TokenLogprob | None]]:
        """Sample the rows that are not in `bad`. Those get NO_TOKEN."""
        good = np.array([line for line in range(len(request_ids)) if line not in bad], dtype=np.int64)
        result = np.full(len(request_ids), NO_TOKEN, dtype=np.int64)
        report: list[TokenLogprob | None] = [None] * len(request_ids)
        if len(good):
            good_rows = torch.from_numpy(good).to(logits.device)
            result[good], entries = self.sample(request_ids[good], logits[good_rows])
            for line, entry in zip(good.tolist(), entries, strict=False):
                report[line] = entry
        return result, report if any(report) else []


def find_nonfinite_rows(rows: torch.Tensor) -> list[int]:
    """The rows of [n, m] float32 that have a NaN or an infinite number, ascending."""
    if rows.device.type == "cpu":  # after a step's weights, torch's code is in no cache
        with np.errstate(over="ignore", invalid="ignore"):
            if np.isfinite(rows.numpy().sum(axis=-1)).all():
                return []
    sums = rows.sum(dim=-1)
    if torch.isfinite(sums).all():
        return []
    # The sum of very large finite numbers is infinite too.
    suspects = torch.nonzero(~torch.isfinite(sums))[:, 0].tolist()
    return [line for line in suspects if not torch.isfinite(rows[line]).all()]


def token_logprobs(logprobs: torch.Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprob]:
    """The log-probabilities of the sampled tokens, with the likeliest alternatives of each row.

    logprobs: [n, vocab]. tokens: the n sampled tokens. count: alternatives in a record.
    """
    token_values = logprobs.gather(1, torch.tensor(tokens, device=logprobs.device)[:, None])[:, 0].tolist()
    values, ids = torch.topk(logprobs, min(max(count, 1), logprobs.shape[1]), dim=-1)
    best = zip(ids.tolist(), values.tolist(), strict=True)
    return [
        TokenLogprob(token, value, list(zip(top_ids, top_values, strict=True))[:count])
        for token, value, (top_ids, top_values) in zip(tokens, token_values, best, strict=True)
    ]


def _finite(logits: torch.Tensor) -> torch.Tensor | None:
    """[p] whether each row is finite, where it is read together with the tokens: on a GPU."""
    return None if logits.device.type == "cpu" else torch.isfinite(logits).all(dim=-1)


def _choose_tokens(logits: torch.Tensor, rows: list[_Row], finite: torch.Tensor | None) -> IntArray:
    """[p] the token of each row of logits [p, vocab], NO_TOKEN where not `finite`.

    On a GPU the host waits once, for this result. On a CPU numpy finds the largest entries, since it touches
    less cold memory.
    """
    noisy = [index for index, row in enumerate(rows) if not row.request.params.greedy]
    if finite is None:
        result: IntArray = logits.numpy().argmax(axis=-1)
        if noisy:
            result[noisy] = _draw(logits[noisy], [rows[index] for index in noisy]).numpy()
        return result
    tokens = torch.argmax(logits, dim=-1)
    if noisy:
        lines = move_array(np.array(noisy), logits.device)
        noisy_tokens = _draw(logits.index_select(0, lines), [rows[index] for index in noisy])
        tokens.index_copy_(0, lines, noisy_tokens)
    return tokens.masked_fill_(~finite, NO_TOKEN).cpu().numpy()


def _log_softmax_where(logits: torch.Tensor, is_wanted: list[bool]) -> torch.Tensor | None:
    """Log-probabilities of the wanted rows, before the logits are changed. None if no row is wanted."""
    if not any(is_wanted):
        return None
    return torch.log_softmax(logits[move_array(np.flatnonzero(is_wanted), logits.device)], dim=-1)


def _report(
    raw: torch.Tensor | None, rows: list[_Row], tokens: IntArray, bad: list[int]
) -> list[TokenLogprob | None]:
    """The log-probabilities of each row, None where its request wants none and in rows `bad`.

    raw: of the rows that want some.

    Rows that want equally many alternatives share one topk. One topk of the largest count for all rows would
    be wrong: how it orders ties could depend on the other requests in the batch.
    """
    report: list[TokenLogprob | None] = [None] * len(rows)
    if raw is None:
        return []
    counts = [(index, row.request.params.logprobs) for index, row in enumerate(rows)]
    wanted_rows = [(index, count) for index, count in counts if count is not None]
    for count in {count for _, count in wanted_rows}:
        lines = [line for line, (_, other_count) in enumerate(wanted_rows) if other_count == count]
        alike = raw if len(lines) == len(wanted_rows) else raw[lines]
        indices = [wanted_rows[line][0] for line in lines]
        entries = token_logprobs(alike, tokens[indices].clip(min=0).tolist(), count)
        for line, index, entry in zip(lines, indices, entries, strict=True):
            token_ids = rows[index].request.params.logprob_token_ids
            if token_ids:
                values = raw[line, torch.tensor(token_ids, device=raw.device)].tolist()
                entry = replace(entry, top=list(zip(token_ids, values, strict=True)))
            report[index] = None if index in bad else entry
    return report


def _draw(logits: torch.Tensor, rows: list[_Row]) -> torch.Tensor:
    """[n] tokens, by inverting the cumulative distribution over the tokens in the order of their ids.

    In that order, rather than by probability, a rounding error only moves a boundary and never swaps two
    tokens. Logits that are not finite (all masked, or a penalty that overflows) count as the largest or the
    smallest, so the result is always a token of the vocabulary.
    """

    def column(values: Sequence[float]) -> torch.Tensor:
        return move_array(np.array(values, dtype=np.float32), logits.device)[:, None]

    params = [row.request.params for row in rows]
    scaled_logits = logits.nan_to_num(nan=-LARGEST).clamp_(-LARGEST, LARGEST)
    scaled_logits = scaled_logits / column([p.temperature for p in params])
    scaled_logits = scaled_logits - scaled_logits.amax(dim=-1, keepdim=True)
    if any(p.min_p > 0 for p in params):
        floor = column([p.min_p for p in params]).log()
        scaled_logits = scaled_logits.masked_fill(scaled_logits < floor, -torch.inf)
    scaled_logits = _keep_top(scaled_logits, [p.top_k for p in params], [p.top_p for p in params])
    cumulative = torch.softmax(scaled_logits, dim=-1, dtype=torch.float64).cumsum(dim=-1)
    positions = np.array([row.length for row in rows])
    seeds = np.array([p.seed or 0 for p in params], dtype=np.int64)
    noise = move_array(uniform(seeds, positions), logits.device)[:, None]
    return torch.searchsorted(cumulative, noise * cumulative[:, -1:], right=True)[:, 0]


def _keep_top(scaled_logits: torch.Tensor, top_k: list[int], top_p: list[float]) -> torch.Tensor:
    """`scaled_logits` [n, vocab], with -inf for tokens outside the top-k and then for those outside the
    top-p."""
    vocab = scaled_logits.shape[-1]
    keep = [vocab if k < 1 else min(k, vocab) for k in top_k]
    if max(keep) == vocab and min(keep) == vocab and min(top_p) >= 1.0:
        return scaled_logits
    top_logits = torch.topk(scaled_logits, max(keep), dim=-1).values
    last = move_array(np.array(keep), scaled_logits.device)[:, None] - 1
    rank = torch.arange(top_logits.shape[-1], device=scaled_logits.device)[None]
    top_logits = top_logits.masked_fill(rank > last, -torch.inf)
    probabilities = torch.softmax(top_logits, dim=-1, dtype=torch.float64)
    # A token stays while the tokens before it have not reached top_p, so the first one always stays.
    cumulative_before = probabilities.cumsum(dim=-1) - probabilities
    stays = cumulative_before < move_array(np.array(top_p, dtype=np.float64), scaled_logits.device)[:, None]
    stays &= rank <= last
    cutoff = top_logits.masked_fill(~stays, torch.inf).amin(dim=-1, keepdim=True)
    return scaled_logits.masked_fill(scaled_logits < cutoff, -torch.inf)


def uniform(seeds: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """[n] numbers in [0, 1), one for each (seed, position) pair.

    Each is output number `position` of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), whose stream starts at a
    scrambled `seed`.
    """
    with np.errstate(over="ignore"):
        start = _scramble(seeds.astype(np.uint64) + _GOLDEN)
        bits = _scramble(start + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _scramble(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of SplitMix64: every input bit affects every output bit."""
    x = (x ^ (x >> np.uint64(30))) * _MIX[0]
    x = (x ^ (x >> np.uint64(27))) * _MIX[1]
    return x ^ (x >> np.uint64(31))
