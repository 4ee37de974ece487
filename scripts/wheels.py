"""Builds a wheel for the Python that runs this. Who installs it needs no compiler.

    make wheel                                a manylinux wheel in dist/
    python scripts/wheels.py --arch aarch64   for 64-bit Arm, on a machine of any kind
    python scripts/wheels.py --output-dir DIR

The wheel holds the native kernels of every instruction set. moesaic picks one when it starts. The script
checks three things. Where one fails, it prints one line and its exit code is 1.

- The kernels are in the wheel.
- Code that is compiled for an instruction set runs on no CPU without it.
- auditwheel finds a manylinux tag. The tag names the oldest glibc that the wheel can run on.

A wheel needs at least the C and C++ libraries of the machine that built it. For older systems, run the script
in a manylinux image, as .github/workflows/ci.yml does.

Another architecture needs its compiler (Debian: apt install g++-aarch64-linux-gnu). The headers are those of
this Python: on 64-bit Linux they differ only in macros that no extension uses.
"""

from __future__ import annotations

import argparse
import io
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
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
MACHINES = {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}
"""The architectures that wheels are built for, and their names in ELF files."""
HARMLESS = {"DW.ref.__gxx_personality_v0"}
"""Shared symbols that are data."""


class WheelError(Exception):
    """A wheel that must not be published."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output-dir", type=Path, default=ROOT / "dist", help="where the wheel goes")
    parser.add_argument(
        "--arch", choices=MACHINES, default=platform.machine(), help="the CPUs that it runs on"
    )
    arguments = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory(prefix="moesaic-wheel-") as folder:
            built = build(Path(folder), arguments.arch)
            check_objects(Path(folder) / "objects")
            check_machine(built, arguments.arch)
            wheel = repair(built, arguments.output_dir)
    except WheelError as error:
        print(f"wheels: {error}", file=sys.stderr)
        return 1
    print(wheel)
    return 0


def build(folder: Path, arch: str) -> Path:
    """The wheel as the compiler made it, in `folder`. Its objects are in `folder`/objects."""
    settings, variables = cross_settings(arch) if arch != platform.machine() else ([], {})
    options = [f"build-dir={folder / 'objects'}", *settings]
    run(
        *("pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"),
        *(word for option in options for word in ("--config-settings", option)),
        *("--wheel-dir", str(folder), str(ROOT)),
        **variables,
    )
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    if missing := [module for module in COMPILED if not any(name.startswith(module) for name in names)]:
        raise WheelError(f"{missing[0]} did not compile; `pip wheel -v --no-build-isolation .` tells why")
    return wheel


def cross_settings(arch: str) -> tuple[list[str], dict[str, str]]:
    """The settings and the environment with which scikit-build-core compiles for another architecture.

    Raises WheelError where the compiler is missing.
    """
    compiler = f"{arch}-linux-gnu-g++"
    if shutil.which(compiler) is None:
        package = f"g++-{arch.replace('_', '-')}-linux-gnu"
        raise WheelError(f"--arch {arch}: {compiler} is missing (Debian: apt install {package})")
    defined = {
        "CMAKE_SYSTEM_NAME": "Linux",
        "CMAKE_SYSTEM_PROCESSOR": arch,
        "CMAKE_CXX_COMPILER": compiler,
    }
    suffix = sysconfig.get_config_var("EXT_SUFFIX").replace(platform.machine(), arch)
    variables = {"_PYTHON_HOST_PLATFORM": f"linux-{arch}", "SETUPTOOLS_EXT_SUFFIX": suffix}
    return [f"cmake.define.{name}={value}" for name, value in defined.items()], variables


def check_machine(wheel: Path, arch: str) -> None:
    """Raise if a compiled module is for another architecture, by its name or by its code."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if not name.endswith(".so"):
                continue
            with archive.open(name) as file:
                machine = ELFFile(io.BytesIO(file.read()))["e_machine"]
            if machine != MACHINES[arch] or f"-{arch}-" not in name:
                raise WheelError(f"{name} is for {machine}; allowed: {MACHINES[arch]}")


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


def run(module: str, *arguments: str, **variables: str) -> None:
    """Run `python -m module` with more variables. Its PATH begins with the programs beside this Python."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, env={**os.environ, **variables, "PATH": path})
    if done.returncode:
        raise WheelError(f"{module} {arguments[0]} ended with exit code {done.returncode}")


if __name__ == "__main__":
    raise SystemExit(main())
