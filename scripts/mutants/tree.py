"""A copy of the tree, with a virtual environment that imports the package from it."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from scripts.mutants import entered, plugin, recorder
from scripts.mutants.mutations import Mutation

LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "build", "dist", "__pycache__", ".*_cache", ".hypothesis")
RECORDER, PLUGIN = "mutants_recorder", "mutants_plugin"
"""Names that the modules `recorder` and `plugin` have in the copy."""
SCRIPT = "#!{python}\nimport runpy\nrunpy.run_module({module!r}, run_name='__main__', alter_sys=True)\n"


@dataclass(frozen=True)
class Run:
    """The result of a run of pytest."""

    code: int | None
    """The exit code. None if the run took too long and was ended."""
    failed: list[str]
    """Names of tests that failed, or of files that could not be imported."""
    seconds: float
    last_line: str = ""
    """The last line of pytest's output."""

    @property
    def good(self) -> bool:
        return self.code in (0, 5)  # 5: nothing was selected


@dataclass
class Tree:
    """A copy of the tree in `root`."""

    root: Path
    package: str
    deselected: list[str] = field(default_factory=list)
    """Tests that fail in the unchanged copy. They would fail for every mutant."""
    _ages: Iterator[int] = field(default_factory=itertools.count)

    @property
    def python(self) -> Path:
        return self.root / ".venv" / "bin" / "python"

    @property
    def site(self) -> Path:
        return next((self.root / ".venv" / "lib").glob("python*/site-packages"))

    def recording(self) -> AbstractContextManager[entered.Functions]:
        """While the context is open, tests record which functions they enter."""
        return entered.recording(self.root, self.package, self.site / recorder.FOLDER.name)

    def pytest(
        self, tests: Sequence[Path | str], marks: str, workers: int, limit: float, *more: str,
        only: Collection[str] | None = None,
    ) -> Run:  # fmt: skip
        """Run the tests in these files. If none is given, run all tests.

        only: names of tests, or of files. Others do not run.
        """
        command = [str(self.python), "-m", "pytest", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider"]
        command += ["-p", PLUGIN, "-m", marks, *more]
        command += [word for one in self.deselected for word in ("--deselect", one)]
        command += ["-n", str(workers), "--dist", "worksteal"] if workers > 1 else []
        environment = {
            key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PYTEST"))
        }
        if only is not None:
            environment[plugin.ONLY] = str(self.site / "only.txt")
            (self.site / "only.txt").write_text("\n".join(only), "utf-8")
        start = time.monotonic()
        process = subprocess.Popen(
            [*command, *map(str, tests)], cwd=self.root, env=environment, text=True, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            said, code = process.communicate(timeout=limit)[0], process.returncode
        except subprocess.TimeoutExpired:
            said, code = "", None
        finally:
            _end(process)
        lines = [line.split(" - ")[0] for line in said.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        failed = [line.partition(" ")[2].strip() for line in lines]
        return Run(code, failed, time.monotonic() - start, said.strip().rpartition("\n")[2])

    @contextmanager
    def mutated(self, mutation: Mutation) -> Iterator[None]:
        """While the context is open, the copy has this change."""
        file = self.root / mutation.path
        source = file.read_text("utf-8")
        try:
            self._write(file, mutation.apply(source))
            yield
        finally:
            self._write(file, source)

    def _write(self, file: Path, source: str) -> None:
        """Write a file with a modification time of its own. Python would take a compiled file of the same
        time and length for this one's."""
        file.write_text(source, "utf-8")
        age = 1_000_000_000 + next(self._ages)
        os.utime(file, (age, age))


def copy(root: Path, to: Path, package: str) -> Tree:
    """Copy everything except what is built or ignored. Compiled modules and libraries are those of this
    Python."""
    shutil.copytree(root, to, ignore=LEFT_OUT, dirs_exist_ok=True, symlinks=True)
    tree = Tree(to, package)
    venv.create(to / ".venv", symlinks=True)
    libraries = [Path(one) for one in sys.path if one.endswith("site-packages")]
    for file, name in ((recorder.__file__, RECORDER), (plugin.__file__, PLUGIN)):
        shutil.copy(file, tree.site / f"{name}.py")
    starting = f"import {RECORDER}; {RECORDER}.start()"
    (tree.site / "copy.pth").write_text("".join(f"{one}\n" for one in [to / "src", *libraries, starting]))
    for library in libraries:
        for compiled in (library / package).rglob("*.so"):
            place = to / "src" / compiled.relative_to(library)
            if place.parent.is_dir() and not place.exists():
                place.symlink_to(compiled)
    for name, module in ((package, f"{package}.__main__"), ("pytest", "pytest")):
        script = to / ".venv" / "bin" / name
        script.write_text(SCRIPT.format(python=tree.python, module=module))
        script.chmod(0o755)
    return tree


def _end(process: subprocess.Popen[str]) -> None:
    """End a process and everything that it started and that is still in its group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.communicate()
