"""Checkpoints for tests on a GPU, or on one that is none, and which of the slow tests `make test` runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.support import gpu_cases

COVER = {
    "a step of the engine": "test_engine.py::test_answers_are_those_of_the_cpu",
    "no kernels of Triton on a CPU": "test_llm_triton.py::test_a_cpu_outside_of_the_interpreter_is_refused",
    "attention": "triton/test_attention.py::test_attention",
    "collectives": "triton/test_collectives.py::test_launches_of_a_collective",
    "rows of collectives": "triton/test_collectives.py::test_rows_move_as_in_the_reference",
    "sums of collectives": "triton/test_collectives.py::test_sums_have_the_bits_of_the_reference",
    "the gated delta rule": "triton/test_delta.py::test_steps_agree_with_the_reference",
    "convolutions": "triton/test_delta.py::test_a_convolution_alone",
    "experts": "triton/test_experts.py::test_types",
    "quantised experts": "triton/test_experts.py::test_quantised",
    "quantised matrices": "triton/test_experts.py::test_quantised_matrices",
    "dense layers": "triton/test_experts.py::test_gated_mlp",
    "the gate": "triton/test_gate.py::test_rules",
    "rotary embeddings": "triton/test_rows.py::test_rope",
    "merges": "triton/test_rows.py::test_merge",
    "norms": "triton/test_rows.py::test_norms",
    "the KV cache": "triton/test_rows.py::test_store",
    "an exchange of two processes": "triton/test_exchange_processes.py::test_a_server_of_another_process"
    "_answers_the_kernels",
    "graphs of shared attention": "test_attention_graphs.py::test_every_rank_replays_what_it_would_compute",
    "graphs of ranks": "test_rank_graphs.py::test_tokens_are_those_of_one_process",
    "calls by CUDA IPC": "test_device_calls.py::test_tokens_are_those_of_the_host",
    "graphs that ask servers": "test_nvshmem_graphs.py::test_a_placement_that_changes_between_steps",
    "rows of ranks": "test_rows.py::test_no_row_goes_to_the_host",
    "ranks": "test_group.py::test_tokens_are_those_of_one_process",
    "expert servers": "test_servers.py::test_a_worker_on_a_gpu_asks_servers_on_the_cpu",
    "offloading": "test_offload.py::test_tokens_are_those_of_the_model_in_memory",
    "`make gpu`": "test_make_gpu.py::test_a_case_that_fails_costs_no_other_one",
}
"""What only a GPU runs -> the slow test whose first case `make test` runs. The other slow ones are of `make
full`: nobody without a GPU reaches their code. On a real GPU none is left out."""
REAL = ("test_cuda.py", "test_cuda_calls.py", "test_cuda_rows.py")
"""Tests that are skipped without a real GPU."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as full what COVER leaves out, unless this machine has a GPU."""
    if torch.cuda.is_available():
        return
    covered, folder = set(COVER.values()), Path(__file__).parent
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if folder not in item.path.parents or item.path.name in REAL or "slow" not in marks:
            continue
        name = f"{item.path.relative_to(folder)}::{getattr(item, 'originalname', item.name)}"
        if name in covered and "full" not in marks:
            covered.remove(name)
        else:
            item.add_marker(pytest.mark.full)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Where the checkpoint of a model of `cases` lies."""
    known: dict[str, Path] = {}

    def path(name: str) -> Path:
        if name not in known:
            known[name] = tmp_path_factory.mktemp(name)
            gpu_cases.write(name, known[name])
        return known[name]

    return path
