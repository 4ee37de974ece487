"""Gates and ups of a GGUF file that have two types of blocks.

Kernels read one type of both. So both are converted to a type that holds their numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from moesaic.core.weight_types import choose_common_type
from moesaic.models.gguf.blocks import BLOCKS
from moesaic.models.gguf.header import is_gguf
from moesaic.models.gguf.model import Model
from moesaic.models.quantization.scheme import Kinds

PARTNERS = {"gate_proj": "up_proj", "w1": "w3"}
"""Word of a gate in names of tensors -> that of its up."""
_WORDS = PARTNERS | dict(zip(PARTNERS.values(), PARTNERS, strict=True))


def find_common_type(tensor: str, kinds: Kinds) -> str | None:
    """The type in memory of a gate or an up whose partner has another type in the file; None: none has."""
    prefix, _, word = tensor.removesuffix(".weight").rpartition(".")
    pair_kinds = {kinds(f"{prefix}.{name}.weight") for name in (word, _WORDS.get(word, word))}
    types = [BLOCKS[kind] for kind in pair_kinds if kind in BLOCKS]
    return choose_common_type(types) if len(types) == 2 else None


def list_pairs(path: Path) -> Mapping[str, str]:
    """Tensor of a gate -> the type that it and its up get in memory, where a GGUF file has them in two types.

    Other checkpoints have no such pairs.
    """
    if not is_gguf(path):
        return {}
    kinds = {name: entry.tensor.kind for name, entry in Model(path).tensors.items()}
    gates = [name for name in kinds if name.removesuffix(".weight").endswith(tuple(PARTNERS))]
    pairs = {name: find_common_type(name, kinds.get) for name in gates}
    return {name: dtype for name, dtype in pairs.items() if dtype is not None}


def describe_pairs(path: Path) -> list[str]:
    """Says in one sentence that there are such pairs; empty: there are none."""
    pairs = list_pairs(path)
    if not pairs:
        return []
    name, dtype = next(iter(pairs.items()))
    sentence = f"the file has gate and up in two types for {len(pairs)} MLPs: {name} and its up"
    sentence += f" are converted to {dtype} in memory{', and so are the others' if len(pairs) > 1 else ''}"
    return [sentence]
