"""Tables that serving uses beside a placement: they predict the rank of a token from its id or earlier ranks.

Speculative MoE and Sem-MoE only look up these tables and compute nothing else. Two bytes an entry keep them
small: for 102,400 token ids and 60 layers the ranks take 12 MB, and the confidences as much.

Layers are counted from 0 over those with routed experts. The file is a NumPy archive (`.npz`) without pickled
objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moesaic.core import archive
from moesaic.core.archive import Arrays
from moesaic.core.errors import ConfigError
from moesaic.core.placement import Placement
from moesaic.core.profile import SmallArray

SCHEMA = 1

HalfArray = npt.NDArray[np.float16]
ScoreArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Tables:
    """Tables made from one profile for one placement.

    A confidence is the share, 0 to 1, of a token's experts that are expected on the predicted rank. So the
    confidences of both tables can be compared.
    """

    model: str
    """Fingerprint of the model, as in a placement."""
    layers: tuple[int, ...]
    """Indices of the layers with routed experts, ascending."""
    experts: SmallArray
    """[layers, E] the rank of each logical expert."""
    scores: ScoreArray
    """[V, ranks] (token, expert) pairs of one token that are expected on each rank, over all layers.

    Algorithm 2 of Sem-MoE sums these over a prompt. A row sums to layers * k, or more where experts have
    copies.
    """
    labels: SmallArray
    """[V, layers] table T: the rank of each token id."""
    confidence: HalfArray
    """[V, layers] confidence of each entry of `labels`."""
    after: SmallArray
    """[layers, ranks * ranks] table A: the rank of a token that was on rank i two layers ago and j one layer
    ago.

    Its index is i * ranks + j.
    """
    after_confidence: HalfArray
    """[layers, ranks * ranks] confidence of each entry of `after`.

    0 in the first two layers, which have no history.
    """

    @property
    def ranks(self) -> int:
        return int(self.scores.shape[1])

    @property
    def vocab_size(self) -> int:
        return int(self.scores.shape[0])

    @property
    def nbytes(self) -> int:
        """Bytes of all tables in memory."""
        return sum(getattr(self, name).nbytes for name in _ARRAYS)

    def request_scores(self, prompt: Sequence[int] | npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """[ranks] expected local pairs of a whole prompt on each rank (Sem-MoE, Algorithm 2, line 3).

        Token ids outside the tables' vocabulary are ignored.
        """
        ids = np.asarray(prompt, dtype=np.int64)
        scores: npt.NDArray[np.float64] = self.scores[ids[ids < self.vocab_size]].sum(
            axis=0, dtype=np.float64
        )
        return scores

    def check(self, placement: Placement, file: str) -> None:
        """Raise ConfigError if the tables were made for another model, or if an expert is on another rank.

        Additional copies of an expert on other ranks are allowed.
        """
        if self.model != placement.model:
            raise ConfigError.field(f"{file}: model", self.model, f"the placement's, {placement.model!r}")
        if placement.num_experts != self.experts.shape[1]:
            allowed = f"the placement's, {placement.num_experts}"
            raise ConfigError.field(f"{file}: experts", self.experts.shape[1], allowed)
        if self.layers != placement.layers:
            raise ConfigError.field(f"{file}: layers", self.layers, f"the placement's, {placement.layers}")
        for layer, ranks in zip(self.layers, self.experts.tolist(), strict=True):
            for expert, rank in enumerate(ranks):
                holders = placement.holders(layer, expert)
                if rank not in holders:
                    name = f"{file}: rank of expert {expert} in layer {layer}"
                    raise ConfigError.field(name, rank, f"the placement's, {', '.join(map(str, holders))}")

    # ---- the file

    @classmethod
    def load_for(cls, file: str, placement: Placement) -> Tables | None:
        """The tables that `placement`, which was read from `file`, names. None if it names none.

        Raises ConfigError as `load` does, and for tables that do not fit the placement.
        """
        if not placement.tables:
            return None
        path = Path(file).parent / placement.tables
        tables, servers = cls.load(path), len(placement.servers)
        if tables.ranks != servers:
            raise ConfigError.field(f"{path}: ranks", tables.ranks, f"as many as are served, {servers}")
        tables.check(placement, str(path))
        return tables

    def save(self, path: Path) -> None:
        """Write the file. After a failure the old file is unchanged."""
        arrays: dict[str, Any] = {name: getattr(self, name) for name in _ARRAYS}
        archive.save(path, {"schema": SCHEMA, "model": self.model, "layers": self.layers, **arrays})

    @classmethod
    def load(cls, path: Path) -> Tables:
        """Read a file of `save`. Raises ConfigError with one line that names the file and the problem."""
        return archive.load(path, "tables of tokens", cls._from_arrays)

    @classmethod
    def _from_arrays(cls, arrays: Arrays) -> Tables:
        """Raises KeyError and ValueError for arrays of another file."""
        if int(arrays["schema"]) != SCHEMA:
            raise ValueError(f"schema {arrays['schema']}, this version reads {SCHEMA}")
        tables = cls(
            model=str(arrays["model"]),
            layers=tuple(arrays["layers"].tolist()),
            **{name: arrays[name] for name in _ARRAYS},
        )
        _check(tables)
        return tables


_ARRAYS = [field.name for field in fields(Tables) if field.name not in ("model", "layers")]


def _check(tables: Tables) -> None:
    """Raise ValueError where arrays do not fit each other, so that users of the tables need no checks."""
    vocab_size, ranks = tables.scores.shape
    layers = len(tables.layers)
    fits = (
        tables.experts.ndim == 2
        and len(tables.experts) == layers
        and tables.labels.shape == tables.confidence.shape == (vocab_size, layers)
        and tables.after.shape == tables.after_confidence.shape == (layers, ranks * ranks)
    )
    for part in (tables.experts, tables.labels, tables.after):
        fits = fits and (not part.size or bool(0 <= part.min() <= part.max() < ranks))
    for shares in (tables.scores, tables.confidence, tables.after_confidence):
        fits = fits and bool(np.isfinite(shares).all())
    if not fits:
        raise ValueError("its arrays do not fit each other")
