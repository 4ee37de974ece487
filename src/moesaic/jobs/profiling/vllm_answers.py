"""Reads the experts in answers of a vLLM server with `--enable-return-routed-experts`.

Each answer of `/v1/completions` or `/v1/chat/completions` is a JSON object, in a file of its own (.json) or
in a line (.jsonl). Lines of vLLM's `run-batch`, which have the answer in `response.body`, are read too.
Requests need `"return_token_ids": true`, since a profile needs token ids. Two forms of the experts are known:

    now     choices[i].routed_experts: the base64 text of a .npy file [tokens - 1, layers, k] over prompt and
            answer (`vllm/entrypoints/openai/completion/protocol.py`). The last token never ran.
    v0.21   prompt_routed_experts and choices[i].routed_experts: nested lists [tokens, layers, k] over the
            prompt and the answer (`docs/training/routed_experts_replay.md`). -1 stands for cached tokens.

Question: How is routing of SGLang or vLLM read?
"""

from __future__ import annotations

import base64
import binascii
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from moesaic.core.archive import DAMAGE_ERRORS
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


def read(paths: list[Path], model: RoutedModel) -> list[RoutingRecord]:
    """Read all files. Raises ConfigError naming the file and line of an answer that cannot be used."""
    return [_read(path, model) for path in paths]


def _read(path: Path, model: RoutedModel) -> RoutingRecord:
    routes: list[Routes] = []
    left_out = 0
    for location, answer in _answers(path):
        for number, choice in enumerate(_list(answer.get("choices"), f"{location}: choices")):
            label = f"{location}: choices[{number}]"
            prompt = choice.get("prompt_token_ids", answer.get("prompt_token_ids"))
            prompt_ids = _ids(prompt, f"{label}: prompt_token_ids")
            ids = _ids(choice.get("token_ids"), f"{label}: token_ids")
            experts = _experts(choice, answer, len(prompt_ids) + len(ids), label)
            tokens = np.array(prompt_ids + ids, dtype=np.int64)[: len(experts)]
            experts = select_routed_layers(experts, model, 1, label)
            is_complete = np.asarray((experts >= 0).all(axis=(1, 2)))
            check_ids(tokens[is_complete], experts[is_complete], model, label)
            left_out += int((~is_complete).sum())
            if is_complete.any():
                num_prompt = int(is_complete[: len(prompt_ids)].sum())
                routes.append(make_request_routes(tokens[is_complete], experts[is_complete], num_prompt))
    return RoutingRecord(routes, left_out=left_out)


def _experts(choice: dict[str, Any], answer: dict[str, Any], tokens: int, label: str) -> AnyArray:
    """[t, layers, k] of the first t of `tokens` tokens: those of the prompt, then those of the answer."""
    answer_experts = choice.get("routed_experts")
    if answer_experts is None:
        raise ConfigError(
            f"{label}: it has no routed_experts; start vLLM with --enable-return-routed-experts"
        )
    if isinstance(answer_experts, str):
        experts = _decode(answer_experts, label)
    else:
        parts = [_parse_lists(answer.get("prompt_routed_experts"), f"{label}: prompt_routed_experts")]
        experts = np.concatenate(
            parts + ([_parse_lists(answer_experts, f"{label}: routed_experts")] if answer_experts else [])
        )
    if experts.ndim != 3 or experts.dtype.kind not in "iu" or not tokens - 1 <= len(experts) <= tokens:
        allowed_values = f"whole numbers [{tokens - 1} or {tokens} tokens, layers, k]"
        raise ConfigError.field(
            f"{label}: routed_experts", f"{experts.dtype} {list(experts.shape)}", allowed_values
        )
    return experts.astype(np.int64)


def _decode(text: str, label: str) -> AnyArray:
    try:
        array: AnyArray = np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    except (binascii.Error, *DAMAGE_ERRORS) as error:
        raise ConfigError(f"{label}: routed_experts: not the base64 text of a .npy file: {error}") from error
    return array


def _parse_lists(value: Any, label: str) -> AnyArray:
    try:
        array: AnyArray = np.array(value)
    except ValueError as error:
        raise ConfigError(f"{label}: not lists of equal lengths: {error}") from error
    if array.ndim != 3:
        raise ConfigError.field(label, f"{array.ndim} dimensions", "[tokens, layers, k]")
    return array


def _ids(value: Any, label: str) -> list[int]:
    if value is None:
        raise ConfigError(f'{label}: missing; send requests to vLLM with "return_token_ids": true')
    if not isinstance(value, list) or any(type(item) is not int for item in value):
        raise ConfigError.field(label, str(value)[:40], "a list of token ids")
    return value


def _list(value: Any, label: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or any(not isinstance(item, dict) for item in value):
        raise ConfigError.field(label, str(value)[:40], "a list of objects, as in an answer of vLLM")
    return value


def _answers(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each answer of the file, and where it stands."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8: {error}") from error
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    lines = path.suffix == ".jsonl"
    for number, part in enumerate(text.splitlines() if lines else [text], 1):
        location = f"{path}, line {number}" if lines else str(path)
        if not part.strip():
            continue
        try:
            answer = json.loads(part)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{location}: not JSON: {error}") from error
        if isinstance(answer, dict) and isinstance(answer.get("response"), dict):
            answer = answer["response"].get("body")  # a line that `vllm run-batch` wrote
        if not isinstance(answer, dict):
            raise ConfigError.field(location, type(answer).__name__, "an answer of vLLM, a JSON object")
        yield location, answer
