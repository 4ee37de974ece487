"""From logits to tokens, for a whole batch at once.

The order is vLLM's: logit bias, penalties, min_tokens, then for rows that are not greedy
temperature, min-p, top-k, top-p. Log-probabilities are of the logits before any of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from moesaic.core.request import Request, TokenLogprob
from moesaic.core.tokens import IntArray
from moesaic.runtime.sampling.noise import uniform
from moesaic.runtime.sampling.penalties import Adjustment, adjust

LARGEST = 1e30
"""Of a logit when noise is drawn: over the smallest temperature it is still a finite float32."""


@dataclass
class _Row:
    """What sampling keeps of one request in the batch."""

    request: Request
    length: int
    """Tokens of the prompt and the answer."""
    adjustment: Adjustment | None
    """Of its logits; None where they stay as they are."""


class Sampler:
    """Holds the requests in the batch and picks their next tokens."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rows: dict[int, _Row] = {}

    def admit(self, request: Request, generated: list[int]) -> None:
        """`request` enters the batch, having generated `generated` before a preemption."""
        adjustment = Adjustment(request, generated) if Adjustment.wanted(request.params) else None
        length = len(request.prompt_token_ids) + len(generated)
        self._rows[request.request_id] = _Row(request, length, adjustment)

    def release(self, request_id: int) -> None:
        """Forget a request. Unknown ids are ignored: it was never admitted."""
        self._rows.pop(request_id, None)

    def request(self, request_id: int) -> Request:
        return self._rows[request_id].request

    def sample(
        self, request_ids: IntArray, logits: torch.Tensor
    ) -> tuple[IntArray, list[TokenLogprob | None]]:
        """Next token of each request, and log-probabilities if any of them asked (else an empty list).

        logits: [p, vocab] float32, row i of request_ids[i]; may be changed in place.
        """
        rows = [self._rows[int(request_id)] for request_id in request_ids]
        raw = _log_softmax_where(logits, [row.request.params.logprobs is not None for row in rows])
        adjusted = {line: row.adjustment for line, row in enumerate(rows) if row.adjustment is not None}
        if adjusted:
            adjust(logits, list(adjusted), list(adjusted.values()))
        result = _argmax(logits)
        noisy = [index for index, row in enumerate(rows) if not row.request.params.greedy]
        if noisy:
            result[noisy] = _draw(logits[noisy], [rows[index] for index in noisy]).cpu().numpy()
        report = _report(raw, rows, result)
        for row, token in zip(rows, result, strict=True):
            row.length += 1
            if row.adjustment is not None:
                row.adjustment.append(int(token))
        return result, report


def token_logprobs(logprobs: torch.Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprob]:
    """One record per row. logprobs: [n, vocab]; tokens: the n tokens that were taken."""
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logprobs.device)[:, None])[:, 0].tolist()
    values, ids = torch.topk(logprobs, min(max(count, 1), logprobs.shape[1]), dim=-1)
    best = zip(ids.tolist(), values.tolist(), strict=True)
    return [
        TokenLogprob(token, value, list(zip(top_ids, top_values, strict=True))[:count])
        for token, value, (top_ids, top_values) in zip(tokens, chosen, best, strict=True)
    ]


def _argmax(logits: torch.Tensor) -> IntArray:
    """[p] the first of the largest of each row. On a CPU numpy's has less to fetch into cold caches."""
    if logits.device.type == "cpu":
        first: IntArray = logits.numpy().argmax(axis=-1)
        return first
    return torch.argmax(logits, dim=-1).cpu().numpy().astype(np.int64)


def _log_softmax_where(logits: torch.Tensor, wanted: list[bool]) -> torch.Tensor | None:
    """Log-probabilities of the wanted rows only, before the logits are changed; None if none is."""
    if not any(wanted):
        return None
    return torch.log_softmax(logits[torch.tensor(wanted, device=logits.device)], dim=-1)


def _report(raw: torch.Tensor | None, rows: list[_Row], tokens: IntArray) -> list[TokenLogprob | None]:
    """Of each row, None where it did not ask. raw: log-probabilities of those that did.

    Rows that ask for equally many alternatives share one topk. To take the most that anyone asks for, and cut
    it, would let a row's ties fall another way when somebody with a larger wish is in the batch.
    """
    report: list[TokenLogprob | None] = [None] * len(rows)
    if raw is None:
        return []
    wishes = {index: row.request.params.logprobs for index, row in enumerate(rows)}
    asked = [(index, count) for index, count in wishes.items() if count is not None]
    for count in {count for _, count in asked}:
        lines = [line for line, (_, wish) in enumerate(asked) if wish == count]
        alike = raw if len(lines) == len(asked) else raw[lines]
        indices = [asked[line][0] for line in lines]
        entries = token_logprobs(alike, tokens[indices].tolist(), count)
        for index, entry in zip(indices, entries, strict=True):
            report[index] = entry
    return report


def _draw(logits: torch.Tensor, rows: list[_Row]) -> torch.Tensor:
    """[n] tokens by inverting the cumulative distribution, tokens in order of their ids.

    In that order (rather than by probability) a rounding error moves a boundary by as much and
    never swaps two tokens. Logits that are not finite (all masked, or a penalty that overflows) count as
    the largest or the smallest: whatever a client asks for, a token of the vocabulary comes out.
    """

    def column(values: Sequence[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=logits.device)[:, None]

    params = [row.request.params for row in rows]
    scaled = logits.nan_to_num(nan=-LARGEST).clamp_(-LARGEST, LARGEST)
    scaled = scaled / column([p.temperature for p in params])
    scaled = scaled - scaled.amax(dim=-1, keepdim=True)
    if any(p.min_p > 0 for p in params):
        floor = column([p.min_p for p in params]).log()
        scaled = scaled.masked_fill(scaled < floor, -torch.inf)
    scaled = _keep_top(scaled, [p.top_k for p in params], [p.top_p for p in params])
    cumulative = torch.softmax(scaled, dim=-1, dtype=torch.float64).cumsum(dim=-1)
    positions = np.array([row.length for row in rows])
    seeds = np.array([p.seed or 0 for p in params], dtype=np.int64)
    noise = torch.from_numpy(uniform(seeds, positions))[:, None].to(logits.device)
    return torch.searchsorted(cumulative, noise * cumulative[:, -1:], right=True)[:, 0]


def _keep_top(scaled: torch.Tensor, top_k: list[int], top_p: list[float]) -> torch.Tensor:
    """`scaled` [n, vocab] with all but the top-k, then all but the top-p tokens at -inf."""
    vocab = scaled.shape[-1]
    keep = [vocab if k < 1 else min(k, vocab) for k in top_k]
    if max(keep) == vocab and min(keep) == vocab and min(top_p) >= 1.0:
        return scaled
    ordered = torch.topk(scaled, max(keep), dim=-1).values
    last = torch.tensor(keep, device=scaled.device)[:, None] - 1
    rank = torch.arange(ordered.shape[-1], device=scaled.device)[None]
    ordered = ordered.masked_fill(rank > last, -torch.inf)
    probabilities = torch.softmax(ordered, dim=-1, dtype=torch.float64)
    # A token stays while the tokens before it have not reached top_p: the first always does.
    before = probabilities.cumsum(dim=-1) - probabilities
    stays = before < torch.tensor(top_p, dtype=torch.float64, device=scaled.device)[:, None]
    stays &= rank <= last
    cutoff = ordered.masked_fill(~stays, torch.inf).amin(dim=-1, keepdim=True)
    return scaled.masked_fill(scaled < cutoff, -torch.inf)
