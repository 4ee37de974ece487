from __future__ import annotations

import dataclasses
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.core.errors import ConfigError
from moesaic.core.placement import Placement, fingerprint

FILE = """{"schema": 1, "model": "mixtral-6b1f0c2d9a3e", "version": 4, "num_experts": 4,
     "layers": {"0": {"0": [0, 1, 2], "7": [2, 3]}, "1": {"0": [0, 1], "7": [2, 3]}}}"""
"""The example of the module's docstring."""


def edited(**changes: object) -> str:
    return json.dumps(json.loads(FILE) | changes)


def test_worked_example() -> None:
    placement = Placement.from_json(FILE)
    assert (placement.version, placement.num_experts, placement.layers) == (4, 4, (0, 1))
    assert placement.servers == (0, 7)
    assert placement.holders(0, 2) == (0, 7) and placement.holders(1, 2) == (7,)
    assert placement.experts_of(7, 0) == (2, 3) and placement.experts_of(3, 0) == ()
    assert placement.server_experts(0) == {0: (0, 1, 2), 1: (0, 1)} and placement.server_experts(3) == {}
    assert placement.replicas(0).tolist() == [1, 1, 2, 1]
    assert placement.table(0).tolist() == [[0, -1], [0, -1], [0, 7], [7, -1]]
    assert placement.table(1).tolist() == [[0], [0], [7], [7]]
    assert placement.is_complete
    assert placement.orphans(excluded_servers={7}) == [(0, 3), (1, 2), (1, 3)]


def test_tables_are_made_once_and_cannot_be_written() -> None:
    placement = Placement.from_json(FILE)
    assert placement.table(0) is placement.table(0)
    with pytest.raises(ValueError, match="read-only"):
        placement.table(0)[0, 0] = 5


def test_experts_without_a_holder() -> None:
    placement = Placement(0, 3, {2: {9: [1]}, 5: {}})
    assert not placement.is_complete
    assert placement.layers == (2, 5) and placement.servers == (9,)
    assert placement.orphans() == [(2, 0), (2, 2), (5, 0), (5, 1), (5, 2)]
    assert placement.holders(2, 0) == () and placement.holders(2, 1) == (9,)
    assert placement.table(5).tolist() == [[-1], [-1], [-1]]
    assert placement.replicas(5).tolist() == [0, 0, 0]


def test_order_and_empty_servers_make_no_difference() -> None:
    one = Placement(1, 4, {1: {7: [3, 2], 0: [1, 0]}, 0: {0: (2, 0, 1, 3), 5: ()}})
    other = Placement(1, 4, {0: {0: [0, 1, 2, 3]}, 1: {0: [0, 1], 7: [2, 3]}})
    assert one == other and hash(one) == hash(other) and one.to_json() == other.to_json()
    assert one.layers == (0, 1) and list(one.experts_by_layer[1]) == [0, 7]
    assert type(one.experts_of(0, 1)[0]) is int


def test_stages_worked_example() -> None:
    """Three layers over two stages: two servers share layers 0 and 1, the third holds all of layer 2."""
    placement = Placement.from_stages([0, 1, 2], 4, [(0, 1), (2,)])
    assert placement.experts_by_layer == {
        0: {0: (0, 1), 1: (2, 3)},
        1: {0: (0, 1), 1: (2, 3)},
        2: {2: (0, 1, 2, 3)},
    }
    assert placement.is_complete and placement.server_experts(2) == {2: (0, 1, 2, 3)}


@given(
    st.lists(st.integers(0, 90), min_size=1, max_size=9, unique=True),
    st.integers(1, 9),
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
)
def test_stages_hold_every_expert_once(layers: list[int], num_experts: int, sizes: list[int]) -> None:
    sizes = sizes[: len(layers)]
    ends = np.cumsum([0, *sizes]).tolist()
    groups = [range(10 + one, 10 + other) for one, other in pairwise(ends)]
    placement = Placement.from_stages(layers, num_experts, groups)
    assert placement.layers == tuple(sorted(layers))
    stage_layers = [0] * len(groups)
    for layer in layers:
        assert placement.replicas(layer).tolist() == [1] * num_experts
        (stage,) = {
            i for i, group in enumerate(groups) if set(placement.experts_by_layer[layer]) <= set(group)
        }
        stage_layers[stage] += 1
        counts = [len(placement.experts_of(server, layer)) for server in groups[stage]]
        assert max(counts) - min(counts) <= 1
    assert max(stage_layers) - min(stage_layers) <= 1


