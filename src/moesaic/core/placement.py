"""The placement: which servers hold which experts, and its file.

Experts are logical: the gate does not know where they are. A server id is never used for another server. As
servers join and leave, ids need not be 0 to n - 1. Servers may hold different numbers of experts
(Expert-as-a-Service, section 4.5), and none of some layers.

The file is JSON:

    {"schema": 1, "model": "moe-6b1f0c2d9a3e", "version": 4, "num_experts": 4, "tables": "tables.npz",
     "layers": {"0": {"0": [0, 1, 2], "7": [2, 3]}, "1": {"0": [0, 1], "7": [2, 3]}}}

Here expert 2 of layer 0 has a copy on server 0 and another one on server 7.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from moesaic.core.errors import ConfigError
from moesaic.core.tokens import IntArray

SCHEMA = 1
FLAG = "--placement"
NO_SERVER = -1
"""Padding of the rows in `Placement.table`: no server."""

_FIELDS = {"schema", "model", "version", "num_experts", "layers"}
_MAX_EXPERTS = 2**20
MAX_EXACT_INTEGER = 2**53
"""Larger integers are not exact in every JSON reader."""


def fingerprint(
    model_type: str, layers: Sequence[int], num_experts: int, hidden: int, width: int, weights: str = ""
) -> str:
    """A short name of a model: one word for the sizes of its experts, and one for its weights.

    layers: the MoE layers.
    hidden: size of a hidden state.
    width: size of an expert's intermediate row.
    weights: fingerprint of the checkpoint (`models.fingerprint`). Empty: any, and the name has no such word.

    Example: ("mixtral", [0, 1], 8, 64, 96) -> "mixtral-26265f2ea0fb".
    """
    sizes = json.dumps([model_type, list(layers), num_experts, hidden, width])
    words = [sizes, weights] if weights else [sizes]
    return "-".join([model_type, *(hashlib.sha256(word.encode()).hexdigest()[:12] for word in words)])


def refuse_model(field: str, got: str, served_model: str) -> None:
    """Raise ConfigError if the names that `fingerprint` gave to two models differ. field: what has `got`."""
    if got != served_model:
        reason = ""
        if got.split("-")[:2] == served_model.split("-")[:2]:
            names_weights = got.count("-") > 1
            reason = (
                " (the sizes are equal, the weights are not)" if names_weights else " (it names no weights)"
            )
        raise ConfigError.field(field, got, f"this model's, {served_model!r}{reason}")


@dataclass(frozen=True)
class Placement:
    """Which servers hold which experts. Immutable: a change makes another placement with a higher version."""

    version: int
    """0 or more. Of two placements the one with the higher version is later."""
    num_experts: int
    """Logical experts of each layer."""
    experts_by_layer: Mapping[int, Mapping[int, Sequence[int]]] = field(hash=False)
    """Layer -> server -> its experts, all ascending. Servers that hold nothing of a layer are left out."""
    model: str = ""
    """Fingerprint of the model that it was made for."""
    tables: str = ""
    """Name of the file with the Tables made with it, in the same directory. Empty if there is none."""

    def __post_init__(self) -> None:
        """Sort `held`. Raises ConfigError for ids that are out of range or listed twice."""
        _check_integer("version", self.version, 0)
        _check_integer("num_experts", self.num_experts, 1, _MAX_EXPERTS)
        experts_by_layer = {
            layer: {
                server: self._sort_experts(layer, server, self.experts_by_layer[layer][server])
                for server in sorted(self.experts_by_layer[layer])
                if len(self.experts_by_layer[layer][server])
            }
            for layer in sorted(self.experts_by_layer)
        }
        object.__setattr__(self, "experts_by_layer", experts_by_layer)

    def _sort_experts(self, layer: int, server: int, experts: Sequence[int]) -> tuple[int, ...]:
        place = f"{FLAG}: layer {layer}, server {server}"
        if layer < 0 or server < 0:
            raise ConfigError.field(FLAG, f"layer {layer}, server {server}", "ids from 0 on")
        for expert in experts:
            if not 0 <= expert < self.num_experts:
                raise ConfigError.field(place, expert, f"experts 0 to {self.num_experts - 1}")
        ordered = tuple(sorted(map(int, experts)))
        for one, other in pairwise(ordered):
            if one == other:
                raise ConfigError.field(place, f"expert {one} twice", "one copy of an expert on a server")
        return ordered

    @classmethod
    def from_stages(
        cls, layers: Sequence[int], num_experts: int, groups: Sequence[Sequence[int]], model: str = ""
    ) -> Placement:
        """A placement in stages: server group i holds the i-th share of the layers and no other layer.

        Within a group the experts are cut into consecutive ranges. Shares differ by at most one, the larger
        ones first. One group is plain expert parallelism. Several are the pipeline placement of Asynchronous
        Expert Parallelism. Raises ConfigError for a group without a layer or a server in two groups.

        Example: layers 0, 1, 2, 4 experts, groups (0, 1) and (2,). Servers 0 and 1 hold experts 0, 1 and 2, 3
        of layers 0 and 1. Server 2 holds all of layer 2.
        """
        servers = [server for group in groups for server in group]
        if not 1 <= len(groups) <= len(layers) or not all(groups):
            raise ConfigError.field("groups", len(groups), f"1 to {len(layers)} groups of 1 server or more")
        if len(set(servers)) < len(servers):
            raise ConfigError.field("groups", servers, "each server once")
        experts_by_layer: dict[int, dict[int, list[int]]] = {}
        for group, share in zip(groups, np.array_split(np.array(layers), len(groups)), strict=True):
            ranges = np.array_split(np.arange(num_experts), len(group))
            for layer in share.tolist():
                experts_by_layer[layer] = {
                    server: mine.tolist() for server, mine in zip(group, ranges, strict=True)
                }
        return cls(0, num_experts, experts_by_layer, model)

    @classmethod
    def read(cls, file: str, servers: int) -> Placement:
        """Read a file for servers 0 to `servers` - 1, each with at least one expert.

        Raises ConfigError with one line.
        """
        try:
            placement = cls.from_json(Path(file).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{FLAG}: {file}: {getattr(error, 'strerror', None) or error}") from error
        for server in sorted(set(placement.servers) ^ set(range(servers))):
            got = f"server {server}" if server in placement.servers else f"nothing for server {server}"
            raise ConfigError.field(FLAG, got, f"experts on each of servers 0 to {servers - 1}, on no other")
        return placement

    # ---- queries

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """The model's MoE layers, ascending."""
        return tuple(self.experts_by_layer)

    @cached_property
    def servers(self) -> tuple[int, ...]:
        """Servers that hold at least one expert, ascending."""
        return tuple(sorted({server for by_server in self.experts_by_layer.values() for server in by_server}))

    @cached_property
    def _tables(self) -> dict[int, IntArray]:
        return {
            layer: _table(by_server, self.num_experts) for layer, by_server in self.experts_by_layer.items()
        }

    def table(self, layer: int) -> IntArray:
        """[E, most] the servers that hold each expert, ascending, padded with NO_SERVER.

        Read-only; most >= 1.
        """
        return self._tables[layer]

    def holders(self, layer: int, expert: int) -> tuple[int, ...]:
        """The servers that hold this expert, ascending."""
        row = self.table(layer)[expert]
        return tuple(row[row != NO_SERVER].tolist())

    def experts_of(self, server: int, layer: int) -> tuple[int, ...]:
        """The experts of a layer that a server holds, ascending."""
        return tuple(self.experts_by_layer[layer].get(server, ()))

    def server_experts(self, server: int) -> dict[int, tuple[int, ...]]:
        """Layer -> the experts that a server holds. Layers without any are left out."""
        return {
            layer: tuple(by_server[server])
            for layer, by_server in self.experts_by_layer.items()
            if server in by_server
        }

    def replicas(self, layer: int) -> IntArray:
        """[E] number of copies of each expert."""
        copies: IntArray = (self.table(layer) != NO_SERVER).sum(axis=1, dtype=np.int64)
        return copies

    def orphans(self, excluded_servers: Collection[int] = ()) -> list[tuple[int, int]]:
        """(layer, expert) pairs that no server holds, not counting the servers in `excluded_servers`,
        ascending."""
        missing = []
        for layer, by_server in self.experts_by_layer.items():
            left = {
                e for server, experts in by_server.items() if server not in excluded_servers for e in experts
            }
            missing += [(layer, expert) for expert in range(self.num_experts) if expert not in left]
        return missing

    @property
    def is_complete(self) -> bool:
        """Whether a server holds every expert of every layer."""
        return not self.orphans()

    def with_layer(self, layer: int | None) -> Placement:
        """The placement with this layer too. One that it lacks is placed as the layer before it.

        Files name the layers of the model's tokens, and not one that only drafts some.
        """
        earlier_layers = [one for one in self.layers if layer is not None and one < layer]
        if layer is None or layer in self.experts_by_layer or not earlier_layers:
            return self
        return replace(
            self, experts_by_layer={**self.experts_by_layer, layer: self.experts_by_layer[earlier_layers[-1]]}
        )

    def check(self, fingerprint: str, layers: Sequence[int], num_experts: int) -> None:
        """Raise ConfigError if the placement was made for another model, or lacks an expert."""
        refuse_model(f"{FLAG}: model", self.model, fingerprint)
        if self.num_experts != num_experts:
            raise ConfigError.field(f"{FLAG}: num_experts", self.num_experts, str(num_experts))
        for layer in sorted(set(self.layers) ^ set(layers)):
            problem = f"layer {layer}" if layer in self.experts_by_layer else f"no layer {layer}"
            raise ConfigError.field(f"{FLAG}: layers", problem, f"the model's MoE layers, {ranges(layers)}")
        for layer, expert in self.orphans():
            raise ConfigError.field(f"{FLAG}: layer {layer}, expert {expert}", 0, "1 server or more holds it")

    # ---- the file

    def to_json(self) -> str:
        """The text of the file, with one line per layer, so that diff can compare versions."""
        head: dict[str, Any] = {"schema": SCHEMA, "model": self.model, "version": self.version}
        head |= {"tables": self.tables} if self.tables else {}
        fields = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in head.items()]
        rows = [f'  "{layer}": {json.dumps(by_server)}' for layer, by_server in self.experts_by_layer.items()]
        fields += [f'"num_experts": {self.num_experts}', '"layers": {\n' + ",\n".join(rows) + "\n}"]
        return "{" + ",\n".join(fields) + "}\n"

    @classmethod
    def from_json(cls, text: str) -> Placement:
        """Parse the text of `to_json`, or an edited one. Raises ConfigError with one line that names the
        field.

        It does not compare the model, which `check` does.
        """
        try:
            data = json.loads(text, object_pairs_hook=_parse_object)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{FLAG}: not JSON: {error}") from error
        data = _object("the file", data)
        _check_integer("schema", data.get("schema"), SCHEMA, SCHEMA)
        if set(data) not in (_FIELDS, _FIELDS | {"tables"}):
            allowed = f"{', '.join(sorted(_FIELDS))}, and tables"
            raise ConfigError.field(f"{FLAG}: fields", sorted(data), allowed)
        for name in ("model", "tables"):
            if not isinstance(data.get(name, ""), str):
                raise ConfigError.field(f"{FLAG}: {name}", data[name], "a string")
        _check_integer("version", data["version"], 0)
        _check_integer("num_experts", data["num_experts"], 1, _MAX_EXPERTS)
        experts_by_layer = {
            _id("layers", layer): _servers(f"layer {layer}", by_server)
            for layer, by_server in _object("layers", data["layers"]).items()
        }
        tables = data.get("tables", "")
        placement = cls(data["version"], data["num_experts"], experts_by_layer, data["model"], tables)
        placement.check(placement.model, placement.layers, placement.num_experts)
        return placement


