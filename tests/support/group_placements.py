"""Placements with tables for groups that shuffle, made of a model's own routing."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moesaic import LLM, SamplingParams
from moesaic.commands.place_formats import save
from moesaic.core.profile import Profile
from moesaic.core.routing import Assembly
from moesaic.llm import Completion
from moesaic.models import files, registry
from moesaic.policy.placement import redundancy
from moesaic.policy.placement.solvers.tokens import label_tokens


def recorded(
    model: str, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]
) -> tuple[list[Completion], Profile]:
    """The answers of one process, and its routing. The requests of the profile are in the prompts' order."""
    spec = registry.routed_model(files.resolve(model, None))
    assembly = Assembly(spec, 1 << 30)
    answers = LLM(model, threads=1, kv_cache_memory="64MiB", routing=assembly.add).generate(prompts, params)
    routes = assembly.take()[1]
    profile = Profile.from_routes(spec.model, spec.vocab_size, spec.num_experts, spec.layers, routes)
    return answers, profile


def write(folder: Path, profile: Profile, units: int, copies: int = 0) -> str:
    """Writes a placement with random experts on each rank. In each layer `copies` of them are on a second
    rank too. Returns the file."""
    rng = np.random.default_rng(units)
    row = np.arange(profile.num_experts) % units
    experts = np.stack([rng.permutation(row) for _ in profile.layers]).astype(np.int16)
    clusters = label_tokens(profile, experts)
    placement = redundancy.place(profile, clusters, copies, f"{units}.tables.npz")
    file = folder / f"{units}.json"
    save(placement, redundancy.tables_of(profile, clusters, placement), file)
    return str(file)
