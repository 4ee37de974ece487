"""Ranks with Triton's kernels on the sanitizer's device: their decode steps are CUDA graphs, and tokens are
those of one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from tests.support import model_configs, pairs, tiny_models
from tests.support.gpu_graphs import graphs
from tests.support.gpu_sanitizer import in_thread, sanitized
from tests.support.graph_peers import GraphPeers, graph_peers
from tests.support.group_placements import recorded, write
from tests.support.thread_groups import group_of_threads
from tests.support.triton_kernels import INTERPRETED

from moesaic import LLM, SamplingParams
from moesaic.collectives.group import Group
from moesaic.config import WorkerConfig
from moesaic.kernels import table
from moesaic.runtime.group import build_rank
from moesaic.runtime.group.device_rows import DeviceRows
from moesaic.runtime.group.recorded_rank import RecordedRank
from moesaic.runtime.group.rows import HostRows, RowCollectives
from moesaic.testing import byte_tokenizer

pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="a GPU compiles what it runs"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of NumPy, in the interpreter
]
TWO = {"num_hidden_layers": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "keys and values": (
        "mixtral",
        model_configs.mixtral(num_attention_heads=4, num_key_value_heads=2, **TWO),
    ),
    "latent": ("deepseek_v2", model_configs.deepseek(n_shared_experts=1, **TWO)),
    "shared experts": ("qwen2_moe", model_configs.qwen2(num_attention_heads=4, num_key_value_heads=2, **TWO)),
}
FORMS = ("all-reduce", "reduce-scatter", "deepspeed", "shuffled")
PROMPTS = [tiny_models.prompt(length, model_configs.VOCAB, seed=length) for length in (1, 2, 3)]
COUNTS = (4, 2, 4)
"""Tokens of each answer: a step has three rows, then two."""


def answers(llm: LLM) -> list[list[int]]:
    params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in COUNTS]
    return [one.outputs[0].token_ids for one in llm.generate(PROMPTS, params)]


def saved(model: str, folder: Path) -> Path:
    path = tiny_models.save(tiny_models.build(*MODELS[model]), folder)
    byte_tokenizer(path)
    return path


def alone(path: Path) -> list[list[int]]:
    return answers(LLM(str(path), threads=1, device="cpu", kernels="reference", max_model_len=64))


@contextmanager
def ranks(path: Path, nccl: bool, size: int = 2, **settings: Any) -> Iterator[tuple[LLM, list[GraphPeers]]]:
    """A group of threads on the device. nccl: graphs can hold its exchanges."""
    ends = graph_peers(size)
    kernels = table.pick("cuda", "triton")

    def connect(config: WorkerConfig, group: Group) -> RowCollectives:
        return DeviceRows(group, ends[group.rank], kernels) if nccl else HostRows(group)

    @contextmanager
    def within() -> Iterator[None]:
        with in_thread(), np.errstate(all="ignore"):
            try:
                yield
            except BaseException:
                ends[0].abort()  # so that the others do not wait for this rank
                raise

    asked = {"max_model_len": 64, "kv_cache_memory": "16MiB", "kernels": "triton", "device": "cuda"}
    with (
        np.errstate(all="ignore"), sanitized(), graphs(), mock.patch.object(build_rank, "connect", connect),
        group_of_threads(str(path), within, tensor_parallel_size=size, **asked, **settings) as (llm, _, _),
    ):  # fmt: skip
        yield llm, ends


CASES = pairs.params(MODELS, FORMS, (True, False), (False, True))


@pytest.mark.parametrize(("model", "form", "nccl", "eager"), CASES)
def test_tokens_are_those_of_one_process(
    model: str, form: str, nccl: bool, eager: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nccl: graphs can hold exchanges of rows. eager: with --enforce-eager."""
    made: list[tuple[int, int]] = []
    record = RecordedRank._record

    def seen(self: RecordedRank, *key: int) -> Any:
        made.append(key)
        return record(self, *key)

    monkeypatch.setattr(RecordedRank, "_record", seen)
    path = saved(model, tmp_path)
    settings: dict[str, Any] = {"moe_collectives": form, "enforce_eager": eager}
    if form == "shuffled":
        greedy = [SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)] * len(PROMPTS)
        settings["placement"] = write(tmp_path, recorded(str(path), PROMPTS, greedy)[1], 2, copies=1)
    wanted = alone(path)
    with ranks(path, nccl, **settings) as (llm, _):
        assert answers(llm) == wanted
    expected = [] if eager or form == "shuffled" else [(4, 1024), (2, 1024)]
    assert sorted(made) == sorted(2 * expected), "both ranks record the same"
