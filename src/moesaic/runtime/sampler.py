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
from moesaic.runtime.noise import uniform

LARGEST = 1e30
"""Of a logit when noise is drawn: over the smallest temperature it is still a finite float32."""


@dataclass
class _Row:
    """What sampling keeps of one request in the batch."""

    request: Request
    generated: list[int]
    plain: bool
    """True when argmax of the raw logits is the answer."""


class Sampler:
    """Holds the requests in the batch and picks their next tokens."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rows: dict[int, _Row] = {}

    def admit(self, request: Request, generated: list[int]) -> None:
        """`request` enters the batch, having generated `generated` before a preemption."""
        params = request.params
        plain = params.greedy and not params.penalised and not params.logit_bias and not params.min_tokens
        self._rows[request.request_id] = _Row(request, list(generated), plain)

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
        if not all(row.plain for row in rows):
            _adjust(logits, rows)
        tokens = torch.argmax(logits, dim=-1)
        noisy = [index for index, row in enumerate(rows) if not row.request.params.greedy]
        if noisy:
            tokens[noisy] = _draw(logits[noisy], [rows[index] for index in noisy])
        result = tokens.cpu().numpy().astype(np.int64)
        report = _report(raw, rows, result)
        for row, token in zip(rows, result, strict=True):
            row.generated.append(int(token))
        return result, report


def token_logprobs(logprobs: torch.Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprob]:
    """One record per row. logprobs: [n, vocab]; tokens: the n tokens that were taken."""
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logprobs.device)[:, None])[:, 0].tolist()
    values, ids = torch.topk(logprobs, max(count, 1), dim=-1)
    best = zip(ids.tolist(), values.tolist(), strict=True)
    return [
        TokenLogprob(token, value, list(zip(top_ids, top_values, strict=True))[:count])
        for token, value, (top_ids, top_values) in zip(tokens, chosen, best, strict=True)
    ]


def _log_softmax_where(logits: torch.Tensor, wanted: list[bool]) -> torch.Tensor | None:
    """Log-probabilities of the wanted rows only, before the logits are changed; None if none is."""
    if not any(wanted):
        return None
    return torch.log_softmax(logits[torch.tensor(wanted, device=logits.device)], dim=-1)


def _report(raw: torch.Tensor | None, rows: list[_Row], tokens: IntArray) -> list[TokenLogprob | None]:
    if raw is None:
        return []
    report: list[TokenLogprob | None] = [None] * len(rows)
    asked = [index for index, row in enumerate(rows) if row.request.params.logprobs is not None]
    for line, index in enumerate(asked):
        count = rows[index].request.params.logprobs or 0
        report[index] = token_logprobs(raw[line : line + 1], [int(tokens[index])], count)[0]
    return report


def _adjust(logits: torch.Tensor, rows: list[_Row]) -> None:
    """Logit bias, penalties and min_tokens, in place."""
    for index, row in enumerate(rows):
        params = row.request.params
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias), device=logits.device)
            logits[index, ids] += torch.tensor(list(params.logit_bias.values()), device=logits.device)
        if params.penalised:
            _penalise(logits[index], row)
        if len(row.generated) < params.min_tokens and row.request.stop_ids:
            logits[index, list(row.request.stop_ids)] = -torch.inf


def _penalise(logits: torch.Tensor, row: _Row) -> None:
    """Repetition, then frequency and presence penalty on one row [vocab], in place."""
    params = row.request.params

    def counts(tokens: list[int]) -> torch.Tensor:
        return torch.bincount(torch.tensor(tokens, device=logits.device), minlength=len(logits))

    if params.repetition_penalty != 1.0:
        seen = counts(row.request.prompt_token_ids + row.generated) > 0
        scale = params.repetition_penalty
        logits.copy_(torch.where(seen, torch.where(logits > 0, logits / scale, logits * scale), logits))
    if row.generated:
        often = counts(row.generated)
        logits.sub_(params.frequency_penalty * often + params.presence_penalty * (often > 0))


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
    positions = np.array([len(row.request.prompt_token_ids) + len(row.generated) for row in rows])
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
