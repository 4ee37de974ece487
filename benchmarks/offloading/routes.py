"""Records which experts a model chose, and which ones its next router would have chosen early.

The prompts are sections of the project's documentation and files of its code, each in a request of its own.
For each token it keeps the chosen experts of all layers. It also keeps the experts that the router of each
layer chooses from the rows that the router of the layer before got, under its own norm.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from moesaic import LLM, SamplingParams
from moesaic.core.routing import END_POSITION, Rows
from moesaic.models.block import DecoderBlock
from moesaic.models.model import Model

ROOT = Path(__file__).resolve().parents[2]
SECTION = 400
"""Characters of a prompt."""
TEMPERATURE, SEED = 0.7, 1
"""Of the sampling. Greedy answers of small models go round in circles, which any cache finds."""
Experts = npt.NDArray[np.int16]


@dataclass(frozen=True)
class Request:
    """The routes of one request, prompt and answer."""

    prompt: int
    """Tokens of the prompt."""
    tokens: npt.NDArray[np.int32]
    """[t]"""
    experts: Experts
    """[t, layers, k] best first."""
    early: Experts
    """[t, layers, k] by the rows of the layer before; -1 in the first layer."""


@dataclass(frozen=True)
class Recording:
    """The routes of one model."""

    num_experts: int
    requests: tuple[Request, ...]

    def save(self, path: Path) -> None:
        """Write a .npz file."""
        arrays: dict[str, Any] = {"num_experts": self.num_experts, "count": len(self.requests)}
        for number, request in enumerate(self.requests):
            arrays |= {f"{name}{number}": value for name, value in vars(request).items()}
        np.savez_compressed(path, **arrays)

    @classmethod
    def load(cls, path: Path) -> Recording:
        """Read a file of `save`."""
        with np.load(path) as arrays:
            requests = [
                Request(
                    int(arrays[f"prompt{number}"]),
                    *(arrays[f"{name}{number}"] for name in ("tokens", "experts", "early")),
                )
                for number in range(int(arrays["count"]))
            ]
            return cls(int(arrays["num_experts"]), tuple(requests))


class Watcher:
    """A router that also asks the next layer's router about its rows."""

    def __init__(self, block: DecoderBlock, following: DecoderBlock, found: list[Experts]) -> None:
        assert block.router is not None and following.router is not None
        self._router, self._following, self._found = block.router, following.router, found
        self._scale = following.post_norm.float() / block.post_norm.float()

    def choose(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self._found.append(self._following.choose(rows * self._scale)[0].numpy().astype(np.int16))
        return self._router.choose(rows)


def record(
    model: str,
    prompts: list[str],
    new_tokens: int,
    temperature: float = TEMPERATURE,
    max_model_len: int = 1024,
) -> Recording:
    """Answer each prompt alone, and record the routes."""
    rows: list[Rows] = []
    flags: dict[str, Any] = {"enable_prefix_caching": False, "enforce_eager": True, "max_num_seqs": 1}
    llm = LLM(model, routing=rows.append, max_model_len=max_model_len, **flags)
    early = _watch(llm._worker._executor._model)  # no public name leads to the model in a process
    params = SamplingParams(max_tokens=new_tokens, temperature=temperature, seed=SEED, ignore_eos=True)
    requests = []
    for prompt in prompts:
        rows.clear()
        for found in early.values():
            found.clear()
        llm.generate([prompt], params)
        requests.append(_request(rows, early))
    return Recording(llm.info.num_experts, tuple(requests))


def list_prompts(count: int) -> list[str]:
    """Beginnings of sections of docs/, and of modules, in turn. Each is of another page or module."""
    pages = sorted((ROOT / "docs").glob("*.md"))
    sections = [re.split(r"\n## ", page.read_text("utf-8"))[-1].split("\n", 1)[-1] for page in pages]
    modules = sorted((ROOT / "src/moesaic").glob("*/*.py"), key=lambda path: path.name)
    codes = [path.read_text("utf-8") for path in modules if path.stat().st_size > 2 * SECTION]
    texts = [text.strip()[:SECTION] for pair in zip(sections, codes, strict=False) for text in pair]
    return [text for text in texts if len(text) == SECTION][:count]


def _watch(model: Model) -> dict[int, list[Experts]]:
    """Put watchers before the routers. Returns layer -> what its router said early."""
    blocks, found = list(model.blocks), {}
    routed = [layer for layer, block in enumerate(blocks) if block.is_routed]
    for layer, following in itertools.pairwise(routed):
        block, next_block = blocks[layer], model.blocks[following]
        assert isinstance(block, DecoderBlock) and isinstance(next_block, DecoderBlock)
        found[following] = []
        blocks[layer] = replace(block, router=Watcher(block, next_block, found[following]))
    object.__setattr__(model, "blocks", tuple(blocks))
    return found


def _request(rows: list[Rows], early: dict[int, list[Experts]]) -> Request:
    records = np.concatenate(rows)
    prompt = int(records["token"][records["position"] == END_POSITION][0])
    records = records[records["position"] != END_POSITION]
    assert (records["position"] == np.arange(len(records))).all()
    said = np.full(records["experts"].shape, -1, np.int16)
    for number, layers in enumerate(early.values(), start=1):
        said[:, number] = np.concatenate(layers)
    return Request(prompt, records["token"].astype(np.int32), records["experts"].astype(np.int16), said)
