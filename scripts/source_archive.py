"""Builds the source archive (sdist) and checks what is in it.

    python scripts/source_archive.py             dist/moesaic-VERSION.tar.gz
    python scripts/source_archive.py --build     and a wheel from the unpacked archive, which is not kept

The archive has what a build needs: the package with its C++ sources and the demo, and the licences. Tests,
docs and scripts stay in the repository.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from scikit_build_core.build import build_sdist

ROOT = Path(__file__).parent.parent
FILES = {
    "CHANGELOG.md",
    "CMakeLists.txt",
    "LICENSE",
    "NOTICE",
    "PKG-INFO",
    "README.md",
    "constraints.txt",
    "pyproject.toml",
}
"""All that stands beside the folder src."""
NEEDED = {
    *("CMakeLists.txt", "LICENSE", "NOTICE", "pyproject.toml", "src/moesaic/demo/model.safetensors"),
    *("src/moesaic/kernels/native/csrc/module.cpp", "src/moesaic/transport/csrc/module.cpp"),
    "src/moesaic/server/page/index.html",
}


class ArchiveError(Exception):
    """A source archive that must not be published."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output-dir", type=Path, default=ROOT / "dist", help="where the archive goes")
    parser.add_argument("--build", action="store_true", help="build a wheel from the archive")
    options = parser.parse_args(arguments)
    output = options.output_dir.resolve()
    os.chdir(ROOT)
    archive = output / build_sdist(str(output))
    try:
        check_names(archive)
        if options.build:
            build_wheel(archive)
    except ArchiveError as error:
        print(f"source_archive: {error}", file=sys.stderr)
        return 1
    print(archive)
    return 0


def check_names(archive: Path) -> None:
    """Raise if a file is missing, or if one is there that does not belong."""
    top = archive.name.removesuffix(".tar.gz") + "/"
    with tarfile.open(archive) as files:
        names = {file.name.removeprefix(top) for file in files if file.isfile()}
    if missing := NEEDED - names:
        raise ArchiveError(f"{archive.name} lacks {', '.join(sorted(missing))}")
    strange = {name for name in names if not name.startswith("src/moesaic/") and name not in FILES}
    strange |= {name for name in names if "__pycache__" in name or name.endswith((".so", ".pyc"))}
    if strange:
        raise ArchiveError(f"{archive.name} has {min(strange)}, which does not belong there")


def build_wheel(archive: Path) -> None:
    """Build a wheel from the unpacked archive, where no repository is. Raises if it has no kernels."""
    with tempfile.TemporaryDirectory(prefix="moesaic-archive-") as folder:
        with tarfile.open(archive) as files:
            files.extractall(folder, filter="data")
        [source] = Path(folder).iterdir()
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            [*command, "--wheel-dir", folder, str(source)], env={**os.environ, "PATH": path}
        )
        if done.returncode:
            raise ArchiveError(f"pip wheel of the unpacked archive ended with exit code {done.returncode}")
        [wheel] = Path(folder).glob("*.whl")
        if "none-any" in wheel.name:
            raise ArchiveError("the unpacked archive did not compile")


if __name__ == "__main__":
    raise SystemExit(main())
