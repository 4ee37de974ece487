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
from moesaic.core.stored import unquantized
from moesaic.core.text_config import WRAPPERS
from moesaic.models import registry
from moesaic.models.files import read_json

ALIASES = {"kimi_k2": "deepseek_v3"}
"""A model_type that transformers does not know -> the one whose code computes it."""
NOT_COMPARED = {
    "granitemoe": "moesaic computes its hidden states in another scale",
    **dict.fromkeys(WRAPPERS, "a text model within a model that sees images"),
}
"""A model_type that is not compared, and why."""
EMBEDDING, NORM, HEAD = "model.embed_tokens.", "model.norm.", "lm_head."


class Reference:
    """transformers' side. Raises ConfigError if transformers is missing or does not know the model."""

    def __init__(self, path: Path, tokens: list[int]) -> None:
        self._path, self._tokens = path, torch.tensor([tokens])
        self._library = _Library()
        self._model = self._library.without_memory(path)
        self._base = self._model.base_model
        self._kept = self._arguments()

    def embed(self) -> torch.Tensor:
        """Returns the embeddings [n, h] of the prompt."""
        module = self._model.get_input_embeddings()
        with self._loaded(module, EMBEDDING):
            found: torch.Tensor = module(self._tokens)[0]
        return found

    def layer(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, h] before a layer -> [n, h] after it."""
        module = self._base.layers[layer]
        with self._loaded(module, f"model.layers.{layer}."):
            out = module(hidden[None], **self._kept[layer])
        found: torch.Tensor = (out[0] if isinstance(out, tuple) else out)[0]
        return found

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, h] after the last layer -> logits [n, V]."""
        norm, head = self._base.norm, self._model.get_output_embeddings()
        with self._loaded(norm, NORM):
            normed = norm(hidden[None])
        tied = self._model.config.tie_word_embeddings
        with self._loaded(head, EMBEDDING if tied else HEAD, embedding=tied):
            found: torch.Tensor = head(normed)[0]
        return found

    def _arguments(self) -> list[dict[str, Any]]:
        """What the model passes to each layer besides hidden states: masks, positions, angles.

        The model runs once with layers that only record it.
        """
        kept: list[dict[str, Any]] = []

        def record(hidden: torch.Tensor, *more: Any, **named: Any) -> torch.Tensor:
            assert not more
            kept.append(named)
            return hidden

        with ExitStack() as stack:
            for module in (*self._base.layers, self._base.norm):
                stack.enter_context(_instead(module, record))
            zeros = torch.zeros(1, self._tokens.shape[1], self._model.config.hidden_size)
            self._base(inputs_embeds=zeros, use_cache=False)
        return kept[:-1]

    @contextmanager
    def _loaded(self, module: torch.nn.Module, prefix: str, embedding: bool = False) -> Any:
        """A context in which a module has its weights. embedding: the head has those of the embedding."""
        tensors = registry.stored_tensors(self._path, prefix)
        if embedding:
            [weight] = tensors.values()
            module.weight = torch.nn.Parameter(weight.float(), requires_grad=False)
        else:
            self._library.fill(self._model, tensors)
        del tensors
        empty = [name for name, one in (*module.named_parameters(), *module.named_buffers()) if one.is_meta]
        if empty:
            raise CheckpointError(f"{self._path}: transformers finds no tensor for {prefix}{empty[0]}")
        try:
            yield
        finally:
            module.to("meta")


@contextmanager
def _instead(module: torch.nn.Module, forward: Callable[..., Any]) -> Any:
    """A context in which a module computes something else."""
    module.forward = forward
    try:
        yield
    finally:
        del module.forward


def _check(raw: dict[str, Any]) -> None:
    """Raises ConfigError for a model that cannot be compared."""
    kind = str(raw.get("model_type"))
    if kind in NOT_COMPARED:
        raise ConfigError(f"verify: got model_type {kind!r}: {NOT_COMPARED[kind]}; allowed: other families")
    if not unquantized(raw):
        method = raw["quantization_config"].get("quant_method")
        raise ConfigError(
            f"verify: got a checkpoint in {method}; allowed: checkpoints that are not quantised"
        )


class _Library:
    """transformers, which is imported when it is needed."""

    def __init__(self) -> None:
        try:
            import transformers
            from transformers.conversion_mapping import get_model_conversion_mapping
            from transformers.core_model_loading import convert_and_load_state_dict_in_model
            from transformers.modeling_utils import LoadStateDictConfig
        except ImportError as error:
            raise ConfigError(
                f"--against transformers: transformers 5 is needed and not installed ({error}); "
                "pip install 'transformers>=5.0'"
            ) from error
        self._transformers: Any = transformers
        self._conversions: Any = get_model_conversion_mapping
        self._load, self._settings = convert_and_load_state_dict_in_model, LoadStateDictConfig
        self._transformers.utils.logging.disable_progress_bar()
        self._transformers.utils.logging.set_verbosity_error()

    def without_memory(self, path: Path) -> Any:
        """Builds the model of a config.json without memory for its weights."""
        raw = read_json(path / "config.json")
        _check(raw)
        kind = ALIASES.get(str(raw.get("model_type")), str(raw.get("model_type")))
        if kind not in self._transformers.CONFIG_MAPPING:
            version = self._transformers.__version__
            raise ConfigError(f"--against transformers: version {version} has no model_type {kind!r}")
        plain = {name: value for name, value in raw.items() if name != "quantization_config"}
        config = self._transformers.CONFIG_MAPPING[kind].from_dict({**plain, "model_type": kind})
        with torch.device("meta"):
            model = self._transformers.AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation="eager"
            )
        # Its angles are no weights, so they are computed, and not read.
        model.base_model.rotary_emb = type(model.base_model.rotary_emb)(config)
        return model.eval().requires_grad_(False)

    def fill(self, model: Any, tensors: dict[str, torch.Tensor]) -> None:
        """Puts tensors of a checkpoint into the model, in float32."""
        settings = self._settings(
            dtype=torch.float32, device_map={"": "cpu"}, weight_mapping=self._conversions(model)
        )
        self._load(model, tensors, settings)
