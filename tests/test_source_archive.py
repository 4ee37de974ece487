"""What scripts/source_archive.py refuses. tests/test_wheel.py builds a real archive."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest
from scripts.source_archive import FILES, NEEDED, ArchiveError, check_names


def archive(folder: Path, names: set[str]) -> Path:
    """A source archive with empty files of these names."""
    path = folder / "moesaic-1.2.3.tar.gz"
    with tarfile.open(path, "w:gz") as files:
        for name in sorted(names):
            files.addfile(tarfile.TarInfo(f"moesaic-1.2.3/{name}"), io.BytesIO())
    return path


def test_an_archive_with_all_that_a_build_needs_passes(tmp_path: Path) -> None:
    check_names(archive(tmp_path, NEEDED | FILES))


@pytest.mark.parametrize("name", ["NOTICE", "src/moesaic/transport/csrc/module.cpp"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(ArchiveError, match=f"moesaic-1.2.3.tar.gz lacks {name}"):
        check_names(archive(tmp_path, NEEDED - {name}))


@pytest.mark.parametrize(
    "name", [".venv/pyvenv.cfg", "tests/test_a.py", "src/moesaic/__pycache__/a.pyc", "src/moesaic/a.so"]
)
def test_a_file_that_does_not_belong_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(ArchiveError, match=f"has {name}, which does not belong there"):
        check_names(archive(tmp_path, NEEDED | {name}))
