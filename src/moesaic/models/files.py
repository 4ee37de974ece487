"""Finds a model's files, and reads the small JSON files beside its weights. Does not import torch."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from moesaic.config.environment import cache_folder
from moesaic.core.errors import CheckpointError, ConfigError, RequestError
from moesaic.core.home import expand_home
from moesaic.core.request import SamplingParams
from moesaic.core.text_config import TEXT, read_text_config
from moesaic.core.weight_types import is_unquantized
from moesaic.models import hub, overrides
from moesaic.models.gguf.header import SPLIT, SUFFIX
from moesaic.models.gguf.header import is_gguf as is_gguf
from moesaic.models.gguf.hub import HubFile, parse_hub_file
from moesaic.models.gguf.model import Model as GgufModel

DEMO = "demo"
MODEL = "a directory with config.json, a GGUF file, a hub id, demo, or HUB_ID:Q4_K_M for a GGUF file there"
"""What the name of a model can be."""
WEIGHTS = (".safetensors", SUFFIX)
"""How names of files with weights end."""
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MODELOPT_FILE = "hf_quant_config.json"
"""The file in which older versions of ModelOpt say how a checkpoint is quantised."""
PICKLES = (".bin", ".pt", ".pth")
"""How names of files with pickled weights end."""
CONFIG_BYTES = 4 << 20
"""Largest config file that is read. Real ones have a few kilobytes."""
INDEX_BYTES = 64 << 20
"""Largest index of tensors that is read. Those of the largest models have about 10 MB."""
SMALL_FILES = {INDEX: INDEX_BYTES, MODELOPT_FILE: CONFIG_BYTES}
"""Files beside config.json that are read before weights are downloaded -> most bytes that are read."""
_POINTER = b"version https://git-lfs.github.com/spec/"
_POINTER_BYTES = 1024
"""Git LFS keeps its pointers smaller than this."""


def resolve(model: str, revision: str | None = None, hf_overrides: str | None = None) -> Path:
    """Returns the directory of a model, given as a path, the word "demo", or a hub id such as "org/name".

    hf_overrides: changes of its config.json, see overrides.py. The directory is then one of links, in the
    user's cache folder.
    """
    path = _resolve(model, revision)
    if hf_overrides is None:
        return path
    patch = overrides.parse(hf_overrides)
    return overrides.overlay(path, patch, read_config(path), cache_folder() / "overrides")


def _resolve(model: str, revision: str | None) -> Path:
    """Finds or downloads a model.

    A model in a GGUF file is that file, or the first of several. It can also be given as its directory, or as
    one in a hub's repository ("org/name:Q4_K_M").
    A hub id is looked up in the local Hugging Face cache, or downloaded into it. huggingface_hub reads its
    own settings (HF_ENDPOINT, HF_HUB_OFFLINE, HF_HOME). Raises ConfigError in one line.
    """
    if revision is not None and (model == DEMO or expand_home(model).exists()):
        raise ConfigError.field(
            "--revision", revision, "none for a model in a directory or a file, which has no other"
        )
    if model == DEMO:
        return _check_directory(Path(__file__).parent.parent / "demo", "the demo checkpoint is not installed")
    path, file = expand_home(model), parse_hub_file(model)
    if file is not None and not path.exists():
        return _gguf_from_hub(file, revision)
    if is_gguf(path) or path.is_dir():
        return gguf_at(path) or _check_directory(path, "no config.json in this directory")
    if path.exists() or path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise ConfigError.field("model", model, MODEL)
    return _from_hub(model, revision)


def is_hub_name(model: str) -> bool:
    """Whether `resolve` looks for a model on a hub."""
    path = expand_home(model)
    if model == DEMO or path.exists():
        return False
    if parse_hub_file(model) is not None:
        return True
    is_path = is_gguf(path) or path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1
    return not is_path


def gguf_at(path: Path) -> Path | None:
    """The GGUF file at `path`, or that of a directory that has one model in this form and no other weights.

    Raises ConfigError for a file that does not exist, and for a directory with several.
    """
    if is_gguf(path):
        if not path.is_file():
            raise ConfigError(f"model: {path}: there is no such file")
        return GgufModel(path).path
    if any(path.glob("*.safetensors")):
        return None
    gguf_files = [file for file in sorted(path.glob(f"*{SUFFIX}")) if not _is_later_part(file)]
    if len(gguf_files) > 1:
        names = ", ".join(file.name for file in gguf_files[:4])
        raise ConfigError.field("model", str(path), f"one GGUF file; this directory has {names}")
    return GgufModel(gguf_files[0]).path if gguf_files else None


def _is_later_part(file: Path) -> bool:
    match = SPLIT.fullmatch(file.name)
    return match is not None and int(match[2]) != 1


def refuse_gguf(path: Path, command: str) -> None:
    """Raises ConfigError for a GGUF file. command: what cannot read one."""
    if is_gguf(path):
        raise ConfigError(f"{command}: got {path}, a GGUF file; allowed: a directory with safetensors")


def model_files(path: Path) -> list[Path]:
    """The files that a model is read from: some may not exist."""
    if is_gguf(path):
        return GgufModel(path).files
    return [path / "config.json", path / INDEX, *sorted(path.glob("*.safetensors"))]


def read_config(path: Path) -> dict[str, Any]:
    """What config.json of the model at `path` says, or would say for a GGUF file."""
    return GgufModel(path).config if is_gguf(path) else _read_config_file(path / "config.json")


def _read_config_file(file: Path) -> dict[str, Any]:
    """A config.json, with what older versions of ModelOpt say in a file beside it."""
    raw, quantizer_file = read_json(file), file.parent / MODELOPT_FILE
    configs = [config for config in (raw, raw.get(TEXT)) if isinstance(config, dict)]
    if file.name != "config.json" or not quantizer_file.is_file() or not all(map(is_unquantized, configs)):
        return raw
    return raw | {"quantization_config": {"quant_method": "modelopt"} | read_json(quantizer_file)}


def _check_directory(path: Path, problem: str) -> Path:
    if not (path / "config.json").is_file():
        raise CheckpointError(f"model: {path}: {lookalike_without_config(path) or problem}")
    if (pointer := lfs_pointer_in(path)) is not None:
        raise CheckpointError(f"model: {path}: {pointer}")
    if (missing := describe_missing_weights([file.name for file in path.iterdir()])) is not None:
        raise CheckpointError(f"model: {path}: {missing}")
    return path


def _from_hub(model: str, revision: str | None) -> Path:
    problem = f"no config.json in this repository; of one with GGUF files, name a file as {model}:Q4_K_M"
    return _check_directory(hub.download(model, revision, MODEL), problem)


def _gguf_from_hub(file: HubFile, revision: str | None) -> Path:
    """A file that the cache has is not looked for on the hub."""
    path = hub.gguf_in_cache(file, revision) or hub.download_gguf(file, revision, MODEL)
    return GgufModel(path).path


@dataclass(frozen=True)
class FoundModel:
    """What can be known of a model without a download of its weights."""

    config: Path
    """The model's config.json, or its GGUF file."""
    directory: Path | None = None
    """The whole checkpoint: its directory or GGUF file. A GGUF file on a hub has nothing but its header here.
    None: only small files are on this machine."""
    files: Mapping[str, int] | None = None
    """The files of a model on the hub that would be downloaded, with their bytes."""
    name: str | None = None
    """The name of a model on the hub, which commands take."""

    @property
    def has_weights(self) -> bool:
        """Whether the weights are on this machine."""
        return self.directory is not None and self.files is None

    def read(self) -> dict[str, Any]:
        """Reads what config.json of the model says, or would say for a GGUF file."""
        return read_config(self.config) if is_gguf(self.config) else _read_config_file(self.config)

    @property
    def parent(self) -> Path:
        """How messages name the checkpoint."""
        return self.config if is_gguf(self.config) else self.config.parent

    @property
    def index(self) -> Path | None:
        """The index of the tensors of a model on the hub; None if it has none."""
        file = self.config.parent / INDEX
        return file if self.files is not None and file.is_file() else None


