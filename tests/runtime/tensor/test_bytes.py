"""Payload that the transport counted, against the forms' closed sums, and the shuffled form's locality."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from tests.models import cases, tiny
from tests.runtime.tensor.threads import Threads, group_of_threads

from moesaic import LLM, SamplingParams
from moesaic.collectives.group import Traffic
from moesaic.core.profile import Profile, Routes
from moesaic.core.routing import Assembly, Rows
from moesaic.core.tokens import IntArray
from moesaic.models import registry
from moesaic.policy import predict
from moesaic.policy.cocluster.tokens import labelled
from moesaic.testing import byte_tokenizer

PROMPT = tiny.prompt(24, cases.VOCAB, seed=3)
ONE = SamplingParams(max_tokens=1, ignore_eos=True)
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
HIDDEN, EXPERTS, LAYERS = 48, 12, 3
WIDTH = 4 * HIDDEN
"""Bytes of a row."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = cases.qwen3(num_attention_heads=4, num_key_value_heads=4)
    made = tiny.save(tiny.build("qwen3_moe", options), tmp_path_factory.mktemp("model"))
    byte_tokenizer(made)
    return made


@pytest.fixture(scope="module")
def routes(path: Path) -> Routes:
    """Of the prompt, by one process."""
    seen: list[Rows] = []
    LLM(str(path), threads=1, routing=seen.append).generate([PROMPT], ONE)
    assembly = Assembly(registry.read_spec(path).routed, 1 << 20)
    for rows in seen:
        assembly.add(rows)
    return assembly.take()[1]


def traffic(path: Path, size: int, form: str, placement: Path | None = None) -> Traffic:
    """Of all ranks together, for the prompt, once all have ended."""
    more = {} if placement is None else {"placement": str(placement)}
    with group_of_threads(str(path), tensor_parallel_size=size, moe_collectives=form, **more) as made:
        model, _, threads = made
        model.generate([PROMPT], ONE)
    return total(threads)


def total(threads: Threads) -> Traffic:
    ends = [end.traffic for end in threads.ends]
    return Traffic(**{field.name: sum(getattr(end, field.name) for end in ends) for field in fields(Traffic)})


def all_to_all(routes: Routes, owners: IntArray, homes: IntArray) -> int:
    """Bytes: a row once to each other rank with experts of it, and a row back for each of those pairs.

    owners: [layers, E] ranks of the experts. homes: [layers, n] where each row was gated.
    """
    there = back = 0
    for layer in range(LAYERS):
        for row, ids in enumerate(routes.experts[:, layer]):
            ranks = [
                int(owners[layer, expert]) for expert in ids if owners[layer, expert] != homes[layer, row]
            ]
            there, back = there + len(set(ranks)), back + len(ranks)
    return WIDTH * (there + back)


@pytest.mark.parametrize("size", [2, 4])
def test_payload_is_that_of_the_closed_forms(path: Path, routes: Routes, size: int) -> None:
    """Of B rows of S bytes, summed over the ranks: an all-reduce 2 (G - 1) B S, its halves half of that."""
    half = LAYERS * (size - 1) * len(PROMPT) * WIDTH
    owners = np.broadcast_to(np.repeat(np.arange(size), EXPERTS // size), (LAYERS, EXPERTS))
    homes = np.broadcast_to(np.repeat(np.arange(size), len(PROMPT) // size), (LAYERS, len(PROMPT)))
    exchange = all_to_all(routes, owners, homes)
    assert exchange > 0
    found = {form: traffic(path, size, form) for form in ("deepspeed", "all-reduce", "reduce-scatter")}
    counted = {
        form: (one.all_reduce, one.reduce_scatter, one.all_gather, one.all_to_all)
        for form, one in found.items()
    }
    assert counted == {
        "deepspeed": (2 * half, 0, half, exchange),
        "all-reduce": (4 * half, 0, 0, 0),
        "reduce-scatter": (0, half, half, exchange),
    }


@pytest.mark.parametrize("align", ["move", "variable"])
def test_shuffled_rows_meet_their_experts(path: Path, routes: Routes, tmp_path: Path, align: str) -> None:
    """A profile of the very prompt: where nothing has to move, rows go where most of their experts are."""
    spec = registry.read_spec(path)
    profile = Profile.of_routes(spec.routed.model, spec.vocab_size, EXPERTS, spec.moe_layers, routes)
    experts = np.stack([np.random.default_rng(layer).permutation(EXPERTS) % 2 for layer in range(LAYERS)])
    clusters = labelled(profile, experts.astype(np.int16))
    predict.build(profile, clusters).save(tmp_path / "tables.npz")
    placed = clusters.placement(profile.layers, profile.model, tables="tables.npz")
    (tmp_path / "placement.json").write_text(placed.to_json())
    settings = {"tensor_parallel_size": 2, "placement": str(tmp_path / "placement.json")}
    wanted = LLM(str(path), threads=1).generate([PROMPT], GREEDY)
    pairs: dict[str, tuple[int, int]] = {}
    for form in ("reduce-scatter", "shuffled"):
        with group_of_threads(str(path), moe_collectives=form, shuffle_align=align, **settings) as made:
            model, _, threads = made
            [found] = model.generate([PROMPT], GREEDY)
            assert found.outputs[0].token_ids == wanted[0].outputs[0].token_ids
        pairs[form] = total(threads).all_to_all, total(threads).all_gather
    assert pairs["shuffled"][0] < pairs["reduce-scatter"][0]
    assert pairs["shuffled"][1] == pairs["reduce-scatter"][1] > 0
