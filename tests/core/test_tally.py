from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from moesaic.core import tally
from moesaic.core.profile import Counts, Profile, Routes
from moesaic.core.routing import RoutedModel, draw, join_routes
from moesaic.core.tally import Tally

MODEL = RoutedModel("moe-x", 50, 8, 2, (1, 2, 4))


def drawn(requests: int, seed: int, length: int = 10) -> Routes:
    """Strategy for requests of 1 to `length` tokens."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, length + 1, requests)
    total = int(lengths.sum())
    experts = rng.random((total, 3, 8)).argsort(axis=2)[:, :, :2].astype(np.int16)
    return Routes(
        tokens=rng.integers(0, 50, total).astype(np.int32),
        starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        prompts=lengths.astype(np.int64),
        topics=rng.integers(0, 2, requests).astype(np.int16),
        experts=experts,
    )


def same_counts(one: tuple[Counts, ...], other: tuple[Counts, ...]) -> bool:
    return all(
        (getattr(a, field.name) == getattr(b, field.name)).all()
        for a, b in zip(one, other, strict=True)
        for field in fields(Counts)
    )


@pytest.mark.parametrize("at_once", [1, 100, 8192])
def test_with_room_for_all_it_is_the_profile_of_all_routes(
    at_once: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tally, "MIN_COUNTED_TOKENS", at_once)
    parts = [drawn(20, seed) for seed in range(5)]
    made = Tally(MODEL, 1 << 24)
    for part in parts:
        made.add(part)
    known = made.known_tokens
    profile = made.profile(("a", "b"))
    whole = Profile.from_routes("moe-x", 50, 8, (1, 2, 4), join_routes(MODEL, parts), ("a", "b"))
    assert same_counts(profile.counts, whole.counts)
    assert (profile.transitions == whole.transitions).all()
    for field in fields(Routes):
        assert (getattr(profile.routes, field.name) == getattr(whole.routes, field.name)).all()
    assert known.tolist() == np.unique(whole.routes.tokens).tolist()
    assert (made.requests, made.tokens, made.left_out) == (100, whole.tokens, 0)
    profile.save(tmp_path / "p.npz", compress=False)
    assert Profile.load(tmp_path / "p.npz").tokens == whole.tokens


def test_past_the_memory_routes_are_a_uniform_sample_and_counts_are_of_all() -> None:
    made, most = Tally(MODEL, 40_000), 40_000
    parts = [drawn(50, seed) for seed in range(30)]
    for part in parts:
        made.add(part)
    profile = made.profile()
    whole = Profile.from_routes("moe-x", 50, 8, (1, 2, 4), join_routes(MODEL, parts))
    assert same_counts(profile.counts, whole.counts)
    assert 100 < profile.routes.requests < 1000
    held = sum(getattr(profile.routes, field.name).nbytes for field in fields(Routes))
    assert held < most
    kept = [number for _, number, _ in made._sample]
    drawn_highest = max(draw(number, 0) for number in kept)
    assert sorted(kept) == [number for number in range(1500) if draw(number, 0) <= drawn_highest]
    whole_routes = join_routes(MODEL, parts)
    assert (profile.routes.tokens == whole_routes.select(sorted(kept)).tokens).all()
    made.add(drawn(1, 99))
    assert made.requests == 1501 and not made.is_full


def test_which_routes_stay_is_a_matter_of_the_seed_only() -> None:
    def kept(seed: int, at_once: int) -> list[int]:
        made, routes = Tally(MODEL, 30_000, seed), drawn(600, 0)
        for start in range(0, 600, at_once):
            made.add(routes.select(range(start, start + at_once)))
        tokens: list[int] = made.profile().routes.tokens.tolist()
        return tokens

    assert kept(0, 100) == kept(0, 100)
    assert kept(0, 100) != kept(1, 100)


def test_once_counts_alone_fill_the_memory_nothing_more_is_counted() -> None:
    made = Tally(MODEL, 5_000)
    for seed in range(10):
        made.add(drawn(50, seed))
    profile = made.profile()
    assert made.is_full
    assert profile.routes.requests == 0
    assert 0 < made.requests < 500
    assert made.requests + made.left_out == 500
    assert profile.tokens == made.tokens
