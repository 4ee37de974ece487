"""Computes a prompt layer by layer with transformers in float32, with one layer in memory at a time.

The whole model exists on torch's "meta" device, where tensors have no memory. Before a layer computes, its
weights are read from the checkpoint, with transformers' own conversion of names and shapes. No code of a
checkpoint runs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from moesaic.core.errors import CheckpointError, ConfigError
from moesaic.core.text_config import TEXT, WRAPPERS
from moesaic.models.files import read_config
from moesaic.models.plain_tensors import plain_tensors

ALIASES = {"kimi_k2": "deepseek_v3"}
"""A model_type that transformers does not know -> the one whose code computes it."""
EMBEDDING, NORM, HEAD = "model.embed_tokens.", "model.norm.", "lm_head."
REFERENCE_NAMES = {
    "DbrxModel": {"model.layers.": "blocks.", EMBEDDING: "wte.", NORM: "norm_f."},
    "Lfm2MoeModel": {NORM: "embedding_norm."},
}
"""transformers' class of a text model -> how it calls parts that moesaic names otherwise."""
UNREAD_KEYS = ("quantization_config", "auto_map")
"""Keys of config.json that transformers does not get: about compressed and quantised matrices, which are made
numbers before, and about code of the checkpoint."""


class Reference:
    """transformers' side. Raises ConfigError if transformers is missing or does not know the model."""

    def __init__(self, path: Path, tokens: list[int]) -> None:
        self._path, self._tokens = path, torch.tensor([tokens])
        self._library = _Library()
        self._model = self._library.build_on_meta(path)
        self._base = _text_model(self._model)
        [self._front] = [name for name, module in self._model.named_modules() if module is self._base]
        self._embeddings, self._layer_arguments = self._start()

    def embed(self) -> torch.Tensor:
        """Returns the embeddings [n, h] of the prompt."""
        return self._embeddings

    def layer(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, h] before a layer -> [n, h] after it."""
        module = _layers(self._base)[layer]
        with self._load_weights(module, f"model.layers.{layer}."):
            output = module(hidden[None], **self._layer_arguments[layer])
        hidden_after: torch.Tensor = (output[0] if isinstance(output, tuple) else output)[0]
        return hidden_after

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, h] after the last layer -> logits [n, V]."""
        norm, head = _norm(self._base), self._model.get_output_embeddings()
        is_tied = self._model.config.tie_word_embeddings and not plain_tensors(self._path, HEAD)
        with ExitStack() as stack:
            stack.enter_context(self._load_weights(norm, NORM))
            stack.enter_context(self._load_weights(head, EMBEDDING if is_tied else HEAD, embedding=is_tied))
            for module in (self._model.get_input_embeddings(), *_layers(self._base)):
                stack.enter_context(_replace_forward(module, lambda *_, **__: hidden[None]))
            all_logits: torch.Tensor = self._model(self._tokens, use_cache=False).logits[0]
        return all_logits

    def _start(self) -> tuple[torch.Tensor, list[dict[str, Any]]]:
        """What the model passes to its layers: embeddings [n, h] to the first one, and to each one masks,
        positions and angles.

        The model runs once with layers that only record it.
        """
        layer_arguments: list[dict[str, Any]] = []
        embeddings: list[torch.Tensor] = []

        def record(hidden: torch.Tensor, *positional: Any, **keywords: Any) -> torch.Tensor:
            assert not positional
            embeddings.append(hidden)
            layer_arguments.append(keywords)
            return hidden

        with ExitStack() as stack:
            embedding = self._model.get_input_embeddings()
            stack.enter_context(self._load_weights(embedding, EMBEDDING))
            for module in _layers(self._base):
                stack.enter_context(_replace_forward(module, record))
            for module in (_norm(self._base), self._model.get_output_embeddings()):
                stack.enter_context(_replace_forward(module, lambda hidden: hidden))
            self._model(self._tokens, use_cache=False)
        return embeddings[0][0], layer_arguments

    @contextmanager
    def _load_weights(self, module: torch.nn.Module, prefix: str, embedding: bool = False) -> Any:
        """A context in which a module has its weights. embedding: the head has those of the embedding."""
        tensors = plain_tensors(self._path, prefix)
        if embedding:
            [weight] = tensors.values()
            module.weight = torch.nn.Parameter(weight.float(), requires_grad=False)
        else:
            named_tensors = {self._reference_name(name): tensor for name, tensor in tensors.items()}
            self._library.fill(self._model, named_tensors)
            # The module has these numbers now, so the memory of the files is not needed any more.
            del named_tensors
        del tensors
        empty = [
            name for name, tensor in (*module.named_parameters(), *module.named_buffers()) if tensor.is_meta
        ]
        if empty:
            raise CheckpointError(f"{self._path}: transformers finds no tensor for {prefix}{empty[0]}")
        try:
            yield
        finally:
            module.to("meta")

    def _reference_name(self, name: str) -> str:
        """How transformers calls a tensor of the text model."""
        names = REFERENCE_NAMES.get(type(self._base).__name__, {})
        word = next((word for word in names if name.startswith(word)), None)
        if word is not None:
            return f"{self._front}.{names[word]}{name.removeprefix(word)}"
        return f"{self._front}.{name.removeprefix('model.')}" if name.startswith("model.") else name


