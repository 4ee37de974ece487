"""A model in one GGUF file, or split over several: its config, and its tensors by moesaic's names."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from moesaic.core.end_tokens import ENDS
from moesaic.core.errors import CheckpointError
from moesaic.models.config import shorten
from moesaic.models.gguf import header
from moesaic.models.gguf.architectures import ARCHITECTURES, Architecture
from moesaic.models.gguf.blocks import NUMBERS
from moesaic.models.gguf.header import Tensor
from moesaic.models.gguf.metadata import Metadata, shortest
from moesaic.models.gguf.shared_keys import read_common

METHOD = "gguf"
"""quant_method of its config, whether or not tensors are quantised."""
CONTROL = 3
"""Type of special tokens in tokenizer.ggml.token_type."""
_GATES = ("gate.weight", "router.weight", "router.layer.weight")
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"


class StoredTensor(NamedTuple):
    """A tensor of the model."""

    file: Path
    tensor: Tensor


class Model:
    """The headers of all files of a model.

    Raises CheckpointError in one line for files that are missing or damaged, and for an architecture, a type
    of tensors or metadata that is not supported.
    """

    def __init__(self, path: Path) -> None:
        """path: its file, or the first of its files."""
        self.path = path
        self.files = header.files(path)
        self._headers = {file: header.read(file) for file in self.files}
        self.metadata: Mapping[str, Any] = self._headers[path].metadata
        """The metadata of the first file, which stands for the whole model."""
        count = self.metadata.get("split.count")
        if isinstance(count, int) and count > 1 and count != len(self.files):
            raise CheckpointError(
                f"{path}: split.count: got {count}; allowed: {len(self.files)}, the files of this model. A "
                "split model has files NAME-00001-of-0000N.gguf"
            )

    def texts(self, key: str) -> list[str] | None:
        """A list of texts of the metadata; None if there is no such list."""
        where = self.metadata.get(key)
        return header.read_texts(self.path, where) if isinstance(where, header.Texts) else None

    @cached_property
    def architecture(self) -> Architecture:
        name = self.metadata.get("general.architecture")
        if not isinstance(name, str) or name not in ARCHITECTURES:
            got, allowed_names = shorten(repr(name)), ", ".join(ARCHITECTURES)
            raise CheckpointError(f"{self.path}: general.architecture: got {got}; allowed: {allowed_names}")
        return ARCHITECTURES[name]

    @cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        """Every tensor of all files. Matrices of all experts are [E, o, i]."""
        names, found = self.architecture.names, dict[str, StoredTensor]()
        for file, file_header in self._headers.items():
            for name, tensor in file_header.tensors.items():
                plain = names.plain(name)
                if plain in found:
                    raise CheckpointError(f"{file}: tensor {shorten(name)} is there twice, as {plain}")
                shape = names.shape(name, tensor.shape)
                found[plain] = StoredTensor(file, Tensor(tensor.kind, shape, tensor.offset, tensor.size))
        return found

    @cached_property
    def config(self) -> dict[str, Any]:
        """What config.json of the model would say. The scheme of its matrices is in quantization_config."""
        name, architecture = self.metadata.get("general.architecture"), self.architecture
        tensors = {
            name: tensor
            for file_header in self._headers.values()
            for name, tensor in file_header.tensors.items()
        }
        endings = {name.split(".", 2)[-1] for name in tensors if name.startswith("blk.")}
        if _EMBEDDING not in tensors or len(tensors[_EMBEDDING].shape) != 2:
            raise CheckpointError(f"{self.path}: tensor {_EMBEDDING} is missing, or is no matrix")
        meta = Metadata(self.path, str(name), self.metadata)
        found = read_common(meta) | architecture.config(meta, endings.__contains__)
        if "moe_k" in found:  # as ernie calls it
            del found["num_experts_per_tok"]
        if "norm_eps" in found:  # as LFM2 calls it
            del found["rms_norm_eps"]
        extra = meta.integer("nextn_predict_layers", 0)
        if extra:
            found["num_nextn_predict_layers"] = extra
        elif found["model_type"] in ("deepseek_v3", "glm4_moe"):  # whose own default is another one
            found["num_nextn_predict_layers"] = 0
        meta.refuse_unread()
        scheme: dict[str, Any] = {"quant_method": METHOD}
        if architecture.has_permuted_heads:
            heads = found["num_attention_heads"], found["num_key_value_heads"]
            scheme |= {"permuted_heads": list(heads)}
        if architecture.has_norm_offset:
            scheme |= {"one_added": True}
        if "linear_num_key_heads" in found:
            sizes = ("linear_num_key_heads", "linear_num_value_heads", "linear_value_head_dim")
            scheme |= {
                "linear_heads": [found[size] for size in sizes],
                "tiled_heads": architecture.has_tiled_heads,
            }
        return found | {
            "vocab_size": tensors[_EMBEDDING].shape[0],
            "tie_word_embeddings": _HEAD not in tensors,
            "quantization_config": scheme,
        }

    @property
    def generation(self) -> dict[str, Any]:
        """What generation_config.json of the model would say. Known tokens that end an answer count, too."""
        ends = ("eos_token_id", "eot_token_id", "eom_token_id")
        token_ids = [self.metadata.get(f"tokenizer.ggml.{name}") for name in ends]
        kinds = self.metadata.get("tokenizer.ggml.token_type")
        if isinstance(kinds, list):
            tokens = zip(self.texts("tokenizer.ggml.tokens") or [], kinds, strict=False)
            token_ids += [
                token_id for token_id, (text, kind) in enumerate(tokens) if kind == CONTROL and text in ENDS
            ]
        sampling = {"temperature": "temp", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"}
        sampling["repetition_penalty"] = "penalty_repeat"
        settings = {name: self.metadata.get(f"general.sampling.{key}") for name, key in sampling.items()}
        settings = {
            name: shortest(value) if isinstance(value, float) else value for name, value in settings.items()
        }
        return {"eos_token_id": [each for each in token_ids if each is not None], **settings}

    @property
    def numbers(self) -> str:
        """The type of matrices that are not quantised, other than gates: the one that holds them all."""
        kinds = {
            stored_tensor.tensor.kind
            for name, stored_tensor in self.tensors.items()
            if len(stored_tensor.tensor.shape) > 1 and not name.endswith((*_GATES, ".bias"))
        }
        plain = kinds & set(NUMBERS)
        return plain.pop() if len(plain) == 1 else "F32" if plain else "BF16"
