"""Prompts that come back from a disk, for each kind of memory that layers have: the same bits as computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support import model_configs, tiny_models

from moesaic import LLM, SamplingParams
from moesaic.core.errors import ConfigError
from moesaic.core.offload import Offload
from moesaic.kernels import table
from moesaic.testing import byte_tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not table.instruction_sets(), reason="no native kernels in this build"),
]
FAMILIES: dict[str, tuple[str, Any]] = {
    "latent attention": ("deepseek_v3", model_configs.deepseek3),
    "windows": ("gpt_oss", model_configs.gpt_oss),
    "linear attention": ("qwen3_next", model_configs.qwen3_next),
    "short convolutions": ("lfm2_moe", model_configs.lfm2),
}
FIRST = tiny_models.prompt(90, model_configs.VOCAB, seed=1)
PARAMS = SamplingParams(temperature=0.0, max_tokens=40, logprobs=2, ignore_eos=True)


def engine(path: Path, directory: Path | None, **settings: Any) -> LLM:
    stored = {} if directory is None else {"prefix_cache_dir": str(directory)}
    settings = {"max_model_len": 192, "kv_cache_memory": "8MiB", "max_num_seqs": 4} | stored | settings
    return LLM(str(path), threads=1, **settings)


def answer(llm: LLM, prompt: list[int]) -> tuple[int, list[int], object]:
    """How many tokens were in a cache, and all that the bits of the memory decide."""
    (completion,) = llm.generate([prompt], PARAMS)
    output = completion.outputs[0]
    return output.num_cached_tokens, output.token_ids, output.logprobs


@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_goes_on_after_a_restart(family: str, tmp_path: Path) -> None:
    """Its second turn begins with the first one and its answer."""
    kind, make = FAMILIES[family]
    path = tiny_models.save(tiny_models.build(kind, make()), tmp_path / "model")
    byte_tokenizer(path)
    plain = engine(path, None, enable_prefix_caching=False)
    wanted = answer(plain, FIRST)[1:]
    second = [*FIRST, *wanted[0], *range(2, 20)]
    wanted_second = answer(plain, second)[1:]

    llm = engine(path, tmp_path / "disk")
    assert answer(llm, FIRST) == (0, *wanted)
    llm._worker.close()
    llm = engine(path, tmp_path / "disk")
    assert answer(llm, second) == (128, *wanted_second)
    assert llm.stats().stored_prefixes.read_tokens == 128
    assert answer(llm, FIRST)[1:] == wanted


def test_a_model_larger_than_memory_reads_what_one_in_memory_wrote(tmp_path: Path) -> None:
    path = tiny_models.save(tiny_models.build("qwen3_moe", model_configs.qwen3()), tmp_path / "model")
    byte_tokenizer(path)
    wanted = answer(engine(path, None), FIRST)[1:]
    llm = engine(path, tmp_path / "disk")
    assert answer(llm, FIRST) == (0, *wanted)
    llm._worker.close()
    offload = Offload(1 << 30, "cgopipe", micro_batch=2, micro_batches=2, prefill_rows=19)
    streaming = engine(path, tmp_path / "disk", offload=offload, max_num_batched_tokens=64)
    assert answer(streaming, FIRST) == (80, *wanted)


def test_no_snapshots_are_stored_of_a_model_larger_than_memory(tmp_path: Path) -> None:
    path = tiny_models.save(tiny_models.build("lfm2_moe", model_configs.lfm2()), tmp_path / "model")
    byte_tokenizer(path)
    offload = Offload(1 << 30, "cgopipe", micro_batch=2, micro_batches=2, prefill_rows=19)
    with pytest.raises(ConfigError, match="--prefix-cache-dir: got .* nothing with --fast-memory and linear"):
        engine(path, tmp_path / "disk", offload=offload, max_num_batched_tokens=64)
