"""Which ranks of a group hold which experts, from the placement file or in equal ranges."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from moesaic.config import WorkerConfig
from moesaic.core.errors import ConfigError
from moesaic.core.placement import Placement
from moesaic.core.tables import Tables
from moesaic.core.tokens import IntArray
from moesaic.experts.collectives.group import Group
from moesaic.runtime.drafting import uses_mtp
from moesaic.runtime.model_loading import read_expert_layout


@dataclass(frozen=True)
class ExpertOwners:
    """Which ranks of a group hold which experts."""

    owners: Mapping[int, IntArray]
    """Layer -> [E] the unit that holds each expert. A unit is a rank, or the ranks that share each expert."""
    tables: Tables | None
    """The ranks where rows are expected to need their experts, if the placement has such tables."""
    left_out: int = 0
    """Copies in the placement beyond the first one of each expert, over all layers. No rank holds them."""

    def list_experts(self, unit: int) -> dict[int, list[int]]:
        """Layer -> the experts of a unit, ascending."""
        return {layer: np.flatnonzero(owners == unit).tolist() for layer, owners in self.owners.items()}

    @property
    def digest(self) -> int:
        """31 bits that are equal for equal owners and tables."""
        arrays = [*self.owners.values()]
        if self.tables is not None:
            arrays += [array for array in vars(self.tables).values() if isinstance(array, np.ndarray)]
        # 31 bits, because ranks exchange notes as int32 numbers.
        return zlib.crc32(b"".join(array.tobytes() for array in arrays)) >> 1

    @property
    def max_experts(self) -> int:
        """The most experts of one layer in one unit."""
        return max(int(np.bincount(owners).max()) for owners in self.owners.values())


def read_owners(config: WorkerConfig) -> ExpertOwners:
    """Reads who holds which expert from the placement file, or divides the experts into equal ranges.

    Of an expert's copies it takes the one that the tables expect, or else the first rank's. Raises
    ConfigError for a file that does not fit, and for `shuffled` without tables.
    """
    parallel, layout = config.parallel, read_expert_layout(config.model, uses_mtp(config))
    units = parallel.expert_parallel_size
    if parallel.placement is None:
        expert_owners = ExpertOwners(equal_owners(layout.layers, layout.num_experts, units), None)
    else:
        placement = Placement.read(parallel.placement, units)
        tables = Tables.load_for(parallel.placement, placement)
        placement = placement.with_layer(layout.prediction)
        placement.check(layout.fingerprint, layout.layers, layout.num_experts)
        expert_owners = _take_from_placement(placement, tables)
    if parallel.moe_collectives == "shuffled" and expert_owners.tables is None:
        raise ConfigError.field("--placement", parallel.placement, "a file with tables, for shuffled rows")
    return expert_owners


def _take_from_placement(placement: Placement, tables: Tables | None) -> ExpertOwners:
    left_out = sum(int((placement.replicas(layer) - 1).sum()) for layer in placement.layers)
    owners = {layer: placement.table(layer)[:, 0] for layer in placement.layers}
    if tables is not None:
        owners |= zip(tables.layers, tables.experts.astype(np.int64), strict=True)
    return ExpertOwners(owners, tables, left_out)


def equal_owners(layers: tuple[int, ...], num_experts: int, units: int) -> Mapping[int, IntArray]:
    """Consecutive ranges, which differ by at most one expert.

    Example: 5 experts in 2 units: 0, 0, 0, 1, 1.
    """
    counts = [len(experts) for experts in np.array_split(np.arange(num_experts), units)]
    return dict.fromkeys(layers, np.repeat(np.arange(units), counts))


def check_placement(config: WorkerConfig, group: Group, owners: ExpertOwners) -> None:
    """Raises ConfigError on every rank if the hosts of a group have different files of --placement."""
    if config.parallel.nnodes == 1:
        return
    own_digest = np.array([owners.digest], np.int64)
    if len(set(group.gather_notes(own_digest, np.arange(group.size)).tolist())) > 1:
        raise ConfigError.field("--placement", config.parallel.placement, "the same file on all hosts")
