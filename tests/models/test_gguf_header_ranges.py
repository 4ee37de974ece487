"""Reading no more of a GGUF file than its header."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support import gguf_files, model_configs, tiny_models

from moesaic.core.errors import CheckpointError
from moesaic.models import hub
from moesaic.models.gguf import header
from moesaic.models.gguf import hub as gguf_hub
from moesaic.models.gguf.hub import read_header


class Elsewhere:
    """A file that is read in ranges, each of which is recorded."""

    def __init__(self, data: bytes, size: int | None = None) -> None:
        """size: what it claims to be. None: as many bytes as it has."""
        self.data, self.size = data, len(data) if size is None else size
        self.asked: list[tuple[int, int]] = []

    def fetch(self, begin: int, end: int) -> tuple[bytes, int]:
        assert begin < end
        self.asked.append((begin, end))
        return self.data[begin:end], self.size


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("gguf")
    source = tiny_models.save(tiny_models.build(*model_configs.CASES["qwen3"]), folder / "source")
    return gguf_files.write(source, folder / "made")[0].read_bytes()


def test_every_beginning_says_whether_the_header_is_whole(data: bytes, tmp_path: Path) -> None:
    length = header.length(data, len(data))
    for cut in (*range(4, length, 97), length - 1):
        assert cut < header.length(data[:cut], len(data)) <= length
    for cut in (length, length + 1, len(data) - 1):
        assert header.length(data[:cut], len(data)) == length
    whole, sparse = tmp_path / "whole.gguf", tmp_path / "sparse.gguf"
    whole.write_bytes(data)
    sparse.write_bytes(data[:length].ljust(len(data), b"\0"))
    assert header.read(whole) == header.read(sparse)


@pytest.mark.parametrize(("first", "largest"), [(64, 256), (1000, 1000), (1 << 20, 4 << 20)])
def test_ranges_grow_until_the_header_is_whole(
    data: bytes, first: int, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_hub, "FIRST_RANGE", first)
    monkeypatch.setattr(gguf_hub, "LARGEST_RANGE", largest)
    length, file = header.length(data, len(data)), Elsewhere(data)
    assert read_header(file.fetch) == (data[:length], len(data))
    ends = [end for _, end in file.asked]
    assert [begin for begin, _ in file.asked] == [0, *ends[:-1]], "no byte is asked for twice"
    assert length <= ends[-1] <= max(first, length + largest)
    assert all(end - begin >= min(first, len(data) - begin) for begin, end in file.asked)


@pytest.mark.parametrize("name", ["../a.gguf", "b/../../a.gguf", "/tmp/a.gguf"])
def test_a_repository_cannot_name_a_file_elsewhere(name: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="allowed: names inside a repository"):
        hub._header("org/name", None, name, tmp_path / "folder")
    assert not list(tmp_path.iterdir())


def test_headers_that_are_refused(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_hub, "FIRST_RANGE", 256)
    with pytest.raises(ValueError, match="not a GGUF file .it is empty"):
        read_header(Elsewhere(b"").fetch)
    for cut in (300, 3000, len(data) - 1):
        with pytest.raises(ValueError, match="truncated or corrupt"):
            read_header(Elsewhere(data[:cut]).fetch)
    length = header.length(data, len(data))
    monkeypatch.setattr(gguf_hub, "LONGEST_HEADER", length - 1)
    file = Elsewhere(data)
    with pytest.raises(ValueError, match=f"bytes or more; allowed: at most {length - 1}"):
        read_header(file.fetch)
    assert file.asked[-1][1] < length
    monkeypatch.setattr(gguf_hub, "LONGEST_HEADER", 1 << 20)
    at = data.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens") + 16
    file = Elsewhere(data[:at] + (1 << 40).to_bytes(8, "little") + data[at + 8 :], size=1 << 50)
    with pytest.raises(ValueError, match="bytes or more; allowed: at most"):
        read_header(file.fetch)
    assert file.asked[-1][1] <= at + 256, "a text of a terabyte is not asked for"
