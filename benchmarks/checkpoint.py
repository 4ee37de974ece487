"""What `peers.py` and its child processes have to know about a checkpoint, read without any engine."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Stored:
    """The place of a tensor in the checkpoint."""

    file: Path
    dtype: str
    """The dtype in the spelling of safetensors: BF16, F16, F32."""
    shape: tuple[int, ...]
    start: int
    """Offset of its first byte in the file."""


@dataclass(frozen=True)
class Checkpoint:
    """A Hugging Face directory."""

    path: Path

    @cached_property
    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = json.loads((self.path / "config.json").read_text())
        return config

    @cached_property
    def tensors(self) -> dict[str, Stored]:
        """Name -> tensor, for the tensors of every shard."""
        found: dict[str, Stored] = {}
        for file in sorted(self.path.glob("*.safetensors")):
            with file.open("rb") as opened:
                length = int.from_bytes(opened.read(8), "little")
                header = json.loads(opened.read(length))
            header.pop("__metadata__", None)
            for name, entry in header.items():
                start = 8 + length + entry["data_offsets"][0]
                found[name] = Stored(file, entry["dtype"], tuple(entry["shape"]), start)
        return found

    def setting(self, *names: str) -> Any:
        """The value of the first of these keys that config.json has."""
        return next(self.config[name] for name in names if self.config.get(name) is not None)

    @property
    def numbers(self) -> int:
        """Of all tensors."""
        return sum(prod(tensor.shape) for tensor in self.tensors.values())

    def prefill_flops(self, prompts: int, tokens: int) -> int:
        """Of the matrix products with weights, for `tokens` in all; the head sees each prompt's last only.

        The products inside attention, of tokens with tokens, are left out.
        """
        chosen: int = self.setting("num_experts_per_tok")
        experts: int = self.setting("num_experts", "num_local_experts", "n_routed_experts")
        body = routed = 0
        for name, tensor in self.tensors.items():
            if len(tensor.shape) == 2 and name not in (EMBEDDING, HEAD):
                if ".experts." in name:
                    routed += prod(tensor.shape)
                else:
                    body += prod(tensor.shape)
        head = prod(self.tensors[EMBEDDING].shape)
        return 2 * (tokens * (body + routed * chosen // experts) + prompts * head)
