"""`moesaic profile import`: makes a profile of routing that another server recorded."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from moesaic.core.errors import ConfigError
from moesaic.core.profile import Profile
from moesaic.jobs.profiling import llama_traces, sglang_files, vllm_answers
from moesaic.jobs.profiling.routing_records import make_profile
from moesaic.jobs.profiling.run import Show
from moesaic.models import files
from moesaic.models.embedding import nearest_known
from moesaic.models.registry import routed_model

READERS = {"sglang": sglang_files.read, "vllm": vllm_answers.read, "llama-moe-trace": llama_traces.read}
"""Reader of each program's files."""
Source = tuple[str, str | None, str | None]
"""What `models.files.resolve` takes to find a model: name, revision and changes of its config.json."""


@dataclass(frozen=True)
class Report:
    """The result of `moesaic profile import`."""

    model: str
    output: str
    source: str
    files: int
    layers: int
    num_experts: int
    top_k: int
    tokens: int
    """Number of tokens that were counted."""
    requests: int
    """Requests with routes in the profile."""
    token_ids: bool
    """False: the files had loads of experts and no tokens."""
    left_out: int
    """Tokens that were left out, since the files lack some of their experts."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def run(recording: Sequence[Path], source: str, model_source: Source, output: Path, show: Show) -> Report:
    """Read the files `recording`, write the profile `output`, and say what is in it.

    source: a name in READERS. model_source: as on a command line. Raises ConfigError for files that cannot be
    read, that are of another model, or that have no token.
    """
    model = model_source[0]
    path = files.resolve(*model_source)
    spec = routed_model(path)
    if not spec.layers:
        raise ConfigError.field("--model", model, "one with routed experts")
    parts = READERS[source](list(recording), spec)
    profile = make_profile(spec, parts)
    if not profile.tokens:
        raise ConfigError.field("FILES", "no token", "files with at least one token and its experts")
    if profile.token_ids:
        known_ids = profile.counts[0].known_tokens.astype(np.int32)
        nearest_ids = nearest_known(
            path, known_ids, lambda num_done, total: show("nearest tokens", num_done, total)
        )
        profile = replace(profile, nearest=nearest_ids)
    try:
        profile.save(output)
    except OSError as error:
        allowed_values = f"a file to write into ({error.strerror})"
        raise ConfigError.field("--output-file", str(output), allowed_values) from error
    return Report(
        model=model,
        output=str(output),
        source=source,
        files=len(recording),
        layers=len(spec.layers),
        num_experts=spec.num_experts,
        top_k=spec.top_k,
        tokens=profile.tokens,
        requests=profile.routes.requests,
        token_ids=profile.token_ids,
        left_out=sum(part.left_out for part in parts),
    )


def with_nearest(
    profile: Profile, file: Path, model_source: Source, show: Callable[[int, int], None] | None = None
) -> Profile:
    """The same profile with `nearest`: the nearest known tokens, by the embedding of the model.

    A profile that was recorded without the checkpoint has none. file: path of the profile, for messages.
    model_source: as on a command line. show: called with the tokens done and their total. Raises ConfigError
    if the profile was made for another model.
    """
    path = files.resolve(*model_source)
    profile.check(routed_model(path).model, str(file))
    known_ids = profile.counts[0].known_tokens.astype(np.int32)
    return replace(profile, nearest=nearest_known(path, known_ids, show))