def _layers(base: Any) -> Any:
    return base.blocks if hasattr(base, "blocks") else base.layers


def _norm(base: Any) -> Any:
    name = REFERENCE_NAMES.get(type(base).__name__, {}).get(NORM, NORM.removeprefix("model."))
    return getattr(base, name.removesuffix("."))


def _text_model(model: Any) -> Any:
    """The model of text in a model of transformers: its layers, and the norm after them."""
    base = model.base_model
    return getattr(base, "language_model", base)


@contextmanager
def _replace_forward(module: torch.nn.Module, forward: Callable[..., Any]) -> Any:
    """A context in which a module computes something else."""
    module.forward = forward
    try:
        yield
    finally:
        del module.forward


class _Library:
    """transformers, which is imported when it is needed."""

    def __init__(self) -> None:
        try:
            import transformers
            from transformers.conversion_mapping import get_model_conversion_mapping
            from transformers.core_model_loading import convert_and_load_state_dict_in_model
            from transformers.integrations.mxfp4 import convert_moe_packed_tensors
            from transformers.modeling_utils import LoadStateDictConfig
        except ImportError as error:
            raise ConfigError(
                f"--against transformers: transformers 5 is needed and not installed ({error}); "
                "pip install 'transformers>=5.0'"
            ) from error
        self._transformers: Any = transformers
        self._conversions: Any = get_model_conversion_mapping
        self._from_mxfp4: Any = convert_moe_packed_tensors
        self._load, self._settings = convert_and_load_state_dict_in_model, LoadStateDictConfig
        self._transformers.utils.logging.disable_progress_bar()
        self._transformers.utils.logging.set_verbosity_error()

    def build_on_meta(self, path: Path) -> Any:
        """Builds the model of a config.json without memory for its weights."""
        raw = self._check_config(read_config(path))
        config = self._transformers.CONFIG_MAPPING[raw["model_type"]].from_dict(raw)
        config.get_text_config().output_router_logits = False
        is_wrapped = raw["model_type"] in WRAPPERS
        auto = "AutoModelForImageTextToText" if is_wrapped else "AutoModelForCausalLM"
        with torch.device("meta"):
            model = getattr(self._transformers, auto).from_config(
                config, dtype=torch.float32, attn_implementation="eager"
            )
        # Its angles are no weights, so they are computed, and not read.
        base = _text_model(model)
        angles = "pos_emb" if hasattr(base, "pos_emb") else "rotary_emb"
        setattr(base, angles, type(getattr(base, angles))(base.config))
        return model.eval().requires_grad_(False)

    def _check_config(self, raw: dict[str, Any]) -> dict[str, Any]:
        """A parsed config.json, or the text_config in it, with a model_type that transformers knows."""
        kind = ALIASES.get(str(raw.get("model_type")), str(raw.get("model_type")))
        if kind not in self._transformers.CONFIG_MAPPING:
            version = self._transformers.__version__
            raise ConfigError(f"--against transformers: version {version} has no model_type {kind!r}")
        known_config = {name: value for name, value in raw.items() if name not in UNREAD_KEYS} | {
            "model_type": kind
        }
        if kind in WRAPPERS:
            known_config[TEXT] = self._check_config(raw[TEXT])
        return known_config

    def fill(self, model: Any, tensors: dict[str, torch.Tensor]) -> None:
        """Puts tensors of a checkpoint into the model, in float32. It dequantises experts in MXFP4 itself."""
        for name in [tensor_name for tensor_name in tensors if tensor_name.endswith("_blocks")]:
            plain = name.removesuffix("_blocks")
            parts = tensors.pop(name), tensors.pop(f"{plain}_scales")
            tensors[plain] = self._from_mxfp4(*parts, dtype=torch.float32)
        settings = self._settings(
            dtype=torch.float32, device_map={"": "cpu"}, weight_mapping=self._conversions(model)
        )
        self._load(model, tensors, settings)
