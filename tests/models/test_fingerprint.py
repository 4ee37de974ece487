"""Checkpoints are told apart by config, headers and bytes; what was read once is not read again."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from moesaic.core.errors import CheckpointError
from moesaic.core.experts import ExpertLayout
from moesaic.models import fingerprint
from moesaic.models.fingerprint import DigestQueue, ExpertDigests

LAYOUT = ExpertLayout({0: "a"}, "g", "u", "d", 8, 4, 2, 1, "float32")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(fingerprint, "KEPT", 0)
    return tmp_path / "cache" / "moesaic" / "digests"


def tensors() -> dict[str, np.ndarray]:  # type: ignore[type-arg]
    rng = np.random.default_rng(0)
    return {
        name: rng.normal(size=shape).astype(np.float32)
        for expert in range(LAYOUT.num_experts)
        for name, *shape in LAYOUT.tensors(0, expert)
    }


def write(path: Path, *shards: dict[str, np.ndarray], **config: object) -> Path:  # type: ignore[type-arg]
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"size": 1, **config}))
    if len(shards) == 1:
        save_file(shards[0], path / "model.safetensors")
        return path
    where = {}
    for number, shard in enumerate(shards):
        save_file(shard, path / f"{number}.safetensors")
        where |= dict.fromkeys(shard, f"{number}.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return path


def test_each_part_of_a_fingerprint_tells_its_own_difference(tmp_path: Path) -> None:
    first = fingerprint.compute_fingerprint(write(tmp_path / "first", tensors()))
    changed, renamed = tensors(), tensors()
    changed["a.1.d.weight"][3, 2] += 1
    renamed["more"] = np.zeros(2, np.float32)
    for part, other in (
        ("", write(tmp_path / "same", tensors(), transformers_version="4")),
        ("config.json", write(tmp_path / "config", tensors(), size=2)),
        ("bytes of tensors", write(tmp_path / "changed", changed)),
        ("names, types or shapes of tensors, bytes of tensors", write(tmp_path / "renamed", renamed)),
    ):
        assert fingerprint.difference(first, fingerprint.compute_fingerprint(other)) == part


def test_files_may_be_cut_otherwise(tmp_path: Path) -> None:
    every = tensors()
    half = dict(list(every.items())[:3])
    rest = {name: tensor for name, tensor in every.items() if name not in half}
    one, two = write(tmp_path / "one", every), write(tmp_path / "two", half, rest)
    assert fingerprint.compute_fingerprint(one) == fingerprint.compute_fingerprint(two)
    assert ExpertDigests(one, LAYOUT).digest_of(0, 1) == ExpertDigests(two, LAYOUT).digest_of(0, 1)


def test_samples_miss_what_digests_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each tensor of 128 bytes, 30 are read: at its begin, its middle and its end."""
    monkeypatch.setattr(fingerprint, "SAMPLED", 30 * 6)
    found = {}
    for number in (0, 3, 8, 16, 31):
        changed = tensors()
        changed["a.0.g.weight"].reshape(-1)[number] += 1
        path = write(tmp_path / str(number), changed)
        found[number] = fingerprint.compute_fingerprint(path), ExpertDigests(path, LAYOUT).digest_of(0, 0)
    path = write(tmp_path / "first", tensors())
    first = fingerprint.compute_fingerprint(path), ExpertDigests(path, LAYOUT).digest_of(0, 0)
    assert {number for number, one in found.items() if one[0] != first[0]} == {0, 16, 31}
    assert all(one[1] != first[1] for one in found.values())


def test_digests_tell_experts_types_and_shapes_apart(tmp_path: Path) -> None:
    digests = ExpertDigests(write(tmp_path / "one", tensors()), LAYOUT)
    assert digests.digest_of(0, 0) != digests.digest_of(0, 1)
    narrow = {name: tensor.astype(np.float16) for name, tensor in tensors().items()}
    assert ExpertDigests(write(tmp_path / "narrow", narrow), LAYOUT).digest_of(0, 0) != digests.digest_of(
        0, 0
    )


def test_what_was_read_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "one", tensors())
    queue = DigestQueue(path, LAYOUT)
    queue.add({0: [0, 1]})
    queue.add({0: [1]})
    first = {}
    while queue:
        first |= queue.compute_next()[0]
    assert len(first) == 2 and not queue.compute_next()
    known = fingerprint.compute_fingerprint(path)
    fingerprint._compute.cache_clear()

    def refused(*_: object) -> bytes:
        raise AssertionError("it is read again")

    monkeypatch.setattr(fingerprint.os, "pread", refused)
    assert [ExpertDigests(path, LAYOUT).digest_of(0, expert) for expert in (0, 1)] == [first[0], first[1]]
    assert fingerprint.compute_fingerprint(path) == known
    os.utime(path / "model.safetensors", ns=(1, 1))
    with pytest.raises(AssertionError, match="read again"):
        ExpertDigests(path, LAYOUT).digest_of(0, 0)
    with pytest.raises(AssertionError, match="read again"):
        fingerprint.compute_fingerprint(path)


