"""Linear attention by the gated delta rule, and what stands around it. `kernels.states` has the form."""

from __future__ import annotations

import torch
from torch.nn import functional

from moesaic.kernels.batch import AttentionBatch
from moesaic.kernels.states import CHUNK, LayerStates, StateRows, state_rows

KEY_EPSILON = 1e-6
"""Added to the squared length of queries and keys, as in the models' code."""


def convolve(
    rows: torch.Tensor,
    weight: torch.Tensor,
    states: LayerStates,
    batch: AttentionBatch,
    activate: bool = True,
) -> torch.Tensor:
    """Mixes each channel of rows [n, C] with the rows before it in its sequence.

    weight: [C, taps] float32, the last tap for the row itself. activate: whether silu is applied then.
    Changes the tails in `states`. Returns [n, C].
    """
    output, num_earlier = torch.empty_like(rows), weight.shape[1] - 1
    for part in state_rows(batch.batch):
        count = part.stop - part.start
        begin = part.first // CHUNK * CHUNK
        ring, seat = states.sizes.ring, states.tails[part.seat]
        places = torch.arange(part.first - num_earlier, part.first + count, device=rows.device) % ring
        earlier_inputs = (
            states.page_tails[part.page(begin)] if part.first == begin else seat[places[:num_earlier]]
        )
        inputs = torch.cat((earlier_inputs, rows[part.start : part.stop]))
        mixed_rows = inputs[:count] * weight[:, 0]
        for tap in range(1, weight.shape[1]):
            mixed_rows.addcmul_(inputs[tap : tap + count], weight[:, tap])
        output[part.start : part.stop] = functional.silu(mixed_rows) if activate else mixed_rows
        seat[places[-ring:]] = inputs[-ring:]
        if begin + CHUNK <= part.first + count:
            completed_rows = (
                part.first + count
            ) // CHUNK * CHUNK - part.first  # rows up to the last multiple
            states.page_tails[part.write_page] = inputs[completed_rows : completed_rows + num_earlier]
    return output


def delta(
    mixed_rows: torch.Tensor,
    gates: torch.Tensor,
    decay: torch.Tensor,
    bias: torch.Tensor,
    states: LayerStates,
    batch: AttentionBatch,
) -> torch.Tensor:
    """The gated delta rule for rows after the convolution. Changes `states`.

    mixed_rows: [n, C] query, key and value of all heads. gates: [n, 2 * Hv], beta and alpha of each value
    head before their activations. decay: [Hv] negative factor of alpha's logarithm. bias: [Hv] added to
    alpha's gate. Returns [n, Hv, dv] float32.
    """
    sizes = states.sizes
    width = sizes.key_heads * sizes.key_width
    query, key, value = mixed_rows.tensor_split([width, 2 * width], dim=1)
    query = _normalize(query.view(-1, sizes.key_heads, sizes.key_width)) * sizes.key_width**-0.5
    key = _normalize(key.view(-1, sizes.key_heads, sizes.key_width))
    value = value.view(-1, sizes.value_heads, sizes.value_width)
    beta, alpha = gates.view(-1, 2, sizes.value_heads).unbind(1)
    beta, logs = beta.sigmoid(), decay * functional.softplus(alpha + bias)
    output = torch.empty_like(value)
    for part in state_rows(batch.batch):
        row, position = part.start, part.first
        while row < part.stop:
            begin = position // CHUNK * CHUNK
            stop = min(part.stop, row + begin + CHUNK - position)
            inputs = [tensor[row:stop] for tensor in (query, key, value, beta, logs)]
            output[row:stop] = _chunk(inputs, states, part, begin, position - begin)
            row, position = stop, position + stop - row
    return output


def _normalize(heads: torch.Tensor) -> torch.Tensor:
    """heads [n, H, d], each of length one."""
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + KEY_EPSILON)


def _chunk(
    inputs: list[torch.Tensor], states: LayerStates, part: StateRows, begin: int, index: int
) -> torch.Tensor:
    """Rows of one sequence from position begin + index on, up to the next multiple of CHUNK at most.

    inputs: query, key, value, beta and the logarithm of alpha of these rows.
    """
    query, key, value, beta, logs = inputs
    heads_per_key = states.sizes.value_heads // states.sizes.key_heads
    matrix = states.pages[part.page(begin)]
    keys, updates, decays = (tensor[part.seat] for tensor in (states.keys, states.updates, states.decays))
    output = torch.empty_like(value)
    for row in range(len(query)):
        place = index + row
        # The sum of the logarithms is stored, since products of many decays would underflow.
        keys[:, place] = key[row]
        decays[:, place] = logs[row] if place == 0 else decays[:, place - 1] + logs[row]
        log_decay = decays[:, place, None]
        fade = torch.exp(log_decay - decays[:, : place + 1])
        of_key, of_query = (
            (torch.einsum("hid,hd->hi", keys[:, : place + 1], tensor[row])).repeat_interleave(
                heads_per_key, 0
            )
            * fade
            for tensor in (key, query)
        )
        old = torch.exp(log_decay)
        k, q = (tensor[row].repeat_interleave(heads_per_key, 0) for tensor in (key, query))
        prediction = old * torch.einsum("hkv,hk->hv", matrix, k)
        prediction += torch.einsum("hi,hiv->hv", of_key[:, :place], updates[:, :place])
        updates[:, place] = beta[row, :, None] * (value[row] - prediction)
        output[row] = old * torch.einsum("hkv,hk->hv", matrix, q)
        output[row] += torch.einsum("hi,hiv->hv", of_query, updates[:, : place + 1])
    # Only a multiple of CHUNK gets a new matrix. So a row's arithmetic does not depend on the chunks before.
    if index + len(query) == CHUNK:
        fade = torch.exp(decays[:, -1:] - decays)
        update = torch.einsum(
            "hik,hiv->hkv", keys.repeat_interleave(heads_per_key, 0) * fade[:, :, None], updates
        )
        states.pages[part.write_page] = torch.exp(decays[:, -1, None, None]) * matrix + update
    return output


def gated_norm(rows: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Divides each head of rows [n, H, d] by its root mean square, times weight [d], times silu(gate).

    gate: [n, H * d]. Returns [n, H * d].
    """
    scale = torch.rsqrt(rows.square().mean(-1, keepdim=True) + epsilon)
    return (rows * scale * weight).flatten(1) * functional.silu(gate)


def sigmoid_times(rows: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Multiplies rows [n, H, d] by sigmoid(gate [n, H, d]). Returns [n, H * d]."""
    return (rows * gate.sigmoid()).flatten(1)


def times(rows: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Multiplies rows [n, w] by factors [n, w]. Returns [n, w]."""
    return rows * factors
