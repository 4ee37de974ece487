"""What scripts/check_wheel.py reads of a wheel, and how its clean systems are entered."""

from __future__ import annotations

import platform
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest
from scripts.check_wheel import arch_of, main, requirements
from scripts.clean_root import ELF_MACHINES, CleanRoot, elf_magic, missing_tools

METADATA = """Metadata-Version: 2.4
Name: moesaic
Version: 1
Requires-Dist: torch>=2.11
Requires-Dist: numpy>=2.0
Requires-Dist: uvloop>=0.21; sys_platform != "win32"
Requires-Dist: ray>=2.60; extra == "ray"
"""


def wheel(folder: Path, tag: str) -> Path:
    path = folder / f"moesaic-1-cp311-cp311-{tag}.whl"
    with ZipFile(path, "w") as archive:
        archive.writestr("moesaic-1.dist-info/METADATA", METADATA)
    return path


@pytest.mark.parametrize("arch", ["x86_64", "aarch64"])
def test_the_tag_names_the_architecture(tmp_path: Path, arch: str) -> None:
    assert arch_of(wheel(tmp_path, f"manylinux_2_28_{arch}")) == arch


def test_another_architecture_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(wheel(tmp_path, "linux_armv7l"))]) == 1
    says = "moesaic-1-cp311-cp311-linux_armv7l.whl is tagged linux_armv7l; allowed: x86_64 or aarch64"
    assert capsys.readouterr().err == f"check_wheel: {says}\n"


def test_requirements_are_those_without_extras_and_torch(tmp_path: Path) -> None:
    assert requirements(wheel(tmp_path, "linux_x86_64")) == ["numpy>=2.0", "uvloop>=0.21"]


def test_the_magic_of_a_program_has_as_many_bytes_as_its_mask() -> None:
    for arch in ELF_MACHINES:
        magic, mask = (text.encode().decode("unicode_escape") for text in elf_magic(arch).split(":"))
        assert len(magic) == len(mask) == 20 and magic.startswith("\x7fELF")


@pytest.mark.skipif(sys.platform != "linux", reason="reads an ELF program")
def test_the_magic_is_that_of_programs() -> None:
    """This Python is a program of one of the architectures, or of none of them."""
    head = Path(sys.executable).read_bytes()[:20].decode("latin-1")
    machines = []
    for arch in ELF_MACHINES:
        magic, mask = (text.encode().decode("unicode_escape") for text in elf_magic(arch).split(":"))
        if all(ord(a) & ord(c) == ord(b) & ord(c) for a, b, c in zip(head, magic, mask, strict=True)):
            machines.append(arch)
    assert machines == [arch for arch in ELF_MACHINES if arch == platform.machine()]


def test_programs_see_only_their_own_variables(tmp_path: Path) -> None:
    words = CleanRoot(tmp_path, "x86_64").command("moesaic", "serve", LANG="C")
    assert words[words.index("/usr/bin/env") :][1:3] == ["-i", "PATH=/usr/local/bin:/usr/bin:/bin"]
    assert words[-3:] == ["LANG=C", "moesaic", "serve"]


def test_missing_tools_are_named_with_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert "mmdebstrap (Debian: apt install mmdebstrap)" in missing_tools("x86_64")
