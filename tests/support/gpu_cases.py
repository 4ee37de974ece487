"""What is tried on a GPU, and on the sanitizer where there is none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from moesaic import LLM, RequestOutput, SamplingParams
from moesaic.testing import byte_tokenizer
from tests.support import model_configs, tiny_models

NEW = 12
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral-window": model_configs.CASES["mixtral-window"],
    "qwen3-bias-dense-layers": model_configs.CASES["qwen3-bias-dense-layers"],
    "qwen3-window-yarn-k8": model_configs.QWEN3_WINDOW_YARN_K8,
    "deepseek-lite-yarn": model_configs.CASES["deepseek-lite-yarn"],
    "deepseek-full": model_configs.CASES["deepseek-full"],
}
"""Between them: windows, YaRN, norms of heads, biases, dense layers, both kinds of latent attention, shared
experts and a choice that is limited to groups."""
FEW_BLOCKS: dict[str, Any] = {"block_size": 4, "max_model_len": 80}
"""With a KV cache of one longest request."""
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"max_num_batched_tokens": 11, "max_num_seqs": 5, "block_size": 1},
    "no prefix reuse": {"enable_prefix_caching": False, "mmap": False, "block_size": 5},
    "blocks run out": {**FEW_BLOCKS, "max_num_batched_tokens": 24, "max_num_seqs": 8},
}


def prompts() -> list[list[int]]:
    """Of one token, around block boundaries, past windows and original contexts; the last two share 40."""
    drawn = [
        tiny_models.prompt(length, model_configs.VOCAB, seed=length) for length in (1, 15, 16, 17, 33, 60)
    ]
    return [*drawn, drawn[-1][:40] + drawn[1]]


def requests(new: int) -> list[SamplingParams]:
    """One for each prompt: every way to sample, greedy ones between."""
    common: dict[str, Any] = {"max_tokens": new, "ignore_eos": True}
    return [
        SamplingParams(temperature=0.0, logprobs=2, **common),
        SamplingParams(seed=1, top_p=0.9, logprobs=0, **common),
        SamplingParams(seed=2, top_k=9, min_p=0.05, frequency_penalty=0.7, presence_penalty=-0.4, **common),
        SamplingParams(temperature=0.0, repetition_penalty=1.3, logit_bias={3: 1.5, 40: -2.0}, **common),
        SamplingParams(
            seed=3, temperature=1.4, logprobs=5, stop_token_ids=[5, 6], min_tokens=new // 3, **common
        ),
        SamplingParams(temperature=0.0, prompt_logprobs=3, **common),
        SamplingParams(seed=4, n=2, top_p=0.5, top_k=30, repetition_penalty=0.8, **common),
    ]


def write(name: str, path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """A checkpoint of MODELS in `path`, and the model of transformers that it is of."""
    model = tiny_models.build(*MODELS[name])
    tiny_models.save(model, path, dtype)
    byte_tokenizer(path)  # nothing is asked of it but to be there
    return model


def one_request(path: Path, **settings: Any) -> str:
    """Bytes of KV that the longest request of FEW_BLOCKS takes."""
    info = LLM(str(path), threads=1, device="cpu", kernels="reference", **FEW_BLOCKS, **settings).info
    return str(info.kv_bytes // info.num_blocks * -(-FEW_BLOCKS["max_model_len"] // FEW_BLOCKS["block_size"]))


def answers(llm: LLM, new: int = NEW) -> list[list[RequestOutput]]:
    """Of all prompts; then of all backwards, with what the first ones left in the cache."""
    wanted = list(zip(prompts(), requests(new), strict=True))
    found = []
    for several in (wanted, wanted[::-1]):
        told = llm.generate([prompt for prompt, _ in several], [params for _, params in several])
        found += [completion.outputs for completion in told]
    return found


def tokens(found: list[list[RequestOutput]]) -> list[list[list[int]]]:
    return [[output.token_ids for output in outputs] for outputs in found]


Operation = Callable[[str], object]
"""What it does with a device."""


def _ones(device: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device=device)


def _ids(device: str, *ids: int) -> torch.Tensor:
    return torch.tensor(ids, device=device)


def _attention(rows: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(rows, rows, rows, attn_mask=mask)


ALLOWED: dict[str, Operation] = {
    "a scalar of the CPU": lambda d: _ones(d, 3) * torch.tensor(2.0),
    "a scalar of the CPU, in place": lambda d: _ones(d, 3).add_(torch.tensor(2.0)),
    "a number": lambda d: _ids(d, 7, 8) // 2,
    "CPU indices": lambda d: _ones(d, 3)[_ids("cpu", 0, 2)],
    "a CPU mask": lambda d: _ones(d, 2)[torch.tensor([True, False])],
    "a list": lambda d: _ones(d, 3)[[0, 2]],
    "a scalar of the CPU put in places": lambda d: _ones(d, 3).index_put_((_ids(d, 0),), torch.tensor(2.0)),
    "a CPU tensor into a slice": lambda d: _ones(d, 3).__setitem__(slice(2), _ones("cpu", 2)),
    "a copy to it": lambda d: _ones(d, 3).copy_(_ones("cpu", 3)),
    "a copy from it": lambda d: _ones("cpu", 3).copy_(_ones(d, 3)),
    "a scalar of the CPU to fill with": lambda d: _ones(d, 3).masked_fill_(
        _ones(d, 3) > 0, torch.tensor(2.0)
    ),
    "numpy by the way of the CPU": lambda d: _ones(d, 3).cpu().numpy(),
    "lists": lambda d: _ones(d, 3).tolist(),
    "a product": lambda d: _ones(d, 2, 3) @ _ones(d, 3, 2),
}
REFUSED: dict[str, Operation] = {
    "a sum": lambda d: _ones(d, 3) + _ones("cpu", 3),
    "a sum in place": lambda d: _ones("cpu", 3).add_(_ones(d, 3)),
    "its scalar in a sum of the CPU": lambda d: _ones("cpu", 3) + _ones(d),
    "its scalar in a scalar of the CPU": lambda d: _ones("cpu").add_(_ones(d)),
    "a concatenation": lambda d: torch.cat([_ones(d, 3), _ones("cpu", 3)]),
    "a product with a CPU tensor": lambda d: _ones(d, 2, 3) @ _ones("cpu", 3, 2),
    "a projection": lambda d: functional.linear(_ones("cpu", 2, 3), _ones(d, 4, 3)),
    "an embedding": lambda d: functional.embedding(_ids("cpu", 0), _ones(d, 4, 3)),
    "rows by CPU indices": lambda d: _ones(d, 3).index_select(0, _ids("cpu", 0)),
    "numbers by CPU indices": lambda d: _ones(d, 3).gather(0, _ids("cpu", 0)),
    "a copy to CPU indices": lambda d: _ones(d, 3).index_copy_(0, _ids("cpu", 0), _ones(d, 1)),
    "a copy of CPU rows": lambda d: _ones(d, 3).index_copy_(0, _ids(d, 0), _ones("cpu", 1)),
    "its indices into the CPU": lambda d: _ones("cpu", 3)[_ids(d, 0)],
    "CPU numbers put in places": lambda d: _ones(d, 3).index_put_((_ids(d, 0, 1),), _ones("cpu", 2)),
    "a CPU mask to fill by": lambda d: _ones(d, 3).masked_fill(_ones("cpu", 3) > 0, 0.0),
    "a CPU mask to choose by": lambda d: torch.where(_ones("cpu", 3) > 0, _ones(d, 3), _ones(d, 3)),
    "a CPU mask of attention": lambda d: _attention(_ones(d, 1, 1, 4, 8), _ones("cpu", 1, 1, 4, 4) > 0),
    "a search": lambda d: torch.searchsorted(_ones(d, 3), _ones("cpu", 1)),
}
"""Each with a RuntimeError."""


def copies_are_copies(device: str) -> None:
    """What is written on one side does not show on the other."""
    array = np.zeros(2)
    there = torch.from_numpy(array).to(device)
    array[:] = 1
    here = there.cpu()
    there += 5
    assert here.tolist() == [0, 0] and there.tolist() == [5, 5]


def views_are_views(device: str) -> None:
    """What is written to a part shows in the whole, in every type."""
    whole = torch.zeros(2, 4, device=device)
    whole[1].index_copy_(0, _ids(device, 3), _ones(device, 1))
    whole.flatten(0, 1)[:1].add_(2)
    assert whole.tolist() == [[2, 0, 0, 0], [0, 0, 0, 1]]
    assert whole.view(torch.int32)[0, 0].item() == np.float32(2).view(np.int32)
    assert whole.contiguous().data_ptr() == whole.data_ptr() != whole.clone().data_ptr()


def results_decide(device: str) -> None:
    """Operations whose results' sizes depend on the numbers, and branches."""
    ids = _ids(device, 2, 0, 2)
    assert torch.bincount(ids, minlength=4).tolist() == [1, 0, 2, 0]
    assert torch.unique(ids).tolist() == [0, 2] and ids.nonzero().flatten().tolist() == [0, 2]
    assert bool((ids == 2).any()) and int(ids[0]) == 2 and len(ids[ids > 0]) == 2
    assert [one.device.type for one in (ids, ids.cpu(), ids.to("cpu").to(ids.device))] == [
        "cuda",
        "cpu",
        "cuda",
    ]


FACTS: tuple[Operation, ...] = (copies_are_copies, views_are_views, results_decide)
