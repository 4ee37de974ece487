"""Finds the expert server that is at fault for an answer with NaN or infinities.

Equal weights give NaN on every server, so the attention worker computes such a pair again, itself, from its
own checkpoint. If its own answer is finite, the server is at fault. Otherwise the model is, and the request
ends with an error.

Question: Who notices an expert server that computes NaN?
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import torch

from moesaic.core.errors import CheckpointError
from moesaic.core.experts import ExpertLayout
from moesaic.core.tokens import FloatRows, IntArray
from moesaic.experts.outstanding import OpenCall
from moesaic.kernels import table
from moesaic.models import registry

LOG = logging.getLogger(__name__)

Check = Callable[[OpenCall, IntArray], str | None]
"""What the server did wrong in these rows [p] of a call's answer, in words, or None when nothing is wrong."""


class WrongAnswer(Exception):
    """A server answered what its experts cannot answer."""


class AnswerCheck:
    """The check of one client."""

    def __init__(self, finite: Callable[[int, int, FloatRows], bool]) -> None:
        """finite: whether the checkpoint's answer of (layer, expert) to a row [h] is finite."""
        self._finite = finite

    def __call__(self, call: OpenCall, indices: IntArray) -> str | None:
        """What the server did wrong in these rows of its answer, or None.

        At most one server is blamed for a submission, so that one request cannot take down all servers.
        """
        nonfinite_row, submission = call.find_nonfinite_row(indices), call.submission
        if nonfinite_row is None or submission.has_blamed_server:
            return None
        row, experts = nonfinite_row
        layer, hidden = submission.layer, submission.row(row)
        submission.has_blamed_server = all(self._finite(layer, expert, hidden) for expert in experts.tolist())
        if not submission.has_blamed_server:
            return None
        return f"answered NaN or infinities for expert {', '.join(map(str, experts))} of layer {layer}"


class Recompute:
    """Computes single pairs of the checkpoint at `path` with the reference kernels. Keeps no weights."""

    def __init__(self, path: Path, layout: ExpertLayout, use_mmap: bool) -> None:
        self._path, self._layout, self._use_mmap = path, layout, use_mmap

    def is_finite(self, layer: int, expert: int, row: FloatRows) -> bool:
        """Whether the expert's answer to `row` [h] is finite. Reads its weights, which takes milliseconds.

        False as well where the weights cannot be read any more, so that nobody is blamed for that.
        """
        kernels, dtype = table.pick("cpu", "reference"), self._layout.dtype
        try:
            read = registry.load_experts(self._path, kernels, {layer: [expert]}, "cpu", dtype, self._use_mmap)
        except CheckpointError as error:
            LOG.warning("cannot tell who is at fault for an answer that is not finite: %s", error)
            return False
        with torch.inference_mode():
            hidden = torch.from_numpy(row.copy())[None]
            answer = kernels.experts(read[layer], hidden, torch.tensor([[expert]]))
        return bool(torch.isfinite(answer).all())
