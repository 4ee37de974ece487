"""What Qwen's families share: which layers have routed experts, and a shared expert with its gate."""

from __future__ import annotations

from collections.abc import Collection

from moesaic.models.block import Dense
from moesaic.models.layers import GatedSharedExpert
from moesaic.models.loader import Loader


def sparse_layers(layers: int, dense: Collection[int], step: int) -> tuple[int, ...]:
    """Returns the layers with routed experts: every step-th one, without those that are listed as dense.

    >>> sparse_layers(6, [3], 2)
    (1, 5)
    """
    return tuple(layer for layer in range(layers) if layer not in dense and (layer + 1) % step == 0)


def dense_part(loader: Loader, name: str, hidden: int, dense_width: int, shared_width: int | None) -> Dense:
    """Loads the dense MLP of a dense layer, or the shared expert and its gate.

    shared_width: of the shared expert; None: the layer is dense.
    """
    if shared_width is None:
        return loader.mlp(name, hidden, dense_width)
    return GatedSharedExpert(
        loader.kernels,
        loader.mlp(f"{name}.shared_expert", hidden, shared_width),
        loader.exact(f"{name}.shared_expert_gate.weight", 1, hidden),
    )
