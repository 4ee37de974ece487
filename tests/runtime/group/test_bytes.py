"""Payload that the transport counted, against the forms' closed sums, and the shuffled form's locality."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import pytest
from tests.support import model_configs, tiny_models
from tests.support.group_placements import recorded, write
from tests.support.thread_groups import Threads, group_of_threads

from moesaic import SamplingParams
from moesaic.core.metrics import GroupStats
from moesaic.core.placement import Placement
from moesaic.core.profile import Profile, Routes
from moesaic.core.tables import Tables
from moesaic.core.tokens import IntArray
from moesaic.experts.collectives.group import Traffic
from moesaic.experts.collectives.packets import metadata_bytes
from moesaic.policy.placement import predict
from moesaic.policy.placement.shuffle import Align, Shuffle, plan
from moesaic.testing import byte_tokenizer

PROMPT = tiny_models.prompt(24, model_configs.VOCAB, seed=3)
KNOWN = 12
"""Tokens of the prompt that the tables were made of."""
CHUNK = 10
NEW = 3
GREEDY = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)
STEPS = [slice(0, 10), slice(10, 20), slice(20, 24), slice(24, 25), slice(25, 26)]
"""Rows of the steps: the prompt's chunks, then the tokens that are fed back."""
ROWS, HIDDEN, EXPERTS, TOP_K, LAYERS = len(PROMPT) + NEW - 1, 48, 12, 4, 4
WIDTH = 4 * HIDDEN
"""Bytes of a row."""


@dataclass(frozen=True)
class Alone:
    """A checkpoint, and what one process makes of the prompt."""

    path: Path
    answer: list[int]
    routes: Routes
    profile: Profile
    """Of the prompt's beginning."""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    options = model_configs.qwen3(num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=LAYERS)
    path = tiny_models.save(tiny_models.build("qwen3_moe", options), tmp_path_factory.mktemp("model"))
    byte_tokenizer(path)
    [completion], whole = recorded(str(path), [PROMPT], GREEDY)
    _, profile = recorded(str(path), [PROMPT[:KNOWN]], SamplingParams(max_tokens=1, ignore_eos=True))
    assert whole.routes.experts.shape == (ROWS, LAYERS, TOP_K)
    return Alone(path, completion.outputs[0].token_ids, whole.routes, profile)


@dataclass(frozen=True)
class Counted:
    """Of one run."""

    traffic: Traffic
    """Of all ranks together, once all have ended."""
    group: GroupStats
    """Of the first rank."""


def run(alone: Alone, size: int, shared: int, **settings: str) -> Counted:
    """The prompt in chunks, in a group: the tokens of one process."""
    sizes = {"tensor_parallel_size": size, "expert_tensor_parallel_size": shared}
    rows = {"max_num_batched_tokens": CHUNK, "max_num_seqs": 1, "kv_cache_memory": "64MiB"}
    with group_of_threads(str(alone.path), **sizes, **rows, **settings) as (model, _, threads):
        [completion] = model.generate([PROMPT], GREEDY)
        assert completion.outputs[0].token_ids == alone.answer
        group = model.stats().experts.group
    return Counted(total(threads), group)


def total(threads: Threads) -> Traffic:
    ends = [end.traffic for end in threads.ends]
    return Traffic(**{field.name: sum(getattr(end, field.name) for end in ends) for field in fields(Traffic)})


Plans = list[list[Shuffle]]
"""Of each step, of each layer."""


def in_order(size: int) -> Plans:
    """Equal shards in the batch's order."""
    nobody = [np.zeros(step.stop - step.start, dtype=np.int64) for step in STEPS]
    return [[plan(rows, rows, size, "none")] * LAYERS for rows in nobody]


def forecast(tables: Tables, routes: Routes, size: int, align: Align, history: bool = True) -> Plans:
    """What the tables say, given what the gates said in the layers before. history: whether A is asked."""
    shared, plans = size // tables.ranks, []
    for step in STEPS:
        tokens, homes = routes.tokens[step], np.empty((0, step.stop - step.start), dtype=np.int64)
        found = []
        for layer in range(LAYERS):
            past = homes[-2:].T if history and layer >= 2 else None
            ranks, sure = predict.predict(tables, layer, tokens, past)
            turns = np.arange(len(tokens)) % shared
            found.append(plan(ranks * shared + turns, sure, size, align))
            home = predict.device(routes.experts[step, layer], tables.experts[layer], tables.ranks)
            homes = np.concatenate([homes, home[None]])
        plans.append(found)
    return plans


