"""Counts, routes and profiles, and the file that stores them."""

from __future__ import annotations

import zipfile
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.core.errors import ConfigError
from moesaic.core.profile import Counts, Profile, Routes, transitions


def counts_of(rows: np.ndarray) -> Counts:
    """Counts from a dense matrix [V, E]."""
    starts = np.concatenate([[0], np.cumsum((rows > 0).sum(axis=1))])
    tokens, experts = np.nonzero(rows)
    return Counts(starts, experts.astype(np.int16), rows[tokens, experts].astype(np.int32))


def dense(counts: Counts, size: int) -> np.ndarray:
    found = np.zeros((len(counts.starts) - 1, size), dtype=np.int64)
    found[counts.tokens, counts.experts] = counts.counts
    return found


def profile_of(seed: int = 0, requests: int = 7, layers: int = 3, nearest: bool = True) -> Profile:
    """A profile with 20 token ids, 6 experts and top-2."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 5, requests)
    tokens = int(lengths.sum())
    routes = Routes(
        rng.integers(20, size=tokens).astype(np.int32),
        np.concatenate([[0], np.cumsum(lengths)]),
        lengths // 2,
        rng.integers(-1, 2, requests).astype(np.int16),
        rng.random((tokens, layers, 6)).argsort(axis=2)[:, :, :2].astype(np.int16),
    )
    near = rng.integers(20, size=20).astype(np.int32) if nearest else None
    return Profile.from_routes("m", 20, 6, [1, 2, 5][:layers], routes, ("law", "poetry"), near)


def same_arrays(one: Any, other: Any) -> bool:
    return all(
        np.array_equal(getattr(one, field.name), getattr(other, field.name)) for field in fields(type(one))
    )


def nearest_of(profile: Profile) -> np.ndarray:
    return np.array([]) if profile.nearest is None else profile.nearest


def same(one: Profile, other: Profile) -> bool:
    names = ("model", "vocab_size", "num_experts", "top_k", "layers", "topics")
    return (
        all(getattr(one, name) == getattr(other, name) for name in names)
        and all(same_arrays(a, b) for a, b in zip(one.counts, other.counts, strict=True))
        and same_arrays(one.routes, other.routes)
        and np.array_equal(one.transitions, other.transitions)
        and np.array_equal(nearest_of(one), nearest_of(other))
    )


# ---- counts


def test_counts_worked_example() -> None:
    found = Counts.from_pairs(np.array([5, 5]), np.array([[1, 0], [1, 2]]), 7, 3)
    assert found.starts.tolist() == [0, 0, 0, 0, 0, 0, 3, 3]
    assert found.experts.tolist() == [0, 1, 2] and found.counts.tolist() == [1, 2, 1]
    assert found.tokens.tolist() == [5, 5, 5] and found.known_tokens.tolist() == [5]
    assert found.loads(4).tolist() == [1, 2, 1, 0]


@given(st.integers(0, 1000), st.integers(0, 20))
def test_counts_count(seed: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    tokens, experts = rng.integers(6, size=size), rng.integers(4, size=(size, 2))
    expected = np.zeros((6, 4), dtype=np.int64)
    for token, row in zip(tokens, experts, strict=True):
        for expert in row:
            expected[token, expert] += 1
    found = Counts.from_pairs(tokens, experts, 6, 4)
    assert (dense(found, 4) == expected).all()
    assert found.counts.size == 0 or found.counts.min() >= 1
    assert found.loads(4).tolist() == expected.sum(axis=0).tolist()


@given(st.integers(0, 1000), st.integers(1, 5), st.integers(1, 5))
def test_counts_add(seed: int, first: int, second: int) -> None:
    """Holds also if only one side knows the higher experts."""
    rng = np.random.default_rng(seed)
    one, other = rng.integers(0, 3, (5, first)), rng.integers(0, 3, (5, second))
    both = np.zeros((5, 5), dtype=np.int64)
    both[:, :first] += one
    both[:, :second] += other
    found = counts_of(one) + counts_of(other)
    assert (dense(found, 5) == both).all()
    assert same_arrays(found, counts_of(both))
    assert found.experts.dtype == np.int16 and found.counts.dtype == np.int32


def test_counts_of_halves_add_up_to_the_whole() -> None:
    profile = profile_of(requests=20)
    one, other = (profile.with_routes(half) for half in profile.routes.split(0.3, seed=1))
    for whole, first, second in zip(profile.counts, one.counts, other.counts, strict=True):
        assert same_arrays(whole, first + second)
    assert (profile.transitions == one.transitions + other.transitions).all()


def test_adjacent_layers_worked_example() -> None:
    found = transitions(np.array([[[0, 1], [2, 0]], [[0, 2], [2, 1]]], dtype=np.int16), 3)
    assert found.tolist() == [[[1, 1, 2], [1, 0, 1], [0, 1, 1]]]
    assert transitions(np.zeros((4, 1, 2), dtype=np.int16), 3).shape == (0, 3, 3)


# ---- routes


def test_some_requests_in_the_order_given() -> None:
    routes = profile_of(requests=6).routes
    chosen = routes.select([4, 0])
    for place, request in enumerate([4, 0]):
        mine, given_rows = (
            slice(*chosen.starts[place : place + 2]),
            slice(*routes.starts[request : request + 2]),
        )
        assert chosen.tokens[mine].tolist() == routes.tokens[given_rows].tolist()
        assert chosen.experts[mine].tolist() == routes.experts[given_rows].tolist()
        assert chosen.prompts[place] == routes.prompts[request]
        assert chosen.topics[place] == routes.topics[request]
    assert chosen.requests == 2 and routes.select([]).requests == 0


def test_owners() -> None:
    routes = replace(profile_of().routes, starts=np.array([0, 2, 2, 3]), prompts=np.array([0, 0, 0]))
    assert routes.owners.tolist() == [0, 0, 2]


@given(st.integers(1, 30), st.floats(0, 1), st.integers(0, 100))
def test_a_split_shares_out_the_requests(requests: int, share: float, seed: int) -> None:
    routes = profile_of(requests=requests).routes
    marked = replace(routes, prompts=np.arange(requests))
    one, other = marked.split(share, seed)
    assert one.requests == max(1, round(share * requests))
    assert sorted([*one.prompts, *other.prompts]) == list(range(requests))
    assert all((np.diff(half.prompts) > 0).all() for half in (one, other))
    again, _ = marked.split(share, seed)
    assert same_arrays(one, again)


def test_another_seed_splits_otherwise() -> None:
    marked = replace(profile_of(requests=30).routes, prompts=np.arange(30))
    assert marked.split(0.5, 0)[0].prompts.tolist() != marked.split(0.5, 1)[0].prompts.tolist()


# ---- profiles


def test_a_profile_counts_its_routes() -> None:
    profile = profile_of()
    assert profile.tokens == len(profile.routes.tokens) > 0
    assert profile.loads.shape == (3, 6) and (profile.loads.sum(axis=1) == 2 * profile.tokens).all()
    assert (profile.top_k, profile.layers, profile.topics) == (2, (1, 2, 5), ("law", "poetry"))


def test_a_profile_of_no_layers() -> None:
    assert replace(profile_of(), counts=()).tokens == 0


def test_a_profile_for_another_model_is_refused() -> None:
    profile_of().check("m", "p.npz")
    with pytest.raises(ConfigError, match=r"^p\.npz: model: got 'm'; allowed: this model's, 'other'"):
        profile_of().check("other", "p.npz")


# ---- the file


@pytest.mark.parametrize(("layers", "requests", "nearest"), [(3, 7, True), (1, 3, False), (2, 0, True)])
def test_what_is_written_is_read(tmp_path: Path, layers: int, requests: int, nearest: bool) -> None:
    profile = profile_of(requests=requests, layers=layers, nearest=nearest)
    profile.save(tmp_path / "profile.npz")
    assert same(Profile.load(tmp_path / "profile.npz"), profile)
    assert [path.name for path in tmp_path.iterdir()] == ["profile.npz"]


def test_a_profile_without_routes_keeps_its_counts(tmp_path: Path) -> None:
    """A recorder without memory for a sample writes such a profile."""
    profile = profile_of()
    bare = replace(profile, routes=profile.routes.select([]), topics=())
    bare.save(tmp_path / "p")
    assert same(Profile.load(tmp_path / "p"), bare)


def arrays_of(path: Path) -> dict[str, Any]:
    with np.load(path) as archive:
        return dict(archive)


def changed(**changes: Any) -> dict[str, Any]:
    return changes


BAD = [
    (changed(schema=2), "not a profile: schema 2, this version reads 1"),
    (changed(model=None), "not a profile: it has no 'model'"),
    (changed(counts_1=None), "not a profile: it has no 'counts_1'"),
    (changed(routes_starts=None), "not a profile: it has no 'routes_starts'"),
    (changed(sizes=[20, 6]), "not a profile: "),
    (changed(sizes=[21, 6, 2]), "not a profile: its arrays do not fit"),
    (changed(sizes=[20, 5, 2]), "not a profile: its arrays do not fit"),
    (changed(sizes=[20, 6, 3]), "not a profile: its arrays do not fit"),
    (changed(layers=[1, 2]), "not a profile: its arrays do not fit"),
    (changed(counts_0=np.ones(1, np.int32)), "not a profile: its arrays do not fit"),
    (changed(starts_2=np.zeros(21, np.int64)), "not a profile: its arrays do not fit"),
    (changed(transitions=np.zeros((1, 6, 6), np.int64)), "not a profile: its arrays do not fit"),
    (changed(routes_starts=np.array([0, 1])), "not a profile: its arrays do not fit"),
    (changed(routes_topics=np.full(7, 2, np.int16)), "not a profile: its arrays do not fit"),
    (changed(topics=np.array(["law"])), "not a profile: its arrays do not fit"),
    (changed(nearest=np.full(20, 20, np.int32)), "not a profile: its arrays do not fit"),
    (changed(nearest=np.zeros(3, np.int32)), "not a profile: its arrays do not fit"),
    (changed(routes_prompts=np.full(7, 99)), "not a profile: its arrays do not fit"),
    (changed(routes_experts=np.zeros(3, np.int16)), "not a profile: "),
    (changed(model=np.array({}, dtype=object)), "not a profile: "),
    (changed(layers=[5, 2, 1]), "not a profile: its arrays do not fit"),
    (changed(layers=[np.nan] * 3), "not a profile: layers: got float64; allowed: whole numbers from 0 on"),
    (changed(layers=[-1, 2, 5]), "not a profile: layers: got -1; allowed: whole numbers from 0 on"),
    (changed(routes_prompts=np.full(7, -1)), "not a profile: routes_prompts: got -1; allowed: whole"),
    (changed(transitions=np.full((2, 6, 6), -3)), "not a profile: transitions: got -3; allowed: whole"),
]


@pytest.mark.parametrize(
    ("changes", "message"), BAD, ids=[f"{next(iter(c))}-{i}" for i, (c, _) in enumerate(BAD)]
)
def test_a_damaged_file_gets_one_line(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = tmp_path / "profile.npz"
    profile_of().save(path)
    arrays = arrays_of(path) | changes
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    with pytest.raises(ConfigError) as caught:
        Profile.load(path)
    assert str(caught.value).startswith(f"{path}: {message}") and "\n" not in str(caught.value)


@pytest.mark.parametrize("count", [0, -1, np.nan])
def test_counts_that_are_none_are_refused(tmp_path: Path, count: float) -> None:
    path = tmp_path / "profile.npz"
    profile_of().save(path)
    arrays = arrays_of(path)
    np.savez(path, **arrays | {"counts_1": np.full(len(arrays["counts_1"]), count, np.array(count).dtype)})
    got = "float64" if np.isnan(count) else count
    with pytest.raises(ConfigError, match=f"counts_1: got {got}; allowed: whole numbers from 1 on$"):
        Profile.load(path)


@pytest.mark.parametrize("content", [b"", b"not an archive", b"PK\x03\x04", b"\x93NUMPY\x01\x00"])
def test_what_is_no_archive_gets_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "profile.npz"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        Profile.load(path)
    assert str(caught.value).startswith(f"{path}: not a profile") and "\n" not in str(caught.value)


def test_a_single_array_gets_one_line(tmp_path: Path) -> None:
    np.save(tmp_path / "one.npy", np.arange(3))
    with pytest.raises(ConfigError, match=r"one\.npy: not a profile"):
        Profile.load(tmp_path / "one.npy")


def test_a_missing_file_gets_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.npz: No such file or directory$"):
        Profile.load(tmp_path / "nowhere.npz")


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_a_file_cut_short_gets_one_line(tmp_path: Path, share: float) -> None:
    path = tmp_path / "profile.npz"
    profile_of().save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(ConfigError, match=r"profile\.npz: not a profile"):
        Profile.load(path)


@pytest.mark.slow
@given(place=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_a_flipped_bit_is_noticed_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, place: int, bit: int
) -> None:
    path = tmp_path_factory.mktemp("flipped") / "profile.npz"
    profile_of().save(path)
    content = bytearray(path.read_bytes())
    content[place % len(content)] ^= 1 << bit
    path.write_bytes(bytes(content))
    try:
        found = str(Profile.load(path).num_experts)
    except ConfigError as error:
        found = str(error)
    assert found == "6" or (found.startswith(f"{path}: not a profile") and "\n" not in found)


def test_an_archive_of_something_else_gets_one_line(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "p.npz", "w") as archive:
        archive.writestr("readme.txt", "hello")
    with pytest.raises(ConfigError, match=r"p\.npz: not a profile"):
        Profile.load(tmp_path / "p.npz")
