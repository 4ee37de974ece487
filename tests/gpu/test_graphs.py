"""Decode steps that are recorded as CUDA graphs, on the sanitizer's device and with Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tests.support import model_configs, pairs, tiny_models
from tests.support.delta_steps import BLOCK, STATES, Inputs, Layer
from tests.support.drafting import Oracle
from tests.support.gpu_graphs import Graph, graphs, record
from tests.support.gpu_sanitizer import WAITS, sanitized
from tests.support.triton_kernels import IS_INTERPRETED, TRITON
from torch import nn

from moesaic import LLM, SamplingParams
from moesaic.core.tokens import IntArray
from moesaic.gpu.graphs import graphs as module
from moesaic.gpu.graphs.graph_inputs import GraphInputs
from moesaic.kernels.batch import AttentionBatch
from moesaic.kernels.states import StateSizes
from moesaic.runtime.step.step_kind import Kind
from moesaic.testing import byte_tokenizer

pytestmark = [
    pytest.mark.skipif(not IS_INTERPRETED, reason="a GPU compiles what it runs"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of NumPy, in the interpreter
]
FAMILIES = ("lfm2", *(pytest.param(one, marks=pairs.REST) for one in ("deepseek-full", "qwen3-next")))
LONE = replace(StateSizes.of_convolution(40, 3), max_draft_tokens=2)
STEPS = (
    ([(0, 3), (1, 1), (2, 2)], [2, 0, 1]),
    ([(0, 3), (2, 3)], [0, 0, 1]),
    ([(2, 1), (1, 3), (0, 2)], [1, 2, 0]),
    ([(1, 2)], [0, 0, 0]),
)
"""Rows of each sequence, and how many of them are wrong drafts. The first one comes to 64 tokens."""
PROMPTS = [tiny_models.prompt(length, model_configs.VOCAB, seed=length) for length in (1, 2, 3)]


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    with np.errstate(all="ignore"), sanitized(), graphs():
        yield


def loaded(folder: Path, **settings: Any) -> LLM:
    return LLM(str(folder), threads=1, max_model_len=96, **settings)


def said(model: LLM, prompts: list[list[int]], counts: list[int]) -> list[list[int]]:
    """Answers of different lengths, so that a step gets fewer rows from time to time."""
    params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in counts]
    return [one.outputs[0].token_ids for one in model.generate(prompts, params)]


def kinds_recorded(monkeypatch: pytest.MonkeyPatch) -> list[Kind]:
    """What recordings are made from now on."""
    made: list[Kind] = []
    record_step = module.GraphRunner._record

    def seen(self: Any, kind: Kind, recorder: Any) -> Any:
        made.append(kind)
        return record_step(self, kind, recorder)

    monkeypatch.setattr(module.GraphRunner, "_record", seen)
    return made


class Replayed(NamedTuple):
    """A step that was replayed."""

    rows: int
    sequences: int
    kind: Kind


def steps_replayed(monkeypatch: pytest.MonkeyPatch) -> list[Replayed]:
    """Each step that is replayed from now on."""
    replayed: list[Replayed] = []
    fill = GraphInputs.fill

    def seen(self: Any, batch: Any) -> Any:
        replayed.append(Replayed(batch.num_rows, batch.num_sequences, self.kind))
        return fill(self, batch)

    monkeypatch.setattr(GraphInputs, "fill", seen)
    return replayed


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_steps_give_the_tokens_of_the_reference(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = kinds_recorded(monkeypatch)
    byte_tokenizer(tiny_models.save(tiny_models.build(*model_configs.CASES[family]), tmp_path))
    counts = [3, 2, 3]
    found = said(loaded(tmp_path, kernels="triton", device="cuda"), PROMPTS, counts)
    assert made == [(4, 1024, False), (2, 1024, False)], "three rows are padded to four; then there are two"
    assert found == said(loaded(tmp_path, kernels="reference", device="cpu"), PROMPTS, counts)


REST = ("qwen3-next", "qwen3.5", "qwen3-next-dense-layers-odd-heads")
DRAFTED = ("lfm2", "deepseek-full", *(pytest.param(one, marks=pairs.REST) for one in REST))
STATELESS = {"deepseek-full"}


class Erring(Oracle):
    """Every fourth token of a sequence is drafted wrong, all others right."""

    def propose(self, tokens: IntArray, max_tokens: int) -> list[int]:
        drafted = super().propose(tokens, max_tokens)
        return [token ^ (at % 4 == 0) for at, token in enumerate(drafted, len(tokens))]


@pytest.mark.slow
@pytest.mark.parametrize("family", DRAFTED)
def test_steps_with_drafted_tokens_are_recorded(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sequence has one to three rows a step. Nothing is drafted for the last prompt.

    States are written to a page at 64 tokens. With states, steps in which a sequence has several rows have
    recordings of their own, and other steps those of a model without drafts.
    """
    byte_tokenizer(tiny_models.save(tiny_models.build(*model_configs.CASES[family]), tmp_path))
    first = PROMPTS[0] if family in STATELESS else tiny_models.prompt(60, model_configs.VOCAB, seed=60)
    prompts, counts = [first, *PROMPTS[1:]], [7, 4, 2]
    wanted = said(loaded(tmp_path, kernels="reference", device="cpu"), prompts, counts)
    oracle = Erring(list(zip(prompts, wanted, strict=True))[:2], right=1.0)
    monkeypatch.setattr("moesaic.runtime.drafting.make_drafter", lambda config: oracle)
    drafts = {"method": "ngram", "num_speculative_tokens": 2}
    steps = steps_replayed(monkeypatch)
    model = loaded(tmp_path, kernels="triton", device="cuda", speculative_config=drafts)
    assert said(model, prompts, counts) == wanted
    speculation = model.stats().speculation
    assert 0 < speculation.accepted_tokens < speculation.draft_tokens
    drafted = [step for step in steps if step.rows > step.sequences]
    assert len(drafted) > 1 and any(step.kind.rows > step.rows for step in drafted)
    assert {step.kind.has_sequences_of_several_rows for step in drafted} == {family not in STATELESS}
    steps.clear()
    assert said(model, prompts[2:], counts[2:]) == wanted[2:]
    assert steps == [(1, 1, (1, 1024, False))]


