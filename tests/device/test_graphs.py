"""Decode steps that are recorded as CUDA graphs, on the sanitizer's device and with Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support import model_configs, pairs, tiny_models
from tests.support.drafting import Oracle
from tests.support.gpu_graphs import Graph, graphs, record
from tests.support.gpu_sanitizer import WAITS, sanitized
from tests.support.triton_kernels import INTERPRETED

from moesaic import LLM, SamplingParams
from moesaic.runtime.step import graphs as module
from moesaic.testing import byte_tokenizer

pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="a GPU compiles what it runs"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of NumPy, in the interpreter
]
FAMILIES = ("lfm2", *(pytest.param(one, marks=pairs.REST) for one in ("deepseek-full", "qwen3-next")))
PROMPTS = [tiny_models.prompt(length, model_configs.VOCAB, seed=length) for length in (1, 2, 3)]


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    with np.errstate(all="ignore"), sanitized(), graphs():
        yield


def answers(folder: Path, counts: list[int], **settings: Any) -> list[list[int]]:
    """Answers of different lengths, so that a step gets fewer rows from time to time."""
    model = LLM(str(folder), threads=1, max_model_len=64, **settings)
    params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in counts]
    return [one.outputs[0].token_ids for one in model.generate(PROMPTS[: len(counts)], params)]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_steps_give_the_tokens_of_the_reference(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[int, int]] = []
    record_step = module.GraphRunner._record

    def seen(self: Any, rows: int, longest: int, recorder: Any) -> Any:
        made.append((rows, longest))
        return record_step(self, rows, longest, recorder)

    monkeypatch.setattr(module.GraphRunner, "_record", seen)
    byte_tokenizer(tiny_models.save(tiny_models.build(*model_configs.CASES[family]), tmp_path))
    counts = [3, 2, 3]
    found = answers(tmp_path, counts, kernels="triton", device="cuda")
    assert made == [(4, 1024), (2, 1024)], "three rows are padded to four; then there are two"
    assert found == answers(tmp_path, counts, kernels="reference", device="cpu")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "recorded"), [("deepseek-full", True), pytest.param("lfm2", False, marks=pairs.REST)]
)
def test_steps_with_drafted_tokens_are_recorded_as_rows_of_their_own(
    tmp_path: Path, family: str, recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences have one to three rows a step. Steps of a model with states are not recorded."""
    replayed: list[tuple[int, int]] = []
    run = module.GraphRunner._run

    def seen(self: Any, batch: Any, memory: Any) -> Any:
        replayed.append((batch.num_rows, batch.num_sequences))
        return run(self, batch, memory)

    monkeypatch.setattr(module.GraphRunner, "_run", seen)
    byte_tokenizer(tiny_models.save(tiny_models.build(*model_configs.CASES[family]), tmp_path))
    counts = [4, 3, 4]
    wanted = answers(tmp_path, counts, kernels="reference", device="cpu")
    oracle = Oracle(zip(PROMPTS, wanted, strict=True), right=0.7, seed=1)
    monkeypatch.setattr("moesaic.runtime.drafting.drafter_of", lambda config: oracle)
    drafts = {"method": "ngram", "num_speculative_tokens": 2}
    found = answers(tmp_path, counts, kernels="triton", device="cuda", speculative_config=drafts)
    assert found == wanted
    drafted = [rows for rows, sequences in replayed if rows > sequences]
    assert bool(drafted) == recorded, replayed


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