@pytest.mark.parametrize("groups", [[], [(0,), (1,), (2,)], [(0,), ()]])
def test_a_stage_has_a_layer_and_a_server(groups: list[tuple[int, ...]]) -> None:
    with pytest.raises(ConfigError, match="^groups: got .*; allowed: 1 to 2 groups of 1 server or more"):
        Placement.from_stages([0, 1], 4, groups)


def test_a_server_is_in_one_stage() -> None:
    with pytest.raises(ConfigError, match="^groups: got .*; allowed: each server once"):
        Placement.from_stages([0, 1], 4, [(0, 1), (1,)])


# ---- the file


@pytest.mark.slow
@given(
    st.integers(1, 5).flatmap(
        lambda experts: st.dictionaries(
            st.integers(0, 60),
            st.dictionaries(st.integers(0, 2**20), st.sets(st.integers(0, experts - 1)), max_size=4).map(
                lambda by_server: {3: range(experts)} | {k: sorted(v) for k, v in by_server.items() if k != 3}
            ),
            min_size=1,
            max_size=4,
        ).map(lambda held: Placement(7, experts, held, "m"))
    )
)
def test_what_is_written_is_read(placement: Placement) -> None:
    again = Placement.from_json(placement.to_json())
    assert again == placement and again.experts_by_layer == placement.experts_by_layer


def test_the_file_has_a_line_for_each_layer() -> None:
    lines = Placement.from_json(FILE).to_json().splitlines()
    assert lines[-3:] == [
        '  "0": {"0": [0, 1, 2], "7": [2, 3]},',
        '  "1": {"0": [0, 1], "7": [2, 3]}',
        "}}",
    ]


def test_tables_are_named_where_there_are_any() -> None:
    assert '"tables"' not in Placement.from_json(FILE).to_json()
    placement = Placement.from_json(edited(tables="here.npz"))
    assert placement.tables == "here.npz" and Placement.from_json(placement.to_json()) == placement


BAD = [
    ("[1, 2", "not JSON: Expecting"),
    ("[" * 100_000, "not JSON: "),
    ("[]", "the file: got 'list'; allowed: a JSON object"),
    ("{}", "schema: got None; allowed: 1"),
    (edited(schema=2), "schema: got 2; allowed: 1"),
    (edited(schema=True), "schema: got True; allowed: 1"),
    (
        edited(more="x"),
        "fields: got .*'more'.*; allowed: layers, model, num_experts, schema, version, and tables",
    ),
    (edited(tables=5), "tables: got 5; allowed: a string"),
    (edited(model=None), "model: got None; allowed: a string"),
    (edited(version=-1), "version: got -1; allowed: a whole number from 0 "),
    (edited(num_experts=4.0), "num_experts: got 4.0; allowed: a whole number from 1 "),
    (edited(num_experts=10**9), "num_experts: got 1000000000; allowed: "),
    (edited(layers=[]), "layers: got 'list'; allowed: a JSON object"),
    (edited(layers={"x": {}}), "layers: got 'x'; allowed: whole numbers"),
    (edited(layers={"-1": {}}), "layers: got '-1'; allowed: whole numbers"),
    (edited(layers={"0": []}), "layer 0: got 'list'; allowed: a JSON object"),
    (edited(layers={"0": {"01": [0]}}), "layer 0: got '01'; allowed: whole numbers"),
    (edited(layers={"0": {"1": 5}}), "layer 0, server 1: got 5; allowed: a list of expert numbers"),
    (
        edited(layers={"0": {"1": [0, True]}}),
        "layer 0, server 1: got True; allowed: a list of expert numbers",
    ),
    (edited(layers={"0": {"1": [0, 4]}}), "layer 0, server 1: got 4; allowed: experts 0 to 3"),
    (edited(layers={"0": {"1": [0, -1]}}), "layer 0, server 1: got -1; allowed: experts 0 to 3"),
    (edited(layers={"3": {"1": [0, 2, 0]}}), "layer 3, server 1: got 'expert 0 twice'; allowed: one copy"),
    (edited(layers={"0": {"1": [0, 1, 3]}}), "layer 0, expert 2: got 0; allowed: 1 server or more holds it"),
    (edited(layers={"0": {}}), "layer 0, expert 0: got 0; allowed: 1 server or more holds it"),
    (FILE.replace('"7"', '"0"', 1), ".*'0' twice in one object.*; allowed: each name once"),
]


