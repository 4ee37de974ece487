"""Builds a wheel for the Python that runs this. Who installs it needs no compiler.

    make wheel                               a manylinux wheel in dist/
    python scripts/wheels.py --output-dir DIR

The wheel holds the native kernels of every instruction set. moesaic picks one when it starts. The script
checks three things. Where one fails, it prints one line and its exit code is 1.

- The kernels are in the wheel.
- Code that is compiled for an instruction set runs on no CPU without it.
- auditwheel finds a manylinux tag. The tag names the oldest glibc that the wheel can run on.

A wheel needs at least the C and C++ libraries of the machine that built it. For older systems, run the script
in a manylinux image, as .github/workflows/ci.yml does.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from elftools.elf.elffile import ELFFile
from elftools.elf.sections import Symbol, SymbolTableSection
from packaging.utils import parse_wheel_filename

ROOT = Path(__file__).parent.parent
KERNELS = "kernels_"
"""The beginning of the name of the folder with the objects of one instruction set."""
COMPILED = ("moesaic/kernels/native/_native.cpython", "moesaic/transport/_shm.cpython")
"""The beginnings of the names of the compiled modules' files."""
HARMLESS = {"DW.ref.__gxx_personality_v0"}
"""Shared symbols that are data."""


class WheelError(Exception):
    """A wheel that must not be published."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output-dir", type=Path, default=ROOT / "dist", help="where the wheel goes")
    arguments = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory(prefix="moesaic-wheel-") as folder:
            built = build(Path(folder))
            check_objects(Path(folder) / "objects")
            wheel = repair(built, arguments.output_dir)
    except WheelError as error:
        print(f"wheels: {error}", file=sys.stderr)
        return 1
    print(wheel)
    return 0


def build(folder: Path) -> Path:
    """The wheel as the compiler made it, in `folder`. Its objects are in `folder`/objects."""
    run(
        *("pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"),
        *("--config-settings", f"build-dir={folder / 'objects'}", "--wheel-dir", str(folder), str(ROOT)),
    )
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    if missing := [module for module in COMPILED if not any(name.startswith(module) for name in names)]:
        raise WheelError(f"{missing[0]} did not compile; `pip wheel -v --no-build-isolation .` tells why")
    return wheel


def check_objects(folder: Path) -> None:
    """Raise if code of an instruction set could run without having been picked.

    The linker keeps one copy of an inline function that several objects define. A copy that is compiled for
    AVX-512 would then serve all. So the name of each such symbol must contain the namespace of its
    instruction set. No object may have code that runs when the module is loaded.
    """
    objects = sorted(folder.glob(f"**/{KERNELS}*.dir/**/*.o"))
    if not objects:
        raise WheelError(f"no objects of kernels in {folder}")
    for path in objects:
        name = next(part for part in path.parts if part.startswith(KERNELS)).removesuffix(".dir")
        problems = shared_code(path, name.removeprefix(KERNELS))
        if problems:
            raise WheelError(f"{name}: {problems[0]} is not of that instruction set alone")


def shared_code(path: Path, instruction_set: str) -> list[str]:
    """Symbols and sections of an object file that do not belong to `instruction_set` alone."""
    namespace = f"{len(instruction_set)}{instruction_set}"
    with path.open("rb") as file:
        elf = ELFFile(file)
        found = [section.name for section in elf.iter_sections() if section.name.startswith(".init_array")]
        for table in elf.iter_sections():
            if isinstance(table, SymbolTableSection):
                found += [symbol.name for symbol in table.iter_symbols() if is_shared(symbol, namespace)]
    return found


def is_shared(symbol: Symbol, namespace: str) -> bool:
    """Whether an object defines `symbol` in a way that the linker may merge with another object's."""
    entry = symbol.entry
    if entry["st_shndx"] == "SHN_UNDEF" or entry["st_info"]["bind"] == "STB_LOCAL":
        return False
    return namespace not in symbol.name and symbol.name not in HARMLESS


def repair(wheel: Path, output: Path) -> Path:
    """The wheel in `output`, under the name that says which systems it runs on."""
    with tempfile.TemporaryDirectory() as folder:
        run("auditwheel", "repair", "--wheel-dir", folder, str(wheel))
        [repaired] = Path(folder).glob("*.whl")
        tags = {tag.platform for tag in parse_wheel_filename(repaired.name)[3]}
        if not all(tag.startswith("manylinux") for tag in tags):
            raise WheelError(f"auditwheel tags it {', '.join(sorted(tags))}; allowed: manylinux")
        run("auditwheel", "show", str(repaired))
        output.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(repaired, output))


def run(module: str, *arguments: str) -> None:
    """Run `python -m module`. Its PATH begins with the programs that are installed beside this Python."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, env={**os.environ, "PATH": path})
    if done.returncode:
        raise WheelError(f"{module} {arguments[0]} ended with exit code {done.returncode}")


if __name__ == "__main__":
    raise SystemExit(main())
