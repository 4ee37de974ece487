"""A placement as the map of physical experts that SGLang's `--init-expert-location` takes, and back.

A physical expert is a slot. Each rank has equally many of them, one after another, and each row of the map
has the logical expert of every slot of a layer. The rows are numbered as the model's layers are, so layers
without routed experts have a row, too. SGLang's `python/sglang/srt/eplb/expert_location.py` (0.5.23) defines
the form.

Question: How does a placement get into SGLang, and how does one of SGLang come here?
"""

from __future__ import annotations

from collections.abc import Sequence

from moesaic.core.errors import ConfigError
from moesaic.core.placement import Placement

PhysicalMap = list[list[int]]
"""[layers of the model, physical experts] the logical expert of each slot."""


def to_physical_map(placement: Placement, ranks: int) -> PhysicalMap:
    """The map of the placement, up to its last layer. Servers 0 to `ranks` - 1 are the ranks.

    Layers that the placement lacks have the experts in turn, which is SGLang's own start. Raises ConfigError
    if a rank has more slots than another.
    """
    rows = {
        layer: [by_server.get(rank, ()) for rank in range(ranks)]
        for layer, by_server in placement.experts_by_layer.items()
    }
    slots = {len(experts) for by_rank in rows.values() for experts in by_rank}
    if len(slots) > 1:
        allowed = f"experts, and redundant ones, that {ranks} ranks divide evenly"
        raise ConfigError.field("--format", "sglang", allowed)
    physical = slots.pop() * ranks
    in_turn = [slot % placement.num_experts for slot in range(physical)]
    return [
        [expert for experts in rows[layer] for expert in experts] if layer in rows else in_turn
        for layer in range(max(rows) + 1)
    ]


def from_physical_map(
    rows: object, layers: Sequence[int], num_experts: int, ranks: int, model: str, field: str
) -> Placement:
    """The placement that a map gives these layers. Two copies on one rank count as one.

    rows: as they were read, of any type. field: names the map in messages. Raises ConfigError for rows that
    are no such map, and for a layer that lacks an expert.
    """
    if not isinstance(rows, list) or len(rows) <= max(layers):
        got = f"{len(rows)} rows" if isinstance(rows, list) else type(rows).__name__
        raise ConfigError.field(field, got, f"a list with a row for each layer up to {max(layers)}")
    experts_by_layer = {}
    for layer in layers:
        row = rows[layer]
        if not isinstance(row, list) or not row or len(row) % ranks:
            got = f"{len(row)} experts" if isinstance(row, list) else type(row).__name__
            allowed = f"a list of physical experts that {ranks} ranks divide evenly"
            raise ConfigError.field(f"{field}: layer {layer}", got, allowed)
        for expert in row:
            if type(expert) is not int or not 0 <= expert < num_experts:
                raise ConfigError.field(f"{field}: layer {layer}", expert, f"experts 0 to {num_experts - 1}")
        if missing := set(range(num_experts)) - set(row):
            raise ConfigError.field(
                f"{field}: layer {layer}", f"no expert {min(missing)}", "each expert once"
            )
        share = len(row) // ranks
        experts_by_layer[layer] = {
            rank: sorted(set(row[rank * share : (rank + 1) * share])) for rank in range(ranks)
        }
    return Placement(0, num_experts, experts_by_layer, model)