@dataclass
class Exchanged:
    """Of the all-to-alls of a run."""

    there: int = 0
    """Rows, each once to every other rank with a part of its experts."""
    back: int = 0
    """Rows for the pairs with these."""
    metadata: int = 0
    """Bytes."""
    local: int = 0
    """Pairs whose expert is on the first rank, of rows that were gated there."""


def exchanged(routes: Routes, owners: IntArray, plans: Plans, size: int) -> Exchanged:
    """owners: [layers, E] units of the experts, as many ranks in each as make `size`."""
    found, shared = Exchanged(), size // (int(owners.max()) + 1)
    for (step, of_layers), layer in itertools.product(zip(STEPS, plans, strict=True), range(LAYERS)):
        homes, units = of_layers[layer].ranks, owners[layer][routes.experts[step, layer]]
        packets = np.zeros((size, size), dtype=np.int64)
        for home, unit in zip(homes.tolist(), units.tolist(), strict=True):
            asked = [shared * one + part for one in unit for part in range(shared)]
            packets[home, sorted(set(asked))] += 1
            found.back += len([rank for rank in asked if rank != home])
            found.local += asked.count(0) if home == 0 else 0
        others = packets[~np.eye(size, dtype=bool)].tolist()
        found.there += sum(others)
        found.metadata += sum(metadata_bytes(rows, TOP_K * shared) for rows in others)
    return found


SIZES = [pytest.param(*each, marks=pytest.mark.slow) for each in ((2, 1), (4, 1), (4, 2))]
"""Ranks, and those that share an expert."""
ORDERED = ("deepspeed", "all-reduce", "reduce-scatter")


def sums(one: Traffic) -> tuple[int, int, int, int, int]:
    return one.all_reduce, one.reduce_scatter, one.all_gather, one.all_to_all, one.metadata


@pytest.mark.parametrize(("size", "shared"), SIZES)
def test_payload_is_that_of_the_closed_forms(alone: Alone, size: int, shared: int) -> None:
    """Of B rows of S bytes, summed over the ranks: an all-reduce 2 (G - 1) B S, its halves half of that."""
    half, units = LAYERS * (size - 1) * ROWS * WIDTH, size // shared
    owners = np.broadcast_to(np.repeat(np.arange(units), EXPERTS // units), (LAYERS, EXPERTS))
    exchange = exchanged(alone.routes, owners, in_order(size), size)
    pairs = WIDTH * (exchange.there + exchange.back)
    assert exchange.back > exchange.there > 0
    found = {form: run(alone, size, shared, moe_collectives=form) for form in ORDERED}
    counted = {form: sums(one.traffic) for form, one in found.items()}
    assert counted == {
        "deepspeed": (2 * half, 0, half, pairs, exchange.metadata),
        "all-reduce": (4 * half, 0, 0, 0, 0),
        "reduce-scatter": (0, half, half, pairs, exchange.metadata),
    }
    assert found["deepspeed"].group.local_pairs == found["reduce-scatter"].group.local_pairs == exchange.local


@pytest.mark.parametrize("align", ["move", "variable"])
@pytest.mark.parametrize(("size", "shared"), SIZES)
def test_shuffled_payload_is_that_of_the_plan(
    alone: Alone, size: int, shared: int, align: Align, tmp_path: Path
) -> None:
    """Rows are where the tables send them: what is left to send follows, byte for byte."""
    file = write(tmp_path, alone.profile, size // shared)
    tables = Tables.load_for(file, Placement.read(file, size // shared))
    assert tables is not None
    owners, routes = tables.experts.astype(np.int64), alone.routes
    plans = forecast(tables, routes, size, align)
    exchange = exchanged(routes, owners, plans, size)
    without_history = exchanged(routes, owners, forecast(tables, routes, size, align, history=False), size)
    assert exchange != without_history, "table A decides nothing here"
    assert exchange.back < exchanged(routes, owners, in_order(size), size).back
    found = run(alone, size, shared, moe_collectives="shuffled", shuffle_align=align, placement=file)
    half, notes = LAYERS * (size - 1) * ROWS * WIDTH, 4 * (LAYERS - 1) * (size - 1) * ROWS
    pairs = WIDTH * (exchange.there + exchange.back)
    assert sums(found.traffic) == (0, half, half, pairs, exchange.metadata + notes)
    assert found.group.local_pairs == exchange.local
    kept = sum(one.kept for of_layers in plans for one in of_layers)
    assert (found.group.shuffled_rows, found.group.kept_rows) == (LAYERS * ROWS, kept)
    assert (kept == LAYERS * ROWS) == (align == "variable")