def find(
    model: str, folder: Path, revision: str | None = None, hf_overrides: str | None = None
) -> FoundModel:
    """Finds a model as `resolve` does, but does not download its weights. A path of a config.json is found,
    too.

    folder: gets config.json and the index of tensors of a hub id that is not in the local cache, or the
    headers of its GGUF files, and what `hf_overrides` changes. Raises ConfigError in one line.
    """
    source = _find(model, folder, revision)
    return source if hf_overrides is None else _change(source, overrides.parse(hf_overrides), folder)


def _change(source: FoundModel, patch: dict[str, Any], folder: Path) -> FoundModel:
    """The model with changes of its config.json."""
    if source.directory is not None:
        directory = overrides.overlay(source.directory, patch, source.read(), folder)
        return replace(source, config=directory / overrides.CONFIG, directory=directory)
    config = folder / overrides.CONFIG
    config.write_text(json.dumps(overrides.merge(source.read(), patch)), encoding="utf-8")
    return replace(source, config=config)


def _find(model: str, folder: Path, revision: str | None) -> FoundModel:
    """Finds a model without changes."""
    path = expand_home(model)
    if path.is_file() and path.suffix == ".json":
        if revision is not None:
            raise ConfigError.field("--revision", revision, "none for a config.json, which has no other")
        return FoundModel(path)
    if (file := parse_hub_file(model)) is not None and not path.exists():
        return _gguf_on_hub(file, revision, folder)
    is_local = path.exists() or is_gguf(path)
    if model == DEMO or is_local or path.is_absolute() or model.startswith((".", "~")):
        path_found = resolve(model, revision)
        return FoundModel(path_found if is_gguf(path_found) else path_found / "config.json", path_found)
    cached_folder = _in_cache(model, revision)
    if cached_folder is not None:
        return FoundModel(cached_folder / "config.json", cached_folder)
    gguf = hub.only_gguf(model, revision, MODEL)
    if gguf is not None:
        return _gguf_on_hub(gguf, revision, folder)
    files = hub.small_files(model, revision, folder, SMALL_FILES, MODEL)
    return FoundModel(folder / "config.json", files=files, name=model)


