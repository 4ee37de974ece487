"""`moesaic serve --fast-memory` divides memory by the requests that are there, and stays under its cap."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tests.commands.test_run_batch_offload import MACHINE
from tests.commands.test_serve_offload import BESIDE, LARGE, asked, libraries, peak, serving
from tests.support import model_configs, tiny_models
from tests.support.processes import children
from tests.test_serve import Server

from moesaic import LLM, SamplingParams
from moesaic.kernels import table
from moesaic.testing import byte_tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not table.instruction_sets(), reason="no native kernels in this build"),
]

SIZES = {**LARGE, "head_dim": 32, "num_attention_heads": 8, "num_key_value_heads": 4}
"""8 KiB of keys and values a token, and 6 MiB for an expert of each layer."""
CAP, LENGTH, CLIENTS, TOKENS = 90, 160, 16, 60
FLAGS = (
    *("--max-num-seqs", str(CLIENTS), "--max-model-len", str(LENGTH), "--offload-schedule", "on-demand"),
    *("--micro-batch-size", str(CLIENTS), "--micro-batches", "1"),
)
RESIDENTS, CHANGES = "moesaic:resident_experts{}", "moesaic:memory_divisions_total{}"
PATIENCE = 240.0
"""Seconds in which memory is divided anew at the latest."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("divided") / "model"
    folder.mkdir()
    tiny_models.save(tiny_models.build("qwen3_moe", model_configs.qwen3(**SIZES)), folder, torch.bfloat16)
    byte_tokenizer(folder)
    (folder.parent / "this.toml").write_text(MACHINE)
    return folder


def prompts() -> list[list[int]]:
    return [tiny_models.prompt(20 + index, model_configs.VOCAB, seed=index) for index in range(CLIENTS)]


def blocks(metrics: dict[str, float]) -> float:
    """KV blocks that the cache has now."""
    return sum(metrics[f'moesaic:kv_blocks{{,state="{state}"}}'] for state in ("free", "cached", "used"))


def answers(server: Server, clients: int) -> list[str]:
    """One client asks twice, and many ask once each."""
    asking = prompts()[: max(2, clients)]
    with ThreadPoolExecutor(clients) as pool:
        return list(pool.map(lambda prompt: asked(server, prompt, TOKENS).choices[0].text, asking))


def ask_until(server: Server, clients: int, done: Callable[[dict[str, float]], bool]) -> list[list[str]]:
    """Asks again and again until /metrics says `done`."""
    found, deadline = [answers(server, clients)], time.monotonic() + PATIENCE
    while not done(server.metrics()) and time.monotonic() < deadline:
        found.append(answers(server, clients))
    return found


def test_experts_give_way_to_many_clients_and_come_back_for_one(path: Path) -> None:
    own = libraries()
    with serving(path, *FLAGS, cap=f"{CAP}MiB") as server:
        [worker] = children(server.process.pid, "moesaic.runtime")
        planned = server.metrics(until=lambda found: blocks(found) > 0)
        first = ask_until(server, 1, lambda found: found[CHANGES] > 0)
        alone = server.metrics()
        assert alone[RESIDENTS] >= planned[RESIDENTS] + 3
        assert blocks(alone) < blocks(planned) / 4
        many = ask_until(server, CLIENTS, lambda found: blocks(found) > blocks(planned) / 2)
        crowded = server.metrics()
        assert blocks(crowded) > blocks(planned) / 2 and crowded[RESIDENTS] < alone[RESIDENTS]
        again = ask_until(server, 1, lambda found: found[RESIDENTS] > crowded[RESIDENTS])
        assert server.metrics()[RESIDENTS] > crowded[RESIDENTS]
        most = peak(worker)
    assert most < own + CAP + BESIDE, f"{most:.0f} MiB, libraries {own:.0f} MiB"
    llm = LLM(str(path), threads=1, max_model_len=LENGTH)
    params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    wanted = [result.outputs[0].text for result in llm.generate(prompts(), params)]
    assert all(found == wanted[: len(found)] for found in [*first, *many, *again])


def test_a_fixed_division_stays(path: Path) -> None:
    with serving(path, *FLAGS, "--memory-division", "fixed", cap=f"{CAP}MiB") as server:
        planned = server.metrics(until=lambda found: blocks(found) > 0)
        answers(server, 1)
        after = server.metrics(until=lambda found: found["moesaic:generation_tokens_total{}"] > 0)
    assert after[CHANGES] == 0 and after[RESIDENTS] == planned[RESIDENTS] > 0
    assert blocks(after) == blocks(planned)
