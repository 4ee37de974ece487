"""Every model through the whole engine: transformers' tokens and probabilities, whatever happens around."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moesaic import LLM, RequestOutput, SamplingParams
from moesaic.testing import byte_tokenizer
from tests.support import model_configs, pairs, tiny_models

NEW = 32
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True, logprobs=0)
MODELS = {
    "mixtral-window": model_configs.CASES["mixtral-window"],
    "mixtral-k1-window-yarn": (
        "mixtral",
        model_configs.mixtral(num_experts_per_tok=1, sliding_window=16, rope_parameters=model_configs.YARN),
    ),
    "qwen3-bias-dense-layers": model_configs.CASES["qwen3-bias-dense-layers"],
    "qwen3-window-yarn-k8": model_configs.QWEN3_WINDOW_YARN_K8,
    "deepseek-lite-yarn": model_configs.CASES["deepseek-lite-yarn"],
    "deepseek-full": model_configs.CASES["deepseek-full"],
    "olmoe": model_configs.CASES["olmoe-clip-bias-gqa"],
    "qwen2": model_configs.CASES["qwen2-windows-odd-heads"],
}  # fmt: skip
FEW_BLOCKS = {"block_size": 4, "max_model_len": 148}
"""With a KV cache of one longest request."""
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one at a time": {"max_num_seqs": 1},
    "chunks, blocks of one token": {"max_num_batched_tokens": 11, "max_num_seqs": 5, "block_size": 1},
    "no prefix reuse": {"enable_prefix_caching": False, "block_size": 5},
    "blocks run out": {**FEW_BLOCKS, "max_num_batched_tokens": 24, "max_num_seqs": 8},
}
ONCE = {
    "mixtral-k1-window-yarn": "no prefix reuse",
    "qwen3-window-yarn-k8": "chunks, blocks of one token",
    "olmoe": "blocks run out",
    "qwen2": "chunks, blocks of one token",
}
"""Of these models the other settings are left to the full matrices."""
ON_REFERENCE = ("mixtral-window", "qwen3-window-yarn-k8", "deepseek-full")
"""Also tried with the kernels of a GPU, and of an install without a compiler: each setting with one of them,
in the full matrices with all."""


def prompts() -> list[list[int]]:
    """Of one token, around block boundaries, past windows and original contexts; two share 60 tokens."""
    drawn = [
        tiny_models.prompt(length, model_configs.VOCAB, seed=length) for length in (1, 15, 16, 17, 33, 84)
    ]
    return [*drawn, drawn[-1][:60] + drawn[1]]


class Reference:
    """A checkpoint, and what transformers makes of `prompts`."""

    def __init__(self, name: str, path: Path) -> None:
        kind, options = MODELS[name]
        model = tiny_models.build(kind, options)
        self.path = tiny_models.save(model, path)
        byte_tokenizer(path)  # nothing is asked of it but to be there
        self.tokens = [tiny_models.reference_greedy(model, prompt, NEW) for prompt in prompts()]
        self.logprobs = [
            _taken(tiny_models.reference_logits(model, prompt + tokens), len(prompt), tokens)
            for prompt, tokens in zip(prompts(), self.tokens, strict=True)
        ]


def _taken(logits: torch.Tensor, start: int, tokens: list[int]) -> torch.Tensor:
    """Log-probabilities [NEW] of `tokens`, which stand from position `start` on."""
    rows = torch.log_softmax(logits[start - 1 : -1], dim=-1)
    return rows.gather(1, torch.tensor(tokens)[:, None])[:, 0]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    """Filled as the tests ask."""

    class Lazy(dict[str, Reference]):
        def __missing__(self, name: str) -> Reference:
            self[name] = Reference(name, tmp_path_factory.mktemp(name))
            return self[name]

    return Lazy()


def slow_or_full(model: str, setting: str) -> Any:
    return pytest.mark.slow if ONCE.get(model, setting) == setting else pairs.REST


def _matrix() -> list[Any]:
    """Model, setting, kernels."""
    fastest = [
        pytest.param(
            model,
            setting,
            "auto",
            marks=slow_or_full(model, setting),
        )
        for model in MODELS
        for setting in SETTINGS
    ]
    return fastest + [
        pytest.param(model, setting, "reference", marks=pytest.mark.slow if row == col % 3 else pairs.REST)
        for row, model in enumerate(ON_REFERENCE)
        for col, setting in enumerate(SETTINGS)
    ]


def _compare(outputs: list[RequestOutput], wanted: Reference, order: list[int]) -> None:
    for output, index in zip(outputs, order, strict=True):
        assert output.token_ids == wanted.tokens[index]
        assert output.logprobs is not None
        found = torch.tensor([entry.logprob for entry in output.logprobs])
        scale = wanted.logprobs[index].abs().clamp(min=1.0)
        assert ((found - wanted.logprobs[index]).abs() / scale).max() < 1e-4


@pytest.mark.parametrize(("model", "setting", "kernels"), _matrix())
def test_tokens_and_logprobs_are_those_of_transformers(
    references: dict[str, Reference], model: str, setting: str, kernels: str
) -> None:
    wanted, settings = references[model], SETTINGS[setting]
    if setting == "blocks run out":
        settings = settings | {"kv_cache_memory": str(_one_request(wanted.path))}
    llm = LLM(str(wanted.path), threads=1, kernels=kernels, **settings)
    assert kernels == "auto" or llm.info.kernels == "reference (torch)"
    order = list(range(len(prompts())))
    for _ in range(2):  # the second time backwards, with what the first one cached
        results = llm.generate([prompts()[index] for index in order], GREEDY)
        _compare([result.outputs[0] for result in results], wanted, order)
        order.reverse()
    stats = llm.stats()
    assert (
        stats.blocks.num_used == 0
        and stats.blocks.num_free + stats.blocks.num_cached == stats.blocks.num_total
    )
    assert (stats.preemptions > 0) == (setting == "blocks run out")
    assert (stats.blocks.prefix_hits > 0) == settings.get("enable_prefix_caching", True)


def _one_request(path: Path) -> int:
    """Bytes of KV that the longest request of FEW_BLOCKS takes."""
    info = LLM(str(path), threads=1, **FEW_BLOCKS).info
    blocks = -(-FEW_BLOCKS["max_model_len"] // FEW_BLOCKS["block_size"])
    return info.kv_bytes // info.num_blocks * blocks
