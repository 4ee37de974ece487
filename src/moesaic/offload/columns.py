"""Routed experts that the files store in columns, of a model larger than the fast memory.

The kernels read rows (see `core.experts.ExpertLayout.form`). So each expert is read into memory that all
share, and copied from there to its place as rows. A page is a number of whole experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from moesaic.core.experts import PARTS, ExpertLayout
from moesaic.kernels.weights import ExpertWeights
from moesaic.models.columns import transpose
from moesaic.models.pages import aligned
from moesaic.offload.arrangement import Arrangement
from moesaic.offload.reading import ALIGNMENT
from moesaic.offload.weights import DTYPES, Memory, Plan, Streamed, views

Expert = tuple[torch.Tensor, ...]
"""Gate, up and down, and their biases."""


class StreamedColumns(Streamed):
    """As Streamed, of the same arguments. On a CPU only."""

    def load_static(self) -> int:
        return sum(
            self._load(layer, expert, self._kept[layer, expert]) for layer, expert in sorted(self._kept)
        )

    def load_page(self, count: int, layer: int, page: int, pages: int) -> int:
        if not 0 <= page < pages:
            raise ValueError(f"page {page} of {pages}")
        away = self._plan.away(layer)
        first, last = (number * len(away) // pages for number in (page, page + 1))
        return self.load_chosen(count, layer, away[first:last])

    def load_chosen(self, count: int, layer: int, experts: Iterable[int]) -> int:
        slot, away = count % 2, self._places[layer]
        wanted = sorted({int(expert) for expert in experts if (layer, int(expert)) not in self._kept})
        return sum(self._load(layer, expert, away[expert][slot]) for expert in wanted)

    def _load(self, layer: int, expert: int, target: Expert) -> int:
        """Reads one expert and copies it to `target`. Returns the bytes read."""
        places = self._plan.places[layer, expert]
        arranged = Arrangement(places)
        size = self._read(arranged, [(0, arranged.size)], self._staging)
        found = views(arranged, self._staging, self._dtype)
        gate_up, down, inner_bias, down_bias = (found[place] for place in places)
        for into, matrix in zip(target[:3], (gate_up[:, 0::2], gate_up[:, 1::2], down), strict=True):
            transpose(matrix, into)
        for into, bias in zip(target[3:], (inner_bias[0::2], inner_bias[1::2], down_bias), strict=True):
            into.copy_(bias)
        return size

    @staticmethod
    def _memory(plan: Plan, layout: ExpertLayout) -> Memory:
        one, most = _size(layout), max(len(plan.away(layer)) for layer in layout.layers)
        staging = max((Arrangement(parts).size for parts in plan.places.values()), default=0)
        return Memory(_blocks(len(plan.kept) * one), _blocks(most * one), staging)

    def _lay_out(self, layout: ExpertLayout) -> dict[tuple[int, int], ExpertWeights]:
        self._dtype = DTYPES[layout.dtype]
        self._kept = dict(zip(sorted(self._plan.kept), _in(self._static, layout), strict=False))
        self._places = {
            layer: dict(
                zip(
                    self._plan.away(layer),
                    zip(*(_in(each, layout) for each in self._slots), strict=True),
                    strict=False,
                )
            )
            for layer in layout.layers
        }
        return {
            (layer, slot): self._weights(layout, layer, slot) for layer in layout.layers for slot in (0, 1)
        }

    def _weights(self, layout: ExpertLayout, layer: int, slot: int) -> ExpertWeights:
        held = {expert: parts for (of, expert), parts in self._kept.items() if of == layer}
        held |= {expert: slots[slot] for expert, slots in self._places[layer].items()}
        return ExpertWeights.of_held(layout.num_experts, held, PARTS[layout.form], layout.activation)


def _blocks(size: int) -> int:
    """The next multiple of a block, which direct reads need."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _size(layout: ExpertLayout) -> int:
    """Bytes of the memory of one expert as rows."""
    return sum(map(aligned, layout.matrix_bytes))


def _in(memory: torch.Tensor, layout: ExpertLayout) -> Iterator[Expert]:
    """The experts, one after another, that there is room for in `memory`."""
    width, hidden, dtype = layout.width, layout.hidden, DTYPES[layout.dtype]
    shapes = (width, hidden), (width, hidden), (hidden, width), (width,), (width,), (hidden,)
    for begin in range(0, len(memory) - _size(layout) + 1, _size(layout)):
        parts, at = [], begin
        for shape, size in zip(shapes, layout.matrix_bytes, strict=True):
            kind = dtype if len(shape) == 2 else torch.float32
            parts.append(memory[at : at + size].view(kind).view(shape))
            at += aligned(size)
        yield tuple(parts)
