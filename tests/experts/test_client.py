"""The two calls of the routed experts, answered in this process."""

from __future__ import annotations

import torch

from moesaic.experts.client import DirectExperts, ExpertRequest, RequestHandle
from moesaic.kernels.reference.experts import experts_plain
from moesaic.kernels.table import REFERENCE
from moesaic.kernels.weights import ExpertWeights


def weights(seed: int) -> ExpertWeights:
    generator = torch.Generator().manual_seed(seed)

    def make(*shape: int) -> tuple[torch.Tensor, ...]:
        return tuple(torch.randn(shape, generator=generator) * 0.2 for _ in range(4))

    return ExpertWeights(make(6, 8), make(6, 8), make(8, 6))


def test_an_answer_holds_until_it_is_released_and_only_for_its_handle() -> None:
    layers = {0: weights(0), 3: weights(3)}
    direct = DirectExperts(layers, REFERENCE, rows=9)
    for layer, rows in ((0, 5), (3, 9), (0, 2)):
        hidden = torch.randn(rows, 8)
        ids = torch.stack([torch.randperm(4)[:2] for _ in range(rows)])
        handle = direct.submit(ExpertRequest(layer, hidden, ids))
        assert direct.poll(RequestHandle(handle.number + 1)) is None
        answer = direct.poll(handle)
        assert answer is not None
        torch.testing.assert_close(answer, experts_plain(layers[layer], hidden, ids), rtol=1e-4, atol=1e-5)
        again = direct.poll(handle)
        assert again is not None and again.data_ptr() == answer.data_ptr()
        direct.release(handle)
        assert direct.poll(handle) is None
