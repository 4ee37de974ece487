"""A contender in a process of its own: transformers, with accelerate's hooks that read experts from the disk.

    PYTHON -m offloading.accelerated MODEL FOLDER

writes FOLDER, once: the experts as transformers computes with them, a file a tensor, which is what
`from_pretrained(..., offload_folder=FOLDER)` does whenever it loads a checkpoint of separate experts.
"""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from offloading.telling import Telling

EXPERTS = ".mlp.experts"
WORKING = 5
"""Number of layers whose experts need memory besides those that stay: read, copied by products,
freed late.
"""
ROW_NUMBERS = 12
"""Maximum numbers that a row has in memory for the experts it chose, as a multiple of the hidden size."""
DONE = "done.json"
"""A file in FOLDER that is written last."""


def devices(layers: int, resident: int) -> dict[str, str]:
    """accelerate's device map. Everything is in memory except the experts of the layers from
    `resident` on."""
    held = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
    found = dict.fromkeys(held, "cpu")
    for layer in range(layers):
        name = f"model.layers.{layer}"
        parts = ("self_attn", "mlp.gate", "input_layernorm", "post_attention_layernorm")
        found |= {f"{name}.{part}": "cpu" for part in parts}
        found[f"{name}{EXPERTS}"] = "cpu" if layer < resident else "disk"
    return found


@dataclass(frozen=True)
class Way:
    """How a batch is run in a given amount of memory."""

    size: int
    """Number of prompts in a batch. The next batch starts when these have all of their tokens."""
    rows: int
    """Maximum number of rows of a pass."""
    resident: int
    """Number of layers whose experts stay in memory."""