def _table(by_server: Mapping[int, Sequence[int]], num_experts: int) -> IntArray:
    rows: list[list[int]] = [[] for _ in range(num_experts)]
    for server, experts in by_server.items():
        for expert in experts:
            rows[expert].append(server)
    table = np.full((num_experts, max(1, *map(len, rows))), NO_SERVER, dtype=np.int64)
    for expert, servers in enumerate(rows):
        table[expert, : len(servers)] = servers
    table.setflags(write=False)
    return table


def count_copies(num_experts: int, redundant: int, min_replicas: int) -> int:
    """Copies of experts that a layer has, if enough servers hold them.

    >>> count_copies(24, redundant=4, min_replicas=1), count_copies(24, redundant=4, min_replicas=2)
    (28, 48)
    """
    return max(num_experts + redundant, num_experts * min_replicas)


def ranges(numbers: Sequence[int]) -> str:
    """A short form of one or more numbers. Example: (0, 1, 2, 5, 7, 8) -> "0-2, 5, 7-8"."""
    runs = np.split(np.array(sorted(numbers)), np.flatnonzero(np.diff(sorted(numbers)) != 1) + 1)
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _parse_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Raises ConfigError if a name is given twice."""
    parsed = dict(pairs)
    if len(parsed) < len(pairs):
        names = [name for name, _ in pairs]
        repeated_name = next(name for name in names if names.count(name) > 1)
        raise ConfigError.field(FLAG, f"{repeated_name!r} twice in one object", "each name once")
    return parsed


def _object(place: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError.field(f"{FLAG}: {place}", type(value).__name__, "a JSON object")
    return value


def _servers(place: str, value: Any) -> dict[int, list[int]]:
    """Parse a layer of the file: server -> experts."""
    by_server = {}
    for name, experts in _object(place, value).items():
        odd = (
            [expert for expert in experts if type(expert) is not int]
            if isinstance(experts, list)
            else [experts]
        )
        if odd:
            raise ConfigError.field(f"{FLAG}: {place}, server {name}", odd[0], "a list of expert numbers")
        by_server[_id(place, name)] = experts
    return by_server


def _id(place: str, text: str) -> int:
    if not re.fullmatch("0|[1-9][0-9]{0,6}", text):
        raise ConfigError.field(f"{FLAG}: {place}", text, "whole numbers as names, such as '0'")
    return int(text)


def _check_integer(name: str, value: Any, minimum: int, maximum: int = MAX_EXACT_INTEGER) -> None:
    if type(value) is not int or not minimum <= value <= maximum:
        span = str(minimum) if minimum == maximum else f"a whole number from {minimum} to {maximum}"
        raise ConfigError.field(f"{FLAG}: {name}", value, span)