@pytest.mark.parametrize(("text", "message"), BAD, ids=[message[:40] for _, message in BAD])
def test_a_bad_file_gets_one_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^--placement: {message}") as caught:
        Placement.from_json(text)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


def test_a_file_for_another_model_is_refused() -> None:
    placement = Placement.from_json(FILE)
    name = "mixtral-6b1f0c2d9a3e"
    placement.check(name, (0, 1), 4)
    with pytest.raises(
        ConfigError, match=f"^--placement: model: got '{name}'; allowed: this model's, 'other'"
    ):
        placement.check("other", (0, 1), 4)
    weighed = dataclasses.replace(placement, model=f"{name}-0123456789ab")
    weighed.check(f"{name}-0123456789ab", (0, 1), 4)
    for one, why in (
        (weighed, "the sizes are equal, the weights are not"),
        (placement, "it names no weights"),
    ):
        with pytest.raises(ConfigError, match=rf"^--placement: model: got '{one.model}'.* \({why}\)$"):
            one.check(f"{name}-ba9876543210", (0, 1), 4)
    with pytest.raises(ConfigError, match="^--placement: num_experts: got 4; allowed: 8"):
        placement.check(name, (0, 1), 8)
    with pytest.raises(ConfigError, match="^--placement: layers: got 'layer 0'; .* MoE layers, 1-3, 7"):
        placement.check(name, (7, 1, 2, 3), 4)
    with pytest.raises(ConfigError, match="^--placement: layers: got 'no layer 2'; .* MoE layers, 0-2"):
        placement.check(name, (0, 1, 2), 4)
    with pytest.raises(ConfigError, match="^--placement: layer 1, expert 0: got 0; "):
        dataclasses.replace(placement, experts_by_layer={0: {0: range(4)}, 1: {}}).check(name, (0, 1), 4)


@pytest.mark.parametrize("groups", [[(0, 1, 2)], [(0, 1), (2,)]], ids=["every layer", "staged"])
def test_a_file_is_for_as_many_servers_as_are_served(tmp_path: Path, groups: list[tuple[int, ...]]) -> None:
    made = Placement.from_stages([0, 1], 4, groups, "moe-x")
    file = tmp_path / "p.json"
    file.write_text(made.to_json())
    assert Placement.read(str(file), 3) == made
    with pytest.raises(
        ConfigError, match="^--placement: got 'server 2'; allowed: .* servers 0 to 1, on no other$"
    ):
        Placement.read(str(file), 2)
    words = "got 'nothing for server 3'; allowed: experts on each of servers 0 to 3, on no other"
    with pytest.raises(ConfigError, match=f"^--placement: {words}$"):
        Placement.read(str(file), 4)


@pytest.mark.parametrize(
    ("version", "held"),
    [(-1, {}), (0, {0: {0: [4]}}), (0, {0: {0: [0, 0]}}), (0, {-1: {0: [0]}}), (0, {0: {-1: [0]}})],
)
def test_what_cannot_be_is_refused(version: int, held: dict[int, dict[int, list[int]]]) -> None:
    with pytest.raises(ConfigError, match="^--placement: "):
        Placement(version, 4, held)


def test_fingerprints_are_stable_and_tell_sizes_apart() -> None:
    assert fingerprint("mixtral", [0, 1], 8, 64, 96) == "mixtral-26265f2ea0fb"
    names = {
        fingerprint("mixtral", [0, 1], 8, 64, 96),
        fingerprint("qwen3_moe", [0, 1], 8, 64, 96),
        fingerprint("mixtral", (0, 1, 2), 8, 64, 96),
        fingerprint("mixtral", (0, 2), 8, 64, 96),
        fingerprint("mixtral", (0, 1), 16, 64, 96),
        fingerprint("mixtral", (0, 1), 8, 128, 96),
        fingerprint("mixtral", (0, 1), 8, 64, 192),
        fingerprint("mixtral", (0, 1), 8, 64, 96, "a.b.c"),
        fingerprint("mixtral", (0, 1), 8, 64, 96, "a.b.d"),
    }
    assert len(names) == 9
    assert fingerprint("mixtral", range(2), 8, 64, 96) in names
