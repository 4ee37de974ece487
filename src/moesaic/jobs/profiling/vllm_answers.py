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
from moesaic.jobs.profiling.recorded import AnyArray, Recorded, check_ids, request, routed_rows


def read(paths: list[Path], model: RoutedModel) -> list[Recorded]:
    """Read all files. Raises ConfigError naming the file and line of an answer that cannot be used."""
    return [_read(path, model) for path in paths]


def _read(path: Path, model: RoutedModel) -> Recorded:
    routes: list[Routes] = []
    left_out = 0
    for where, answer in _answers(path):
        for number, choice in enumerate(_list(answer.get("choices"), f"{where}: choices")):
            what = f"{where}: choices[{number}]"
            prompt = choice.get("prompt_token_ids", answer.get("prompt_token_ids"))
            prompt_ids = _ids(prompt, f"{what}: prompt_token_ids")
            ids = _ids(choice.get("token_ids"), f"{what}: token_ids")
            experts = _experts(choice, answer, len(prompt_ids) + len(ids), what)
            tokens = np.array(prompt_ids + ids, dtype=np.int64)[: len(experts)]
            experts = routed_rows(experts, model, 1, what)
            whole = np.asarray((experts >= 0).all(axis=(1, 2)))
            check_ids(tokens[whole], experts[whole], model, what)
            left_out += int((~whole).sum())
            if whole.any():
                known = int(whole[: len(prompt_ids)].sum())
                routes.append(request(tokens[whole], experts[whole], known))
    return Recorded(routes, left_out=left_out)


def _experts(choice: dict[str, Any], answer: dict[str, Any], tokens: int, what: str) -> AnyArray:
    """[t, layers, k] of the first t of `tokens` tokens: those of the prompt, then those of the answer."""
    given = choice.get("routed_experts")
    if given is None:
        raise ConfigError(f"{what}: it has no routed_experts; start vLLM with --enable-return-routed-experts")
    if isinstance(given, str):
        found = _decoded(given, what)
    else:
        parts = [_nested(answer.get("prompt_routed_experts"), f"{what}: prompt_routed_experts")]
        found = np.concatenate(parts + ([_nested(given, f"{what}: routed_experts")] if given else []))
    if found.ndim != 3 or found.dtype.kind not in "iu" or not tokens - 1 <= len(found) <= tokens:
        allowed = f"whole numbers [{tokens - 1} or {tokens} tokens, layers, k]"
        raise ConfigError.field(f"{what}: routed_experts", f"{found.dtype} {list(found.shape)}", allowed)
    return found.astype(np.int64)


def _decoded(text: str, what: str) -> AnyArray:
    try:
        found: AnyArray = np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    except (binascii.Error, *DAMAGE_ERRORS) as error:
        raise ConfigError(f"{what}: routed_experts: not the base64 text of a .npy file: {error}") from error
    return found


def _nested(value: Any, what: str) -> AnyArray:
    try:
        found: AnyArray = np.array(value)
    except ValueError as error:
        raise ConfigError(f"{what}: not lists of equal lengths: {error}") from error
    if found.ndim != 3:
        raise ConfigError.field(what, f"{found.ndim} dimensions", "[tokens, layers, k]")
    return found


def _ids(value: Any, what: str) -> list[int]:
    if value is None:
        raise ConfigError(f'{what}: missing; send requests to vLLM with "return_token_ids": true')
    if not isinstance(value, list) or any(type(one) is not int for one in value):
        raise ConfigError.field(what, str(value)[:40], "a list of token ids")
    return value


def _list(value: Any, what: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or any(not isinstance(one, dict) for one in value):
        raise ConfigError.field(what, str(value)[:40], "a list of objects, as in an answer of vLLM")
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
        where = f"{path}, line {number}" if lines else str(path)
        if not part.strip():
            continue
        try:
            found = json.loads(part)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where}: not JSON: {error}") from error
        if isinstance(found, dict) and isinstance(found.get("response"), dict):
            found = found["response"].get("body")  # a line that `vllm run-batch` wrote
        if not isinstance(found, dict):
            raise ConfigError.field(where, type(found).__name__, "an answer of vLLM, a JSON object")
        yield where, found
