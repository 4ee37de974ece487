"""Loads a model from a directory. The checkpoint's model_type selects the model file.

Question: Where are the config's sizes checked against the files?
Question: How is a model loaded from a directory?
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from moesaic.core.errors import CheckpointError, ConfigError
from moesaic.core.experts import ExpertLayout
from moesaic.core.routing import RoutedModel
from moesaic.core.text_config import TEXT, WRAPPERS, find_contradictions, read_text_config
from moesaic.core.weight_types import COMPRESSED_DTYPE, is_packed, is_quantized, split_dtype
from moesaic.kernels.matrix import Weight
from moesaic.kernels.table import REFERENCE, Kernels
from moesaic.kernels.weights import ExpertWeights
from moesaic.models import fingerprint
from moesaic.models.block import Block
from moesaic.models.checkpoint import INDEX, SINGLE, Checkpoint, Claims, Partial, Progress
from moesaic.models.config import UnreadKeyError, leave_out, shorten, write_flag
from moesaic.models.conversion import CountingClaims
from moesaic.models.families import MODELS, Config, ModelFile
from moesaic.models.files import model_files, read_config
from moesaic.models.gguf.header import is_gguf
from moesaic.models.gguf.pairs import describe_pairs as describe_pairs
from moesaic.models.known_keys import changes_nothing
from moesaic.models.layer_norm import Centring
from moesaic.models.layers import Scale
from moesaic.models.loader import Loader, quantised_experts
from moesaic.models.model import Model
from moesaic.models.quantization import parse as quantization
from moesaic.models.routed_experts import claim_experts, experts, other_types, refuse_integer_kernels
from moesaic.models.shard import WHOLE, Shard
from moesaic.models.spec import NO_MULTIPLIERS, ModelSpec, Multipliers
from moesaic.models.wrapped_names import IMAGES

_log = logging.getLogger(__name__)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CACHE_DTYPES = {**DTYPES, "int8": torch.int8}
PREDICTION_LOADER = "prediction_layer"
"""The function of a model file that loads this layer, in families that have one."""
FILES_MATCHER = "match_files"
"""The function of a model file that changes a config by the files, in families that have one."""


def read_spec(path: Path, shard: Shard = WHOLE) -> ModelSpec:
    """Reads the sizes of the model in `path`, or of one rank's part of it, from config.json.

    If there are weights, their headers have all tensors of these sizes. Raises ConfigError for a shard that
    does not fit the model.
    """
    config: Config = _parse(path)[1]
    return shard.spec(config.spec)


def model_file(path: Path) -> tuple[ModelFile, Config]:
    """The code of the model in `path`, and its config, for what reads its tensors by name."""
    return _parse(path)


def routed_model(path: Path) -> RoutedModel:
    """How recorded routing describes the model in `path`. Samples the weights for its name."""
    return read_spec(path).to_routed_model(fingerprint.origin(path))


def has_tied_embeddings(path: Path) -> bool:
    """Whether LM head and embedding are the same matrix."""
    return _has_tied_embeddings(_parse(path)[1], Checkpoint(path))


def load(
    path: Path,
    kernels: Kernels,
    device: str = "cpu",
    dtype: str = "auto",
    with_experts: bool = True,
    progress: Progress | None = None,
    shard: Shard = WHOLE,
    use_mmap: bool = True,
    positions: int | None = None,
    predicting: bool = False,
) -> Model:
    """Loads the model in a directory: with or without routed experts, and with all or one rank's heads.

    dtype: data type of the matrices. "auto" means the checkpoint's own type, or float32 on a CPU whose
    kernels would have to convert that type at each use.
    progress: called with bytes read, and total bytes, after each tensor.
    use_mmap: False copies the weights into memory, so that the files' pages can be dropped.
    shard: with more than one rank, `output_projection` returns a partial sum, and the spec has the rank's
    heads.
    positions: maximum tokens of a request; None: the model's own maximum.
    predicting: also load the layer that predicts the token after the next one.

    Raises ConfigError for a shard that does not fit the model, or a model without such a layer. Raises
    CheckpointError, naming it, for a key or a tensor that is missing or not understood.
    """
    file, config = _parse(path)
    spec = shard.spec(config.spec)
    if predicting:
        check_prediction(path, file, spec)
    checkpoint = Checkpoint(path, progress, use_mmap)
    number = _dtype(dtype, device, checkpoint, kernels)
    loader = Loader(checkpoint, kernels, device, number, shard, positions=positions)
    if with_experts:
        names = {layer: file.expert_names(config, layer) for layer in spec.moe_layers}
        refuse_integer_kernels(path, loader, names)
    model = replace(
        _build_outside(config, spec, loader),
        blocks=tuple(file.blocks(config, loader)),
        experts=_experts(file, config, loader, with_experts),
    )
    if predicting:
        model = with_prediction(model, file, config, loader, with_experts)
    images = IMAGES if checkpoint.is_wrapped else ()
    checkpoint.refuse_unread((*file.UNUSED_TENSORS, *prediction_tensors(spec), *images))
    pair_sentences = describe_pairs(path) if kernels.can_use_quantized else []
    for sentence in (*describe_unused(read_config(path), checkpoint.names), *pair_sentences):
        _log.warning("%s", sentence)
    return model


def bytes_outside_experts(path: Path, kernels: Kernels, dtype: str = "auto", device: str = "cpu") -> int:
    """Bytes that all but the routed experts takes in the memory of `device`. Only headers are read."""
    return claim_outside_experts(path, kernels, dtype, device).bytes


def claim_outside_experts(
    path: Path, kernels: Kernels, dtype: str = "auto", device: str = "cpu"
) -> CountingClaims:
    """Counts what all but the routed experts takes. Only headers are read."""
    file, config = _parse(path)
    claims = CountingClaims(path)
    loader = Loader(claims, kernels, "meta", _dtype(dtype, device, claims, kernels), positions=0)
    _build_outside(config, config.spec, loader)
    file.blocks(config, loader)
    return claims


def load_outside(path: Path, kernels: Kernels) -> Model:
    """Loads a model on the CPU without its layers: embedding, final norm and LM head."""
    config = _parse(path)[1]
    checkpoint = Checkpoint(path)
    loader = Loader(checkpoint, kernels, "cpu", _dtype("auto", "cpu", checkpoint, kernels))
    return _build_outside(config, config.spec, loader)


def _build_outside(config: Config, spec: ModelSpec, loader: Loader) -> Model:
    kernels, factors = loader.kernels, _multipliers(config)
    is_centred: bool = getattr(config, "layer_norm", False)
    has_biases: bool = getattr(config, "has_biases", False)
    embedding = loader.weight("model.embed_tokens", spec.vocab_size, spec.hidden_size)
    return Model(
        spec=spec,
        kernels=kernels,
        embedding=embedding,
        blocks=(),
        final_norm=(loader.exact("model.norm.weight", spec.hidden_size) + factors.norm_offset)
        * factors.logits,
        head=_head(config, loader, embedding),
        epsilon=config.epsilon,
        experts={},
        scale=None if factors.embedding == 1.0 else Scale.build(kernels, factors.embedding, loader.device),
        centring=Centring.build(kernels, spec.hidden_size, loader.device) if is_centred else None,
        head_bias=loader.exact("lm_head.bias", spec.vocab_size) if has_biases else None,
    )


def residual(path: Path) -> float:
    """The number by which the blocks of the model in `path` divide its own hidden states."""
    return _multipliers(_parse(path)[1]).residual


def _multipliers(config: Config) -> Multipliers:
    multipliers: Multipliers = getattr(config, "multipliers", NO_MULTIPLIERS)
    return multipliers


def load_layer(
    path: Path, kernels: Kernels, layer: int, positions: int, with_experts: bool = True
) -> tuple[Block, ExpertWeights | None]:
    """Loads one layer on the CPU, and its routed experts if it has some. No other layer's weights are read.

    positions: maximum tokens of a request. with_experts: False leaves the experts out.
    """
    file, config = _parse(path)
    prefix = f"model.layers.{layer}."
    checkpoint = Partial(path, lambda name: name.startswith(prefix))
    number = _dtype("auto", "cpu", checkpoint, kernels)
    loader = Loader(checkpoint, kernels, "cpu", number, positions=positions)
    routed_experts = None
    if with_experts and layer in config.spec.moe_layers:
        routed_experts = experts(loader, file.expert_names(config, layer), None)
    return file.blocks(config, loader)[layer], routed_experts


def understand(raw: dict[str, Any], path: Path, claims: Claims | None = None) -> ModelSpec:
    """The sizes in a parsed config.json. Refuses what `load` would refuse, but reads no weights.

    path: for messages. claims: the tensors of the checkpoint, whose names and shapes are checked; None if
    they are not known.
    Raises CheckpointError for the first key or tensor that is missing or not understood.
    """
    file, config = _parse_config(raw, path)
    spec: ModelSpec = config.spec
    if claims is not None:
        _claim(file, _match_files(file, config, claims), claims)
        claims.refuse_unread((*file.UNUSED_TENSORS, *prediction_tensors(spec)))
    return spec


def describe_unused(raw: dict[str, Any], names: Collection[str]) -> list[str]:
    """Says which tensors of a checkpoint are understood and not used, one sentence each.

    raw: its parsed config.json. names: those of its tensors; empty if they are not known.
    """
    return quantization.describe_unused(raw, names)


def stored_type(raw: dict[str, Any], path: Path, checkpoint: Checkpoint) -> str:
    """Type in which the routed experts of a checkpoint are stored, or all matrices if there are none.

    Of quantised ones it is the type of the layer where they are largest.
    """
    file, config = _parse_config(raw, path)
    layers = config.spec.moe_layers
    name = EMBEDDING
    if layers:
        names = [file.expert_names(config, layer) for layer in layers]
        kinds = {
            kind for layer_names in names if (kind := quantised_experts(checkpoint, layer_names)) is not None
        }
        if kinds:
            return max(sorted(kinds), key=names[0].bytes_of)
        name = names[0].list_tensors(0)[0][0]
    number = checkpoint.dtype(name)
    return COMPRESSED_DTYPE if number is torch.uint8 else str(number).removeprefix("torch.")


def is_quantised(raw: dict[str, Any]) -> bool:
    """Whether a parsed config.json says that matrices are quantised.

    Raises CheckpointError for a quantization_config that is not understood.
    """
    return quantization.parse(raw) is not None


def type_in_memory(file_type: str, device: str, kernels: Kernels) -> str:
    """Type that `load` with dtype "auto" gives to matrices stored as `file_type`, a name of
    core/weight_types.py."""
    number = _dtype_in_memory(DTYPES.get(file_type, torch.bfloat16), device, kernels)
    if is_quantized(split_dtype(file_type)[0]) and (kernels.can_use_quantized or device.startswith("cpu")):
        return kernels.choose_quantized_type(file_type)
    if file_type not in DTYPES and kernels.can_use_compressed and number is torch.bfloat16:
        return file_type
    return str(number).removeprefix("torch.")


def expert_layout(
    path: Path, kernels: Kernels, device: str = "cpu", dtype: str = "auto", predicting: bool = False
) -> ExpertLayout:
    """Returns the tensor names and sizes of a model's routed experts, for expert servers.

    predicting: with those of the layer that predicts the token after the next one.
    Raises CheckpointError for a model without routed experts, and ConfigError for one without such a layer.
    """
    file, config = _parse(path)
    spec: ModelSpec = config.spec
    if not spec.moe_layers:
        raise CheckpointError(f"{path}: this model has no routed experts to serve")
    checkpoint = Checkpoint(path)
    loader = Loader(checkpoint, kernels, device, _dtype(dtype, device, checkpoint, kernels))
    if predicting:
        check_prediction(path, file, spec)
    layers = (*spec.moe_layers, spec.num_layers) if predicting else spec.moe_layers
    names = {layer: file.expert_names(config, layer) for layer in layers}
    refuse_integer_kernels(path, loader, names)
    first_names = names[spec.moe_layers[0]]
    kind = loader.expert_type(first_names)
    return ExpertLayout(
        prefixes={
            layer: checkpoint.file_prefix(layer_names.prefix, *layer_names.list_tensors(0)[0])
            for layer, layer_names in names.items()
        },
        gate_name=first_names.gate_name,
        up_name=first_names.up_name,
        down_name=first_names.down_name,
        hidden=first_names.hidden,
        width=first_names.width,
        num_experts=first_names.num_experts,
        top_k=spec.top_k,
        dtype=kind,
        weights=fingerprint.compute_fingerprint(path),
        origin=fingerprint.origin(path),
        form=first_names.form,
        activation=first_names.activation,
        layer_dtypes=other_types(loader, names, kind),
        prediction=spec.num_layers if predicting else None,
    )


def load_experts(
    path: Path,
    kernels: Kernels,
    expert_ids: Mapping[int, Iterable[int]],
    device: str = "cpu",
    dtype: str = "auto",
    use_mmap: bool = True,
    of_expert: Shard = WHOLE,
) -> dict[int, ExpertWeights]:
    """Loads routed experts only, for an expert server. expert_ids: layer -> expert ids. dtype: that of a
    layout.

    use_mmap: False copies them into memory of this process. of_expert: the part of each expert's width to
    load; compressed experts are then decompressed.
    Raises CheckpointError for a layer without routed experts or an id that does not exist.
    """
    file, config = _parse(path)
    checkpoint = Checkpoint(path, use_mmap=use_mmap)
    number = _dtype("auto" if is_packed(dtype) else dtype, device, checkpoint, kernels)
    loader = Loader(checkpoint, kernels, device, number, of_expert=of_expert)
    for layer in expert_ids:
        if layer not in routed_layers(file, config.spec):
            raise CheckpointError(f"{path}: layer {layer} has no routed experts")
    return {
        layer: experts(loader, file.expert_names(config, layer), ids) for layer, ids in expert_ids.items()
    }


def _parse(path: Path) -> tuple[ModelFile, Any]:
    """Reads the config, and checks that the files have each tensor of the model that it describes.

    So the files bound the config's sizes before anything is allocated. A directory without any weights is
    not checked: nothing can be loaded from it.
    """
    return _parse_stamped(path, _stamp(*model_files(path)))


@lru_cache(maxsize=4)
def _parse_stamped(path: Path, stamp: tuple[object, ...]) -> tuple[ModelFile, Any]:
    """Parses the config and checks the files. stamp: that of the files, so that changed ones are read
    again."""
    file, config = _parse_config(read_config(path), path)
    if is_gguf(path) or (path / SINGLE).is_file() or (path / INDEX).is_file():
        claims = Claims(path)
        config = _match_files(file, config, claims)
        _claim(file, config, claims)
    return file, config


def _match_files(file: ModelFile, config: Any, claims: Claims) -> Any:
    """The config with what only the files tell, for families whose files have one of several forms."""
    return getattr(file, FILES_MATCHER)(config, claims) if hasattr(file, FILES_MATCHER) else config


def _parse_config(raw_config: dict[str, Any], path: Path) -> tuple[ModelFile, Any]:
    """The model file of a parsed config.json, and its config."""
    quantization.parse(raw_config)
    raw = read_text_config(raw_config)
    _refuse_contradictions(raw_config)
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in MODELS:
        key = f"{TEXT}.model_type" if str(raw_config.get("model_type")) in WRAPPERS else "model_type"
        allowed_types = f"{', '.join(sorted(MODELS))}, and around one of them {', '.join(WRAPPERS)}"
        raise CheckpointError(f"{path}: {key}: got {shorten(repr(model_type))}; allowed: {allowed_types}")
    file = MODELS[model_type]
    try:
        return file, file.parse(raw)
    except UnreadKeyError as error:
        if str(raw_config.get("model_type")) in WRAPPERS and error.path[0] in raw_config[TEXT]:
            raise UnreadKeyError.of_key((TEXT, *error.path), error.value) from None
        family = _find_family_by_class(raw_config)
        if family is not None and MODELS[family] is not file:
            raise CheckpointError(
                f"config.json: model_type: got {model_type!r}; allowed: {family!r}, since architectures has "
                f"{raw_config['architectures'][0]}. To change it by hand: "
                f"{write_flag({'model_type': family})}"
            ) from None
        raise


def _find_family_by_class(raw_config: dict[str, Any]) -> str | None:
    """The model_type whose class in transformers is the first of `architectures`; None if it is none here."""
    match raw_config.get("architectures"):
        case [str(name), *_]:
            letters = name.removesuffix("ForCausalLM").replace("_", "").lower()
            return next((family for family in MODELS if family.replace("_", "") == letters), None)
    return None


def _refuse_contradictions(raw_config: dict[str, Any]) -> None:
    """Raises CheckpointError for a key that a wrapper and its text_config have with different values.

    Keys beside text_config may be neutral or at their generic defaults. Those of text_config count.
    """
    for name, inner in find_contradictions(raw_config).items():
        if not changes_nothing(name, raw_config[name], str(raw_config.get("model_type"))):
            got = shorten(repr(raw_config[name]))
            raise CheckpointError(
                f"config.json: {shorten(name)}: got {got}; allowed: {shorten(repr(inner))}, as in {TEXT}. "
                f"If it changes nothing, leave it out: {leave_out([name])}"
            )


def _stamp(*files: Path) -> tuple[object, ...]:
    """What changes when a file does. Files that do not exist are left out."""
    statuses = [(file, file.stat()) for file in files if file.is_file()]
    return tuple((file, stat.st_ino, stat.st_size, stat.st_mtime_ns) for file, stat in statuses)


def _claim(file: ModelFile, config: Config, claims: Claims) -> None:
    """Raises CheckpointError unless the files have each tensor of `config`, in its shape.

    It builds the whole model from tensors without memory, and stops at the first one that does not fit.
    """
    spec, loader = config.spec, Loader(claims, REFERENCE, "meta", torch.float32, positions=0)
    loader.matrix("model.embed_tokens", spec.vocab_size, spec.hidden_size)
    loader.exact("model.norm.weight", spec.hidden_size)
    file.blocks(config, loader)
    _experts(file, config, loader, read=False)
    if not config.has_tied_embeddings or HEAD in claims.names:
        claims.claim(HEAD, spec.vocab_size, spec.hidden_size)


def _dtype(dtype: str, device: str, checkpoint: Checkpoint, kernels: Kernels) -> torch.dtype:
    if dtype == "auto":
        stored_dtype = checkpoint.number(EMBEDDING)
        return _dtype_in_memory(
            torch.bfloat16 if stored_dtype is torch.uint8 else stored_dtype, device, kernels
        )
    allowed_dtypes = [name for name, dtype_value in DTYPES.items() if dtype_value in kernels.weight_dtypes]
    if dtype not in allowed_dtypes:
        raise ConfigError.field(
            "--dtype", dtype, f"{', '.join(('auto', *allowed_dtypes))} with {kernels.name} kernels"
        )
    return DTYPES[dtype]


def _dtype_in_memory(stored_dtype: torch.dtype, device: str, kernels: Kernels) -> torch.dtype:
    return (
        stored_dtype
        if not device.startswith("cpu") or stored_dtype in kernels.unconverted_dtypes
        else torch.float32
    )


def _head(config: Config, loader: Loader, embedding: Weight) -> Weight:
    shape = config.spec.vocab_size, config.spec.hidden_size
    # A head in the files is claimed although it may not be read: else it would count as not expected.
    if not config.has_tied_embeddings or HEAD in loader.checkpoint.names:
        loader.checkpoint.claim(HEAD, *shape)
    return embedding if _has_tied_embeddings(config, loader.checkpoint) else loader.weight("lm_head", *shape)


def _has_tied_embeddings(config: Config, checkpoint: Checkpoint) -> bool:
    """A head in the files may be a copy of the embedding that some tools write. One that differs counts."""
    return config.has_tied_embeddings and (HEAD not in checkpoint.names or checkpoint.equal(HEAD, EMBEDDING))


def _experts(file: ModelFile, config: Config, loader: Loader, read: bool) -> dict[int, ExpertWeights]:
    weights = {}
    for layer in config.spec.moe_layers:
        names = file.expert_names(config, layer)
        if read:
            weights[layer] = experts(loader, names, None)
        else:
            claim_experts(loader.checkpoint, names)
    return weights


def check_prediction(path: Path, file: ModelFile, spec: ModelSpec) -> None:
    """Raises ConfigError for a model without such a layer."""
    if hasattr(file, PREDICTION_LOADER) and spec.extra_layers and not is_gguf(path):
        return
    families = ", ".join(name for name, one in MODELS.items() if hasattr(one, PREDICTION_LOADER))
    allowed = f"ngram; mtp for safetensors of {families} whose num_nextn_predict_layers is not 0"
    raise ConfigError.field("--speculative-config: method", "mtp", allowed)


def prediction_tensors(spec: ModelSpec) -> list[str]:
    """Patterns of the tensors of layers after the others. Those that are not read are no error."""
    first = spec.num_layers
    extra = range(first, first + spec.extra_layers)
    return [rf"(model\.layers|blk)\.{layer}\..*" for layer in extra]


def routed_layers(file: ModelFile, spec: ModelSpec) -> tuple[int, ...]:
    """The layers of the files with routed experts that can be loaded: also that layer's."""
    extra = (spec.num_layers,) if hasattr(file, PREDICTION_LOADER) and spec.extra_layers else ()
    return (*spec.moe_layers, *extra)


def with_prediction(
    model: Model, file: ModelFile, config: Config, loader: Loader, with_experts: bool
) -> Model:
    """The model with that layer. with_experts: also with its routed experts."""
    layer, held = model.spec.num_layers, model.experts
    if with_experts:
        held = {**held, layer: experts(loader, file.expert_names(config, layer), None)}
    return replace(
        model,
        spec=replace(model.spec, predicting=1),
        experts=held,
        prediction=getattr(file, PREDICTION_LOADER)(config, loader),
    )
