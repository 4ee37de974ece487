"""Finds the test files that can reach a module of the package, and the nearest of them."""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

FOLDERS = ("tests", "scripts", "benchmarks", "examples", "training")
"""Folders that tests may import from besides the package. Each module's dotted name starts with its folder's
name.
"""
FEW = 8
"""Number of files that are tried first whatever their names are. They have the fewest imports in between."""


@dataclass
class Reach:
    """The import graph of a tree, read from its source."""

    modules: dict[str, Path]
    """Dotted name -> path, relative to the root of the tree."""
    imports: dict[str, set[str]] = field(default_factory=dict)
    anything: set[str] = field(default_factory=set)
    """Modules that import `subprocess`. The programs that they start cannot be read from their source."""

    def tests_of(self, path: str) -> list[Path]:
        """Test files that can reach the file, with the fewest imports in between first.

        A test that starts programs reaches every module, but comes after those that import it.
        """
        target = next(name for name, one in self.modules.items() if one == Path(path))
        found = []
        for name, file in self.modules.items():
            if file.parts[0] == "tests" and file.name.startswith("test_"):
                distances = self._distances(name)
                near = distances.get(target)
                if near is not None:
                    found.append((near, str(file), file))
                elif any(
                    one in self.anything for one in distances if not one.startswith(target.split(".")[0])
                ):
                    found.append((len(self.modules), str(file), file))
        return [file for _, _, file in sorted(found)]

    def users_of(self, path: str) -> set[str]:
        """The file, and the files of the package that import it, or a package's `__init__` that does."""
        names = {module: str(file) for module, file in self.modules.items()}
        found = {path}
        while True:
            targets = {
                name for name, file in names.items() if file == path or (file in found and _is_init(file))
            }
            more = {names[name] for name, used in self.imports.items() if used & targets} - found
            if not more:
                return {one for one in found if one.startswith("src/")}
            found |= more

    def _distances(self, name: str) -> dict[str, int]:
        known, waiting = {name: 0}, deque([name])
        while waiting:
            one = waiting.popleft()
            for other in sorted(self.imports[one]):
                if other not in known:
                    known[other] = known[one] + 1
                    waiting.append(other)
        return known


def read(root: Path, package: str) -> Reach:
    """The graph of root/src/PACKAGE and of the folders with tests and programs."""
    files = {file: file.relative_to(root / "src") for file in (root / "src" / package).rglob("*.py")}
    for folder in FOLDERS:
        files |= {file: file.relative_to(root) for file in (root / folder).rglob("*.py")}
    graph = Reach({_dotted(inner): file.relative_to(root) for file, inner in files.items()})
    for file, inner in files.items():
        name = _dotted(inner)
        found = set(_mentioned(name, ast.parse(file.read_text("utf-8")), inner.name == "__init__.py"))
        if "subprocess" in found:
            graph.anything.add(name)
        conftest = [".".join([*inner.parts[:depth], "conftest"]) for depth in range(1, len(inner.parts))]
        names = [*found, *(conftest if inner.parts[0] == "tests" else ())]
        graph.imports[name] = {one for name in names for one in _with_parents(name) if one in graph.modules}
    return graph


def nearest(path: str, package: str, tests: list[Path]) -> list[Path]:
    """The tests of `tests` that are tried first: those whose names say that they test the file, and the first
    few.

    src/PACKAGE/a/b.py has tests/a/test_b*.py, or else tests/test_b*.py and tests/test_a*.py.
    """
    inner = Path(path).relative_to(Path("src") / package)
    names = [inner.parent.name if inner.stem in ("__init__", "__main__") else inner.stem]
    for folder in (inner.parent, *inner.parent.parents):
        beginnings = tuple(f"test_{name}" for name in names)
        here = [one for one in tests if one.parent == Path("tests") / folder]
        if found := [one for one in here if one.name.startswith(beginnings)]:
            return [*found, *(one for one in tests[:FEW] if one not in found)]
        names.append(folder.name)
    return tests[:FEW]


def _mentioned(name: str, tree: ast.Module, is_package: bool) -> Iterator[str]:
    """The dotted names that are imported anywhere in a file, or named in a string, as by `python -m`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = name.split(".")[: None if is_package else -1]
                base = ".".join([*parts[: len(parts) - node.level + 1], *filter(None, [node.module])])
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isprintable():
            yield node.value
            yield f"{node.value}.__main__"


def _is_init(file: str) -> bool:
    return Path(file).name == "__init__.py"


def _with_parents(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[:depth]) for depth in range(1, len(parts) + 1))


def _dotted(file: Path) -> str:
    parts = file.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