class OnDevice(Layer):
    """Layers with states on the device. inputs: of a recording, in which the rows are padded."""

    def __init__(self, given: Inputs, inputs: Any = None) -> None:
        super().__init__(TRITON, given)
        self.states = replace(self.states, **{name: getattr(self.states, name).cuda() for name in STATES})
        self.padded = inputs

    def compute(self, rows: torch.Tensor, gates: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        there, more = AttentionBatch.build(batch.batch, BLOCK, "cuda"), 0
        if self.padded is not None:
            self.padded.fill(batch.batch)
            there, more = self.padded.attention, len(self.padded.token_ids) - len(rows)
        rows, gates = (
            nn.functional.pad(one, (0, 0, 0, more), value=torch.nan).cuda() for one in (rows, gates)
        )
        weight, decay, bias = (
            one.cuda() for one in (self.inputs.weight, self.inputs.decay, self.inputs.bias)
        )
        found = TRITON.convolve(rows, weight, self.states, there)
        if self.states.sizes.value_heads:
            found = TRITON.delta(found, gates, decay, bias, self.states, there)
        return found[: batch.batch.num_rows].cpu()


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", [StateSizes(1, 2, 8, 40, 3, max_draft_tokens=2), LONE], ids=["delta", "convolution"]
)
def test_states_after_drafted_tokens_are_those_of_the_step_without_padding(sizes: StateSizes) -> None:
    """To the last bit. Some rows do not count, and then others take their places."""
    given = Inputs(sizes, [70, 70, 70])
    padded = GraphInputs(Kind(8, 1024, has_sequences_of_several_rows=True), 1, BLOCK, torch.device("cuda", 0))
    layers = OnDevice(given), OnDevice(given, padded)
    for layer in layers:
        layer.padded, kept = None, layer.padded
        layer.step([(0, 60), (1, 9)])
        layer.padded = kept
    for pieces, wrong in STEPS:
        found = [torch.cat(layer.step(pieces)) for layer in layers]
        assert torch.equal(*found) and not found[0].isnan().any()
        for name in STATES:
            one, other = (getattr(layer.states, name).cpu().nan_to_num(7.0) for layer in layers)
            assert torch.equal(one, other), name
        for layer in layers:
            layer.done = [done - less for done, less in zip(layer.done, wrong, strict=True)]


# ---- the stand-in's graphs


def test_a_replay_reads_what_is_there_then() -> None:
    given, weight = torch.ones(2, 3, device="cuda"), torch.full((3, 3), 2.0, device="cuda")
    graph = Graph()
    with record(graph):
        result = torch.relu(given @ weight)[:, :2].add_(1.0)
    assert result.isnan().all(), "nothing is computed while it is recorded"
    for number in (1.0, 5.0, -3.0):
        given.fill_(number)
        graph.replay()
        assert torch.equal(result.cpu(), torch.full((2, 2), max(6 * number, 0.0) + 1))


REFUSED = {
    "waits": lambda there: there.sum().item(),
    "reads back": lambda there: there.cpu(),
    "reads the host": lambda there: there.copy_(torch.ones(4)),
    "brings an array": lambda there: there + torch.tensor([1.0, 2.0, 3.0, 4.0]).to("cuda"),
    "counts": lambda there: there[there > 0],
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_recording_must_not(what: str) -> None:
    there = torch.ones(4, device="cuda")
    says = "not permitted when stream is capturing"
    with torch.inference_mode(), pytest.raises(RuntimeError, match=says), record(Graph()):
        REFUSED[what](there)
        there + 1  # what was counted is told at the next operation, if not at once


def test_results_that_nobody_keeps_are_gone_after_another_replay() -> None:
    pool = torch.cuda.graph_pool_handle()
    there, first, second = torch.ones(4, device="cuda"), Graph(), Graph()
    with record(first, pool):
        kept = there + 1
        lost = (there + 2).numbers
    with record(second, pool):
        other = there + 3
    for graph in (first, second):
        graph.replay()
    assert float(kept.sum()) == 8 and float(other.sum()) == 16 and lost.isnan().all()
    assert WAITS.of