def _gguf_on_hub(file: HubFile, revision: str | None, folder: Path) -> FoundModel:
    cached_file = hub.gguf_in_cache(file, revision)
    if cached_file is not None:
        return FoundModel(cached_file, cached_file, name=file.name)
    files = hub.headers_of_gguf(file, revision, folder, MODEL)
    first_file = folder / next(iter(files))
    return FoundModel(first_file, first_file, files, file.name)


def _in_cache(model: str, revision: str | None) -> Path | None:
    """The directory of a hub id in the local cache. None unless it has all weights."""
    path = hub.find_cached(model, revision)
    if path is None or not (path / "config.json").is_file():
        return None
    if (path / INDEX).is_file():
        table = read_json(path / INDEX, INDEX_BYTES).get("weight_map")
        # An interrupted download leaves an index without all of its shards.
        shards = set(map(str, table.values())) if isinstance(table, dict) else set()
        return path if shards and all((path / shard).is_file() for shard in shards) else None
    return path if (path / SINGLE).is_file() else None


def read_json(file: Path, max_bytes: int = CONFIG_BYTES) -> dict[str, Any]:
    """Reads a JSON object of at most `max_bytes` bytes.

    Raises CheckpointError if the file is missing, larger, or contains something else.
    """
    try:
        size = file.stat().st_size
        # Checked before reading, so that a damaged or hostile file cannot fill the memory.
        if size > max_bytes:
            raise CheckpointError(f"{file}: got {size} bytes; allowed: at most {max_bytes}")
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{file}: this file is missing") from error
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: contains no JSON object")
    return value


