"""A request on the native kernels: the same floats, not only the same tokens, whatever happens around it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moesaic import LLM, RequestOutput, SamplingParams
from moesaic.kernels import table
from tests.support import model_configs, pairs, tiny_models
from tests.support.native_kernels import native_sets
from tests.support.tiny_checkpoints import MODELS, MORE, Written

NEW = 24
SETS = native_sets({*table.INTEGER, "amx_bf16x2"})
CACHES = [
    *MODELS.items(),
    ("qwen3-bias-dense-layers", "int8"),
    *(pytest.param(name, "int8", marks=pytest.mark.slow) for name in ("mixtral-window", "deepseek-full")),
]
"""A case, and the type of its cache."""
FEW_BLOCKS = {"block_size": 4, "max_model_len": 128}
"""With a KV cache of one longest request."""
SETTINGS: dict[str, dict[str, Any]] = {
    "together": {},
    "not recorded": {"enforce_eager": True},
    "on three threads": {"threads": 3},
    "chunks of the prompts": {"max_num_batched_tokens": 11, "max_num_seqs": 5, "block_size": 3},
    "chunks by their price": {"max_num_batched_tokens": 64, "prefill_step_ms": 0.01, "max_num_seqs": 5},
    "no prefix reuse": {"enable_prefix_caching": False, "block_size": 5},
    "blocks run out": {**FEW_BLOCKS, "max_num_batched_tokens": 24, "max_num_seqs": 8},
}

Floats = list[tuple[int, float, list[tuple[int, float]]] | None]


def prompts() -> list[list[int]]:
    """Around block boundaries, past windows; two share 60 tokens."""
    drawn = [tiny_models.prompt(length, model_configs.VOCAB, seed=length) for length in (1, 16, 17, 40, 84)]
    return [*drawn, drawn[-1][:60] + drawn[1]]


def params(index: int) -> SamplingParams:
    """Every second one is sampled, the others are greedy."""
    temperature = 0.8 if index % 2 else 0.0
    return SamplingParams(temperature=temperature, seed=index, max_tokens=NEW, logprobs=3, ignore_eos=True)


def floats(output: RequestOutput) -> tuple[list[int], Floats, Floats]:
    """Tokens and every log-probability of an answer and of its prompt."""

    def of(entries: Any) -> Floats:
        return [None if one is None else (one.token_id, one.logprob, one.top) for one in entries or ()]

    return output.token_ids, of(output.logprobs), of(output.prompt_logprobs)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return Written(tmp_path_factory.mktemp)


def engine(path: Path, cache: str, kernels: str, **settings: Any) -> LLM:
    return LLM(str(path), **{"threads": 1, "kernels": kernels, "kv_cache_dtype": cache, **settings})


def in_turn() -> list[Any]:
    """Each case on the fastest kernels; the others have every third case, and the full tests the rest."""
    names = [getattr(one, "values", (one,))[0] for one in SETS]
    cases = [getattr(one, "values", one) for one in CACHES]
    every = [(*case, name) for case in cases for name in names]
    now = [
        case
        for index, case in enumerate(every)
        if case[2] == names[0] or sum(divmod(index, len(names))) % 3 == 0
    ]
    return pairs.some(every, now)


@pytest.mark.skipif(not table.instruction_sets(), reason="no native kernels in this build")
@pytest.mark.parametrize(("name", "cache", "kernels"), in_turn())
def test_every_logprob_is_the_same_float_whatever_happens_around_a_request(
    checkpoints: dict[str, Path], name: str, cache: str, kernels: str
) -> None:
    path, order = checkpoints[name], range(len(prompts()))
    alone = engine(path, cache, kernels, enable_prefix_caching=False, max_num_seqs=1)
    wanted = [floats(alone.generate([prompts()[i]], params(i))[0].outputs[0]) for i in order]
    for setting, settings in SETTINGS.items():
        if setting == "blocks run out":
            settings = settings | {"kv_cache_memory": str(one_request(path, cache, kernels))}
        llm = engine(path, cache, kernels, **settings)
        for again in (list(order), list(order)[::-1]):  # then backwards, with what the first round cached
            results = llm.generate([prompts()[i] for i in again], [params(i) for i in again])
            for i, result in zip(again, results, strict=True):
                same = floats(result.outputs[0]) == wanted[i]  # pytest would compare them for minutes
                assert same, (setting, i)
        stats = llm.stats()
        assert (stats.preemptions > 0) == (setting == "blocks run out")
        assert (stats.blocks.prefix_hits > 0) == settings.get("enable_prefix_caching", True)


@pytest.mark.slow
@pytest.mark.skipif(not table.instruction_sets(), reason="no native kernels in this build")
@pytest.mark.parametrize("name", MORE)
def test_every_logprob_is_the_same_float_in_other_families(checkpoints: dict[str, Path], name: str) -> None:
    [fastest, *_] = table.instruction_sets()
    test_every_logprob_is_the_same_float_whatever_happens_around_a_request(
        checkpoints, name, MORE[name], fastest
    )


def one_request(path: Path, cache: str, kernels: str) -> int:
    """Bytes of KV that the longest request of FEW_BLOCKS takes."""
    info = engine(path, cache, kernels, **FEW_BLOCKS).info
    blocks = -(-FEW_BLOCKS["max_model_len"] // FEW_BLOCKS["block_size"])
    return info.kv_bytes // info.num_blocks * blocks


@pytest.mark.parametrize("kernels", SETS)
@pytest.mark.parametrize(("name", "cache"), CACHES)
def test_every_logprob_of_a_prompt_is_the_same_float(
    checkpoints: dict[str, Path], name: str, cache: str, kernels: str
) -> None:
    scored = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=2, ignore_eos=True)
    prompt = prompts()[-1]
    alone = engine(checkpoints[name], cache, kernels)
    wanted = floats(alone.generate([prompt], scored)[0].outputs[0])
    llm = engine(checkpoints[name], cache, kernels, max_num_batched_tokens=9, max_num_seqs=4)
    results = llm.generate([prompts()[1], prompt, prompts()[2]], [params(0), scored, params(1)])
    same = floats(results[1].outputs[0]) == wanted
    assert same


@pytest.mark.parametrize("kernels", SETS)
def test_bf16_weights_are_used_as_they_are_stored(checkpoints: dict[str, Path], kernels: str) -> None:
    llm = engine(checkpoints["deepseek-full"], "auto", kernels)
    assert (llm.info.kernels, llm.info.dtype) == (f"native ({kernels})", "bfloat16")
    wide = LLM(str(checkpoints["deepseek-full"]), threads=1, kernels="reference")
    assert wide.info.dtype == "float32" and wide.info.weight_bytes > 1.8 * llm.info.weight_bytes


IN_THREADS = """
import threading
from moesaic import LLM, SamplingParams

params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
prompts = [[1, 2, 3], [9, 8, 7, 6], [5] * 40]

def answers():
    return [result.outputs[0].token_ids for result in LLM("demo", threads=1).generate(prompts, params)]

wanted, wrong = answers(), []

def work():
    for _ in range(4):
        if answers() != wanted:
            wrong.append(1)

threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
raise SystemExit(len(wrong))
"""


@pytest.mark.slow
def test_engines_in_several_threads_do_not_disturb_each_other() -> None:
    done = subprocess.run([sys.executable, "-c", IN_THREADS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