def test_a_cache_folder_that_cannot_be_used_or_read_costs_time_only(tmp_path: Path, cache: Path) -> None:
    path = write(tmp_path / "one", tensors())
    cache.parent.mkdir(parents=True)
    cache.write_text("a file")
    first = fingerprint.compute_fingerprint(path)
    cache.unlink()
    fingerprint._compute.cache_clear()
    assert fingerprint.compute_fingerprint(path) == first
    [kept] = cache.iterdir()
    kept.write_text("[damaged")
    fingerprint._compute.cache_clear()
    assert fingerprint.compute_fingerprint(path) == first


def others() -> dict[str, np.ndarray]:  # type: ignore[type-arg]
    return {name: tensor + 1 for name, tensor in tensors().items()}


def digest(path: Path) -> str:
    digests = ExpertDigests(path, LAYOUT)
    found = digests.digest_of(0, 0)
    digests.save()
    return found


def test_a_file_with_the_same_size_and_time_is_read_again(tmp_path: Path) -> None:
    """Files from an archive that is built reproducibly all have the same time.

    Here they are blobs of the hub's cache, to which a snapshot has links. A backup may add hard links.
    """
    blobs = write(tmp_path / "blobs", tensors())
    path = tmp_path / "snapshot"
    path.mkdir()
    for blob in blobs.iterdir():
        os.utime(blob, ns=(1, 1))
        (path / blob.name).symlink_to(f"../blobs/{blob.name}")
    stamp, before = fingerprint.stamp(path), (fingerprint.compute_fingerprint(path), digest(path))
    file = blobs / "model.safetensors"
    (tmp_path / "backup").hardlink_to(file)
    file.chmod(0o600)
    assert fingerprint.stamp(path) == stamp
    file.write_bytes(write(tmp_path / "other", others()).joinpath(file.name).read_bytes())
    os.utime(file, ns=(1, 1))
    fingerprint._compute.cache_clear()
    after = fingerprint.compute_fingerprint(path), digest(path)
    assert before[0] != after[0] and before[1] != after[1]
    file.touch()
    assert fingerprint.stamp(path) != stamp


def test_digests_are_those_of_the_files_that_were_there_at_first(tmp_path: Path) -> None:
    """Else those of a file that was replaced meanwhile are kept for the new one, or the other way round."""
    path = write(tmp_path / "one", tensors())
    digests = ExpertDigests(path, LAYOUT)
    first = digests.digest_of(0, 0)
    file = path / "model.safetensors"
    write(tmp_path / "other", others()).joinpath(file.name).replace(file)
    assert digests.digest_of(0, 0) == first
    with pytest.raises(CheckpointError, match=r"model\.safetensors: the files changed since they were first"):
        digests.digest_of(0, 1)
    digests.save()
    assert digest(path) != first


def test_digests_of_a_file_that_is_gone_are_kept(tmp_path: Path) -> None:
    path = write(tmp_path / "one", tensors())
    queue = DigestQueue(path, LAYOUT)
    queue.add({0: [0]})
    while queue:
        queue._digests.digest_of(0, 0)
        (path / "model.safetensors").unlink()
        assert queue.compute_next()


def test_a_fingerprint_of_files_that_change_meanwhile_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "one", tensors())
    read = fingerprint._digest

    def slow(*arguments: object) -> str:
        (path / "config.json").touch()
        return read(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(fingerprint, "_digest", slow)
    with pytest.raises(CheckpointError, match="the files changed"):
        fingerprint.compute_fingerprint(path)


@pytest.mark.parametrize("kept", ['{"fingerprint": 5}', '{"fingerprint": "a.b"}', "[" * 100_000])
def test_nonsense_in_the_cache_folder_is_ignored(kept: str, tmp_path: Path, cache: Path) -> None:
    path = write(tmp_path / "one", tensors())
    first = fingerprint.compute_fingerprint(path)
    [file] = cache.iterdir()
    file.write_text(kept)
    fingerprint._compute.cache_clear()
    assert fingerprint.compute_fingerprint(path) == first


def test_a_full_disk_leaves_no_part_of_a_file(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> Path:
        raise OSError(28, "No space left on device")

    path = write(tmp_path / "one", tensors())
    monkeypatch.setattr(Path, "replace", full)
    assert fingerprint.compute_fingerprint(path) and not list(cache.iterdir())


def test_a_stamp_changes_with_each_file(tmp_path: Path) -> None:
    path = write(tmp_path / "one", dict(list(tensors().items())[:3]), dict(list(tensors().items())[3:]))
    stamps = [fingerprint.stamp(path)]
    with fingerprint.guard_unchanged(path, stamps[0]):
        pass
    for file in sorted(path.iterdir()):
        file.touch()
        stamps.append(fingerprint.stamp(path))
    assert len(set(stamps)) == 5
    with pytest.raises(CheckpointError, match=r"one: the files changed since they were first read"):
        fingerprint.check_unchanged(path, stamps[0])
    (path / "1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"1\.safetensors: this file is missing"):
        fingerprint.stamp(path)


def test_damaged_headers_are_one_line(tmp_path: Path) -> None:
    path = write(tmp_path / "one", tensors())
    file = path / "model.safetensors"
    whole = file.read_bytes()
    for damaged in (whole[:-4], whole.replace(b"[0,128]", b"[0,928]"), b"\1"):
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"model\.safetensors: [^\n]*$"):
            fingerprint.compute_fingerprint(path)
