"""Debian systems in folders, for trying what users install: Python, and no compiler.

    root = make_root(Path("/tmp/root"), "aarch64")
    root.run("/usr/bin/python3", "--version")

It needs Linux, root's rights and mmdebstrap (Debian: apt install mmdebstrap). A system of another
architecture also needs qemu-user-static and Linux 6.7. QEMU is registered in a namespace of its own, so
nothing else on the machine uses it.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

RELEASE = "bookworm"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
"""Debian's names of the architectures."""
ELF_MACHINES = {"x86_64": r"\x3e", "aarch64": r"\xb7"}
"""The first byte of e_machine in the programs of an architecture."""
PACKAGES = ("python3", "python3-venv", "ca-certificates", "libstdc++6")
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
PATH = "/usr/local/bin:/usr/bin:/bin"
ENTER = r"""
set -e
root=$1 interpreter=$2 magic=$3 folders=$4
shift 4
if [ -n "$interpreter" ]; then
    mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc
    echo ":moesaic:M::$magic:$interpreter:F" > /proc/sys/fs/binfmt_misc/register
fi
for folder in /dev /proc /sys $folders; do
    mkdir -p "$root$folder"
    mount --rbind "$folder" "$root$folder"
done
exec chroot "$root" "$@"
"""
"""The script that makes a root's namespaces. Folders of this machine get the same path in the root."""


class RootError(Exception):
    """A root that cannot be made or used here."""


@dataclass(frozen=True)
class CleanRoot:
    """A Debian system in a folder."""

    folder: Path
    arch: str
    folders: tuple[str, ...] = ()
    """Absolute paths of this machine's folders that the system sees."""

    def command(self, *words: str, **variables: str) -> list[str]:
        """The command line that runs `words` in the root, as a process without a parent in between."""
        emulated = self.arch != platform.machine()
        interpreter = shutil.which(f"qemu-{self.arch}-static") or "" if emulated else ""
        named = [f"{name}={value}" for name, value in {"PATH": PATH, "HOME": "/root", **variables}.items()]
        return [
            *("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", ENTER, "sh"),
            *(str(self.folder), interpreter, elf_magic(self.arch), " ".join(self.folders)),
            *("/usr/bin/env", "-i", *named, *words),
        ]

    def has_program(self, name: str) -> bool:
        """Whether the system has a program of this name."""
        return any((self.folder / folder.lstrip("/") / name).exists() for folder in PATH.split(":"))

    def run(self, *words: str, **variables: str) -> None:
        """Run a command to its end. Raises RootError if it fails."""
        done = subprocess.run(self.command(*words, **variables))
        if done.returncode:
            raise RootError(f"{' '.join(words)} ended with exit code {done.returncode} in the clean root")


def elf_magic(arch: str) -> str:
    """The first 20 bytes of 64-bit programs for `arch`, and the mask over them, as binfmt_misc reads them."""
    magic = "".join((r"\x7fELF\x02\x01\x01", r"\x00" * 9, r"\x02\x00", ELF_MACHINES[arch], r"\x00"))
    mask = "".join((r"\xff" * 7, r"\x00", r"\xff" * 8, r"\xfe\xff\xff\xff"))
    return f"{magic}:{mask}"


def missing_tools(arch: str) -> list[str]:
    """What this machine lacks to make a root of `arch` and to run its programs."""
    needed = {"mmdebstrap": "mmdebstrap", "unshare": "util-linux"}
    if arch != platform.machine():
        needed[f"qemu-{arch}-static"] = "qemu-user-static"
    missing = [
        f"{tool} (Debian: apt install {package})"
        for tool, package in needed.items()
        if not shutil.which(tool)
    ]
    return missing if os.geteuid() == 0 else [*missing, "the rights of root"]


def make_root(
    folder: Path, arch: str, packages: tuple[str, ...] = PACKAGES, folders: tuple[str, ...] = ()
) -> CleanRoot:
    """Install Debian in `folder`. The packages of another architecture are unpacked and not configured."""
    if missing := missing_tools(arch):
        raise RootError(f"a clean root needs {', '.join(missing)}")
    foreign = arch != platform.machine()
    essential = ("--include=?essential",) if foreign else ()
    command = [
        *("mmdebstrap", "--quiet", "--mode=root", f"--variant={'extract' if foreign else 'minbase'}"),
        *(f"--architectures={ARCHITECTURES[arch]}", *essential, f"--include={','.join(packages)}"),
        *(RELEASE, str(folder)),
    ]
    done = subprocess.run(command)
    if done.returncode:
        raise RootError(f"mmdebstrap ended with exit code {done.returncode}")
    for name in ("/etc/resolv.conf", CERTIFICATES):
        if Path(name).exists():
            copy = folder / name.lstrip("/")
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(name, copy)
    if foreign:
        (folder / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    return CleanRoot(folder, arch, folders)


def pip_variables(variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The settings of pip and of proxies in this environment."""
    return {
        name: value
        for name, value in variables.items()
        if name.startswith("PIP_") or name.lower() in ("http_proxy", "https_proxy", "no_proxy")
    }
