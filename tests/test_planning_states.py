"""Plans of a model with linear attention: its states are part of the memory, and a worker runs with them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moesaic import LLM, SamplingParams
from moesaic.config import ModelConfig, OffloadConfig, WorkerConfig
from moesaic.core.errors import ConfigError
from moesaic.models import registry
from moesaic.models.kvcache.states import state_bytes
from moesaic.planning import plan
from moesaic.testing import byte_tokenizer
from tests.support import model_configs, tiny_models
from tests.test_planning import HARDWARE, JOB

CONFIGS = {
    "qwen3_next": model_configs.qwen3_next(num_hidden_layers=5, full_attention_interval=5, num_experts=16),
    "lfm2_moe": model_configs.lfm2(
        num_hidden_layers=5, layer_types=["conv"] * 4 + ["full_attention"], num_experts=16
    ),
}
"""Only one of five layers has keys and values, so that a mean over the layers is no whole number."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_planned_worker_has_a_seat_for_each_request(kind: str, tmp_path: Path) -> None:
    path = tiny_models.save(tiny_models.build(kind, CONFIGS[kind]), tmp_path, torch.bfloat16)
    byte_tokenizer(path)
    spec = registry.read_spec(path)
    page, seat = state_bytes(spec.states, len(spec.state_layers))
    found = plan(WorkerConfig(ModelConfig(str(path))), OffloadConfig("4MiB"), JOB, HARDWARE)
    batch, worker = found.worker.scheduler.max_num_seqs, found.worker
    assert found.price.fast["states"] == batch * (page + seat)
    model = LLM(
        str(path),
        threads=1,
        offload=worker.offload,
        max_model_len=worker.model.max_model_len,
        kv_cache_memory=worker.cache.kv_cache_memory,
        max_num_seqs=batch,
        max_num_batched_tokens=worker.scheduler.max_num_batched_tokens,
    )
    assert (model.info.state_seats, model.info.state_snapshots) == (batch, 0)
    prompts = [tiny_models.prompt(9, model_configs.VOCAB, seed=seed) for seed in range(batch)]
    greedy = SamplingParams(temperature=0.0, max_tokens=4)
    wanted = [one.outputs[0].token_ids for one in LLM(str(path), threads=1).generate(prompts, greedy)]
    assert [one.outputs[0].token_ids for one in model.generate(prompts, greedy)] == wanted


@pytest.mark.slow
def test_padding_is_refused(tmp_path: Path) -> None:
    path = tiny_models.save(tiny_models.build("qwen3_next", CONFIGS["qwen3_next"]), tmp_path, torch.bfloat16)
    byte_tokenizer(path)
    found = plan(WorkerConfig(ModelConfig(str(path))), OffloadConfig("4MiB"), JOB, HARDWARE)
    assert found.worker.offload is not None
    offload = replace(found.worker.offload, padded_prompt_len=9)
    with pytest.raises(ConfigError, match="--pad: got 'true'; allowed: false for a model"):
        LLM(str(path), threads=1, offload=offload, max_model_len=16, max_num_seqs=offload.batch)
