"""Reads what SGLang's expert distribution recorder wrote.

SGLang writes the files (`expert_distribution_recorder_*.pt`) on `/dump_expert_distribution_record`, into the
folder SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR. Its `python/sglang/srt/eplb/expert_distribution.py` defines
them. They depend on `--expert-distribution-recorder-mode`:

    stat, stat_approx   {"logical_count": [steps, layers, E], "rank", ...}, summed over all ranks
    per_pass            {"records": [{"global_physical_count": [layers, P], ...}, ...],
                         "last_physical_to_logical_map": [layers, P]}, a file for each rank
    per_token           the same with "input_ids", "extend_seq_lens" and "topk_ids_of_layer" [layers, t, 8]
                         in each record

`layers` are all layers of the model. P are physical experts: with redundant experts several of them are one
logical expert. Missing experts are -1. Only per_token knows tokens. It does not name requests, so each
sequence of a prefill pass counts as a request. Decoded tokens are counted without one.

Question: How is routing of SGLang or vLLM read?
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moesaic.core.errors import ConfigError
from moesaic.core.profile import Routes
from moesaic.core.routing import RoutedModel
from moesaic.jobs.profiling.recorded import AnyArray, Recorded, check_ids, request, routed_rows

MAP = "last_physical_to_logical_map"


def read(paths: list[Path], model: RoutedModel) -> list[Recorded]:
    """Read the files of one recording, for example one of each rank.

    Ranks that share a token's attention record the same tokens. These count once.
    """
    seen: set[tuple[int, bytes, bytes]] = set()
    return [_read(path, model, seen) for path in paths]


def _read(path: Path, model: RoutedModel, seen: set[tuple[int, bytes, bytes]]) -> Recorded:
    found, what = _loaded(path), str(path)
    try:
        if "logical_count" in found:
            return Recorded(loads=_logical(_array(found["logical_count"]), model, what))
        records, places = found["records"], _array(found[MAP])
        if not records:
            raise ConfigError(f"{path}: it has no records; was anything recorded?")
        if all("topk_ids_of_layer" in record for record in records):
            return _tokens(records, places, model, what, seen)
        counts = sum(_array(record["global_physical_count"]).astype(np.int64) for record in records)
        return Recorded(loads=_of_physical(np.asarray(counts), places, model, what))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        problem = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(
            f"{path}: not a file of SGLang's expert distribution recorder: {problem}"
        ) from error


def _loaded(path: Path) -> dict[str, Any]:
    """The contents of a file of torch.save. Nothing in it may run code."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, KeyError) as error:
        allowed = "tensors, numbers, text, lists and dictionaries in a file of torch.save"
        raise ConfigError(f"{path}: not read: it is damaged, or holds more than {allowed}") from error
    if not isinstance(found, dict):
        raise ConfigError.field(str(path), type(found).__name__, "a dictionary, as SGLang writes it")
    return found


def _logical(counts: AnyArray, model: RoutedModel, what: str) -> Any:
    """[layers, E] the sum of `logical_count` [steps, layers, E]."""
    if counts.ndim != 3 or counts.shape[2] != model.num_experts:
        allowed = f"[steps, layers, {model.num_experts}], the model's experts"
        raise ConfigError.field(f"{what}: logical_count", list(counts.shape), allowed)
    return routed_rows(counts.astype(np.int64).sum(axis=0), model, 0, what)


def _of_physical(counts: AnyArray, places: AnyArray, model: RoutedModel, what: str) -> Any:
    """[layers, E] loads of logical experts. counts: [layers, P] of physical ones. places: [layers, P]."""
    if counts.shape != places.shape:
        allowed = f"{list(places.shape)}, as {MAP}"
        raise ConfigError.field(f"{what}: global_physical_count", list(counts.shape), allowed)
    counts, places = (routed_rows(array, model, 0, what) for array in (counts, places))
    _check_places(places, model, what)
    loads = np.zeros((len(model.layers), model.num_experts), dtype=np.int64)
    for row, (mine, experts) in enumerate(zip(counts, places, strict=True)):
        np.add.at(loads[row], experts, mine)
    return loads


def _tokens(
    records: list[dict[str, Any]],
    places: AnyArray,
    model: RoutedModel,
    what: str,
    seen: set[tuple[int, bytes, bytes]],
) -> Recorded:
    places = routed_rows(places, model, 0, what)
    _check_places(places, model, what)
    routes: list[Routes] = []
    tokens: list[AnyArray] = []
    experts: list[AnyArray] = []
    left_out = 0
    for record in records:
        ids = np.asarray(record["input_ids"], dtype=np.int64)
        positions = np.asarray(record["positions"], dtype=np.int64)
        key = int(record["forward_pass_id"]), ids.tobytes(), positions.tobytes()
        if key in seen:
            continue
        seen.add(key)
        chosen = _experts(_array(record["topk_ids_of_layer"]), places, model, what)
        lengths = record["extend_seq_lens"]
        lengths = [] if lengths is None else np.asarray(lengths, dtype=np.int64).tolist()
        start = 0
        for length in lengths if sum(lengths) == len(ids) else []:
            part = slice(start, start + length)
            mine, theirs, missing = _complete(ids[part], chosen[part], model, what)
            if len(mine):
                routes.append(request(mine, theirs, len(mine)))
            start, left_out = start + length, left_out + missing
        if start < len(ids):
            mine, theirs, missing = _complete(ids[start:], chosen[start:], model, what)
            tokens, experts, left_out = [*tokens, mine], [*experts, theirs], left_out + missing
    return Recorded(routes, tokens, experts, left_out=left_out)


def _experts(chosen: AnyArray, places: AnyArray, model: RoutedModel, what: str) -> AnyArray:
    """[t, layers, k] logical experts, -1 where there is none. chosen: [layers, t, columns] physical ones."""
    chosen = routed_rows(chosen, model, 0, what)
    if chosen.ndim != 3 or chosen.shape[2] < model.top_k:
        allowed = f"[layers, tokens, {model.top_k} or more]"
        raise ConfigError.field(f"{what}: topk_ids_of_layer", list(chosen.shape), allowed)
    if (chosen[:, :, model.top_k :] >= 0).any():
        raise ConfigError.field(f"{what}: experts of a token", "more", f"{model.top_k}, as in this model")
    chosen = chosen[:, :, : model.top_k].astype(np.int64)
    if chosen.size and chosen.max() >= places.shape[1]:
        allowed = f"0 to {places.shape[1] - 1}, as in {MAP}"
        raise ConfigError.field(f"{what}: physical expert", int(chosen.max()), allowed)
    rows = np.arange(len(places))[:, None, None]
    logical = np.where(chosen < 0, -1, places[rows, np.maximum(chosen, 0)])
    return np.ascontiguousarray(logical.transpose(1, 0, 2))


def _complete(
    tokens: AnyArray, experts: AnyArray, model: RoutedModel, what: str
) -> tuple[AnyArray, AnyArray, int]:
    """The tokens with an expert in each place, and the number of the others."""
    whole = (experts >= 0).all(axis=(1, 2))
    tokens, experts = tokens[whole], experts[whole]
    check_ids(tokens, experts, model, what)
    return tokens, experts, int((~whole).sum())


def _check_places(places: AnyArray, model: RoutedModel, what: str) -> None:
    if places.size and not 0 <= places.min() <= places.max() < model.num_experts:
        wrong = int(places.max() if places.min() >= 0 else places.min())
        raise ConfigError.field(f"{what}: {MAP}", wrong, f"experts 0 to {model.num_experts - 1}")


def _array(value: Any) -> AnyArray:
    found: AnyArray = value.numpy()
    return found
