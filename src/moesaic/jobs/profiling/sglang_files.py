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
from moesaic.jobs.profiling.routing_records import (
    AnyArray,
    RoutingRecord,
    check_ids,
    make_request_routes,
    select_routed_layers,
)

MAP = "last_physical_to_logical_map"


def read(paths: list[Path], model: RoutedModel) -> list[RoutingRecord]:
    """Read the files of one recording, for example one of each rank.

    Ranks that share a token's attention record the same tokens. These count once.
    """
    seen_passes: set[tuple[int, bytes, bytes]] = set()
    return [_read(path, model, seen_passes) for path in paths]


def _read(path: Path, model: RoutedModel, seen_passes: set[tuple[int, bytes, bytes]]) -> RoutingRecord:
    contents, label = load_dictionary(path), str(path)
    try:
        if "logical_count" in contents:
            return RoutingRecord(loads=_sum_logical_counts(_array(contents["logical_count"]), model, label))
        records, places = contents["records"], _array(contents[MAP])
        if not records:
            raise ConfigError(f"{path}: it has no records; was anything recorded?")
        if all("topk_ids_of_layer" in record for record in records):
            return _tokens(records, places, model, label, seen_passes)
        counts = sum(_array(record["global_physical_count"]).astype(np.int64) for record in records)
        return RoutingRecord(loads=_sum_physical_counts(np.asarray(counts), places, model, label))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        problem = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(
            f"{path}: not a file of SGLang's expert distribution recorder: {problem}"
        ) from error


def load_dictionary(path: Path) -> dict[str, Any]:
    """The contents of a file of torch.save. Nothing in it may run code."""
    try:
        contents = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, KeyError) as error:
        allowed_contents = "tensors, numbers, text, lists and dictionaries in a file of torch.save"
        raise ConfigError(
            f"{path}: not read: it is damaged, or holds more than {allowed_contents}"
        ) from error
    if not isinstance(contents, dict):
        raise ConfigError.field(str(path), type(contents).__name__, "a dictionary, as SGLang writes it")
    return contents


def _sum_logical_counts(counts: AnyArray, model: RoutedModel, label: str) -> Any:
    """[layers, E] the sum of `logical_count` [steps, layers, E]."""
    if counts.ndim != 3 or counts.shape[2] != model.num_experts:
        allowed_values = f"[steps, layers, {model.num_experts}], the model's experts"
        raise ConfigError.field(f"{label}: logical_count", list(counts.shape), allowed_values)
    return select_routed_layers(counts.astype(np.int64).sum(axis=0), model, 0, label)


def _sum_physical_counts(counts: AnyArray, places: AnyArray, model: RoutedModel, label: str) -> Any:
    """[layers, E] loads of logical experts. counts: [layers, P] of physical ones. places: [layers, P]."""
    if counts.shape != places.shape:
        allowed_values = f"{list(places.shape)}, as {MAP}"
        raise ConfigError.field(f"{label}: global_physical_count", list(counts.shape), allowed_values)
    counts, places = (select_routed_layers(array, model, 0, label) for array in (counts, places))
    _check_places(places, model, label)
    loads = np.zeros((len(model.layers), model.num_experts), dtype=np.int64)
    for row, (layer_counts, experts) in enumerate(zip(counts, places, strict=True)):
        np.add.at(loads[row], experts, layer_counts)
    return loads


def _tokens(
    records: list[dict[str, Any]],
    places: AnyArray,
    model: RoutedModel,
    label: str,
    seen_passes: set[tuple[int, bytes, bytes]],
) -> RoutingRecord:
    places = select_routed_layers(places, model, 0, label)
    _check_places(places, model, label)
    routes: list[Routes] = []
    tokens: list[AnyArray] = []
    experts: list[AnyArray] = []
    left_out = 0
    for record in records:
        ids = np.asarray(record["input_ids"], dtype=np.int64)
        positions = np.asarray(record["positions"], dtype=np.int64)
        key = int(record["forward_pass_id"]), ids.tobytes(), positions.tobytes()
        # Ranks that share a token's attention record the same pass.
        if key in seen_passes:
            continue
        seen_passes.add(key)
        topk_ids = _experts(_array(record["topk_ids_of_layer"]), places, model, label)
        lengths = record["extend_seq_lens"]
        lengths = [] if lengths is None else np.asarray(lengths, dtype=np.int64).tolist()
        start = 0
        for length in lengths if sum(lengths) == len(ids) else []:
            part = slice(start, start + length)
            part_tokens, part_experts, missing = _drop_incomplete(ids[part], topk_ids[part], model, label)
            if len(part_tokens):
                routes.append(make_request_routes(part_tokens, part_experts, len(part_tokens)))
            start, left_out = start + length, left_out + missing
        if start < len(ids):
            part_tokens, part_experts, missing = _drop_incomplete(ids[start:], topk_ids[start:], model, label)
            tokens, experts, left_out = [*tokens, part_tokens], [*experts, part_experts], left_out + missing
    return RoutingRecord(routes, tokens, experts, left_out=left_out)


def _experts(physical_ids: AnyArray, places: AnyArray, model: RoutedModel, label: str) -> AnyArray:
    """[t, layers, k] logical experts, -1 where there is none. physical_ids: [layers, t, columns]."""
    physical_ids = select_routed_layers(physical_ids, model, 0, label)
    if physical_ids.ndim != 3 or physical_ids.shape[2] < model.top_k:
        allowed_values = f"[layers, tokens, {model.top_k} or more]"
        raise ConfigError.field(f"{label}: topk_ids_of_layer", list(physical_ids.shape), allowed_values)
    if (physical_ids[:, :, model.top_k :] >= 0).any():
        raise ConfigError.field(f"{label}: experts of a token", "more", f"{model.top_k}, as in this model")
    physical_ids = physical_ids[:, :, : model.top_k].astype(np.int64)
    if physical_ids.size and physical_ids.max() >= places.shape[1]:
        allowed_values = f"0 to {places.shape[1] - 1}, as in {MAP}"
        raise ConfigError.field(f"{label}: physical expert", int(physical_ids.max()), allowed_values)
    rows = np.arange(len(places))[:, None, None]
    logical = np.where(physical_ids < 0, -1, places[rows, np.maximum(physical_ids, 0)])
    return np.ascontiguousarray(logical.transpose(1, 0, 2))


def _drop_incomplete(
    tokens: AnyArray, experts: AnyArray, model: RoutedModel, label: str
) -> tuple[AnyArray, AnyArray, int]:
    """The tokens with an expert in each place, and the number of the others."""
    is_complete = (experts >= 0).all(axis=(1, 2))
    tokens, experts = tokens[is_complete], experts[is_complete]
    check_ids(tokens, experts, model, label)
    return tokens, experts, int((~is_complete).sum())


def _check_places(places: AnyArray, model: RoutedModel, label: str) -> None:
    if places.size and not 0 <= places.min() <= places.max() < model.num_experts:
        wrong = int(places.max() if places.min() >= 0 else places.min())
        raise ConfigError.field(f"{label}: {MAP}", wrong, f"experts 0 to {model.num_experts - 1}")


def _array(value: Any) -> AnyArray:
    array: AnyArray = value.numpy()
    return array