@dataclass(frozen=True)
class Work:
    """A batch of prompts, and the memory that it needs."""

    prompts: int
    longest: int
    """Number of tokens of the longest prompt."""
    new: int
    layers: int
    layer: int
    """Bytes of one layer's experts. The sizes below are bytes too."""
    token: int
    """Bytes of a token in the cache."""
    row: int
    """Bytes of a row while it is computed."""

    def best(self, room: int) -> Way:
        """The way with the fewest reads of a layer in `room` bytes; the smallest one where there is none.

        Example: 4 prompts of 10 tokens, 3 new, layers of 100 bytes, 1 byte a token, 10 a row: 840 bytes
        hold 5 layers to work with, 52 tokens and 28 rows -> all 4 at once, in 2 + 2 passes.
        """
        found = []
        for size in range(1, self.prompts + 1):
            left = room - WORKING * self.layer - size * (self.longest + self.new) * self.token
            for resident in range(self.layers + 1):
                rows = min((left - resident * self.layer) // self.row, size * self.longest)
                if rows < size:
                    break
                passes = math.ceil(self.longest / (rows // size)) + self.new - 1
                reads = math.ceil(self.prompts / size) * passes * (self.layers - resident)
                found.append((reads, size, -rows, resident))
        if not found:
            return Way(1, 1, 0)
        _, size, rows, resident = min(found)
        return Way(size, -rows, resident)


def prepare(model: Path, folder: Path) -> None:
    """Lets transformers write the experts of all layers."""
    import protocol  # noqa: F401  it takes the scripts' folder from the path of this process
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    layers = AutoConfig.from_pretrained(model).num_hidden_layers
    folder.mkdir(parents=True, exist_ok=True)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.bfloat16, device_map=devices(layers, 0), offload_folder=str(folder)
    )
    del loaded
    (folder / DONE).write_text(json.dumps({"layers": layers}))


def load(order: dict[str, Any]) -> tuple[Any, Way]:
    """The model with its hooks, and how it is to be used."""
    import torch
    from accelerate import (  # type: ignore[import-not-found]
        dispatch_model,
        init_empty_weights,
    )
    from accelerate.utils import set_module_tensor_to_device  # type: ignore[import-not-found]
    from safetensors import safe_open
    from transformers import AutoConfig, AutoModelForCausalLM

    folder, dtype = Path(order["folder"]), getattr(torch, order["dtype"])
    config = AutoConfig.from_pretrained(order["model"])
    causal: Any = AutoModelForCausalLM
    with init_empty_weights():
        model = causal.from_config(config, dtype=dtype)
    model.eval()
    experts = {name: tensor for name, tensor in model.named_parameters() if EXPERTS in name}
    layers = config.num_hidden_layers
    rest = sum(tensor.nbytes for name, tensor in model.named_parameters() if name not in experts)
    prompts, number = order["prompts"], dtype.itemsize
    work = Work(
        prompts=len(prompts),
        longest=max(map(len, prompts)),
        new=order["new"],
        layers=layers,
        layer=sum(tensor.nbytes for tensor in experts.values()) // layers,
        token=order["cache_numbers"] * number,
        row=ROW_NUMBERS * config.num_experts_per_tok * config.hidden_size * number,
    )
    way = work.best(order["cap"] - rest)
    index = {
        name: {"safetensors_file": str(folder / f"{name}.safetensors"), "weight_name": name}
        | {"dtype": order["dtype"]}
        for name in experts
    }
    where = devices(layers, way.resident)
    files = sorted(Path(order["model"]).glob("*.safetensors"))
    files += [Path(index[name]["safetensors_file"]) for name in experts if where[_module(name)] == "cpu"]
    wanted = {
        name for name, _ in model.named_parameters() if name not in index or where[_module(name)] == "cpu"
    }
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in wanted.intersection(opened.keys()):
                set_module_tensor_to_device(model, name, "cpu", value=opened.get_tensor(name).clone())
    return dispatch_model(model, where, offload_index=index), way


def _module(parameter: str) -> str:
    return parameter[: parameter.index(EXPERTS) + len(EXPERTS)]


def run(model: Any, telling: Telling, prompts: dict[int, list[int]], new: int, rows: int) -> float:
    """A static batch, padded on the left: prefill, then greedy decoding, no sampling code.

    prompts: by number. Returns seconds of the prefill.
    """
    import torch
    from transformers import DynamicCache

    longest, begun = max(map(len, prompts.values())), time.perf_counter()
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts.values()])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts.values()])
    places = (mask.cumsum(1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)

    def step(ids: Any, places: Any, mask: Any) -> Any:
        """[s] the greedy token after rows ids [s, n], mask [s, all so far]."""
        attended = None if bool(mask.all()) else mask  # no mask takes a faster way
        keywords = {"position_ids": places, "past_key_values": cache, "use_cache": True}
        logits = model(ids, attention_mask=attended, logits_to_keep=1, **keywords).logits
        return logits[:, -1].argmax(dim=-1)

    width = max(1, rows // len(prompts))
    for start in range(0, longest, width):
        part = slice(start, start + width)
        token = step(ids[:, part], places[:, part], mask[:, : start + width])
    prefill = time.perf_counter() - begun
    telling.step(zip(prompts, token.tolist(), strict=True))
    places = places[:, -1:]
    for _ in range(new - 1):
        places, mask = places + 1, torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
        token = step(token[:, None], places, mask)
        telling.step(zip(prompts, token.tolist(), strict=True))
    return prefill


def main() -> None:
    if len(sys.argv) == 3:
        prepare(Path(sys.argv[1]), Path(sys.argv[2]))
        return
    telling = Telling()
    order = telling.order
    import torch

    torch.set_num_threads(order["threads"])
    model, way = load(order)
    model.set_experts_implementation(order["experts"])
    telling.begin(way=asdict(way))
    prompts, prefill = list(enumerate(order["prompts"])), 0.0
    with torch.inference_mode():
        for start in range(0, len(prompts), way.size):
            some = dict(prompts[start : start + way.size])
            prefill += run(model, telling, some, order["new"], way.rows)
    telling.end(prefill_seconds=prefill)


if __name__ == "__main__":
    main()
