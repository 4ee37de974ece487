"""Answers on the device beside those of transformers, for every family and every format of weights.

Checkpoints are tiny and random. transformers computes in float32 on the CPU, with the same weights. In
float32 the greedy tokens have to be its own. In 16 bits each token has to be one that transformers scores
almost as high as its own: rounding decides between such tokens.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from scripts.gpu.plan import Found, Work
from tests.models.test_gguf import MIXES, WIDE
from tests.models.test_quantized import CASES as QUANTISED
from tests.models.test_quantized import FORMATS
from tests.support import gguf_files, quantizers, tiny_models
from tests.support.model_configs import CASES, VOCAB

from moesaic import LLM, SamplingParams
from moesaic.models.compressing import compress
from moesaic.testing import byte_tokenizer

LENGTHS, NEW = (1, 17, 40), 8
"""Tokens of each prompt, and of each answer."""
LARGEST_GAP = 0.25
"""In 16 bits: how far a token's score may be below the best one, in standard deviations of the scores."""
COMPRESSED = "compressed"


@dataclass(frozen=True)
class Checkpoint:
    """What moesaic loads, and transformers' model with the same weights in float32."""

    path: Path
    model: Any


def families() -> dict[str, str]:
    """For each family of models the name of its first case."""
    found: dict[str, str] = {}
    for name, (kind, _) in CASES.items():
        found.setdefault(kind, name)
    return {kind: found[kind] for kind in tiny_models.KINDS if kind in found}


def formats() -> list[str]:
    """The formats of weights: quantised checkpoints, types of GGUF files, and compressed experts."""
    return [*FORMATS, *(f"GGUF {mix}" for mix in MIXES), COMPRESSED]


def cases(work: Work) -> Sequence[str]:
    """ "kernels | family or format | type", what matters most first."""
    first, *others = work.kernels
    exact = [(first, one, "float32") for one in (*families(), *formats())]
    types = ("bfloat16", "float16") if work.device == "cuda" else ("bfloat16",)  # no CPU kernels have float16
    rounded = [(first, one, dtype) for dtype in types for one in families()]
    again = [(kernels, *rest) for kernels in others for _, *rest in exact]
    return [" | ".join(one) for one in (*exact, *rounded, *again)]


def written(name: str, dtype: torch.dtype, folder: Path) -> Checkpoint:
    """A checkpoint of a family or in a format, with a tokenizer."""
    source = folder / "source"
    if name in families():
        model = tiny_models.build(*CASES[families()[name]])
        path = plain = tiny_models.save(model, source, dtype)
        reference = model.float()
    elif name == COMPRESSED:
        model = tiny_models.build(*CASES["qwen3"])
        tiny_models.save(model, source, torch.bfloat16)
        byte_tokenizer(source)
        path, plain, reference = folder / "compressed", source, model.float()
        compress(source, path, 1, lambda done, total: None)
    else:
        if name.startswith("GGUF "):
            kind, kinds = MIXES[name.removeprefix("GGUF ")]
            tiny_models.save(tiny_models.build(*WIDE[kind]), source)
            path, plain = gguf_files.write(source, folder / "file", kinds)
        else:
            model = tiny_models.build(*QUANTISED["gpt-oss" if name == "mxfp4" else "qwen3"])
            tiny_models.save(model, source)
            path, plain = quantizers.quantize(source, folder / "form", FORMATS[name])
        load: Any = transformers.AutoModelForCausalLM.from_pretrained
        reference = load(plain, dtype=torch.float32).eval()
    for one in {path, plain}:
        if one.is_dir():
            byte_tokenizer(one)
    return Checkpoint(path, reference)


def run(work: Work, case: str) -> Found:
    """Compare the answers of one checkpoint, with recorded steps and without."""
    kernels, name, dtype = case.split(" | ")
    prompts = [tiny_models.prompt(length, VOCAB, seed=length) for length in LENGTHS]
    ways = {"recorded": {}, "eager": {"enforce_eager": True}} if kernels == "triton" else {"eager": {}}
    with tempfile.TemporaryDirectory() as folder:
        made = written(name, getattr(torch, dtype), Path(folder))
        wanted = [tiny_models.reference_greedy(made.model, prompt, NEW) for prompt in prompts]
        found: Found = {"ok": True, "tokens": NEW * len(prompts)}
        for way, settings in ways.items():
            tokens, info = answers(made.path, work.device, kernels, dtype, prompts, settings)
            found |= {"device": info.device, "dtype": info.dtype}
            found[way] = compared(made.model, prompts, tokens, wanted, dtype)
            found["ok"] = found["ok"] and found[way]["ok"]
    return found


def answers(
    path: Path, device: str, kernels: str, dtype: str, prompts: list[list[int]], settings: dict[str, Any]
) -> tuple[list[list[int]], Any]:
    """Greedy tokens of each prompt, and what the worker says of itself."""
    common: dict[str, Any] = {"max_model_len": 64, "kv_cache_memory": "16MiB", "threads": 1, "dtype": dtype}
    llm = LLM(str(path), device=device, kernels=kernels, **common, **settings)
    params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
    tokens, info = [list(one.outputs[0].token_ids) for one in llm.generate(prompts, params)], llm.info
    del llm
    gc.collect()
    return tokens, info


def compared(
    model: Any, prompts: list[list[int]], found: list[list[int]], wanted: list[list[int]], dtype: str
) -> Found:
    """How many tokens are transformers' own up to the first difference, and the largest gap of a score."""
    equal = sum(common(*pair) for pair in zip(found, wanted, strict=True))
    gap = max(largest_gap(model, *pair) for pair in zip(prompts, found, strict=True))
    exact = equal == sum(map(len, wanted))
    ok = exact if dtype == "float32" else gap <= LARGEST_GAP
    return {"ok": ok, "equal_tokens": equal, "largest_gap": gap}


def common(one: list[int], other: list[int]) -> int:
    """Tokens before the first difference."""
    same = [a == b for a, b in zip(one, other, strict=True)]
    return [*same, False].index(False)


def largest_gap(model: Any, prompt: list[int], tokens: list[int]) -> float:
    """How far the score of a token is below the best one, at most, in standard deviations of the scores."""
    scores = tiny_models.reference_logits(model, prompt + tokens[:-1])[len(prompt) - 1 :]
    chosen = scores.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return float(((scores.amax(1) - chosen) / scores.std(1)).max())