@dataclass(frozen=True)
class GenerationDefaults:
    """Sampling defaults of the model's authors; None for what they do not specify."""

    eos_token_ids: tuple[int, ...] = ()
    """End-of-sequence ids of generation_config.json and config.json together, in ascending order. Ids outside
    the vocabulary are left out (-1 means none in some files)."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def join_ends(self, token_ids: Iterable[int]) -> tuple[int, ...]:
        """Returns the ids that end an answer: those of the files, and those of the tokenizer."""
        return tuple(sorted({*self.eos_token_ids, *token_ids}))

    @property
    def sampling(self) -> dict[str, Any]:
        """The specified values, by the names of SamplingParams."""
        values = {name: value for name, value in asdict(self).items() if name != "eos_token_ids"}
        return {name: value for name, value in values.items() if value is not None}


def generation_defaults(path: Path) -> GenerationDefaults:
    """Reads the defaults in a model's directory. With "do_sample": false only the end ids are used.

    Raises CheckpointError for a value that a request could not have.
    """
    config = read_text_config(read_config(path))
    file = path / "generation_config.json"
    generation = read_json(file) if file.is_file() else {}
    if is_gguf(path):
        generation, file = GgufModel(path).generation, path
    token_ids = _ids(config.get("eos_token_id")) | _ids(generation.get("eos_token_id"))
    size = config.get("vocab_size")
    end = size if isinstance(size, int) else float("inf")  # the model's own parser refuses other types
    eos = [token for token in sorted(token_ids) if 0 <= token < end]
    if generation.get("do_sample") is False:
        return GenerationDefaults(tuple(eos))
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    defaults = GenerationDefaults(tuple(eos), **{name: generation.get(name) for name in names})
    # Checked like a request's own values, so that a bad file fails at the start and not at the first request.
    try:
        SamplingParams(**defaults.sampling)
    except RequestError as error:
        raise CheckpointError(f"{file}: {error}") from error
    return defaults


def _ids(value: object) -> set[int]:
    """Returns an id, a list of ids or None as a set."""
    items = value if isinstance(value, list) else [value]
    return {item for item in items if isinstance(item, int) and not isinstance(item, bool)}


def describe_missing_weights(names: Collection[str]) -> str | None:
    """Says why the files of these names have no weights that are read. None if they have some.

    >>> describe_missing_weights(["config.json", "model-00001-of-00002.safetensors"])
    'holds shards such as model-00001-of-00002.safetensors but no model.safetensors.index.json: download it'
    """
    if {SINGLE, INDEX} & set(names):
        return None
    shards = sorted(name for name in names if name.endswith(".safetensors"))
    pickles = sorted(name for name in names if name.endswith(PICKLES))
    if shards:
        return f"holds shards such as {shards[0]} but no {INDEX}: download it"
    if pickles:
        return (
            f"holds {pickles[0]} but no safetensors; pickled weights can run code and are not read: convert "
            "them to safetensors"
        )
    return None


def lookalike_without_config(path: Path) -> str | None:
    """What a directory without config.json is, or None if it is nothing known."""
    adapter = path / "adapter_config.json"
    if adapter.is_file():
        return f"this is a LoRA adapter{_base_of(adapter)}; merge it into its model and give the merged model"
    return None


def lfs_pointer_in(path: Path) -> str | None:
    """That a file in a model's directory is a pointer of Git LFS. None if there is none."""
    for pattern in ("config.json", "*.safetensors", "tokenizer.json", "*.index.json"):
        for file in sorted(path.glob(pattern)):
            if _is_pointer(file):
                return f"{file.name} is a Git LFS pointer, not the file itself: run git lfs pull there"
    return None


def _is_pointer(file: Path) -> bool:
    try:
        if file.stat().st_size > _POINTER_BYTES:
            return False
        with file.open("rb") as opened:
            return opened.read(len(_POINTER)) == _POINTER
    except OSError:
        return False


def _base_of(adapter: Path) -> str:
    """The model that an adapter changes, in words."""
    try:
        base = json.loads(adapter.read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError, RecursionError):
        return ""
    return f" of {base}" if isinstance(base, str) and base.isprintable() and 0 < len(base) < 200 else ""
